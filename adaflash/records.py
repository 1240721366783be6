"""Many prompts from a file, decoded at once, into a file that appears when it is complete."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaflash.data.chat import ChatRenderer
from adaflash.data.report import RowError
from adaflash.data.rows import parse_row
from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.types import Request, Trajectory


def read_requests(path: Path, renderer: ChatRenderer, how: Request) -> list[Request]:
    """One request a line, decoded as `how` says. A line that cannot be used is an error that names it."""
    if not path.is_file():
        raise UserError(f"--prompts {path}: no such file")
    requests = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                prompt = renderer.prompt(parse_row(json.loads(line.decode("utf-8-sig")), str(number)))
            except (ValueError, RowError) as error:
                raise UserError(f"{path}:{number}: {error}") from None
            requests.append(replace(how, prompt=prompt.tokens, id=prompt.id, domain=prompt.domain))
    if not requests:
        raise UserError(f"--prompts {path}: the file holds no prompt")
    return requests


def decode_file(
    engine: Engine, requests: Sequence[Request], output: Path, tokenizer: Any
) -> tuple[list[Trajectory], float]:
    """Decode all requests behind a progress bar and write one line each, in their order."""
    _check_writable(output)
    start, tokens = time.perf_counter(), 0
    results: dict[int, Trajectory] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("decoding", total=len(requests))
        for progress in engine.stream(requests):
            tokens += len(progress.tokens)
            speed = f"decoding {tokens / (time.perf_counter() - start):.0f} tokens/s"
            if progress.done is not None:
                results[progress.index] = progress.done
            bar.update(task, completed=len(results), description=speed)
    seconds = time.perf_counter() - start
    ordered = [results[index] for index in range(len(requests))]
    _write(output, [json.dumps(record(each, tokenizer), ensure_ascii=False) for each in ordered])
    return ordered, seconds


def record(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One line: what `RecordedRollout` reads, the text, and the counts."""
    blocks = trajectory.blocks
    text = tokenizer.decode(trajectory.response.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {
        "id": trajectory.id,
        "domain": trajectory.domain,
        "prompt_ids": trajectory.tokens[: trajectory.prompt_length].tolist(),
        "response_ids": trajectory.response.tolist(),
        "finish_reason": trajectory.finish,
        "text": text,
        "counts": {
            "tokens": len(trajectory.response),
            "rounds": len(blocks.anchors),
            "plain_steps": trajectory.plain_steps,
            "verified": int(blocks.lengths.sum()),
            "accepted": int(blocks.accepted.sum()),
            "committed": int(blocks.committed.sum()),
        },
        **({"error": trajectory.error} if trajectory.error else {}),
    }


def summary(results: Sequence[Trajectory], seconds: float) -> str:
    """Tokens, speed, and how drafting went."""
    tokens = sum(len(each.response) for each in results)
    line = f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    rounds = sum(len(each.blocks.anchors) for each in results)
    if rounds:
        committed = sum(int(each.blocks.committed.sum()) for each in results)
        verified = sum(int(each.blocks.lengths.sum()) for each in results)
        line += f"; tau {committed / rounds:.2f} over {rounds} rounds, {verified / rounds:.1f} candidates sent a round"
    failed = [each for each in results if each.error]
    told = [f"\n  {each.id}: {each.error}" for each in failed[:5]]
    return line + (f"; {len(failed)} of {len(results)} requests failed:{''.join(told)}" if failed else "")


def _check_writable(output: Path) -> None:
    """Before an hour of decoding, not after it."""
    if output.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise UserError(f"--output {output}: it cannot be written; name a file in a folder that exists")


def _write(output: Path, lines: Sequence[str]) -> None:
    """All lines or no file: written beside its place, then renamed."""
    handle, name = tempfile.mkstemp(dir=output.absolute().parent, prefix=f".{output.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
        os.chmod(name, 0o644)
        os.replace(name, output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

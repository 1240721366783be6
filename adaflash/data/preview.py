"""`adaflash data preview`: rows as they will be trained on, in colour; what is masked, what is supervised, what is dropped.

A light command: it reads the data part of the configs alone and loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from rich.console import Console
from rich.text import Text

from adaflash.configuration import PACKAGED, expand, nearest, read
from adaflash.data.pool import PromptPool
from adaflash.data.prompts import PromptDataModule
from adaflash.data.report import RowError
from adaflash.errors import UserError
from adaflash.types import Prompt

USAGE = """usage: adaflash data preview -c CONFIG [--target TARGET] [--role train] [--rows 3] [--data.KEY VALUE]

Shows rows of each source as token by token the target sees them: the prompt (masked: never in the loss), the answer
(supervised), and the rows that are dropped, with file, line and reason. Text is decoded token ids; a line break is shown
as one. Without a terminal there is no colour.

  -c, --config NAME   as for fit; only its `data` and `target` are read; later ones win
  --target NAME       whose tokenizer renders the prompts
  --role ROLE         train, val or predict (default: train)
  --rows N            rows of each source (default: 3)
  --width N           characters of a text, its middle is left out beyond that (default: 2000)
"""


def main(words: Sequence[str]) -> int:
    """Entry point of `adaflash data`; returns the exit status."""
    if not words or words[0] in ("-h", "--help") or any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    if words[0] != "preview":
        hint = "Did you mean data preview?" if nearest(words[0], ["preview"]) else "There is: data preview"
        raise UserError(f"no such command: data {words[0]}. {hint}")
    asked = _parse(expand(words[1:]))
    data = asked.data
    data.target = data.target or asked.target
    preview(data, asked.role, asked.rows, asked.width, Console(highlight=False, soft_wrap=True))
    return 0


def preview(data: PromptDataModule, role: str, rows: int, width: int, console: Console) -> None:
    """Print the first rows of every source of a role, and what is dropped. Raises DataError as `fit` would."""
    pools = [PromptPool(source, data.renderer, number, data.seed) for number, source in enumerate(data.sources[role])]
    if not pools:
        raise UserError(f"data.{role} names no source; add one, e.g. --config data/shipped")
    for pool in pools:
        report = pool.check(1.0)  # show what there is; the share that fit allows is judged below
        console.print(Text(f"{role}: {report.name}, {report.kept} rows", style="bold"))
        for index in range(min(rows, len(pool))):
            for line in _row(pool, index, width):
                console.print(line)
        console.print(Text(f"dropped: {report.dropped} rows", style="bold red" if report.dropped else "bold"))
        for place in report.places:
            console.print(Text.assemble("  ", (place, "red")))
        for told in str(report).splitlines()[1:]:
            if " x " in told or "more" in told or "note:" in told:
                console.print(Text(told))
    for pool in pools:
        pool.source.open().check(data.max_dropped)


def _row(pool: PromptPool, index: int, width: int) -> Iterator[Text]:
    where = pool.source.where(index)
    try:
        prompt = pool.prompt(index)
    except RowError as error:  # of a source that is too large to be rendered whole
        yield Text.assemble(("  dropped     ", "bold red"), (f"{where}: {error}", "red"))
        return
    yield Text(f"  {where}  id {prompt.id}  domain {prompt.domain}  {_counts(prompt)}", style="cyan")
    yield _part("masked", prompt.tokens, pool, "dim", width)
    if prompt.response:
        yield _part("supervised", prompt.response, pool, "green", width)
    else:
        yield Text("  supervised  (the answer is made while training)", style="green")


def _counts(prompt: Prompt) -> str:
    answer = f" + {len(prompt.response)} supervised tokens, ends by {prompt.finish}" if prompt.response else ""
    return f"{len(prompt.tokens)} prompt tokens{answer}"


def _part(name: str, ids: Sequence[int], pool: PromptPool, style: str, width: int) -> Text:
    text = str(pool.renderer.tokenizer.decode(list(ids), skip_special_tokens=False)).replace("\n", "\u23ce")
    if len(text) > width:
        text = f"{text[: width // 2]} [...] {text[-width // 2 :]}"
    return Text.assemble((f"  {name:<12}", f"bold {style}"), (text, style))


def _parse(words: Sequence[str]) -> Namespace:
    """The data module and the few options of the command, from the `data` and `target` of the configs."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--target", type=str, default="")
    parser.add_argument("--role", type=str, default="train")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_class_arguments(PromptDataModule, "data")
    given = ["--config", str(PACKAGED / "base.yaml"), *words]
    rest = [
        _data_part(value) if flag == "--config" else value for flag, value in zip(["", *given], given, strict=False)
    ]
    try:
        parsed = parser.parse_args([_inline(word) for word in rest])
        if parsed.role not in ("train", "val", "predict"):
            raise UserError(f"--role is train, val or predict, not {parsed.role!r}")
        made: Namespace = parser.instantiate(parsed)
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{error}") from error
    return made


def _inline(word: str) -> str:
    return f"--config={_data_part(word.removeprefix('--config='))}" if word.startswith("--config=") else word


def _data_part(path: str) -> str:
    """What a config says of the data, as YAML text."""
    from pathlib import Path

    content: dict[str, Any] = read(Path(path))
    return yaml.safe_dump({key: value for key, value in content.items() if key.rstrip("+") in ("data", "target")})

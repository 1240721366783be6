"""`adaflash generate`: continue prompts with a target, and with a trained drafter if there is one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from adaflash.data.chat import ChatRenderer
from adaflash.data.report import RowError
from adaflash.data.rows import parse_row
from adaflash.data.tokenizer import load_renderer
from adaflash.decoding.engine import Engine
from adaflash.decoding.text import TextStream
from adaflash.errors import UserError
from adaflash.length.fixed import FixedLength
from adaflash.records import decode_file, read_requests, summary
from adaflash.types import Request, Trajectory


def generate(
    prompt: str = "",
    checkpoint: str = "",
    target: str = "",
    prompts: str = "",
    output: str = "",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: list[str] = [],  # noqa: B006  (never changed; jsonargparse reads the type from it)
    lanes: int = 8,
    length: int = -1,
    plain: bool = False,
    compare: bool = False,
    template_kwargs: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Continue a prompt, text streamed out; or many prompts from a file into a file.

    Args:
        prompt: The user's turn. `-` reads it from standard input.
        checkpoint: A checkpoint of `adaflash fit`, or the folder of a run. None: the target alone.
        target: Fetched name, folder or Hub id; the checkpoint knows its own.
        prompts: JSONL file with a prompt a line (`prompt`, `messages`, `turns` or `prompt_ids`).
        output: JSONL file for the responses of `prompts`; it appears when it is complete.
        max_new_tokens: Longest response.
        temperature: 0 takes the most probable token.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass.
        seed: Of sampling; the same seed gives the same text, with and without a drafter.
        stop: Strings that end a response.
        lanes: Requests decoded at once.
        length: Verify so many candidates a round instead of asking the trained policy; -1 asks it.
        plain: Decode without the drafter.
        compare: Decode once more without the drafter, and say how much faster drafting was.
        template_kwargs: Switches of the chat template, e.g. `{enable_thinking: false}`.
    """
    if bool(prompt) == bool(prompts):
        raise UserError("give either --prompt TEXT or --prompts FILE")
    if prompts and not output:
        raise UserError("--prompts needs --output FILE for the responses")
    engine, rival, name = _engines(checkpoint, target, lanes, length, plain)
    if compare and rival is None:
        raise UserError("--compare needs a drafter to compare with: give --checkpoint, without --plain")
    renderer = load_renderer(name, template_kwargs)
    how = Request((), max_new_tokens, "", "default", seed, temperature, top_k, top_p, (), tuple(stop))
    if prompts:
        requests = read_requests(Path(prompts), renderer, how)
        results, seconds = decode_file(engine, requests, Path(output), renderer.tokenizer)
    else:
        text = sys.stdin.read() if prompt == "-" else prompt
        requests = [_request(text, renderer, how)]
        results, seconds = _stream(engine, requests[0], renderer.tokenizer, sys.stdout)
    _say(summary(results, seconds))
    if compare and rival is not None:
        _compare(engine, rival, requests)


def _engines(checkpoint: str, target: str, lanes: int, length: int, plain: bool) -> tuple[Engine, Engine | None, str]:
    """The engine asked for, a plain one to compare with if it drafts, and the target's name."""
    from adaflash.run import best_device, load_run  # late: --help needs no torch

    if not checkpoint:
        from adaflash.targets.hf import HFTarget

        if not target:
            raise UserError("give --checkpoint FILE (a trained drafter), or --target NAME to decode plainly")
        return Engine(HFTarget.load(target).to(best_device()), lanes=lanes), None, target

    module = load_run(checkpoint, target, best_device())
    without = Engine(module.target, lanes=lanes)
    if plain:
        return without, None, module.target_name
    policy = module.length if length < 0 else FixedLength(length)
    return Engine(module.target, module.drafter, policy, lanes=lanes), without, module.target_name


def _request(text: str, renderer: ChatRenderer, how: Request) -> Request:
    from dataclasses import replace

    try:
        return replace(how, prompt=renderer.prompt(parse_row({"prompt": text}, "prompt")).tokens, id="prompt")
    except RowError as error:
        raise UserError(f"--prompt: {error}") from None


def _stream(engine: Engine, request: Request, tokenizer: Any, out: TextIO) -> tuple[list[Trajectory], float]:
    """Write the text as it comes; returns the result and the seconds it took."""
    text, start, results = TextStream(tokenizer), time.perf_counter(), []
    for progress in engine.stream([request]):
        out.write(text.push(progress.tokens))
        out.flush()
        if progress.done is not None:
            results.append(progress.done)
    out.write(text.flush() + "\n")
    if results[0].error:
        raise UserError(results[0].error)
    return results, time.perf_counter() - start


def _compare(engine: Engine, rival: Engine, requests: Sequence[Request]) -> None:
    """Both ways once more, warm, in turn: a figure to look at, not a measurement (the gain table of `fit` is one)."""
    seconds, texts = {"plain": 0.0, "drafted": 0.0}, {}
    for name in ("plain", "drafted", "drafted", "plain"):
        start = time.perf_counter()
        done = (rival if name == "plain" else engine).generate(requests)
        seconds[name] += time.perf_counter() - start
        texts[name] = [each.tokens.tolist() for each in done]
    ratio = seconds["plain"] / seconds["drafted"]
    same = "the same text" if texts["plain"] == texts["drafted"] else "DIFFERENT TEXT: please report this"
    verdict = f"{ratio:.2f} x the speed of plain decoding" + ("" if ratio > 1 else ": no gain")
    _say(f"with the drafter: {verdict}; {same} ({seconds['plain'] / 2:.2f} s against {seconds['drafted'] / 2:.2f} s)")


def _say(text: str) -> None:
    print(text, file=sys.stderr)

"""The command line: fit, validate, test and predict on LightningCLI; generate and fetch without a trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from adaflash.configuration import expand, nearest
from adaflash.errors import UserError
from adaflash.flags import bare_switches

HELP = """adaflash: train an adaptive diffusion drafter for speculative decoding, and measure what it gains.

  adaflash fetch NAME        fetch a target without a hub (adaflash fetch: what there is)
  adaflash fit -c CONFIG     train a drafter and a length policy for a target
  adaflash validate ...      decode held-out prompts and measure acceptance
  adaflash test ...          the same, reported as test
  adaflash predict ...       record the target's responses as JSONL
  adaflash generate ...      continue a prompt, text streamed out
  adaflash bench ...         compare length policies with plain decoding, over prompt sets and loads
  adaflash plan -c CONFIG    memory a device will need, by part, before anything is loaded; what to change
  adaflash report RUN ...    runs side by side on one page (HTML, no network)
  adaflash cost ...          measure what rounds cost on this machine, and the tau that drafting needs to pay
  adaflash vocabulary ...    count which tokens your traffic needs, for a drafter with fewer of them
  adaflash data preview ...  show rows as they will be trained on: masked, supervised, dropped and why
  adaflash export ...        write a drafter for SGLang, vLLM or transformers, with the command that serves it
  adaflash import ...        check somebody's drafter against a target, and write it as one of ours
  adaflash doctor ...        find what would lower acceptance in silence

  -c, --config NAME          a file, or a shipped config such as experiment/adaflash; later ones win
  adaflash COMMAND --help    everything a command takes
"""

TRAINER = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0] in ("-V", "--version"):
        from adaflash import __version__

        print(f"adaflash {__version__}")
        return 0
    if os.getcwd() not in sys.path:  # a user's own plugin file works from their own folder
        sys.path.insert(0, os.getcwd())
    try:
        return _run(words[0], words[1:])
    except UserError as error:
        print(f"adaflash {words[0]}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("adaflash: stopped", file=sys.stderr)
        return 130


def _run(command: str, words: list[str]) -> int:
    if command in TRAINER:
        from adaflash.trainer_cli import run

        return run([command, *expand(words)])
    if command not in _LIGHT:
        near = nearest(command, [*TRAINER, *_LIGHT])
        hint = f" Did you mean '{near}'?" if near else ""
        raise UserError(f"no such command.{hint} Commands: {', '.join([*TRAINER, *_LIGHT])}")
    return _LIGHT[command](words)


def _fetch(words: list[str]) -> int:
    from adaflash.targets.fetch import main as fetch

    return fetch(words)


def _plan(words: list[str]) -> int:
    from adaflash.plan.command import main as plan

    return plan(words)


def _data(words: list[str]) -> int:
    from adaflash.data.preview import main as data

    return data(words)


def _doctor(words: list[str]) -> int:
    from adaflash.doctor.command import main as doctor

    return doctor(words)


def _bench(words: list[str]) -> int:
    from adaflash.bench.bench_command import main as bench

    return bench(words)


def _report(words: list[str]) -> int:
    from adaflash.report.command import main as report

    return report(words)


def _function(prog: str, module: str, name: str) -> Callable[[list[str]], int]:
    """A command that is a function: its arguments are the options, what it returns (or 0) is the exit status."""

    def command(words: list[str]) -> int:
        from jsonargparse import auto_cli

        function = getattr(import_module(module), name)
        given = bare_switches(function, words)
        return int(auto_cli(function, args=given, as_positional=False, prog=f"adaflash {prog}") or 0)

    return command


_LIGHT = {
    "fetch": _fetch,
    "generate": _function("generate", "adaflash.generate", "generate"),
    "bench": _bench,
    "plan": _plan,
    "report": _report,
    "cost": _function("cost", "adaflash.bench.cost_command", "cost"),
    "vocabulary": _function("vocabulary", "adaflash.data.vocabulary", "vocabulary"),
    "export": _function("export", "adaflash.export.command", "export"),
    "import": _function("import", "adaflash.export.command", "import_drafter"),
    "data": _data,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())

"""Readable errors of the command line: what is wrong, where it was written, and the nearest valid key."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser

from adaflash.configuration import nearest
from adaflash.data.base import PromptSource
from adaflash.drafters.base import Drafter
from adaflash.length.base import LengthPolicy
from adaflash.losses.base import LossTerm
from adaflash.losses.position import PositionWeight
from adaflash.optim import AdamWConfig
from adaflash.rollouts.base import RolloutSource


class Parser(LightningArgumentParser):
    """One short message instead of a page of usage, with the nearest valid key for a misspelt one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and exit with 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"{prog}: error: {shortened(message)}\n{_hint(message, parser)}")
        sys.exit(2)


NOISE = re.compile(
    r"\s*(?:- )?(Does not validate against any of the Union subtypes|Subtypes: \[.*|Errors:|Given value( type)?:.*"
    r"|- Not a valid subclass of \w+|Subclass types expect one of:|- a class path \(str\)|- a dict with(out)? .*"
    r"|- Expected a <class 'NoneType'>|- Expected a path but .* either not accessible or invalid)"
)


def shortened(message: str) -> str:
    """What is wrong, without the page on everything else that a setting of several types might have been."""
    lines = [line for line in message.strip().splitlines() if not NOISE.fullmatch(line)]
    kept = list(dict.fromkeys(lines))  # the same reason, once a type
    return "\n".join(kept) if any(line.strip() and "Parser key" not in line for line in kept) else message.strip()


def _hint(message: str, parser: Any) -> str:
    """The nearest valid key, where the misspelt one stands, and where to read more."""
    known = sorted({action.dest for action in parser._actions if action.dest not in ("help", "==SUPPRESS==")})
    inner = re.findall(r"[Oo]ption '(\w+)' is not accepted", message)  # a key of some class's init_args
    outer = re.findall(r"(?:option '|unrecognized arguments: --|[Kk]ey \"|[Kk]ey ')([\w.]+)", message)
    candidates = [(word, setting_names()) for word in inner] + [(word, known) for word in outer if word not in known]
    near = [found for word, names in candidates if (found := nearest(word, names))]
    places = [place for word in inner if (place := written_at(word))]
    where = f"It stands in {places[0]}. " if places else ""
    did_you_mean = f"Did you mean '{near[0]}'?" if near else ""
    found = f"{where}{did_you_mean}\n" if where or did_you_mean else ""
    return f"{found}See --help, --print_config, or --model.drafter.help CLASS for what a class takes.\n"


def setting_names() -> list[str]:
    """Names of the settings of every class that a config can name and that is loaded."""
    bases: list[type] = [
        Drafter,
        LengthPolicy,
        LossTerm,
        RolloutSource,
        PromptSource,
        PositionWeight,
        AdamWConfig,
        Callback,
    ]
    found: set[str] = set()
    while bases:
        kind = bases.pop()
        bases += kind.__subclasses__()
        if kind.__module__.startswith("lightning."):  # dozens of names that hardly any config uses
            continue
        found |= set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}  # type: ignore[misc]
    return sorted(found)


def written_at(word: str) -> str:
    """The flag, or the file and line, in which a misspelt key was written; empty if it cannot be found."""
    pattern = re.compile(rf"(^|[\s{{,.])[\"']?{re.escape(word)}[\"']?\s*[:=]")
    for flag in sys.argv[1:]:
        if flag.startswith("--") and word in flag.lstrip("-").partition("=")[0].split("."):
            return flag.partition("=")[0]
    for name in [value for flag, value in zip(sys.argv, sys.argv[1:], strict=False) if flag in ("-c", "--config")]:
        lines = Path(name).read_text(encoding="utf-8").splitlines() if Path(name).is_file() else []
        for number, line in enumerate(lines, 1):
            if pattern.search(line):
                return f"{name}:{number}"
    return ""

"""`adaflash report`: runs side by side on one page."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from adaflash.errors import UserError

SAYS = """Compare runs on one page: one HTML file that needs no network, for screens light and dark, and for paper.

It shows what the run folders hold: validations (acceptance.csv), the gain table (gain.json), logged scalars (metrics.csv),
length calibration (reliability.csv), rows of `adaflash bench` (bench.jsonl), samples (drafts.jsonl) and where the runs come
from. What a run lacks is said, not guessed."""


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = ArgumentParser("adaflash report", description=SAYS, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page (report.html)")
    parser.add_argument("--title", default="", help="heading of the page")
    args = parser.parse_args(list(words))
    write([Path(run) for run in args.runs], Path(args.output), args.title)
    return 0


def write(folders: Sequence[Path], output: Path, title: str = "") -> None:
    """Read, draw, and write the page whole or not at all. Raises UserError."""
    from adaflash.report.page import render
    from adaflash.report.reading import read_runs

    if output.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise UserError(f"-o {output}: it cannot be written; name a file in a folder that exists")
    runs = read_runs(folders)
    page = render(runs, title or " and ".join(run.name for run in runs[:3]) + (" and more" if len(runs) > 3 else ""))
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    part.write_text(page, encoding="utf-8")
    part.replace(output)
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    print(f"{output}: {len(runs)} run{'s' if len(runs) > 1 else ''}, {len(page.encode()) / 1e3:.0f} kB")

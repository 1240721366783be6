"""Samples of drafted rounds: `drafts.jsonl`, and how they look in a terminal and in TensorBoard.

Every candidate carries a mark, so that nothing rests on colour: accepted ✓, rejected ✗, drafted but not verified ·.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from adaflash.types import Trajectory

FILE = "drafts.jsonl"
Fate = Literal["accepted", "rejected", "unverified"]
MARKS: dict[Fate, str] = {"accepted": "✓", "rejected": "✗", "unverified": "·"}
# Blue and orange stay apart for every kind of colour blindness; so do the squares, which TensorBoard lets through.
STYLES: dict[Fate, str] = {"accepted": "bold dodger_blue2", "rejected": "dark_orange", "unverified": "dim"}
SQUARES: dict[Fate, str] = {"accepted": "🟦", "rejected": "🟧", "unverified": "⬜"}
LEGEND = ", ".join(f"{mark} {fate}" for fate, mark in MARKS.items())
_VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"})


@dataclass(frozen=True)
class DraftedRound:
    """One round as text."""

    anchor: str  # the token the block started from
    candidates: list[str]  # all that were computed, in order
    length: int  # L: sent to be verified
    accepted: int  # A: survived
    committed: int  # c: tokens kept
    token: str  # the target's own token behind the accepted ones; "" if the response ended before it

    def fates(self) -> list[Fate]:
        """What became of every candidate."""
        return ["accepted" if k < self.accepted else "rejected" if k < self.length else "unverified"
                for k in range(len(self.candidates))]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """The first rounds of one response: a row of `drafts.jsonl`."""

    step: int
    domain: str
    id: str
    prompt_text: str
    rounds: list[DraftedRound]


def sample_of(trajectory: Trajectory, tokenizer: Any, step: int, rounds: int) -> Sample:
    """The first `rounds` drafted rounds of a trajectory, token by token as text."""
    prompt = tokenizer.decode(trajectory.tokens[: trajectory.prompt_length].tolist(), skip_special_tokens=True)
    shown = [_round(trajectory, i, tokenizer) for i in range(min(rounds, len(trajectory.blocks.anchors)))]
    return Sample(step, trajectory.domain, trajectory.id, prompt, shown)


def _round(trajectory: Trajectory, index: int, tokenizer: Any) -> DraftedRound:
    log, tokens = trajectory.blocks, trajectory.tokens.tolist()
    parts = (log.anchors, log.lengths, log.accepted, log.committed)
    anchor, length, accepted, committed = (int(part[index]) for part in parts)
    computed = [candidate for candidate in log.candidates[index].tolist() if candidate >= 0]
    [start] = _pieces(tokenizer, tokens[anchor - 1 : anchor + 1])
    own = _pieces(tokenizer, tokens[anchor + accepted : anchor + accepted + 2]) if committed > accepted else [""]
    return DraftedRound(start, _pieces(tokenizer, [tokens[anchor], *computed]), length, accepted, committed, own[0])


def append(path: Path, samples: Sequence[Sample]) -> None:
    """Add rows in one write; a row that a kill cut short before is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (("\n" if torn else "") + rows).encode())
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> list[Sample]:
    """Every whole row, oldest step first; of a step that was done twice (after a resume) the later one."""
    found: dict[tuple[int, str, str], Sample] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
            rounds = [DraftedRound(**each) for each in row.pop("rounds")]
            sample = Sample(**row, rounds=rounds)
        except (ValueError, TypeError, KeyError, AttributeError):  # torn by a kill, or foreign
            continue
        found[sample.step, sample.domain, sample.id] = sample
    return sorted(found.values(), key=lambda sample: sample.step)


def visible(token: str) -> str:
    """A token with its white space to be seen."""
    return token.translate(_VISIBLE)


def terminal(samples: Iterable[Sample]) -> Text:
    """A line a round: the anchor, every candidate with its mark, and the target's own token."""
    text = Text.assemble((f"drafts: {LEGEND}; → the target's own\n", "dim"))
    for sample in samples:
        text.append(sample.domain, style="bold").append(f" {excerpt(sample.prompt_text)}\n")
        for each in sample.rounds:
            text.append(f"  {visible(each.anchor)} │")
            for fate, candidate in zip(each.fates(), each.candidates, strict=True):
                text.append(f" {MARKS[fate]}{visible(candidate)}", style=STYLES[fate])
            text.append(f" → {visible(each.token)}\n")
    return text


def tensorboard(samples: Iterable[Sample]) -> str:
    """One raw HTML block of the tags TensorBoard lets through: Markdown inside it is not interpreted."""
    parts = [
        f"<p>{' '.join(f'{SQUARES[fate]}{mark} {fate},' for fate, mark in MARKS.items())} the target's own last</p>"
    ]
    for sample in samples:
        parts.append(f"<h4>{_html(sample.domain)}</h4><p>{html.escape(excerpt(sample.prompt_text))}</p><table>")
        for each in sample.rounds:
            drafted = " ".join(
                f"{SQUARES[fate]}{MARKS[fate]}<code>{_html(candidate)}</code>"
                for fate, candidate in zip(each.fates(), each.candidates, strict=True)
            )
            parts.append(
                f"<tr><td><code>{_html(each.anchor)}</code></td><td>{drafted}</td>"
                f"<td><code>{_html(each.token)}</code></td></tr>"
            )
        parts.append("</table>")
    return "".join(parts)


def excerpt(text: str, longest: int = 100) -> str:
    """The end of a prompt, on one line: the question stands there, the system prompt at the top."""
    line = " ".join(text.split())
    return line if len(line) <= longest else "…" + line[-longest + 1 :]


def _html(token: str) -> str:
    return html.escape(visible(token))


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of ids[1:], each as it reads behind the one before it: some tokenizers drop a space at the start."""
    texts = []
    for before, token in pairwise(ids):
        start, both = _decode(tokenizer, [before]), _decode(tokenizer, [before, token])
        texts.append(both[len(start) :] if both.startswith(start) else _decode(tokenizer, [token]))
    return texts


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

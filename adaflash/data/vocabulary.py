"""`adaflash vocabulary`: which tokens of a target its traffic needs, counted over recorded responses."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adaflash.data.report import RowError
from adaflash.data.sources import JsonlSource
from adaflash.data.tokenizer import load_renderer
from adaflash.errors import UserError
from adaflash.types import Prompt
from adaflash.vocabulary import DraftVocabulary, write_vocabulary

HELD_OUT = 10  # every tenth response is not counted at first, to see how much of what is new can be said

Counts = dict[str, Counter[int]]  # by domain


def vocabulary(
    target: str,
    rows: str | list[str],
    output: str,
    size: int = 8192,
    keep: list[int] = [],  # noqa: B006  (never changed; jsonargparse reads the type from it)
    template_kwargs: dict[str, Any] = {},  # noqa: B006
    force: bool = False,
) -> None:
    """Count the tokens of recorded responses and write the most frequent ones, for a drafter that says no others.

    Args:
        target: Fetched name, folder or Hub id.
        rows: JSONL files or globs with recorded responses (`adaflash predict` writes them): token ids, or chats.
        output: File to write, for --model.drafter.init_args.vocabulary.
        size: How many tokens, stop tokens among them.
        keep: Token ids to keep however rare, such as stop tokens that only your config names.
        template_kwargs: Switches of the chat template, for chats.
        force: Replace the file if it exists.
    """
    file = Path(output).expanduser()
    if file.exists() and not force:
        raise UserError(f"--output {file} exists; give another file, or --force to replace it")
    renderer = load_renderer(target, template_kwargs)
    total = renderer.vocab_size
    always = sorted({*renderer.stop_ids, *keep})
    if not max(2, len(always)) <= size < total or not all(0 <= token < total for token in always):
        raise UserError(
            f"--size is {size} and --keep {keep}; allowed are {max(2, len(always))} .. {total - 1} of the target's "
            f"{total} tokens, and ids below {total}"
        )
    seen, held_out, responses = count(_responses(JsonlSource(rows, responses=True), renderer))
    print(coverage(seen, held_out, size, always, total))
    both = sum((*seen.values(), *held_out.values()), Counter())
    said = DraftVocabulary.of(torch.tensor(most_frequent(both, size, always, total)), total)
    about = {"target": target, "responses": responses, "counted": both.total()}
    write_vocabulary(file, said, about)
    print(f"{file}: {said.describe()} of {target}, from {both.total()} tokens of {responses} responses; use it with")
    print(f"  --model.drafter.init_args.vocabulary {file}")


def _responses(source: JsonlSource, renderer: Any) -> Iterator[Prompt]:
    """Every response that can be rendered; what cannot is counted and said."""
    source.open()
    bad = {}
    for index in range(len(source)):
        try:
            yield renderer.prompt(source.row(index))
        except RowError as error:
            bad[index] = error
    source.drop(bad)
    assert source.report is not None
    if source.report.dropped:
        print(str(source.report), file=sys.stderr)


def count(responses: Iterable[Prompt]) -> tuple[Counts, Counts, int]:
    """Token counts by domain, those of every tenth response apart, and the number of responses.

    Raises:
        UserError: there is nothing to count.
    """
    parts: tuple[Counts, Counts] = defaultdict(Counter), defaultdict(Counter)
    number = 0
    for number, each in enumerate(responses, start=1):
        parts[number % HELD_OUT == 0][each.domain].update(each.response)
    if number < HELD_OUT:
        raise UserError(
            f"--rows: {number} responses can be counted, {HELD_OUT} are needed at the least. Record some with `adaflash "
            "predict` (rows need response_ids, or answers in their messages)"
        )
    return *parts, number


def most_frequent(counts: Counter[int], size: int, always: Sequence[int], vocabulary: int) -> list[int]:
    """`always` and the most frequent others, `size` in all; of equals, and where none is left, the lower id."""
    kept = dict.fromkeys(always)
    for token in sorted(range(vocabulary), key=lambda token: (-counts[token], token)):
        if len(kept) == size:
            break
        kept[token] = None
    return sorted(kept)


def coverage(seen: Counts, held_out: Counts, size: int, always: Sequence[int], vocabulary: int) -> str:
    """Shares of the held-out tokens that can be said, by domain and for sizes around the one asked for."""
    known = sum(seen.values(), Counter())
    sizes = [n for n in (size // 4, size // 2, size, 2 * size) if max(2, len(always)) <= n < vocabulary]
    rows = {**dict(sorted(held_out.items())), "all": sum(held_out.values(), Counter())}
    lines = [f"{'tokens the drafter can say':28}" + "".join(f"{n:>9}" for n in sizes)]
    kept = [set(most_frequent(known, n, always, vocabulary)) for n in sizes]
    for domain, counts in rows.items():
        shares = [sum(n for token, n in counts.items() if token in tokens) / counts.total() for tokens in kept]
        lines.append(f"{domain + ' can be said':28}" + "".join(f"{share:9.2%}" for share in shares))
    note = f"(of every {HELD_OUT}th response, by what the others hold; a candidate that cannot be said ends its block)"
    return "\n".join([*lines, note])

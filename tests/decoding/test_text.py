"""Streamed text: whole characters only, and the pieces joined are the decoded whole."""

from __future__ import annotations

import random
from typing import Any

import pytest

from adaflash.decoding.text import BROKEN, TextStream


@pytest.mark.parametrize("text", ["plain", "naïve café — 雪の花 🌨️ done", "🌨️", " leading and  double spaces\n"])
def test_pieces_join_to_the_whole_and_are_never_broken(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert not any(BROKEN in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_random_bytes_join_to_what_the_tokenizer_decodes(tokenizer: Any) -> None:
    """Also what is no text at all; several tokens at once, as rounds commit them."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(259) for _ in range(rng.randint(0, 30))]
        stream, text, rest = TextStream(tokenizer), "", list(ids)
        while rest:
            count = rng.randint(1, 4)
            text += stream.push(rest[:count])
            rest = rest[count:]
        want = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert (text + stream.flush()).replace(BROKEN, "") == want.replace(BROKEN, "")


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer("雪")["input_ids"][:2]) == ""
    assert stream.flush() == BROKEN

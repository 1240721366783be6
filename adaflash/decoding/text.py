"""Token ids -> text as they come: a character that is not complete yet waits for its last byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

BROKEN = "\ufffd"  # what a tokenizer writes for bytes that are no character (yet)
LONGEST_WAIT = 8  # tokens: a character has at most four bytes; longer waits are a model writing U+FFFD itself


class TextStream:
    """Decodes a growing response piece by piece; the pieces joined are the decoded whole.

    Tokens are decoded together with a few before them, because some tokenizers write a token differently at the start.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0  # first token decoded for its surroundings only
        self._done = 0  # first token whose text has not been given out

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is complete once these tokens are there."""
        return "".join(self._push(token) for token in tokens)

    def flush(self) -> str:
        """What is left at the end, complete or not."""
        return self._give(self._new_text())

    def _push(self, token: int) -> str:
        self._ids.append(token)
        new = self._new_text()
        waits = new.endswith(BROKEN) and len(self._ids) - self._done < LONGEST_WAIT
        return "" if waits else self._give(new)

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._before : self._done])
        return self._decode(self._ids[self._before :])[len(known) :]

    def _give(self, text: str) -> str:
        if text:
            self._before, self._done = self._done, len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

"""The mask token: which id fills the empty slots of a block. Never a silent fall-back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaflash.errors import UserError


class MaskTokenError(UserError):
    """No safe mask token, or the one asked for is not safe."""


def choose_mask_id(
    embedding_rows: int, tokenizer: Any = None, stop_ids: Sequence[int] = (), mask_id: int = -1, mask_token: str = ""
) -> tuple[int, str]:
    """The mask id and where it came from: the first that applies of

    the configured id; the tokenizer's mask token; the first embedding row past the tokenizer's end; the reserved
    special token named by the target's YAML.

    Raises:
        MaskTokenError: nothing applies, or the id is out of range, pad, bos, a stop id or a token of the template.
    """
    chosen, source = _first_that_applies(embedding_rows, tokenizer, mask_id, mask_token)
    if not 0 <= chosen < embedding_rows:
        raise MaskTokenError(
            f"mask id {chosen} ({source}) is not a row of the target's embedding: allowed are 0 .. {embedding_rows - 1}"
        )
    _refuse_used(chosen, source, tokenizer, stop_ids)
    return chosen, source


def _first_that_applies(rows: int, tokenizer: Any, mask_id: int, mask_token: str) -> tuple[int, str]:
    if mask_id != -1:
        return mask_id, "model.drafter.init_args.mask_id"
    if tokenizer is not None:
        if getattr(tokenizer, "mask_token_id", None) is not None:
            return int(tokenizer.mask_token_id), "the tokenizer's mask token"
        if len(tokenizer) < rows:
            return len(tokenizer), "first embedding row past the tokenizer's end"
        if mask_token:
            known = tokenizer.get_vocab()
            if mask_token not in known:
                raise MaskTokenError(f"model.target_options.mask_token: '{mask_token}' is not a token of the tokenizer")
            return int(known[mask_token]), f"reserved token {mask_token}"
    raise MaskTokenError(
        "no mask token: the tokenizer has none and the target no spare embedding row. Name a reserved, otherwise unused "
        "special token by model.target_options.mask_token, or an id by model.drafter.init_args.mask_id"
    )


def _refuse_used(chosen: int, source: str, tokenizer: Any, stop_ids: Sequence[int]) -> None:
    used = {"a stop id": set(stop_ids)}
    if tokenizer is not None:
        used["pad"] = {tokenizer.pad_token_id}
        used["bos"] = {tokenizer.bos_token_id}
        used["eos"] = {tokenizer.eos_token_id}
        used["a token of the chat template"] = _template_ids(tokenizer)
    for what, ids in used.items():
        if chosen in ids:
            raise MaskTokenError(f"mask id {chosen} ({source}) is {what}; choose a token that never occurs in traffic")


def _template_ids(tokenizer: Any) -> set[int]:
    """Special tokens that the chat template writes by name."""
    template = getattr(tokenizer, "chat_template", None) or ""
    texts = template.values() if isinstance(template, dict) else [template]
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return {tokenizer.convert_tokens_to_ids(token) for token in special if any(token in text for text in texts)}

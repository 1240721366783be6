"""From the name of a target to the renderer of its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaflash.data.chat import ChatRenderer
from adaflash.data.report import DataError


def load_renderer(
    target: str, template_kwargs: Mapping[str, Any] | None = None, max_prompt_tokens: int | None = None
) -> ChatRenderer:
    """Renderer with the tokenizer of a target (fetched name, folder or Hub id). Raises DataError."""
    if not target:
        raise DataError("data.target is empty: name the target whose tokenizer renders the prompts (--target NAME)")
    from transformers import AutoTokenizer

    from adaflash.targets.fetch import resolve

    path = resolve(target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # missing files, offline, broken JSON: every layer has its own types
        raise DataError(
            f"cannot load the tokenizer of target {target!r} ({type(error).__name__}: {error}). The folder must hold "
            "tokenizer.json and tokenizer_config.json; a Hub id needs a network or a filled cache"
        ) from error
    return ChatRenderer(tokenizer, template_kwargs, max_prompt_tokens, _stop_ids(path), _vocab_size(path))


def _stop_ids(path: str) -> list[int]:
    """End markers that the generation config lists."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # there is none
        return []
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def _vocab_size(path: str) -> int:
    """Rows of the embedding: may be more than the tokenizer knows, and a target may emit those ids."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(path)
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)

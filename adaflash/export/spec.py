"""What a drafter's checkpoint says of itself, in this project's conventions whatever format it came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen3Config

from adaflash.errors import UserError
from adaflash.export.keys import BORROWED, HEAD, MAPS, documented, drafter_keys, listed
from adaflash.export.refuse import refuse_foreign
from adaflash.export.rope import read_rope
from adaflash.export.weights import CONFIG, find_folder, read_config, read_tensors

# The fields of a Qwen3-style layer that make or break the numbers; the rest of a config is left alone.
_LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class DraftSpec:
    """A drafter before it meets its target."""

    folder: Path
    source: str  # which project's format
    config: Qwen3Config
    block_size: int  # the anchor counts
    mask_id: int
    context_layers: tuple[int, ...]  # id l is the output of decoder layer l
    num_target_layers: int  # 0: the checkpoint does not say
    made_for: str = ""  # name of the target, if the checkpoint says
    dtype: str = ""  # as written in the config
    nested: dict[str, Any] = field(default_factory=dict)  # dflash_config


def read_drafter(name: str) -> tuple[DraftSpec, dict[str, Tensor], dict[str, Tensor]]:
    """A drafter's spec, its tensors, and the rest (length head, borrowed copies), all under documented names.

    Raises:
        UserError: not a plain DFlash drafter, a field is missing, or tensors are missing or unknown (they are listed).
    """
    folder = find_folder(name)
    config, tensors = read_config(folder), documented(read_tensors(folder))
    refuse_foreign(config, set(tensors), str(folder))
    spec = read_spec(folder, config, set(tensors))
    own = drafter_keys(spec.config.num_hidden_layers) | (set(MAPS) & set(tensors))
    missing = own - set(tensors)
    unknown = {key for key in tensors if key not in own and key not in BORROWED and not key.startswith(HEAD)}
    if missing or unknown:
        raise UserError(
            f"{folder} does not hold the tensors of a DFlash drafter with {spec.config.num_hidden_layers} layers. "
            + (f"Missing: {listed(missing)}. " if missing else "")
            + (f"Unknown: {listed(unknown)}. " if unknown else "")
            + "A server that ignores this would draft with random weights"
        )
    return spec, {key: tensors[key] for key in own}, {key: value for key, value in tensors.items() if key not in own}


def read_spec(folder: Path, config: dict[str, Any], keys: set[str] = frozenset()) -> DraftSpec:  # type: ignore[assignment]
    """The spec in a config.json of any known format. Raises UserError naming the field."""
    place = str(folder / CONFIG)
    nested = dict(config.get("dflash_config") or {})
    source = source_of(config, nested, keys)
    if source == "vLLM speculators":
        found = _speculators(config, place)
    else:
        found = _flat(config, nested, source, place)
    layers = found.pop("layers")
    text = found.pop("text")
    return DraftSpec(
        folder=folder,
        source=source,
        config=_layer_config(text, place),
        context_layers=tuple(int(layer) for layer in layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch."),
        nested=nested,
        **found,
    )


def source_of(config: dict[str, Any], nested: dict[str, Any], keys: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Which project's format a config is in."""
    if "speculators_model_type" in config:
        return "vLLM speculators"
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers"
    if config.get("model_type") == "dflash" or "target_num_hidden_layers" in config:
        return "TorchSpec"
    if any(name.startswith("use_thresh_head") for name in nested):
        return "AdaFlash / SGLang"
    return "z-lab / SGLang / SpecForge"


def _flat(config: dict[str, Any], nested: dict[str, Any], source: str, place: str) -> dict[str, Any]:
    """Formats that keep everything at the top level and in `dflash_config`."""
    total = "target_num_hidden_layers" if source == "TorchSpec" else "num_target_layers"
    layers = _either(config, nested, "target_layer_ids", place)
    if layers is None:
        raise UserError(
            f"{place}: dflash_config.target_layer_ids is missing. Readers guess the context layers then, often the wrong "
            "ones and without an error; write the layers the drafter was trained on (id l is the output of layer l)"
        )
    return {
        "text": {"vocab_size": 0, **config} if source == "transformers" else config,  # that class has no such field
        "layers": layers,
        "block_size": int(_required(_either(config, nested, "block_size", place), "block_size", place)),
        "mask_id": int(
            _required(_either(config, nested, "mask_token_id", place), "dflash_config.mask_token_id", place)
        ),
        "num_target_layers": int(config.get(total) or nested.get(total) or 0),
    }


def _speculators(config: dict[str, Any], place: str) -> dict[str, Any]:
    """vLLM's speculators: layer ids count the embedding as 0, and the layers' config is nested."""
    layers = config.get("aux_hidden_state_layer_ids")
    if layers is None:
        raise UserError(f"{place}: aux_hidden_state_layer_ids is missing; write the layers the drafter was trained on")
    if min(layers) < 1:
        raise UserError(
            f"{place}: aux_hidden_state_layer_ids {layers} read the embedding (0); adaflash reads layers only"
        )
    block = int(_required(config.get("block_size"), "block_size", place))
    asked = config.get("speculators_config") or {}
    for method in asked.get("proposal_methods") or []:
        tokens = method.get("speculative_tokens")
        if tokens not in (None, block - 1):
            raise UserError(
                f"{place}: speculative_tokens is {tokens} for a block_size of {block}; the anchor does not count there, "
                f"so it must be {block - 1}"
            )
    return {
        "text": {"max_position_embeddings": 32768, **(config.get("transformer_layer_config") or {})},
        "layers": [layer - 1 for layer in layers],
        "block_size": block,
        "mask_id": int(_required(config.get("mask_token_id"), "mask_token_id", place)),
        "num_target_layers": 0,
        "made_for": str((asked.get("verifier") or {}).get("name_or_path") or ""),
    }


def _layer_config(text: dict[str, Any], place: str) -> Qwen3Config:
    fields = {name: _required(text.get(name), name, place) for name in _LAYER_FIELDS}
    if text.get("hidden_act", "silu") != "silu":
        raise UserError(f"{place}: hidden_act is {text['hidden_act']!r}; adaflash's drafter has silu")
    heads = fields["num_attention_heads"]
    return Qwen3Config(
        **fields,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or fields["hidden_size"] // heads,
        rope_parameters=read_rope(text, place),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
    )


def _either(config: dict[str, Any], nested: dict[str, Any], name: str, place: str) -> Any:
    """A field that lives at the top level, in `dflash_config`, or in both with one value."""
    outer, inner = config.get(name), nested.get(name)
    if outer is not None and inner is not None and outer != inner:
        raise UserError(
            f"{place}: {name} is {outer} at the top level and {inner} in dflash_config; servers read one or the other. "
            "Make them equal"
        )
    return inner if outer is None else outer


def _required(value: Any, name: str, place: str) -> Any:
    if value is None:
        raise UserError(f"{place}: {name} is missing; a reader would guess it, and acceptance would suffer in silence")
    return value

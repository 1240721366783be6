"""adaflash.json: what an exported drafter was made for and from, in plain words that a later reader can check."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaflash import __version__
from adaflash.errors import UserError
from adaflash.export.pairing import target_name
from adaflash.export.sidecar import describe
from adaflash.export.weights import write_json

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash
    from adaflash.length.base import LengthPolicy
    from adaflash.targets.hf import HFTarget

FILE = "adaflash.json"
LAYERS = "id l is the output of decoder layer l, hidden_states[l + 1] of transformers"
_TALK = ({"role": "user", "content": "What is 17 times 24?"},)


@dataclass(frozen=True)
class Origin:
    """Where a drafter comes from; empty fields are unknown."""

    checkpoint: str = ""
    target: str = ""  # as the run called it
    revision: str = ""
    steps: int = 0
    tau: float | None = None  # best val/tau of training
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def write_manifest(
    folder: Path, drafter: DFlash, length: LengthPolicy | None, target: HFTarget, origin: Origin, to: str, dtype: str
) -> None:
    """Write adaflash.json."""
    content = {
        "format": 1,
        "adaflash": __version__,
        "written_for": to,
        "dtype": dtype,
        "target": {
            "name": origin.target or target_name(target),
            "revision": origin.revision or revision(target),
            "model_type": target.config.model_type,
            "hidden_size": target.hidden_size,
            "layers": target.num_layers,
            "vocabulary": target.embedding_rows,
            "stop_ids": list(target.stop_ids),
        },
        "template": template_of(target, origin.template_kwargs),
        "block": {"size": drafter.block_size, "candidates": drafter.block_size - 1, "anchor_predicts": False},
        "context_layers": {"ids": list(drafter.context_layers), "convention": LAYERS},
        "mask_token": {"id": drafter.mask_id, "from": drafter.mask_source},
        "length_policy": None if length is None else describe(length),
        "training": {"checkpoint": origin.checkpoint, "steps": origin.steps, "best_val_tau": origin.tau},
    }
    write_json(folder / FILE, content)


def read_manifest(folder: Path) -> dict[str, Any]:
    """adaflash.json; {} if the drafter was not written by adaflash. Raises UserError if it is damaged."""
    if not (folder / FILE).is_file():
        return {}
    try:
        return dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{folder / FILE}: damaged ({error}); export the drafter again") from error


def revision(target: HFTarget) -> str:
    """The commit of a target from the Hub; empty for a folder."""
    return str(getattr(target.config, "_commit_hash", None) or "")


def template_of(target: HFTarget, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Hash of the chat template, its switches, and the hash of what they make of one question; None without a template.

    The second hash moves with a switch (thinking) even where the template's text is the same.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    from adaflash.data.chat import ChatRenderer

    rendered = ChatRenderer(tokenizer, kwargs).render(_TALK)
    return {
        "sha256": _sha256(tokenizer.chat_template),
        "kwargs": kwargs,
        "rendered_sha256": _sha256([int(token) for token in rendered]),
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

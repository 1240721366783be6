"""A drafter made elsewhere, read and checked against its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from adaflash.errors import UserError
from adaflash.export.keys import HEAD, POLICY_HEAD
from adaflash.export.pairing import check_borrowed, check_maps, check_pair
from adaflash.export.sidecar import read_sidecar
from adaflash.export.spec import DraftSpec, read_drafter

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash
    from adaflash.targets.hf import HFTarget


def read_for(name: str, target: HFTarget) -> tuple[DraftSpec, dict[str, Tensor], dict[str, Tensor]]:
    """Spec, drafter tensors and length head tensors of a folder or Hub id that fits the target.

    Raises:
        UserError: not plain DFlash, incomplete, or made for another target.
    """
    spec, tensors, rest = read_drafter(name)
    check_pair(spec, tensors, target)
    check_borrowed(spec, rest, target, check_maps(spec, tensors, target))
    return spec, tensors, rest


def head_state(rest: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """State of `AdaptiveLength` in float32, from among the tensors or from the sidecar; {} if there is no such head."""
    inside = {POLICY_HEAD + name.removeprefix(HEAD): value for name, value in rest.items() if name.startswith(HEAD)}
    parts = tuple(f"{POLICY_HEAD}{part}." for part in ("down", "res", "out"))
    beside = {name: value for name, value in read_sidecar(folder)[1].items() if name.startswith(parts)}
    return {name: value.float() for name, value in (inside or beside).items()}


def read_head(name: str) -> dict[str, Tensor]:
    """The paper's length head of a drafter's folder or Hub id. Raises UserError if it has none."""
    spec, _, rest = read_drafter(name)
    state = head_state(rest, spec.folder)
    if not state:
        raise UserError(
            f"{name} has no length head ({HEAD}* or a sidecar of AdaptiveLength); leave model.length.init_args.checkpoint "
            "away to train one from scratch"
        )
    return state


def check_settings(drafter: DFlash, spec: DraftSpec) -> None:
    """Settings that are given beside a checkpoint must be the checkpoint's own; sizes of layers are taken from it.

    Raises:
        UserError: a setting contradicts the checkpoint.
    """
    given = {
        "block_size": (drafter.block_size, spec.block_size),
        "context_layers": (list(drafter.context_layers or spec.context_layers), list(spec.context_layers)),
        "mask_id": (spec.mask_id if drafter.mask_id == -1 else drafter.mask_id, spec.mask_id),
    }
    for name, (ours, theirs) in given.items():
        if ours != theirs:
            raise UserError(
                f"model.drafter.init_args.{name} is {ours}, the drafter of {spec.folder} has {theirs}: "
                f"set it with --model.drafter.init_args.{name} {str(theirs).replace(' ', '')}"
            )

"""The project's own format: a DFlash checkpoint of z-lab / SGLang, with the paper's length head beside the drafter.

`save_drafter` writes a folder that appears whole or not at all, and reads it back before it takes its name;
`load_drafter` reads a drafter of any known format.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from adaflash.drafters.dflash import DFlash, as_weight
from adaflash.errors import UserError
from adaflash.export.formats import OWN, Format
from adaflash.export.importer import head_state, read_for
from adaflash.export.keys import HEAD, MAPS, documented, drafter_keys, listed
from adaflash.export.sidecar import write_sidecar
from adaflash.export.spec import read_drafter
from adaflash.export.weights import CONFIG, WEIGHTS, new_folder, write_json, write_tensors
from adaflash.length.adaptive import AdaptiveLength, ThresholdHead
from adaflash.length.base import LengthPolicy

if TYPE_CHECKING:
    from adaflash.targets.hf import HFTarget

Dtype = Literal["float32", "bfloat16", "float16"]


def save_drafter(
    drafter: DFlash,
    length: LengthPolicy | None,
    target: HFTarget,
    folder: str | Path,
    dtype: Dtype = "bfloat16",
    force: bool = False,
) -> Path:
    """Write drafter and length head; reload what was written and compare it before the folder takes its name.

    Raises:
        UserError: the folder exists and `force` was not asked for, or what was read back differs.
    """
    folder = Path(folder)
    with new_folder(folder, force) as work:
        write_drafter(drafter, length, target, work, dtype)
    return folder


def write_drafter(
    drafter: DFlash, length: LengthPolicy | None, target: HFTarget, work: Path, dtype: Dtype, form: Format = OWN
) -> dict[str, Tensor]:
    """config.json, model.safetensors and a policy's sidecar into an existing folder, read back and compared.

    Returns the tensors as written, under documented names.
    """
    form.check(drafter)
    inside = head_tensors(length) if form.head_inside else {}
    tensors = form.tensors(cast({**drafter_tensors(drafter), **inside}, dtype), target)
    head = inside.get(f"{HEAD}out.weight")
    write_tensors(work / WEIGHTS, tensors)
    write_json(work / CONFIG, form.config(drafter, target, dtype, 0 if head is None else head.shape[1]))
    if length is not None and len(inside) < len(length.state_dict()):  # more than what lies inside
        write_sidecar(work, length)
    written = documented(tensors)
    compare(drafter, target, work, written)
    return written


def load_drafter(folder: str | Path, target: HFTarget) -> tuple[DFlash, dict[str, Tensor]]:
    """A drafter of any known format for this target, in float32, and its length head's state ({} if it has none).

    The state is that of `AdaptiveLength`. Raises UserError: see `read_for`.
    """
    spec, tensors, rest = read_for(str(folder), target)
    drafter = DFlash(block_size=spec.block_size)
    drafter.adopt(spec, tensors, target)
    return drafter.to(target.device).eval(), head_state(rest, spec.folder)


def load_length(state: dict[str, Tensor], target: HFTarget, block_size: int) -> AdaptiveLength:
    """The paper's length policy with a head's state. Raises UserError if the head has other sizes."""
    policy = AdaptiveLength()
    policy.build(target.hidden_size, block_size)
    try:
        policy.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"the checkpoint's length head ({HEAD}*) is not the paper's: {error}") from error
    return policy.to(target.device)


def drafter_tensors(drafter: DFlash) -> dict[str, Tensor]:
    """The drafter's tensors; their names are the documented ones."""
    tensors, wanted = dict(drafter.state_dict()), drafter_keys(drafter.num_layers)
    assert set(tensors) - set(MAPS) == wanted, set(tensors) ^ wanted
    return tensors


def head_tensors(length: LengthPolicy | None) -> dict[str, Tensor]:
    """The paper's length head under its served name, from a policy that has one as `head`; else {}."""
    head = getattr(length, "head", None)
    return {HEAD + name: value for name, value in head.state_dict().items()} if isinstance(head, ThresholdHead) else {}


def cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The same tensors on the CPU, weights in another number format."""
    to = getattr(torch, dtype)
    return {n: value.detach().to("cpu", to if value.is_floating_point() else None) for n, value in tensors.items()}


def compare(drafter: DFlash, target: HFTarget, work: Path, written: dict[str, Tensor]) -> None:
    """Read a written folder back as a stranger would: the same keys both ways, the same values, the same block states.

    Raises:
        UserError: anything differs. It is a defect of this exporter or of the disk, and the folder never appears.
    """
    from adaflash.export.probe import block_states

    _, tensors, rest = read_drafter(str(work))
    found = {**tensors, **rest}
    lost, extra = set(written) - set(found), set(found) - set(written)
    changed = [name for name in set(written) & set(found) if not torch.equal(found[name], written[name])]
    if lost or extra or changed:
        raise UserError(f"{work}: read back otherwise than written: {listed([*lost, *extra, *changed])}")
    again, _ = load_drafter(work, target)
    twin = rounded(drafter, target, written)
    prompt = tuple(range(min(8, target.embedding_rows)))
    for one, other in zip(block_states(again, target, prompt), block_states(twin, target, prompt), strict=True):
        if not torch.equal(one, other):
            raise UserError(f"{work}: the drafter read back computes other states than the one written (its config?)")


def rounded(drafter: DFlash, target: HFTarget, written: dict[str, Tensor]) -> DFlash:
    """The drafter in float32 with weights as they were written."""
    import copy

    twin = copy.deepcopy(drafter).float()
    names = drafter_keys(drafter.num_layers) | (set(MAPS) & set(drafter.state_dict()))
    twin.load_state_dict({name: as_weight(written[name]) for name in names})
    return twin.to(target.device).eval()

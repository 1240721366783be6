"""Does a drafter belong to a target? Every disagreement names both models and the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adaflash.drafters.base import check_context_layers
from adaflash.errors import UserError
from adaflash.export.spec import DraftSpec
from adaflash.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from adaflash.targets.hf import HFTarget


def target_name(target: HFTarget) -> str:
    """What the target calls itself: its folder or Hub id."""
    return str(target.model.name_or_path or f"a {target.config.model_type} in memory")


def check_pair(spec: DraftSpec, tensors: dict[str, Tensor], target: HFTarget) -> None:
    """Compare sizes, layers and vocabulary with the target's.

    Raises:
        UserError: the first field that differs.
    """
    width = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 0
    fields = [
        ("hidden size", spec.config.hidden_size, target.hidden_size),
        ("number of target layers", spec.num_target_layers or target.num_layers, target.num_layers),
        ("context width (columns of fc.weight)", width, len(spec.context_layers) * target.hidden_size),
        ("vocabulary (rows of the embedding)", spec.config.vocab_size or target.embedding_rows, target.embedding_rows),
    ]
    for field, theirs, ours in fields:
        if theirs != ours:
            raise mismatch(spec, target, field, theirs, ours)
    check_context_layers(spec.context_layers, target.num_layers, f"{spec.folder}: target_layer_ids")
    if not 0 <= spec.mask_id < target.embedding_rows:
        raise mismatch(spec, target, "mask token id", spec.mask_id, f"0 .. {target.embedding_rows - 1}")


def check_maps(spec: DraftSpec, tensors: dict[str, Tensor], target: HFTarget) -> DraftVocabulary | None:
    """The vocabulary of a drafter that has fewer tokens than the target; None: it has all.

    Raises:
        UserError: d2t and t2d disagree with each other or with the target.
    """
    if "d2t" not in tensors:
        return None
    d2t, t2d = tensors["d2t"], tensors["t2d"].bool()
    if len(t2d) != target.embedding_rows:
        raise mismatch(spec, target, "number of tokens in t2d", len(t2d), target.embedding_rows)
    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    if not torch.equal(tokens, t2d.nonzero().squeeze(1)):
        raise UserError(f"{spec.folder}: d2t and t2d name different tokens; the drafter was written wrongly")
    return DraftVocabulary.of(tokens, len(t2d))


def check_borrowed(
    spec: DraftSpec, rest: dict[str, Tensor], target: HFTarget, said: DraftVocabulary | None = None
) -> None:
    """Copies of the target's embedding and head must be the target's: this drafter always borrows those.

    Raises:
        UserError: the checkpoint brings its own, which another server would use.
    """
    theirs = {
        "embed_tokens.weight": target.embed(torch.arange(target.embedding_rows, device=target.device)),
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    if said is not None:
        theirs["lm_head.weight"] = theirs["lm_head.weight"][said.place.to(target.device) >= 0]
    for name, weight in theirs.items():
        if name not in rest:
            continue
        copy, weight = rest[name].float().cpu(), weight.float().cpu()
        if copy.shape != weight.shape or not torch.allclose(copy, weight, rtol=1e-2, atol=1e-4):
            raise mismatch(spec, target, name, "weights of its own", "other weights")


def mismatch(spec: DraftSpec, target: HFTarget, field: str, theirs: object, ours: object) -> UserError:
    """One sentence for a pair that does not fit."""
    made_for = f", made for {spec.made_for}" if spec.made_for else ""
    return UserError(
        f"drafter {spec.folder} ({spec.source}{made_for}) does not fit target {target_name(target)}: its {field} is "
        f"{theirs}, the target has {ours}. Use the target it was trained for"
    )

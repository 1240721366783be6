"""A probe: two prompts, what the target's context was, and which candidates the drafter gave with which margins.

It lies beside exported weights (`probe.npz`, plain arrays), so that any loader can be checked: first the context
features (wrong layers, order, target or revision), then, from the stored features, the candidates (rotary base, mask
token, norms, names, block layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adaflash.blocks import block_tokens
from adaflash.drafters.base import embed_blocks
from adaflash.types import Blocks, Segments

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash
    from adaflash.targets.hf import HFTarget

FILE = "probe.npz"
_ARRAYS = ("tokens", "context", "candidates", "margins")
PROMPTS = (
    "What is 17 times 24? Answer with the steps, one a line.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


@dataclass(frozen=True)
class Probe:
    """One prompt's probe, on the CPU in float32."""

    tokens: Tensor  # [S + 1] int64: the prompt and the anchor, the target's greedy choice after it
    context: Tensor  # [S, C] context rows before the anchor
    candidates: Tensor  # [K] int64
    margins: Tensor  # [K] logit of the candidate minus that of the second best
    dtype: str = "float32"  # number format of the target when the probe was made


def make_probe(drafter: DFlash, target: HFTarget) -> list[Probe]:
    """The probes of a drafter as it is now."""
    return [_probe(drafter, target, prompt) for prompt in probe_prompts(target)]


def probe_prompts(target: HFTarget) -> list[tuple[int, ...]]:
    """Two short prompts; without a tokenizer, fixed ids."""
    if target.tokenizer is not None:
        texts = [target.tokenizer(text, add_special_tokens=True)["input_ids"] for text in PROMPTS]
        return [tuple(int(token) for token in text) for text in texts]
    rows = target.embedding_rows
    return [tuple((7 * i + 3) % rows for i in range(12)), tuple((11 * i + 5) % rows for i in range(17))]


@torch.no_grad()
def block_states(drafter: DFlash, target: HFTarget, prompt: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Context rows [S, C] of a prompt, and the states [1, B, H] of the block after it; its anchor is the target's choice."""
    anchor, context = read_prompt(drafter.context_layers, target, prompt)
    return context, states_after(drafter, target, anchor, context)


@torch.no_grad()
def read_prompt(layers: tuple[int, ...], target: HFTarget, prompt: tuple[int, ...]) -> tuple[int, Tensor]:
    """The target's greedy token after a prompt, and its context rows [S, C]."""
    features = target.read(torch.tensor(prompt, device=target.device), Segments.whole([len(prompt)]), layers)
    return int(target.head(features.hidden[-1:]).argmax()), features.context


@torch.no_grad()
def states_after(drafter: DFlash, target: HFTarget, anchor: int, context: Tensor) -> Tensor:
    """States [1, B, H] of the one block whose anchor follows the context rows [S, C]."""
    device = target.device
    tokens = block_tokens(torch.tensor([anchor], device=device), drafter.block_size, drafter.mask_id)
    blocks = Blocks(
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        anchors=torch.tensor([len(context)], device=device),
        tokens=tokens,
        labels=tokens[:, 1:],
        supervised=torch.zeros_like(tokens[:, 1:], dtype=torch.bool),
        full=torch.zeros(1, dtype=torch.bool, device=device),
    )
    embeds = embed_blocks(target, tokens, next(drafter.parameters()).dtype)
    return drafter(embeds, blocks, context, Segments.whole([len(context)]))


@torch.no_grad()
def candidates_after(drafter: DFlash, target: HFTarget, anchor: int, context: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates [K] of that block and their margins [K] over the second best."""
    head = drafter.head(target)
    best = head(states_after(drafter, target, anchor, context)[0, 1:]).float().topk(2)
    return head.ids(best.indices[:, 0]).cpu(), (best.values[:, 0] - best.values[:, 1]).cpu()


def _probe(drafter: DFlash, target: HFTarget, prompt: tuple[int, ...]) -> Probe:
    anchor, context = read_prompt(drafter.context_layers, target, prompt)
    candidates, margins = candidates_after(drafter, target, anchor, context)
    dtype = str(target.dtype).removeprefix("torch.")
    return Probe(torch.tensor([*prompt, anchor]), context.float().cpu(), candidates, margins, dtype)


def save_probe(folder: Path, probes: list[Probe]) -> None:
    """Plain arrays, named field_number."""
    arrays = {f"{name}_{i}": getattr(each, name).numpy() for i, each in enumerate(probes) for name in _ARRAYS}
    arrays |= {f"dtype_{i}": np.array(each.dtype) for i, each in enumerate(probes)}
    with (folder / FILE).open("wb") as file:
        np.savez(file, **arrays)


def read_probe(folder: Path) -> list[Probe]:
    """The probes of a folder; [] if it has none."""
    if not (folder / FILE).is_file():
        return []
    with np.load(folder / FILE, allow_pickle=False) as arrays:
        count = sum(name.startswith("tokens_") for name in arrays.files)
        return [
            Probe(
                **{name: torch.from_numpy(arrays[f"{name}_{i}"]) for name in _ARRAYS}, dtype=str(arrays[f"dtype_{i}"])
            )
            for i in range(count)
        ]

"""A target that is loaded in shards is the target: for every family, and for a drafter that starts from its layers."""

from __future__ import annotations

from pathlib import Path

import fitting
import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from adaflash.drafters.dflash import DFlash
from adaflash.parallel.decoding import Gathered
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.placement import Placement
from adaflash.parallel.sharded_target import load_sharded
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Segments


def logits(of: HFTarget) -> torch.Tensor:
    """Context states and logits of one read."""
    tokens = torch.arange(3, 15)
    with torch.no_grad(), of.ranks.decoding():
        features = of.read(tokens, Segments.whole([5, 7]), [0, 2])
        return torch.cat([features.context, of.head(features.hidden), of.embed(tokens)], -1)


def drafter(of: HFTarget) -> DFlash:
    """One that starts from the target's last layers."""
    torch.manual_seed(3)
    made = DFlash(num_layers=2, block_size=4, context_layers=[0, 2], mask_id=tiny.VOCAB - 1, init="target")
    with Placement(None, None, ParallelOptions()).readable(of, 2):
        made.build(of)
    return made


def compare(family: str, folder: Path) -> None:
    """Load whole and in shards, on every rank."""
    name, options, mesh = str(folder / family), TargetOptions(stop_ids=[7]), init_device_mesh("cpu", (2,))
    whole, sharded = HFTarget.load(name, options), load_sharded(name, options, mesh, torch.device("cpu"))
    parameters = dict(sharded.model.named_parameters())
    cut = [n for n, p in parameters.items() if isinstance(p, DTensor)]
    assert all(".layers." in n or n.endswith("norm.weight") for n in cut) and len(cut) >= len(parameters) - 2
    assert sum(p.to_local().numel() for p in parameters.values() if isinstance(p, DTensor)) < 0.6 * sum(
        p.numel() for p in parameters.values() if isinstance(p, DTensor)
    )
    assert not any(p.requires_grad for p in parameters.values())
    assert sharded.stop_ids == whole.stop_ids == (5, 7)
    torch.testing.assert_close(logits(sharded), logits(whole), rtol=0, atol=1e-5)
    ours, theirs = drafter(sharded), drafter(whole)
    for (n, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other), n
    sharded.ranks = Gathered(ours, [], sharded)
    torch.testing.assert_close(logits(sharded), logits(whole), rtol=0, atol=1e-5)


def compare_all(folder: Path) -> None:
    dist.init_process_group("gloo")
    for family in tiny.FAMILIES:
        compare(family, folder)


def test_a_target_loaded_in_shards_is_the_target(tmp_path: Path) -> None:
    for family in tiny.FAMILIES:
        made = tiny.model(family)
        made.generation_config.eos_token_id = [5]
        made.save_pretrained(tmp_path / family)
        fitting.tokenizer().save_pretrained(tmp_path / family)
    run_ranks(compare_all, tmp_path)


GB = 10**9


@pytest.mark.parametrize(
    ("weights", "room", "per_node", "nodes", "place", "mode"),
    [
        (16 * GB, 80 * GB, 8, 1, "replicate", "gathered"),  # Qwen3-8B in bf16 on 80 GB
        (61 * GB, 80 * GB, 8, 2, "node", "lockstep"),
        (61 * GB, 140 * GB, 8, 2, "node", "gathered"),
        (61 * GB, 80 * GB, 1, 16, "world", "lockstep"),  # one device a node: a node has nothing to share
        (470 * GB, 80 * GB, 8, 4, "world", "lockstep"),
        (470 * GB, 80 * GB, 1, 1, "replicate", "lockstep"),  # nobody to share with
    ],
)
def test_what_memory_chooses(weights: int, room: int, per_node: int, nodes: int, place: str, mode: str) -> None:
    assert ParallelOptions().place(weights, room, per_node, nodes) == place
    assert ParallelOptions().mode(weights, room) == mode
    assert ParallelOptions("world", "gathered").place(weights, room, per_node, nodes) == "world"
    assert ParallelOptions("world", "lockstep").mode(1, room) == "lockstep"

"""Faults of kind K10 that no other file here covers: layer counts, targets in shards, the mask id's limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from exporting import make_source, save_run, save_target

from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.command import export, export_drafter
from adaflash.export.own import load_drafter, save_drafter
from adaflash.length.adaptive import AdaptiveLength
from adaflash.targets.hf import HFTarget


@pytest.mark.parametrize(("layers", "context"), [(3, [0, 2]), (1, [0, 1, 2]), (2, [1])])
def test_drafter_layers_and_context_layers_are_independent(layers: int, context: list[int], tmp_path: Path) -> None:
    """FAULTS 19: they look linked and are not."""
    target = tiny.target()
    drafter = tiny.drafter(target, num_layers=layers, context_layers=context)
    for to in ("sglang", "vllm", "hf"):
        export_drafter(replace(make_source(target, head=False), drafter=drafter), to, tmp_path / to)  # type: ignore[arg-type]
        again, _ = load_drafter(tmp_path / to, target)
        assert (again.num_layers, list(again.context_layers)) == (layers, context)


@pytest.mark.parametrize("ids", [[0, 3], [-1, 2], [1, 1], [2, 0], [0, 4]])
def test_context_layers_that_cannot_be(ids: list[int]) -> None:
    with pytest.raises(UserError, match=r"context_layers.*allowed are 0 .. 2"):
        tiny.drafter(tiny.target(), context_layers=ids)


@pytest.mark.parametrize("mask_id", [97, 102, -2])
def test_mask_ids_without_a_row(mask_id: int) -> None:
    """FAULTS 21: named at the start, with the limits, never as an index error."""
    with pytest.raises(UserError, match=r"not a row of the target's embedding: allowed are 0 .. 96"):
        tiny.drafter(tiny.target(), mask_id=mask_id)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_target_in_shards(family: str, tmp_path: Path) -> None:
    """FAULTS 68: one file or many, tied or not: the same embedding and head."""
    name = save_target(tmp_path / "one", family)
    whole = HFTarget.load(name)
    whole.tokenizer.save_pretrained(tmp_path / "many")
    tiny.model(family).save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    shards = HFTarget.load(str(tmp_path / "many"))
    ids, hidden = torch.arange(97), torch.randn(3, 64)
    assert torch.equal(whole.embed(ids), shards.embed(ids)) and torch.equal(whole.head(hidden), shards.head(hidden))
    save_drafter(make_source(whole).drafter, None, whole, tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter", shards)[0].built


def test_a_drafter_goes_round(tmp_path: Path) -> None:
    """run -> export -> go on from it -> export: the same weights; and again after a run that started from a drafter."""
    name = save_target(tmp_path / "target")
    save_run(tmp_path / "first", name)
    export(str(tmp_path / "first"), "sglang", str(tmp_path / "a"), dtype="float32")
    drafter = DFlash(block_size=4, checkpoint=str(tmp_path / "a"))
    length = AdaptiveLength(checkpoint=str(tmp_path / "a"))
    save_run(tmp_path / "second", name, drafter, length)
    export(str(tmp_path / "second"), "sglang", str(tmp_path / "b"), dtype="float32")
    one, other = ((tmp_path / each / "model.safetensors").read_bytes() for each in "ab")
    assert one == other
    a, b = (json.loads((tmp_path / each / "config.json").read_text()) for each in "ab")
    assert a == b

"""On a real model one wrong layer must stand out, though its first token carries states a thousand times larger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exporting import edit

from adaflash.doctor.command import examine
from adaflash.drafters.dflash import DFlash
from adaflash.export.command import export_drafter
from adaflash.export.manifest import Origin
from adaflash.export.source import Source
from adaflash.targets.fetch import fetched_path
from adaflash.targets.hf import HFTarget

NAME = "smollm2-135m"


@pytest.mark.real
@pytest.mark.skipif(fetched_path(NAME) is None, reason=f"adaflash fetch {NAME}")
def test_one_layer_off_by_one_in_half_precision(tmp_path: Path) -> None:
    target = HFTarget.load(NAME)
    drafter = DFlash(num_layers=1, block_size=4, mask_id=16)
    drafter.build(target)
    export_drafter(Source(drafter, None, target, Origin()), "sglang", tmp_path / "out")
    (tmp_path / "out" / "adaflash.json").unlink()
    ids = json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    assert ids == [1, 8, 14, 20, 27]

    def context() -> str:
        checks = examine(NAME, str(tmp_path / "out"), "", [], "bfloat16", "", False)
        return next(check for check in checks if check.name == "probe: context").line()

    assert context().startswith("ok")
    edit(tmp_path / "out", dflash_target_layer_ids=[1, 8, 15, 20, 27])
    assert "the drafter reads layer 14 where its config says 15" in context()

"""The early-stop preset: Lightning's own callback, set up for tau."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_module import FakeData, FakeModule, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping

from adaflash.callbacks.acceptance import AcceptanceMonitor
from adaflash.callbacks.validate_first import ValidateFirst
from adaflash.configuration import PACKAGED


def preset(**changes: Any) -> EarlyStopping:
    content = yaml.safe_load((PACKAGED / "monitor" / "early_stop.yaml").read_text())
    [callback] = content["trainer"]["callbacks+"]
    return EarlyStopping(**{**callback["init_args"], "verbose": False, **changes})


@pytest.mark.parametrize(("rises", "stops_at"), [(False, 10), (True, 14)])
def test_it_stops_when_tau_has_stood_still(tmp_path: Path, rises: bool, stops_at: int) -> None:
    """A validation every update: tau is 3.5 from the first on, or gets better until the fifth."""

    class Module(FakeModule):
        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            self.after = min(max(self.global_step - 2, 0), 3) if rises else 3
            return super().validation_step(batch, batch_idx)

    callbacks = [ValidateFirst(), AcceptanceMonitor(), preset(patience=9)]
    trainer = quiet_trainer(
        tmp_path, callbacks, max_steps=40, num_sanity_val_steps=0, val_check_interval=1, check_val_every_n_epoch=1
    )
    trainer.fit(Module(), datamodule=FakeData())
    assert trainer.global_step == stops_at

"""Signals are noted and nothing else; what they lead to is tested with real ones in tests/cli/test_killed.py."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import fitting
import pytest
import tiny

from adaflash import cli, trainer_cli
from adaflash.saving import LastCheckpoint
from adaflash.stopping import Signals, Stopped


def test_the_first_signal_is_noted_and_a_second_ctrl_c_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    signals = Signals()
    signals._note(signal.SIGINT, None)
    assert signals.number == signal.SIGINT
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    signals._note(signal.SIGTERM, None)
    assert signals.number == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signals._note(signal.SIGINT, None)
    terminated = Signals()
    for _ in range(2):  # schedulers may repeat themselves
        terminated._note(signal.SIGTERM, None)
    assert terminated.number == signal.SIGTERM


def test_the_status_is_what_a_shell_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(how: BaseException) -> int:
        def build() -> None:
            try:
                raise how
            except KeyboardInterrupt:
                raise SystemExit(1)  # noqa: B904  (as Lightning does)

        monkeypatch.setattr(trainer_cli, "TrainerCLI", build)
        return cli.main(["fit"])

    assert ends(Stopped(signal.SIGTERM, 7, "runs/a/last.ckpt")) == 143
    assert "stopped by SIGTERM after update 7: runs/a/last.ckpt holds everything" in capsys.readouterr().err
    assert ends(Stopped(signal.SIGINT, 0, "")) == 130
    assert "stopped by Ctrl-C after update 0: nothing was trained" in capsys.readouterr().err
    assert ends(KeyboardInterrupt()) == 130
    with pytest.raises(SystemExit):
        ends(SystemExit(2))


def test_handlers_are_those_of_before_after_a_fit(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    last = LastCheckpoint(dirpath=tmp_path, save_last=True)
    module = fitting.module(tiny.target())
    fitting.trainer(tmp_path, 1, [last.signals, last], enable_checkpointing=True).fit(
        module, datamodule=fitting.data(tmp_path, tiny.prompts(5))
    )
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert (tmp_path / "last.ckpt").is_file()


def test_a_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def fit() -> None:
        try:
            signals = Signals()
            signals.on_train_end(None, None)  # type: ignore[arg-type]
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.parametrize("steps", [3, 4])
def test_the_last_update_is_saved_between_two_regular_saves(tmp_path: Path, steps: int) -> None:
    import torch

    last = LastCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=2)
    trainer = fitting.trainer(tmp_path, steps, [last.signals, last], enable_checkpointing=True)
    module = fitting.module(tiny.target())
    trainer.fit(module, datamodule=fitting.data(tmp_path, tiny.prompts(5)))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == steps
    assert all(torch.equal(saved["state_dict"][name], tensor) for name, tensor in module.state_dict().items())


def test_the_interval_counts_updates_not_batches(tmp_path: Path) -> None:
    """FAULTS 57: every 4 updates of 2 micro-batches each; and after a validation the drafter trains on."""
    last = LastCheckpoint(dirpath=tmp_path, filename="s{step}", every_n_train_steps=4, save_top_k=-1,
                          save_last=True, auto_insert_metric_name=False)  # fmt: skip
    settings = {"accumulate_grad_batches": 2, "limit_val_batches": 1.0, "val_check_interval": 3}
    trainer = fitting.trainer(tmp_path, 9, [last.signals, last], enable_checkpointing=True, **settings)
    module = fitting.module(tiny.target())
    trainer.fit(module, datamodule=fitting.data(tmp_path, tiny.prompts(5), tiny.prompts(2)))
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "s4.ckpt", "s8.ckpt"]
    assert module.drafter.training and module.length.training and not module.target.model.training

"""The checkpoint a run goes on from: regular, at the end, and when the run is asked to stop."""

from __future__ import annotations

import copy
import signal
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from adaflash.rollouts.base import RolloutFailed
from adaflash.stopping import Signals, Stopped


class LastCheckpoint(ModelCheckpoint):
    """Keeps `last.ckpt` such that a killed and resumed run equals one that never stopped.

    Every run has it, under a key of its own:

        last: {every_n_train_steps: 100, save_last: true}

    Beside the regular saves it saves at the last update, and once `signals` has heard of SIGTERM or Ctrl-C on any rank;
    then the run leaves at once, without a validation. A validation that was due or under way is made up for on resume.
    With `model.reuse.checkpoint: boundary` all this waits for the end of a rollout.

    Args:
        kwargs: Those of Lightning's ModelCheckpoint.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.signals = Signals()
        self._began = 0  # updates done when this process began
        self._put_off = False  # a regular save that waits for the end of a rollout
        self._leaving = False
        self._owed = False  # a validation that the checkpoint's run did not finish
        self._cut = False  # likewise, of this run

    # ---- saving ----

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an update: the regular save, the last one, or the one before leaving."""
        if trainer.fit_loop._should_accumulate():
            return
        ended = 0 < trainer.max_steps <= trainer.global_step
        if not ended and _in_a_rollout(pl_module):
            self._put_off |= self._every_n_train_steps > 0 and trainer.global_step % self._every_n_train_steps == 0
            return
        if self._put_off and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self._put_off = False
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._leaving = self._asked(trainer)
        if self._leaving or ended:
            self._save(trainer)
        if self._leaving:
            trainer.limit_val_batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave, now that the update before has been logged."""
        self._leave(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave, if there is no other batch."""
        self._leave(trainer)
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave in the midst of a validation: half of one would mislead, so the whole of it is owed."""
        if trainer.state.fn != TrainerFn.FITTING or not self._asked(trainer):
            return
        if trainer.global_step > self._began:
            progress: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            for counts in (progress.current, progress.total):  # as at the end: Lightning would go on in the middle
                counts.started = counts.processed = counts.completed = counts.ready
            self._cut = True
            self._save(trainer)
        self._leaving = True
        self._leave(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what no regular save has caught (a run that ended by epochs or by time)."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A rollout that could not be made (its server is gone) loses nothing: the updates before it are saved.

        Only where one process decides alone, and not inside a window of micro-batches, whose gradients would be lost.
        """
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        alone = trainer.world_size == 1 and done % trainer.accumulate_grad_batches == 0
        if isinstance(exception, RolloutFailed) and alone and trainer.global_step > self._began:
            _put_back(trainer)
            self._save(trainer)
        else:
            super().on_exception(trainer, pl_module, exception)

    def _save(self, trainer: Trainer) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _asked(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self.signals.number != 0, all=False)

    def _leave(self, trainer: Trainer) -> None:
        if self._leaving:
            raise Stopped(self.signals.number or signal.SIGTERM, trainer.global_step, self.last_model_path)

    # ---- a validation that was due ----

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note whether a validation of these weights is still to come: Lightning passes over it on resume."""
        checkpoint["validation_due"] = self._cut or _validation_due(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the note up."""
        self._owed = bool(checkpoint.get("validation_due"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate what was not validated before the run was stopped."""
        super().on_train_start(trainer, pl_module)
        self._began = trainer.global_step
        if self._owed and trainer.enable_validation:
            validate_now(trainer, pl_module)
        self._owed = False


def _put_back(trainer: Any) -> None:
    """Undo that the batch in hand was begun: counters, optimizer's counters, position in the stream."""
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = False
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    for progress in (loop.batch_progress, optimizer.step, optimizer.zero_grad):
        for counts in (progress.current, progress.total):
            counts.ready = counts.completed
            for name in ("started", "processed"):
                if hasattr(counts, name):
                    setattr(counts, name, counts.completed)
    trainer.datamodule.put_back()


def _in_a_rollout(pl_module: Any) -> bool:
    """Whether checkpoints must wait for the end of the rollout (`model.reuse.checkpoint: boundary`)."""
    buffer = getattr(pl_module, "buffer", None)
    return buffer is not None and buffer.reuse.checkpoint == "boundary" and not buffer.at_boundary


def _validation_due(trainer: Trainer) -> bool:
    """Whether Lightning is about to validate after the batch in hand."""
    loop = trainer.fit_loop.epoch_loop
    current: Any = loop.batch_progress.current  # typed too narrowly there
    if trainer.state.fn != TrainerFn.FITTING or trainer.validating or current.processed == current.completed:
        return False
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and bool(loop._should_check_val_fx(fetcher))


def validate_now(trainer: Trainer, pl_module: LightningModule) -> None:
    """Run the validation of `fit` outside its turn, on every rank alike; the loop's counters stay as they are."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    progress, restarting, first = copy.deepcopy(loop.batch_progress), loop.restarting, connector._first_loop_iter
    trainer.validating, loop.restarting = True, False
    loop.run()
    # As Lightning's own epoch loop does after a validation inside an epoch.
    trainer.training, connector._first_loop_iter = True, first
    loop.batch_progress, loop.restarting = progress, restarting
    pl_module.train()

"""Stopping when asked to: a signal sets a flag, nothing more; all ranks agree at the end of an update, save, and leave.

Lightning's own handler talks to the other ranks from inside the signal and hangs when several of them are signalled.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

TOLD = b"\nadaflash: stopping after this update, with a checkpoint; Ctrl-C again stops at once\n"


class Stopped(BaseException):
    """Raised on every rank once a run that was asked to stop has saved what it did."""

    def __init__(self, number: int, updates: int, checkpoint: str) -> None:
        """Note the signal, the updates done, and the checkpoint that holds them ("" if nothing was trained)."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        saved = f"{checkpoint} holds everything; go on with --ckpt_path last" if checkpoint else "nothing was trained"
        super().__init__(f"stopped by {name} after update {updates}: {saved}")
        self.status = 128 + number  # as a shell reports it, so that schedulers start the run again


class Signals(Callback):
    """Notes SIGTERM and Ctrl-C while a run trains. It comes first among the callbacks; `LastCheckpoint` acts on it."""

    def __init__(self) -> None:
        self.number = 0  # the signal that came; 0: none

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the place of Lightning's handlers, which it puts back itself after the run."""
        if trainer.received_sigterm:  # while the model was loading
            self.number, trainer._signal_connector.received_sigterm = signal.SIGTERM, False
        self._listen(self._note, self._note)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is saved: what still runs may be stopped at once."""
        self._listen(signal.SIG_DFL, signal.default_int_handler)

    def _listen(self, on_terminate: Any, on_interrupt: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # Python refuses handlers of other threads
            signal.signal(signal.SIGTERM, on_terminate)
            signal.signal(signal.SIGINT, on_interrupt)

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if self.number == signal.SIGINT:
                raise KeyboardInterrupt
            os.write(2, TOLD)  # print is not safe in a signal handler
        self.number = self.number or number

"""When one rank fails all stop within seconds, and each says which rank it was and why.

Without this the others wait in a collective that never comes, or die of a connection that was closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaflash.errors import UserError

KEY = "failed"
LOOK = 0.5  # seconds between two looks
GRACE = 5.0  # seconds that a rank has to end by itself once another one failed


class RankFailed(UserError):
    """Another rank failed first; its own output has the traceback."""


class FailTogether(Callback):
    """Tells the other ranks of an exception. Every run has it; it does nothing where there is one process."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open a line of its own: collectives may be blocked when it is needed."""
        if trainer.world_size == 1 or not dist.is_initialized() or self._store is not None:
            return
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        wait = timedelta(seconds=60)
        if trainer.is_global_zero:
            self._store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
        place = [self._store.port if self._store is not None else 0]
        dist.broadcast_object_list(place, 0)
        self._store = self._store or TCPStore(host, place[0], timeout=wait, wait_for_workers=False)
        self._watch = _Watch(TCPStore(host, place[0], timeout=wait, wait_for_workers=False), trainer.global_rank)
        self._watch.start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the others, or say whose failure this one follows.

        Raises:
            RankFailed: another rank failed first.
        """
        if self._store is None or self._watch is None or not isinstance(exception, Exception):
            return  # a run that was asked to stop does so on all ranks
        if (first := self._first()) and not first.startswith(f"rank {trainer.global_rank} "):
            self._watch.ending = True
            raise RankFailed(f"{first}; all ranks stop. The output of that rank has the traceback") from exception
        with contextlib.suppress(RuntimeError):
            text = f"{type(exception).__name__}: {str(exception).strip() or 'no message'}"
            self._store.set(KEY, f"rank {trainer.global_rank} failed: {text[:2000]}")
            self._await_others(trainer.world_size)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.ending = True
        self._store = self._watch = None

    def _first(self) -> str:
        """What the first rank that failed said, after the moment it may take to say it."""
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # rank 0, which keeps the messages, is gone
            for _ in range(4):
                if self._store.check([KEY]):
                    return self._store.get(KEY).decode()
                time.sleep(LOOK / 4)
        return self._watch.heard if self._watch is not None else ""

    def _await_others(self, world: int) -> None:
        """Stay until all have heard: rank 0 takes the messages with it, and a closed connection explains nothing."""
        assert self._store is not None
        end = time.monotonic() + 4 * LOOK
        while self._store.add("heard", 0) < world and time.monotonic() < end:
            time.sleep(LOOK / 4)


class _Watch(threading.Thread):
    """Looks for another rank's failure while the main thread may be blocked, and ends the process if that stays so."""

    def __init__(self, store: TCPStore, rank: int) -> None:
        super().__init__(daemon=True, name="failures of other ranks")
        self.store, self.rank = store, rank
        self.heard, self.ending = "", False

    def run(self) -> None:
        """Until the run or the process ends."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: the main thread's collectives tell
            while not self.ending and not self.store.check([KEY]):
                time.sleep(LOOK)
            if self.ending:
                return
            self.heard = self.store.get(KEY).decode()
            self.store.add("heard", 1)
            self._end()

    def _end(self) -> None:
        if self.heard.startswith(f"rank {self.rank} "):
            return
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if self.ending:
                return
            time.sleep(LOOK / 4)
        sys.stderr.write(f"adaflash: {self.heard}; this rank ({self.rank}) was still waiting and stops\n")
        sys.stderr.flush()
        os._exit(1)

"""The Lightning data module: prompts for training, validation and prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from adaflash.data.base import PromptSource
from adaflash.data.chat import ChatRenderer
from adaflash.data.finite import PromptBatches, by_domain, in_order
from adaflash.data.order import Mixer
from adaflash.data.pool import PromptPool, shared_prompts
from adaflash.data.position import Position, moved
from adaflash.data.report import DataError
from adaflash.data.stream import CursorLoader, PromptStream
from adaflash.data.tokenizer import load_renderer
from adaflash.errors import UserError
from adaflash.types import Prompt, PromptBatch

# What each stage reads; the first one must not be empty.
ROLES = {"fit": ("train", "val"), "validate": ("val",), "test": ("val",), "predict": ("predict",)}


class PromptDataModule(L.LightningDataModule):
    """Prompts of a target, rendered by its own tokenizer.

    Args:
        target: Fetched name, folder or Hub id whose tokenizer renders the prompts (the CLI links it).
        train: Sources of the training stream, mixed by their weights.
        val: Sources of validation and test, read in order.
        predict: Sources of prediction, one pass in order; empty: those of training.
        batch_size: Trajectories per rank and micro-batch.
        rollout_size: Prompts per rank that are rolled out at once; a multiple of batch_size.
        reuse: How often each rollout is trained on.
        val_batch_size: Prompts handed to the engine at once.
        val_prompts: At most so many prompts per domain in validation; null: all.
        template_kwargs: Switches of the chat template, e.g. `{enable_thinking: false}`.
        max_prompt_tokens: Longer prompts are dropped and counted, never cut.
        num_workers: Processes that read and render.
        seed: Of mixing and shuffling.
        max_dropped: Largest share of a source that may be unusable.
        epochs: Passes over the data of training: the run ends once every source was passed so often, or at
            `trainer.max_steps` if that is sooner; 0: at `trainer.max_steps`.
    """

    def __init__(
        self,
        target: str = "",
        train: list[PromptSource] = [],  # noqa: B006  (read only; a union with None makes CLI errors unreadable)
        val: list[PromptSource] = [],  # noqa: B006
        predict: list[PromptSource] = [],  # noqa: B006
        batch_size: int = 4,
        rollout_size: int = 8,
        reuse: int = 2,
        val_batch_size: int = 8,
        val_prompts: int | None = None,
        template_kwargs: dict[str, Any] = {},  # noqa: B006
        max_prompt_tokens: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
        max_dropped: float = 0.5,
        epochs: int = 0,
    ) -> None:
        super().__init__()
        sizes = {
            "batch_size": batch_size,
            "rollout_size": rollout_size,
            "reuse": reuse,
            "val_batch_size": val_batch_size,
        }
        _check_settings(
            sizes | {"max_prompt_tokens": max_prompt_tokens, "val_prompts": 1 if val_prompts is None else val_prompts},
            max_dropped,
            epochs,
            num_workers,
        )
        self.target, self.sources = target, {"train": train, "val": val, "predict": predict or train}
        self.batch_size, self.rollout_size, self.reuse = batch_size, rollout_size, reuse
        self.val_batch_size, self.val_prompts = val_batch_size, val_prompts
        self.template_kwargs, self.max_prompt_tokens = template_kwargs, max_prompt_tokens
        self.num_workers, self.seed, self.max_dropped = num_workers, seed, max_dropped
        self.visits, self.epochs = rollout_size // batch_size * reuse, epochs
        self.pools: dict[str, list[PromptPool]] = {}
        self._renderer: ChatRenderer | None = None
        self._before, self._now = 0, 0  # batches consumed without and with the batch in hand
        self._loaded: dict[str, Any] | None = None

    # ---- reading the sources ----

    @property
    def renderer(self) -> ChatRenderer:
        """Renders with the target's tokenizer, loaded at first use."""
        if self._renderer is None:
            self._renderer = load_renderer(self.target, self.template_kwargs, self.max_prompt_tokens)
            for key in self._renderer.unknown_switches():
                rank_zero_warn(
                    f"data.template_kwargs: the chat template of {self.target} never mentions {key!r}, so it changes "
                    "nothing. Is it misspelt?"
                )
        return self._renderer

    def setup(self, stage: str) -> None:
        """Read and check the sources that this stage needs, and say what was dropped. Raises DataError."""
        roles = ROLES[stage]
        if not self.sources[roles[0]]:
            raise DataError(f"data.{roles[0]} names no source; add one, e.g. --config data/shipped")
        for role in roles:
            if role not in self.pools:
                self.pools[role] = [self._pool(source, n) for n, source in enumerate(self.sources[role])]
                self._describe(role)
        if stage == "fit":
            _warn_of_leaks(self.pools["train"], self.pools["val"])
            self._end_after_epochs()
            _warn_of_short_epochs(self.trainer)

    def _end_after_epochs(self) -> None:
        """Lower `max_steps` to what the passes need: a number all ranks agree on, unlike the end of their data."""
        if not self.epochs or self.trainer is None:
            return
        pools, per_rollout = self.pools["train"], self.rollout_size * self._rank()[1]
        samples = Mixer([pool.source.weight for pool in pools], self.seed).samples(
            [self.epochs * len(p) for p in pools]
        )
        updates = -(-samples // per_rollout) * self.visits // self.trainer.accumulate_grad_batches
        loop = self.trainer.fit_loop.epoch_loop
        loop.max_steps = max(updates, 1) if loop.max_steps < 0 else min(loop.max_steps, max(updates, 1))
        rank_zero_info(f"data.epochs = {self.epochs}: {samples} prompts, {loop.max_steps} updates")

    def _pool(self, source: PromptSource, number: int) -> PromptPool:
        pool = PromptPool(source, self.renderer, number, self.seed)
        pool.check(self.max_dropped)
        return pool

    def _describe(self, role: str) -> None:
        reports = {id(pool.source): pool.source.report for pool in self.pools[role]}.values()
        parts = ", ".join(f"{report.name} ({report.kept})" for report in reports if report)
        rank_zero_info(f"data.{role}: {parts or 'no source'}")
        for report in reports:
            if report and (report.dropped or report.notes):
                rank_zero_info(str(report))

    def _rank(self) -> tuple[int, int]:
        """This process and the number of processes that share the data."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    # ---- loaders ----

    @property
    def domains(self) -> list[str]:
        """Every domain of the sources read so far, sorted: the same on all ranks, which read the same rows."""
        return sorted({name for pools in self.pools.values() for pool in pools for name in pool.source.domains})

    def train_dataloader(self) -> CursorLoader:
        """Infinite stream of PromptBatch; needs `max_steps`, and `val_check_interval` as a number of batches."""
        stream = PromptStream(self.pools["train"], self.rollout_size, self.visits, self.seed, self.batch_size)
        return CursorLoader(stream, self._begin, self.num_workers)

    def val_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """Tuples of up to `val_batch_size` prompts, domains interleaved; nothing without sources."""
        pools = self.pools["val"]
        return self._batches(pools, by_domain(pools, self.val_prompts)) if pools else []

    def test_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """The validation prompts."""
        return self.val_dataloader()

    def predict_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """Every prompt once, in the order of the data."""
        pools = self.pools["predict"]
        return self._batches(pools, in_order(pools))

    def _batches(self, pools: list[PromptPool], places: list[tuple[int, int]]) -> PromptBatches:
        return PromptBatches(pools, places, self.val_batch_size, *self._rank())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Prompts stay where they are: Lightning does not move frozen dataclasses, and ids are packed later."""
        return batch

    # ---- position in the stream ----

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the position of the batch that is really used: the loader itself is a batch or more ahead."""
        if isinstance(batch, PromptBatch):
            self._before, self._now = self._now, batch.cursor
        return batch

    @property
    def consumed(self) -> int:
        """Batches trained on, the same on all ranks; the batch in hand counts once it has been processed."""
        if self.trainer is None:
            return self._now
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current  # typed too narrowly there
        return self._now if progress.processed == progress.ready else self._before

    def put_back(self) -> None:
        """The batch in hand was not trained on and will not be: it comes again."""
        self._now = self._before

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream as plain values, the same on every rank."""
        return asdict(self._position())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position; it is compared with the data when the stream begins."""
        self._loaded = dict(state_dict)
        self._before = self._now = int(state_dict["consumed"])

    def _position(self) -> Position:
        prints = " ".join(pool.source.fingerprint() for pool in self.pools.get("train", []))
        sources = hashlib.blake2b(prints.encode(), digest_size=8).hexdigest()
        return Position(self.consumed, self._rank()[1], self.rollout_size, self.visits, self.seed, sources)

    def _begin(self, stream: PromptStream) -> None:
        if self._loaded is not None:
            now = self._position()
            self._before = self._now = moved(Position.read(self._loaded, now), now)
            self._loaded = None
        stream.start = self.consumed
        stream.rank, stream.world = self._rank()


def _warn_of_leaks(train: list[PromptPool], val: list[PromptPool]) -> None:
    if shared := shared_prompts(train, val):
        rank_zero_warn(
            f"{len(shared)} validation prompts are also in the training data (first: {shared[0]}), so what is measured "
            "on them is not held out. Take them out of data.train or data.val."
        )


def _warn_of_short_epochs(trainer: Any) -> None:
    """The stream has no end, but `limit_train_batches` may cut it; Lightning makes an update of what is left then."""
    limit, window = getattr(trainer, "limit_train_batches", None), getattr(trainer, "accumulate_grad_batches", 1)
    if isinstance(limit, int) and limit % window:
        rank_zero_warn(
            f"trainer.limit_train_batches = {limit} is no multiple of trainer.accumulate_grad_batches = {window}: the last "
            f"update of every epoch is one of {limit % window} micro-batches (its mean is exact). Warm-up, decay and saves "
            "count updates; trainer.val_check_interval counts micro-batches"
        )


def _check_settings(sizes: dict[str, int], max_dropped: float, epochs: int, num_workers: int) -> None:
    if epochs < 0:
        raise UserError(f"data.epochs must be at least 0 (0: as trainer.max_steps says), got {epochs}")
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"data.{name} must be at least 1, got {value}")
    if num_workers < 0:
        raise UserError(f"data.num_workers must be at least 0 (0: read in the run's own process), got {num_workers}")
    batch, rollout = sizes["batch_size"], sizes["rollout_size"]
    if rollout % batch:
        near = max(rollout // batch, 1) * batch
        raise UserError(f"data.rollout_size = {rollout} must be a multiple of data.batch_size = {batch}, e.g. {near}")
    if not 0 <= max_dropped <= 1:
        raise UserError(f"data.max_dropped is a share from 0 to 1, got {max_dropped:g}")

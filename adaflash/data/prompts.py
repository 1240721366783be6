"""The Lightning data module: prompts for training, validation and prediction."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from adaflash.data.chat import ChatRenderer
from adaflash.data.finite import PromptBatches, by_domain, in_order
from adaflash.data.pool import PromptPool
from adaflash.data.position import Position, moved
from adaflash.data.report import DataError
from adaflash.data.sources import PromptSource
from adaflash.data.stream import CursorLoader, PromptStream
from adaflash.types import Prompt, PromptBatch

log = logging.getLogger(__name__)


class PromptDataModule(L.LightningDataModule):
    """Prompts of a target, rendered by its own tokenizer."""

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
    ) -> None:
        """Settings of the data.

        Args:
            target: fetched name, folder or Hub id whose tokenizer renders the prompts (the CLI links it).
            train: sources of the training stream, mixed by their weights.
            val: sources of validation and test, read in order.
            predict: sources of prediction; empty: those of training, one pass in order.
            batch_size: trajectories per rank and micro-batch.
            rollout_size: prompts per rank that are rolled out at once; a multiple of batch_size.
            reuse: how often each rollout is trained on.
            val_batch_size: prompts handed to the engine at once.
            val_prompts: at most so many prompts per domain in validation; null: all.
            template_kwargs: switches of the chat template, e.g. `{enable_thinking: false}`.
            max_prompt_tokens: longer prompts are dropped and counted, never cut.
            num_workers: processes that read and render.
            seed: of mixing and shuffling.
            max_dropped: largest share of a source that may be unusable.
        """
        super().__init__()
        _check_sizes(batch_size, rollout_size, reuse, val_batch_size, max_dropped)
        self.target, self.sources = target, {"train": train, "val": val, "predict": predict or train}
        self.batch_size, self.rollout_size, self.reuse = batch_size, rollout_size, reuse
        self.val_batch_size, self.val_prompts = val_batch_size, val_prompts
        self.template_kwargs, self.max_prompt_tokens = template_kwargs, max_prompt_tokens
        self.num_workers, self.seed, self.max_dropped = num_workers, seed, max_dropped
        self.visits = rollout_size // batch_size * reuse
        self.pools: dict[str, list[PromptPool]] = {}
        self._renderer: ChatRenderer | None = None
        self._before, self._now = 0, 0  # batches consumed before and with the batch in hand
        self._loaded: dict[str, Any] | None = None

    # ---- reading the sources

    @property
    def renderer(self) -> ChatRenderer:
        """Renders with the target's tokenizer, loaded at first use."""
        if self._renderer is None:
            self._renderer = load_renderer(self.target, self.template_kwargs, self.max_prompt_tokens)
        return self._renderer

    def setup(self, stage: str) -> None:
        """Read and check the sources this stage needs; rank 0 logs what was dropped."""
        needed = {"fit": ["train", "val"], "validate": ["val"], "test": ["val"], "predict": ["predict"]}[stage]
        for role in needed:
            if role not in self.pools:
                self.pools[role] = [self._pool(source, n) for n, source in enumerate(self.sources[role])]

    def _pool(self, source: PromptSource, number: int) -> PromptPool:
        pool = PromptPool(source, self.renderer, number, self.seed)
        pool.check(self.max_dropped)
        if self._rank()[0] == 0:
            log.log(logging.WARNING if source.report.dropped else logging.INFO, "%s", source.report)
        return pool

    def _filled(self, role: str) -> list[PromptPool]:
        pools = self.pools.get(role, [])
        if not pools:
            raise DataError(f"data.{role} names no source; add one, e.g. --config data/shipped.yaml")
        return pools

    def _rank(self) -> tuple[int, int]:
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (kwargs["rank"], kwargs["num_replicas"]) if kwargs else (0, 1)

    # ---- loaders

    def train_dataloader(self) -> CursorLoader:
        """Infinite stream of PromptBatch; set `max_steps`, and `val_check_interval` as a number of batches."""
        stream = PromptStream(self._filled("train"), self.rollout_size, self.visits, self.seed, self.batch_size)
        return CursorLoader(stream, self._begin, self.num_workers)

    def val_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """Tuples of up to `val_batch_size` prompts, domains interleaved; empty list without sources."""
        pools = self.pools["val"]
        return (
            PromptBatches(pools, by_domain(pools, self.val_prompts), self.val_batch_size, *self._rank())
            if pools
            else []
        )

    def test_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """The validation prompts."""
        self._filled("val")
        return self.val_dataloader()

    def predict_dataloader(self) -> Iterable[tuple[Prompt, ...]]:
        """Every prompt once, in the order of the data."""
        pools = self._filled("predict")
        return PromptBatches(pools, in_order(pools), self.val_batch_size, *self._rank())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Prompts stay where they are: Lightning does not move frozen dataclasses, and ids are packed later."""
        return batch

    # ---- position in the stream

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Note the position of the batch that is really used: the loader itself is a batch or more ahead."""
        if isinstance(batch, PromptBatch):
            self._before, self._now = self._now, batch.cursor
        return batch

    @property
    def consumed(self) -> int:
        """Batches trained on, the same on all ranks; a batch in hand counts once it has been processed."""
        if self.trainer is None:
            return self._now
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return self._now if progress.processed == progress.ready else self._before

    def _position(self) -> Position:
        sources = ",".join(
            f"{pool.source.fingerprint()}*{pool.source.weight:g}" for pool in self.pools.get("train", [])
        )
        return Position(self.consumed, self._rank()[1], self.rollout_size, self.visits, self.seed, sources)

    def _begin(self, stream: PromptStream) -> None:
        if self._loaded is not None:
            self._before = self._now = moved(Position(**self._loaded), self._position())
            self._loaded = None
        stream.start = self.consumed
        stream.rank, stream.world = self._rank()

    def state_dict(self) -> dict[str, Any]:
        """Position as plain values, the same on every rank."""
        return self._position().__dict__.copy()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position; it is compared with the data when the stream begins."""
        self._loaded = dict(state_dict)
        self._before = self._now = int(state_dict["consumed"])


def load_renderer(target: str, template_kwargs: dict[str, Any], max_prompt_tokens: int | None) -> ChatRenderer:
    """Renderer with the tokenizer of a target (fetched name, folder or Hub id)."""
    if not target:
        raise DataError("data.target is empty: name the target whose tokenizer renders the prompts")
    from transformers import AutoTokenizer

    from adaflash.targets.fetch import resolve

    path = resolve(target)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(path), template_kwargs, max_prompt_tokens, _stop_ids(path))
    for key in renderer.unknown_switches():
        log.warning("data.template_kwargs: the chat template of %s never mentions %r; is it misspelt?", target, key)
    return renderer


def _stop_ids(path: str) -> list[int]:
    """End markers the target's generation config lists beside the tokenizer's eos."""
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return []
    ids = json.loads(file.read_text()).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _check_sizes(batch_size: int, rollout_size: int, reuse: int, val_batch_size: int, max_dropped: float) -> None:
    for name, value in {"batch_size": batch_size, "rollout_size": rollout_size, "reuse": reuse,
                        "val_batch_size": val_batch_size}.items():  # fmt: skip
        if value < 1:
            raise ValueError(f"data.{name} must be at least 1, got {value}")
    if rollout_size % batch_size:
        below = max(rollout_size // batch_size, 1) * batch_size
        raise ValueError(
            f"data.rollout_size = {rollout_size} must be a multiple of data.batch_size = {batch_size}, e.g. {below}"
        )
    if not 0 <= max_dropped <= 1:
        raise ValueError(f"data.max_dropped is a share between 0 and 1, got {max_dropped}")

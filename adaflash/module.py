"""AdaFlashModule: owns the drafter, the length policy and the frozen target, and trains the first two on-policy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from adaflash.blocks import choose_anchors
from adaflash.decoding.engine import Engine
from adaflash.drafters.base import Drafter, embed_blocks
from adaflash.errors import UserError, at_least_one
from adaflash.length.base import LengthPolicy, Outcome
from adaflash.lesson import Lesson, learnable
from adaflash.losses import SlotSampling
from adaflash.losses.base import LossTerm, check_names, check_said
from adaflash.losses.position import ExponentialDecay, PositionWeight
from adaflash.losses.teach import Head
from adaflash.objective import log_sums, outcome_of, sum_terms
from adaflash.optim import AdamWConfig, check_trainer
from adaflash.parallel.options import ParallelOptions
from adaflash.parallel.own_state import of_all_ranks, of_this_rank
from adaflash.parallel.placement import Placement
from adaflash.parallel.trained import whole
from adaflash.rollouts.base import Players, RolloutSource, seed_of
from adaflash.rollouts.buffer import Reuse, RolloutBuffer
from adaflash.step import DraftStep, StepResult
from adaflash.stopwatch import Stopwatch, timed
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Blocks, Prompt, PromptBatch, Request, Trajectory
from adaflash.vocabulary import DraftHead
from adaflash.window import Window, averages, mean_gradients


class AdaFlashModule(L.LightningModule):
    """On-policy distillation of a block-diffusion drafter and its length policy (AdaFlash, arXiv 2607.19223).

    Args:
        target: Fetched name, local directory or Hub id of the frozen target.
        drafter: The drafter to train.
        length: The length policy; a learned one trains beside the drafter.
        rollout: Where trajectories come from.
        losses: Terms of the drafter's loss; each has a weight and a name of its own.
        position_weight: How much each candidate of a block counts.
        target_options: How the target is loaded.
        optimizer: Optimizer and schedule.
        num_anchors: Blocks trained per trajectory and visit.
        anchor_mix: Share of them that start where the drafter really started a block; the rest is uniform.
        clip: Largest gradient norm of the drafter, and apart from it of the length policy.
        chunk_rows: Vocabulary rows that exist at one time in the loss.
        lanes: Requests decoded at once in validation and `predict`.
        max_new_tokens: Longest response in validation and `predict`.
        seed: Seed of anchors and sampled rollouts.
        freeze_drafter: Train the length policy alone (the paper's initialisation stage).
        sampling: Differentiate a sample of the candidates only, unbiased (`adaflash.losses.SlotSampling`).
        log_gradient_norms_every: Updates between logs of the gradient that each term causes alone; 0 for never. It
            costs one more vocabulary pass a term.
        parallel: Where the weights lie when there are several devices.
        reuse: How long a rollout may be used, and how it is saved in the midst of its visits.
    """

    def __init__(
        self,
        target: str,
        drafter: Drafter,
        length: LengthPolicy,
        rollout: RolloutSource,
        losses: list[LossTerm],
        position_weight: PositionWeight = ExponentialDecay(),  # noqa: B008  (stateless)
        target_options: TargetOptions = TargetOptions(),  # noqa: B008
        optimizer: AdamWConfig = AdamWConfig(),  # noqa: B008
        num_anchors: int = 64,
        anchor_mix: float = 0.5,
        clip: float = 1.0,
        chunk_rows: int = 192,
        lanes: int = 16,
        max_new_tokens: int = 128,
        seed: int = 42,
        freeze_drafter: bool = False,
        sampling: SlotSampling | None = None,
        log_gradient_norms_every: int = 0,
        parallel: ParallelOptions = ParallelOptions(),  # noqa: B008
        reuse: Reuse = Reuse(),  # noqa: B008
    ) -> None:
        super().__init__()
        if num_anchors < 1 or not 0 <= anchor_mix <= 1 or clip <= 0 or log_gradient_norms_every < 0:
            allowed = "num_anchors >= 1, 0 <= anchor_mix <= 1, clip > 0 and log_gradient_norms_every >= 0"
            raise UserError(f"model: allowed are {allowed}")
        at_least_one("model", chunk_rows=chunk_rows, lanes=lanes, max_new_tokens=max_new_tokens)
        check_names(losses)
        self.target_name, self.target_options = target, target_options
        self.drafter, self.length, self.rollout = drafter, length, rollout
        self.losses = nn.ModuleList(losses)
        terms: Any = self.losses
        self.step = DraftStep(terms, position_weight, chunk_rows, sampling=sampling, law=rollout.law())
        self.optimizer_config = optimizer
        self.num_anchors, self.anchor_mix, self.clip = num_anchors, anchor_mix, clip
        self.lanes, self.max_new_tokens, self.seed = lanes, max_new_tokens, seed
        self.freeze_drafter, self.log_gradient_norms_every = freeze_drafter, log_gradient_norms_every
        self.parallel = parallel
        self.buffer, self.window, self.watch = RolloutBuffer(reuse), Window(), Stopwatch()
        self.provenance: dict[str, Any] = {}  # what a checkpoint says of its origin; set by the command line
        # Outside module registration: not in parameters(), state_dict(), DDP or train() (LIGHTNING section 1.2).
        self.__dict__["_target"] = None

    @property
    def target(self) -> HFTarget:
        """The frozen target, loaded by `configure_model`."""
        return self.__dict__["_target"]

    def add_loss(self, term: LossTerm) -> None:
        """A term that a plugin adds. Raises ValueError for a name that is taken."""
        check_names([*self.losses, term])
        self.losses.append(term)

    def configure_model(self, target: HFTarget | None = None) -> None:
        """Load the target, make the weights and lay all of them where they belong; each is done once."""
        placement = Placement(self._trainer, self._device_mesh, self.parallel)
        if self.__dict__["_target"] is None:
            self._build(target or placement.load(self.target_name, self.target_options), placement)
        placement.spread(self)

    def _build(self, loaded: HFTarget, placement: Placement) -> None:
        self.__dict__["_target"] = loaded
        with placement.readable(loaded, getattr(self.drafter, "num_layers", 1)):
            self.drafter.build(loaded, self.target_options.mask_token)
        self.length.build(loaded.hidden_size, self.drafter.block_size)
        check_said(self.drafter.said, list(self.losses))  # type: ignore[arg-type]
        if self.freeze_drafter:
            if not any(True for _ in self.length.parameters()):
                raise UserError(
                    f"model.freeze_drafter: {self.length.describe()} learns nothing, so nothing is left to train"
                )
            self.drafter.requires_grad_(False)

    # ---- training ----

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """prompts -> rollout -> trajectories -> blocks -> drafter -> terms -> loss."""
        with self.watch("rollout"):
            trajectories, fresh = self.buffer.take(batch, self.rollout, self._players(batch))
        chance = self._chance(batch)
        lesson = self._lesson(learnable(trajectories), chance)
        with whole(self.length, self.losses):
            hidden = self._draft(lesson)
            result = self._terms(hidden, lesson, chance)
            outcome = self._outcome(hidden, lesson.blocks, result)
            loss = result.loss + _or_zero(self.length.loss(outcome))
            self._count(hidden, lesson, result, outcome)
        news = {"rollout": self.buffer.trajectories} if fresh else {}
        return {"loss": loss * self._undo_averages(), **news}

    def _players(self, batch: PromptBatch) -> Players:
        return Players(self.target, self.drafter, self.length, self.global_step, seed_of(self.seed, batch.rollout_id))

    def _chance(self, batch: PromptBatch) -> torch.Generator:
        """Of anchors and sampled slots: a function of run, rollout, visit and rank, so that a resumed run draws the same."""
        return torch.Generator().manual_seed(seed_of(self.seed, batch.rollout_id, batch.visit, self.global_rank))

    def _lesson(self, trajectories: list[Trajectory], chance: torch.Generator) -> Lesson:
        """Blocks at chosen anchors. With nothing to learn a pass of weight zero: all ranks do the same collectives."""
        size, mask = self.drafter.block_size, self.drafter.mask_id
        if not trajectories:
            width, hidden = len(self.drafter.context_layers) * self.target.hidden_size, self.target.hidden_size
            nothing = torch.zeros(1, width + hidden, dtype=self.target.dtype, device=self.device)
            return Lesson.empty(size, mask, nothing[:, :width], nothing[:, width:])
        anchors = [choose_anchors(each, self.num_anchors, self.anchor_mix, chance) for each in trajectories]
        return Lesson.of(trajectories, anchors, size, mask, self.device)

    @timed("drafter")
    def _draft(self, lesson: Lesson) -> Tensor:
        embeds = embed_blocks(self.target, lesson.blocks.tokens, torch.float32)
        return self.drafter(embeds, lesson.blocks, lesson.context, lesson.segments)

    @timed("vocabulary")
    def _terms(self, hidden: Tensor, lesson: Lesson, chance: torch.Generator | None = None) -> StepResult:
        when = f"[rank: {self.global_rank}] update {self.global_step + 1}"
        return sum_terms(self.step, hidden, lesson, *self._heads(), chance, when)

    def _outcome(self, hidden: Tensor, blocks: Blocks, result: StepResult) -> Outcome:
        return outcome_of(hidden, blocks, result, self.drafter.head(self.target))

    def _count(self, hidden: Tensor, lesson: Lesson, result: StepResult, outcome: Outcome) -> None:
        every = self.log_gradient_norms_every
        more = log_sums(self.step, hidden, lesson, *self._heads(), bool(every) and self.global_step % every == 0)
        sums = {**result.sums(), **outcome.sums(), "rollout/age": hidden.new_tensor([self.buffer.age, 1.0])}
        self.window.add({"blocks": self.length.counted(outcome).sum(), **sums, **more})

    def _heads(self) -> tuple[Head, DraftHead]:
        return self.target.head, self.drafter.head(self.target)

    def _undo_averages(self) -> float:
        """Lightning divides by the micro-batches of a window, DDP by the ranks; `Window` divides exactly instead."""
        return float(self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the window's summed gradients by its exact denominators, then clip drafter and length policy apart."""
        sums = self.window.close()
        update, zero = self.global_step + 1, torch.zeros(())
        weight, blocks = float(sums.get("weight", zero)), float(sums.get("blocks", zero))
        norms = {"grad_norm/drafter": mean_gradients(self._drafted(), weight, self.clip, update, "drafter")}
        if head := list(self.length.parameters()):
            norms["grad_norm/length"] = mean_gradients(head, blocks, self.clip, update, "length policy")
        self.log_dict({**norms, **averages(sums, weight)}, batch_size=1)

    def _drafted(self) -> list[nn.Parameter]:
        """What the terms train: the drafter, and losses that learn."""
        return [*self.drafter.parameters(), *self.losses.parameters()]

    def configure_optimizers(self) -> Any:
        """AdamW over the drafter, trainable losses and the length policy; never the target.

        Raises:
            UserError: half-precision master weights, clipping set twice, or nothing to learn from.
        """
        check_trainer(str(self.trainer.precision), self.trainer.gradient_clip_val)
        if not self.losses and not self.freeze_drafter:
            raise UserError("model.losses is empty and no plugin adds a loss: nothing would teach the drafter")
        return self.optimizer_config.build(self._drafted(), self.length.parameters(), self.trainer.max_steps)

    # ---- measuring ----

    def engine(self, drafter: bool = True, *, lanes: int = 0, all_candidates: bool = False) -> Engine:
        """The decoding engine with the current drafter and policy, or plain."""
        lanes = lanes or self.lanes
        if not drafter:
            return Engine(self.target, lanes=lanes)
        return Engine(self.target, self.drafter, self.length, lanes=lanes, all_candidates=all_candidates)

    def decoding(self) -> AbstractContextManager[None]:
        """Around all decoding of one hook: every rank enters equally often, and decodes as much as it likes inside."""
        return self.target.ranks.decoding()

    def validation_step(self, batch: tuple[Prompt, ...], batch_idx: int) -> dict[str, list[Trajectory]]:
        """Decode held-out prompts; the acceptance monitor measures what comes out."""
        with self.decoding():
            return {"trajectories": self.engine(all_candidates=True).generate([self._request(p) for p in batch])}

    test_step = validation_step

    def predict_step(self, batch: tuple[Prompt, ...], batch_idx: int) -> list[dict[str, Any]]:
        """Responses to prompts, to be recorded: rows of a rollout file, token ids as tensors.

        Plain mappings, because Lightning does not move frozen dataclasses.
        """
        with self.decoding():
            return [each.row() for each in self.engine().generate([self._request(prompt) for prompt in batch])]

    def _request(self, prompt: Prompt) -> Request:
        return Request(prompt.tokens, self.max_new_tokens, prompt.id, prompt.domain)

    # ---- checkpoints ----

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Beside the weights: an unfinished rollout's tensors, and what the drafter was made for."""
        checkpoint["adaflash"] = {
            "rollout": of_all_ranks(self.buffer.state_dict()),
            "made_for": self.made_for(),
            "provenance": self.provenance,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the rollout; refuse a checkpoint of another architecture by field.

        Raises:
            ValueError: the checkpoint is foreign, or was made for another target or drafter.
        """
        if "adaflash" not in checkpoint:
            raise UserError("this checkpoint was not written by adaflash fit (it has no 'adaflash' entry)")
        made_for = checkpoint["adaflash"]["made_for"]
        ours = self.made_for()
        for name in {**made_for, **ours}:
            if made_for.get(name) != ours.get(name):
                raise UserError(
                    f"the checkpoint's {name} is {made_for.get(name)!r}, this run's is {ours.get(name)!r}: use the config "
                    "it was trained with, or start a new run without --ckpt_path"
                )
        if (mine := of_this_rank(checkpoint["adaflash"]["rollout"])) is not None:
            self.buffer.load_state_dict(mine)

    def made_for(self) -> dict[str, Any]:
        """What must agree between a checkpoint and the run that loads it; plain values only."""
        return {
            "target": self.target_name,
            "hidden_size": self.target.hidden_size,
            "target_layers": self.target.num_layers,
            "block_size": self.drafter.block_size,
            "context_layers": list(self.drafter.context_layers),
            "mask_id": self.drafter.mask_id,
            "length": type(self.length).__name__,
            **({"vocabulary": said.describe()} if (said := self.drafter.said) else {}),
        }


def _or_zero(loss: Tensor | None) -> Tensor | float:
    return 0.0 if loss is None else loss

"""The real module, data module and trainer around a tiny target, for tests that fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from adaflash.data.chat import ChatRenderer
from adaflash.data.prompts import PromptDataModule
from adaflash.data.sources import JsonlSource
from adaflash.drafters.dflash import DFlash
from adaflash.length.adaptive import AdaptiveLength
from adaflash.losses import ExponentialDecay, LossTerm, ReverseKL, TeacherCrossEntropy
from adaflash.module import AdaFlashModule
from adaflash.optim import AdamWConfig
from adaflash.rollouts.live import LiveRollout
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt


def tokenizer(count: int = tiny.VOCAB) -> PreTrainedTokenizerFast:
    """One word per id, no special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    )


def rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Prompts as rows of a data file, with their recorded responses."""
    return [
        {"id": p.id, "domain": p.domain, "prompt_ids": p.tokens, "response_ids": p.response, "finish_reason": p.finish}
        for p in prompts
    ]  # fmt: skip


def data(folder: Path, prompts: Sequence[Prompt], val: Sequence[Prompt] = (), **settings: Any) -> PromptDataModule:
    """The data module over JSONL files of token ids."""
    sources = {}
    for name, chosen in (("train", prompts), ("val", val)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(chosen)))
        sources[name] = [JsonlSource(str(path))] if chosen else []
    made = PromptDataModule("tiny", **sources, **{"batch_size": 2, "rollout_size": 4, "reuse": 2, **settings})  # type: ignore[arg-type]
    made._renderer = ChatRenderer(tokenizer(), vocab_size=tiny.VOCAB)
    return made


def losses() -> list[LossTerm]:
    """The paper's objective."""
    return [TeacherCrossEntropy(0.8, "ce"), ReverseKL(weight=0.2, name="rkl")]


def module(target: HFTarget, seed: int = 0, **settings: Any) -> AdaFlashModule:
    """The module with a small drafter and the paper's parts, built for a target that is in memory."""
    torch.manual_seed(seed)
    parts: dict[str, Any] = {
        "drafter": DFlash(num_layers=1, block_size=8, context_layers=[0, 2], mask_id=tiny.VOCAB - 1, init="random"),
        "length": AdaptiveLength(),
        "rollout": LiveRollout(max_new_tokens=12, lanes=4, warm_updates=3),
        "losses": losses(),
        "position_weight": ExponentialDecay(),
        "optimizer": AdamWConfig(lr=1e-3, head_lr=1e-3),
        "num_anchors": 6,
        "max_new_tokens": 12,
    }
    made = AdaFlashModule("tiny", **{**parts, **settings})
    made.configure_model(target)
    return made


def trainer(folder: Path, steps: int, callbacks: Sequence[Callback] = (), **settings: Any) -> L.Trainer:
    """A silent trainer on the CPU, configured as `configs/base.yaml` does."""
    plain: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_steps": steps, "default_root_dir": folder,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "check_val_every_n_epoch": None, "max_epochs": -1, "limit_val_batches": 0,
    }  # fmt: skip
    return L.Trainer(callbacks=list(callbacks), **{**plain, **settings})


def weights(of: AdaFlashModule) -> dict[str, torch.Tensor]:
    """A copy of everything that is trained."""
    return {name: tensor.detach().clone() for name, tensor in of.state_dict().items()}

"""Target, drafter and length policy of a run as tensors without storage: built by their own code from config.json."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from adaflash.drafters.base import Drafter
from adaflash.length.base import LengthPolicy
from adaflash.plan.meter import fake_mode
from adaflash.targets.fetch import resolve
from adaflash.targets.hf import HFTarget, TargetOptions


@dataclass(frozen=True)
class Models:
    """Weights that have shapes only. No weight of the target is read."""

    mode: FakeTensorMode
    target: HFTarget
    shallow: HFTarget  # the same target with as many layers as are read, for measuring a pass
    drafter: Drafter
    length: LengthPolicy

    @classmethod
    def build(
        cls, name: str, options: TargetOptions, drafter: Drafter, length: LengthPolicy, frozen: bool = False
    ) -> Models:
        """From the target's config.json. Raises UserError as `fit` would: unknown target, family or context layers."""
        config = AutoConfig.from_pretrained(resolve(name), revision=options.revision)
        mode, dtype = fake_mode(), options.format
        with mode:
            target = _target(config, dtype)
            _build_drafter(drafter, target)
            length.build(target.hidden_size, drafter.block_size)
            shallow = _target(_first_layers(config, len(drafter.context_layers) + 1), dtype)
        drafter.requires_grad_(not frozen)
        return cls(mode, target, shallow, drafter, length)


def _target(config: PreTrainedConfig, dtype: torch.dtype) -> HFTarget:
    return HFTarget(AutoModelForCausalLM.from_config(config, dtype=dtype))


def _first_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """The config of a target cut off after `count` layers; a pass without gradients takes no more memory with more."""
    count = min(count, config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    short = copy.deepcopy(config)
    short.num_hidden_layers = count
    if kinds:
        short.layer_types = kinds[:count]
    return short


def _build_drafter(drafter: Any, target: HFTarget) -> None:
    """Its sizes do not depend on where weights and mask come from, so neither is read.

    One with a limited vocabulary is planned with the whole: an upper bound.
    """
    drafter.vocabulary = ""
    if getattr(drafter, "checkpoint", ""):
        from adaflash.export.spec import read_drafter

        spec = read_drafter(drafter.checkpoint)[0]
        drafter.context_layers, drafter.num_layers = spec.context_layers, spec.config.num_hidden_layers
        drafter.intermediate_size, drafter.checkpoint = spec.config.intermediate_size, ""
    drafter.init, drafter.mask_id = "random", max(drafter.mask_id, 0)
    drafter.build(target)

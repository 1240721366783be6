"""A frozen target whose layers are sharded. Embedding and output head stay whole: the drafter borrows them alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from adaflash.linear import keep_unpacked
from adaflash.targets.attention import NAME
from adaflash.targets.families import check_family
from adaflash.targets.fetch import resolve
from adaflash.targets.hf import HFTarget, TargetOptions


def shard_target(target: HFTarget, mesh: DeviceMesh) -> None:
    """Shard every layer; `base_model` is the root, since that is what reads call."""
    model: Any = target.model
    kept = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    keep_unpacked(model.base_model)
    for layer in target.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.base_model, mesh=mesh, ignored_params=kept)
    # transformers finds what it may record of a model by the name of its class, and `fully_shard` gave it another one.
    _CAN_RECORD_REGISTRY[model.base_model] = model.base_model._can_record_outputs


def load_sharded(name: str, options: TargetOptions, mesh: DeviceMesh, device: torch.device) -> HFTarget:
    """Load a target that no device has to hold: rank 0 reads it into host memory and hands out the shards.

    Raises:
        TargetNotFound, UnsupportedTarget: see `HFTarget.load`.
    """
    path = resolve(name)
    target = skeleton(path, options)
    shard_target(target, mesh)
    model: Any = target.model
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for buffer_name, value in buffers.items():  # what the constructor computed, e.g. rotary frequencies
        model.get_buffer(buffer_name).copy_(value)
    state = HFTarget.load(name, options).model.state_dict() if torch.distributed.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return target


def skeleton(path: str | Path, options: TargetOptions) -> HFTarget:
    """The target without memory for its weights; buffers, tokenizer and stop ids are real."""
    config = AutoConfig.from_pretrained(path, revision=options.revision)
    check_family(config)
    with _weightless():
        model = AutoModelForCausalLM.from_config(config, dtype=options.format, attn_implementation=NAME)
    if model.can_generate():
        with suppress(OSError):  # a model without one has that of its config
            model.generation_config = GenerationConfig.from_pretrained(path, revision=options.revision)
    tokenizer = AutoTokenizer.from_pretrained(path, revision=options.revision)
    return HFTarget(model, tokenizer, options.stop_ids or ())


@contextmanager
def _weightless() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and their buffers for real."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

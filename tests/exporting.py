"""What tests of export and doctor share: a tiny target in a folder, a source to export, edits of a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import tiny
import torch
from tokenizers.pre_tokenizers import WhitespaceSplit

from adaflash.drafters.dflash import DFlash
from adaflash.export.manifest import Origin
from adaflash.export.source import Source
from adaflash.length.adaptive import AdaptiveLength
from adaflash.losses import ForwardKL
from adaflash.module import AdaFlashModule
from adaflash.rollouts.live import LiveRollout
from adaflash.targets.hf import HFTarget

TEMPLATE = (
    "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if enable_thinking is not defined or enable_thinking %}"
    "w2{% else %}w3{% endif %}"
)


def save_target(folder: Path, family: str = "qwen3", stop_ids: tuple[int, ...] = (), **changes: Any) -> str:
    """A tiny random target with a tokenizer and a template that has a thinking switch; returns its path."""
    tokenizer = fitting.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()  # else a text is one unknown word
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = tiny.model(family, **changes)
    model.generation_config.eos_token_id = list(stop_ids) or None
    model.save_pretrained(folder)
    return str(folder)


def make_source(target: HFTarget, head: bool = True, block_size: int = 8) -> Source:
    """A noisy random drafter, and a length head, for a target."""
    drafter = tiny.drafter(target, block_size, noise=0.05)
    policy = None
    if head:
        torch.manual_seed(3)
        policy = AdaptiveLength()
        policy.build(target.hidden_size, block_size)
    return Source(drafter, policy, target, Origin("run/last.ckpt", "tiny", steps=7, tau=2.5))


def edit(folder: Path, **changes: Any) -> None:
    """Change config.json; a value of None removes the key; names with dflash_ lie in dflash_config."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        place = config["dflash_config"] if name.startswith("dflash_") else config
        name = name.removeprefix("dflash_")
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def save_run(
    folder: Path, target: str, drafter: DFlash | None = None, length: AdaptiveLength | None = None
) -> AdaFlashModule:
    """A checkpoint as `adaflash fit` writes it, without having fitted."""
    settings: dict[str, Any] = {"num_layers": 2, "block_size": 4, "mask_id": 96, "context_layers": [0, 2]}
    if drafter is not None:
        settings = {"block_size": drafter.block_size, "checkpoint": drafter.checkpoint}
    head = {} if length is None else {"checkpoint": length.checkpoint}
    model = {
        "target": target,
        "drafter": {"class_path": "adaflash.drafters.dflash.DFlash", "init_args": settings},
        "length": {"class_path": "adaflash.length.adaptive.AdaptiveLength", "init_args": head},
        "rollout": {"class_path": "adaflash.rollouts.live.LiveRollout"},
        "losses": [{"class_path": "adaflash.losses.ForwardKL"}],
    }
    parts = drafter or DFlash(**settings), length or AdaptiveLength(), LiveRollout(), [ForwardKL()]
    module = AdaFlashModule(target, *parts)
    module.configure_model()
    module.provenance = {
        "config": json.dumps({"model": model, "data": {"template_kwargs": {"enable_thinking": False}}})
    }
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict(), "global_step": 12}
    checkpoint["callbacks"] = {"best": {"monitor": "val/tau", "best_model_score": torch.tensor(1.75)}}
    module.on_save_checkpoint(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, folder / "last.ckpt")
    return module

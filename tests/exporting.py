"""What tests of export and doctor share: a tiny target in a folder, a source to export, edits of a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import tiny
import torch

from adaflash.export.manifest import Origin
from adaflash.export.source import Source
from adaflash.length.adaptive import AdaptiveLength
from adaflash.targets.hf import HFTarget

TEMPLATE = (
    "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if enable_thinking is not defined or enable_thinking %}"
    "w2{% else %}w3{% endif %}"
)


def save_target(folder: Path, family: str = "qwen3") -> str:
    """A tiny random target with a tokenizer and a template that has a thinking switch; returns its path."""
    tokenizer = fitting.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny.model(family).save_pretrained(folder)
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

"""A tiny target in a directory, and the flags of a fit that takes a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in a directory, as `--target` takes it."""
    return save_target(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Path]:
    """Makes such a target of any family and size."""
    return save_target


def save_target(folder: Path, family: str, **sizes: Any) -> Path:
    """Byte-level tokenizer, ChatML template, a spare row."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    model = tiny.model(family, vocab_size=len(tokenizer) + 2, max_position_embeddings=512, **sizes)
    model.generation_config.eos_token_id = [1]
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def words(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a fit that takes a second."""
    monkeypatch.chdir(tmp_path)
    small = {
        "run": str(tmp_path / "run"),
        "target": str(target),
        "model": {
            "drafter": {"class_path": "adaflash.drafters.dflash.DFlash",
                        "init_args": {"num_layers": 1, "block_size": 4, "context_layers": [0, 2]}},
            "rollout": {"class_path": "adaflash.rollouts.live.LiveRollout", "init_args": {"max_new_tokens": 8, "lanes": 4}},
            "num_anchors": 4, "max_new_tokens": 6,
        },
        "data": {"batch_size": 1, "rollout_size": 2, "reuse": 1, "val_prompts": 1},
        "trainer": {"max_steps": 2, "val_check_interval": 2, "enable_progress_bar": False, "accelerator": "cpu",
                    "log_every_n_steps": 1},
        "gain": {"max_new_tokens": 4, "prompts_per_domain": 1},
    }  # fmt: skip
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    return ["-c", "data/shipped", "-c", str(tmp_path / "small.yaml")]

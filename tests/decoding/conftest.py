"""A tiny target on disk, with a tokenizer of one token per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Ids 0 .. 255 in the byte-level alphabet's order, then the specials; eos is <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `HFTarget.load` takes; 40 embedding rows are spare."""
    folder = tmp_path_factory.mktemp("target")
    tiny.model("qwen3", vocab_size=299).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder

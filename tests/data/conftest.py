"""Tiny tokenizers whose chat templates have the quirks of real ones, and small data files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
HEADER = "<|im_start|>assistant\n"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}" + HEADER + "{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "bos": "{{ bos_token }}" + CHATML,
    # Mistral-like: content trimmed, roles in capitals
    "trim": CHATML.replace("m['role']", "m['role'] | upper")
    .replace("m['content']", "m['content'] | trim")
    .replace(HEADER, HEADER.replace("assistant", "ASSISTANT")),
    # Qwen3-like: reasoning of earlier answers is left out; `enable_thinking: false` opens the answer with an empty one
    "history": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] | trim }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}" + HEADER + "{% if enable_thinking is defined and not enable_thinking %}"
        "<think></think>{% endif %}{% endif %}"
    ),
    # the header of the answer to come is not what a finished answer begins with
    "rewrites": CHATML.replace(HEADER, HEADER + "<think>"),
    "strict": (
        "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML
    ),
    "date": "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHATML,
    "tools": (
        "{% if tools %}{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{% for key, value in c['function']['arguments'].items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}" + HEADER + "{% endif %}"
    ),
}


def make_tokenizer(template: str = "chatml", adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 .. 255, then the specials; eos (= pad) is <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    if adds_bos:
        bos = core.token_to_id("<s>")
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    ends = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **ends)
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer


@pytest.fixture
def tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Factory: tokenizer(template name, adds_bos)."""
    return make_tokenizer


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that looks like a target with a ChatML tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    return str(folder)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, name): rows are objects, or str / bytes for a line as it is; .gz is packed."""

    def do(rows: list[Any], name: str = "data.jsonl", end: bytes = b"\n") -> str:
        raw = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        path = tmp_path / name
        content = b"".join(line + end for line in raw)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return do


@pytest.fixture
def chats() -> Callable[..., list[dict[str, Any]]]:
    """chats(count, prefix, domain): rows with one user turn and an id each."""

    def do(count: int, prefix: str = "p", domain: str = "") -> list[dict[str, Any]]:
        extra = {"domain": domain} if domain else {}
        return [
            {"id": f"{prefix}{i}", "messages": [{"role": "user", "content": f"{prefix} {i}"}]} | extra
            for i in range(count)
        ]

    return do

"""Tiny tokenizers with chat templates that have the quirks of real ones."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def byte_tokenizer(template: str | None = CHATML, adds_bos: bool = False, **kwargs: object) -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 .. 255, then the specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    core = Tokenizer(BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    if adds_bos:
        bos = core.token_to_id("<s>")
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", **kwargs)
    tokenizer.chat_template = template
    return tokenizer

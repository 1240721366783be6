"""K2 on templates with the quirks of Llama 3, Qwen 3, Gemma 3, Mistral, gpt-oss and ChatML: which tokens are supervised.

What is expected is written out by hand: the answer to the last character, and what the model was served before it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from stock import STOCK
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from adaflash.data import chat
from adaflash.data.chat import ChatRenderer
from adaflash.data.pool import PromptPool
from adaflash.data.sources import JsonlSource

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Yes"}  # asked and answered: a search for the text finds the wrong one
FIRST = {"role": "assistant", "content": "Yes"}
MORE = {"role": "user", "content": "Why? "}
LAST = {"role": "assistant", "content": " Yes, since\nI said so. "}
CHAT = [SYSTEM, ASK, FIRST, MORE, LAST]

# template -> the two answers, and what comes right before the first token of each
EXPECTED = {
    "llama3": (("Yes<|eot_id|>", "Yes, since\nI said so.<|eot_id|>"), "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "qwen3": (("<think>\n\n</think>\n\nYes<|im_end|>", "<think>\n\n</think>\n\n Yes, since\nI said so. <|im_end|>"),
              "<|im_start|>assistant\n"),
    "gemma3": (("Yes<end_of_turn>", "Yes, since\nI said so.<end_of_turn>"), "<start_of_turn>model\n"),
    "mistral": ((" Yes</s>", " Yes, since\nI said so.</s>"), "[/INST]"),
    "gpt-oss": (("<|channel|>final<|message|>Yes<|return|>",
                 "<|channel|>final<|message|> Yes, since\nI said so. <|return|>"), "<|start|>assistant"),
    "chatml": (("Yes<|im_end|>", " Yes, since\nI said so. <|im_end|>"), "<|im_start|>assistant\n"),
}  # fmt: skip


def renderer(name: str, **switches: Any) -> ChatRenderer:
    """A byte-level tokenizer with the template's markers."""
    stock = STOCK[name]
    core = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(stock.specials))
    if stock.adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{stock.bos} $A", special_tokens=[(stock.bos, core.token_to_id(stock.bos))]
        )
    ends = {"eos_token": stock.eos, **({"bos_token": stock.bos} if stock.bos else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **ends)
    tokenizer.chat_template = stock.template
    return ChatRenderer(tokenizer, switches, stop_ids=[core.token_to_id(stop) for stop in stock.stops])


def rows(name: str, write: Callable[..., str], record: Any, **switches: Any) -> list[Any]:
    """Rendered rows of one record, as training reads them."""
    source = JsonlSource(write([record], f"{name}.jsonl"), responses=True)
    source.open()
    pool = PromptPool(source, renderer(name, **switches), 0, seed=0)
    return [pool.prompt(index) for index in range(len(pool))]


@pytest.mark.parametrize("name", STOCK)
def test_one_row_per_answer_each_as_it_was_served(name: str, write: Callable[..., str]) -> None:
    """FAULTS 5, 6, 34, 35, 38: exactly the answers and their end markers, whatever the template does to a history."""
    answers, before = EXPECTED[name]
    made = renderer(name)
    found = rows(name, write, {"messages": CHAT})
    assert len(found) == 2
    for row, answer, history in zip(found, answers, (CHAT[:2], CHAT[:4]), strict=True):
        assert made.tokenizer.decode(row.response) == answer
        assert list(row.tokens) == made.render(history)  # what a server would send
        assert made.tokenizer.decode(row.tokens).endswith(before)
        assert row.finish == "stop" and row.response[-1] in made.stop_ids
        assert not set(row.response[:-1]) & made.stop_ids


@pytest.mark.parametrize("name", STOCK)
def test_exactly_one_bos(name: str, write: Callable[..., str]) -> None:
    """FAULTS 33: the template prints it and the tokenizer adds it."""
    bos = renderer(name).tokenizer.bos_token_id
    for row in rows(name, write, {"messages": CHAT}):
        assert [*row.tokens, *row.response].count(bos) == (1 if bos is not None else 0)
        assert bos is None or row.tokens[0] == bos


@pytest.mark.parametrize("name", ["llama3", "gpt-oss"])
def test_a_date_in_the_system_turn_does_not_follow_the_clock(
    name: str, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    today = [row.tokens for row in rows(name, write, {"messages": CHAT})]

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2031, 5, 6)

    monkeypatch.setattr(datetime, "datetime", Later)
    assert [row.tokens for row in rows(name, write, {"messages": CHAT})] == today
    text = renderer(name).tokenizer.decode(today[0])
    assert chat.TODAY.strftime("%d %b %Y" if name == "llama3" else "%Y-%m-%d") in text


def test_reasoning_of_earlier_answers_is_not_in_later_prompts(write: Callable[..., str]) -> None:
    """FAULTS 6: three turns, reasoning in the first."""
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}
    first, second = rows("qwen3", write, {"messages": [ASK, thinking, MORE, LAST]})
    decode = renderer("qwen3").tokenizer.decode
    assert decode(first.response) == "<think>\nhm\n</think>\n\nYes<|im_end|>"
    assert decode(second.tokens) == (
        "<|im_start|>user\nYes<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nWhy? <|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_thinking_switch_moves_the_empty_block_into_the_prompt(write: Callable[..., str]) -> None:
    """FAULTS 7: the same tokens in the same order, but what the server writes is not what the model is taught."""
    (on, *_), (off, *_) = (rows("qwen3", write, {"messages": CHAT}, **s) for s in ({}, {"enable_thinking": False}))
    assert on.tokens + on.response == off.tokens + off.response
    decode = renderer("qwen3").tokenizer.decode
    assert decode(off.tokens).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert decode(off.response) == "Yes<|im_end|>"


def test_channels_and_their_switch(write: Callable[..., str]) -> None:
    """The reasoning is generated too, up to the end marker of the answer; <|end|> ends a channel, not the answer."""
    thinking = {**FIRST, "thinking": "hm"}
    [row] = rows("gpt-oss", write, {"messages": [ASK, thinking]}, reasoning_effort="low")
    decode = renderer("gpt-oss").tokenizer.decode
    assert "Reasoning: low<|end|>" in decode(row.tokens)
    assert decode(row.response) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    )


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_what_a_template_refuses_is_dropped_and_named(name: str, write: Callable[..., str]) -> None:
    good, bad = {"messages": [ASK, FIRST]}, {"messages": [ASK, MORE, FIRST]}  # two questions in a row
    source = JsonlSource(write([good, bad], f"{name}.jsonl"), responses=True)
    report = PromptPool(source, renderer(name), 0, seed=0).check(0.5)
    assert (report.kept, report.reasons) == (1, {"refused by the template": 1})
    assert f"{name}.jsonl:2: refused by the template" in str(report) and "roles must alternate" in str(report)


@pytest.mark.parametrize("name", STOCK)
def test_the_mask_is_neither_nothing_nor_everything(name: str, write: Callable[..., str]) -> None:
    for row in rows(name, write, {"messages": [ASK, FIRST]}):
        assert 0 < len(row.response) < len(row.tokens) + len(row.response)
        assert "Yes" in renderer(name).tokenizer.decode(row.tokens)  # the question is masked, not the answer twice

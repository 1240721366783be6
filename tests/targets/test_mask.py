"""K4: the mask token by every rule, with a real tokenizer; never pad, bos, a stop id or a token of the template."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from adaflash.decoding.engine import Engine
from adaflash.drafters.dflash import DFlash
from adaflash.length.fixed import FullBlock
from adaflash.targets.hf import HFTarget
from adaflash.targets.mask import MaskTokenError, choose_mask_id
from adaflash.types import Request

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"


def tokenizer(template: str = TEMPLATE, **special: str) -> PreTrainedTokenizerFast:
    """Words 0 .. 9, then 10 <s>, 11 <|im_start|>, 12 <|im_end|>, 13 <empty_output>; pad and eos are <|im_end|>."""
    core = Tokenizer(WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    core.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<empty_output>"])
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **special}
    made = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    made.chat_template = template
    return made


def test_first_the_configured_id() -> None:
    chosen, source = choose_mask_id(20, tokenizer(mask_token="<empty_output>"), mask_id=9)
    assert (chosen, source) == (9, "model.drafter.init_args.mask_id")


def test_then_the_tokenizers_own_mask_token() -> None:
    assert choose_mask_id(20, tokenizer(mask_token="<empty_output>")) == (13, "the tokenizer's mask token")


@pytest.mark.parametrize("rows", [15, 20, 128])
def test_then_the_first_row_past_the_tokenizer(rows: int) -> None:
    chosen, source = choose_mask_id(rows, tokenizer(), mask_token="<empty_output>")
    assert chosen == 14
    assert "past the tokenizer's end" in source


def test_then_the_reserved_token_named_for_the_target() -> None:
    chosen, source = choose_mask_id(14, tokenizer(), mask_token="<empty_output>")
    assert (chosen, source) == (13, "reserved token <empty_output>")


def test_never_a_silent_fall_back() -> None:
    """FAULTS 20: no mask token and pad == eos must not become pad."""
    with pytest.raises(MaskTokenError, match=r"no mask token.*model\.target_options\.mask_token.*mask_id"):
        choose_mask_id(14, tokenizer())
    with pytest.raises(MaskTokenError, match="no mask token"):
        choose_mask_id(14, None)


def test_a_reserved_token_that_does_not_exist() -> None:
    with pytest.raises(MaskTokenError, match="'<hole>' is not a token"):
        choose_mask_id(14, tokenizer(), mask_token="<hole>")


@pytest.mark.parametrize("wrong", [20, 25, -2])
def test_ids_that_are_no_rows_are_refused_with_the_limits(wrong: int) -> None:
    """FAULTS 21: at start, never as an index error later."""
    with pytest.raises(MaskTokenError, match=rf"mask id {wrong} .*allowed are 0 \.\. 19"):
        choose_mask_id(20, tokenizer(), mask_id=wrong)


@pytest.mark.parametrize(("wrong", "stops", "what"), [
    (12, (), "pad"), (10, (), "bos"), (11, (), "a token of the chat template"),
    (5, (5, 7), "a stop id"), (7, (5, 7), "a stop id"),
])  # fmt: skip
def test_tokens_in_use_are_refused_by_what_they_are(wrong: int, stops: tuple[int, ...], what: str) -> None:
    with pytest.raises(MaskTokenError, match=f"mask id {wrong} .*is {what}"):
        choose_mask_id(20, tokenizer(pad_token="<|im_end|>"), stops, mask_id=wrong)


def test_eos_is_refused_also_where_pad_is_another_token() -> None:
    with pytest.raises(MaskTokenError, match="is eos"):
        choose_mask_id(20, tokenizer(pad_token="<empty_output>", eos_token="<|im_end|>", template=""), mask_id=12)


def test_the_same_rules_hold_for_what_the_tokenizer_proposes() -> None:
    with pytest.raises(MaskTokenError, match=r"the tokenizer's mask token.*is pad"):
        choose_mask_id(20, tokenizer(mask_token="<|im_end|>"))


def test_templates_by_name_count_too() -> None:
    made = tokenizer()
    made.chat_template = {"default": "x", "tool_use": "<empty_output>"}
    with pytest.raises(MaskTokenError, match="a token of the chat template"):
        choose_mask_id(20, made, mask_id=13)


def test_a_drafter_takes_the_rule_and_says_where_its_id_came_from() -> None:
    target = HFTarget(tiny.model(vocab_size=20), tokenizer())
    drafter = DFlash(num_layers=1, block_size=8, context_layers=[0])
    drafter.build(target, "<empty_output>")
    assert (drafter.mask_id, drafter.mask_source) == (14, "first embedding row past the tokenizer's end")


class Forced(HFTarget):
    """Emits the mask id at every third position, whatever it thinks."""

    mask_id = tiny.VOCAB - 1

    def head(self, hidden: torch.Tensor) -> Any:
        logits = super().head(hidden)
        logits[(logits.argmax(-1) % 3) == 0, self.mask_id] = 1e4
        return logits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("drafting", [True, False])
def test_a_target_that_emits_the_mask_id_keeps_it(count: int, drafting: bool) -> None:
    """FAULTS 30: what is kept is counted by position, never by value; and lengths are exact."""
    target = Forced(tiny.model())
    request = Request(tuple(range(5, 14)), 24)
    whole = Engine(target).generate([request])[0].response.tolist()
    assert 2 < whole.count(target.mask_id) < 22
    drafter = tiny.drafter(target, noise=0.05) if drafting else None
    result = Engine(target, drafter, FullBlock()).generate([Request(request.prompt, count)])[0]
    assert result.response.tolist() == whole[:count]
    assert result.finish == "length"

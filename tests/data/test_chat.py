"""Rendering: one place, one BOS, recorded answers as they would be served (FAULTS K2, K4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adaflash.data.chat import ChatRenderer
from adaflash.data.report import DataError, RowError
from adaflash.data.rows import parse_row

Tokenizers = Callable[..., Any]
ASK = {"role": "user", "content": "Yes"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_render_is_what_the_template_says(tokenizer: Tokenizers) -> None:
    tok = tokenizer()
    ids = ChatRenderer(tok).render([ASK])
    assert all(type(token) is int for token in ids)
    assert tok.decode(ids) == "<|im_start|>user\nYes<|im_end|>\n<|im_start|>assistant\n"


def test_one_bos(tokenizer: Tokenizers) -> None:
    """The template prints it and the tokenizer adds it (FAULTS 33): one, in chats and in texts."""
    tok = tokenizer("bos", adds_bos=True)
    plain = ChatRenderer(tokenizer("", adds_bos=True))
    doubled = ChatRenderer(tokenizer("bos"))
    doubled.template = "{{ bos_token }}" + tok.chat_template
    for ids in (
        ChatRenderer(tok).render([ASK]),
        plain.render_text("Yes"),
        plain.render_text("<s>Yes"),
        doubled.render([ASK]),
    ):
        assert ids[0] == tok.bos_token_id
        assert ids.count(tok.bos_token_id) == 1


def test_no_bos_where_nobody_adds_one(tokenizer: Tokenizers) -> None:
    assert ChatRenderer(tokenizer("")).render_text("Yes") == tokenizer("")("Yes")["input_ids"]
    tok = tokenizer("chatml", adds_bos=True)  # servers send what the template prints, and it prints none
    assert tok.bos_token_id not in ChatRenderer(tok).render([ASK])


def test_no_template(tokenizer: Tokenizers) -> None:
    renderer = ChatRenderer(tokenizer(""))
    assert renderer.prompt(parse_row({"prompt": "Yes"}, "x:1")).tokens == tuple(tokenizer("")("Yes")["input_ids"])
    renderer.tokenizer.name_or_path = "acme/base"
    with pytest.raises(DataError, match="acme/base has no chat template"):
        renderer.prompt(parse_row({"messages": [ASK]}, "x:1"))


def test_long_prompts_are_refused_not_cut(tokenizer: Tokenizers) -> None:
    renderer = ChatRenderer(tokenizer(), max_prompt_tokens=20)
    with pytest.raises(RowError, match=r"longer than max_prompt_tokens \(\d+ > 20\)"):
        renderer.prompt(parse_row({"prompt": "x" * 30}, "x:1"))
    with pytest.raises(RowError, match="longer than"):
        renderer.prompt(parse_row({"prompt_ids": [1] * 21}, "x:1"))
    assert len(renderer.prompt(parse_row({"prompt_ids": [1] * 20}, "x:1")).tokens) == 20


@pytest.mark.parametrize("template", ["chatml", "bos", "trim", "history"])
def test_recorded_answer_is_exactly_the_answer(tokenizer: Tokenizers, template: str) -> None:
    """No header, nothing after the end marker, although "Yes" is asked and answered (FAULTS 5, 35, 38)."""
    tok = tokenizer(template, adds_bos=template == "bos")
    renderer = ChatRenderer(tok)
    prompt, response, finish = renderer.response_row([ASK, answer("Yes"), ASK, answer("  Yes, yes ")])
    assert prompt == renderer.render([ASK, answer("Yes"), ASK])  # what is served for this answer
    expected = "Yes, yes" if template == "trim" else "  Yes, yes "
    assert tok.decode(response) == expected + "<|im_end|>"
    assert finish == "stop"


def test_history_is_rendered_as_served(tokenizer: Tokenizers) -> None:
    """Reasoning of earlier answers is dropped: each answer has the prompt a server would have sent (FAULTS 6)."""
    tok = tokenizer("history")
    chat = [ASK, answer("<think>hm</think>one"), ASK, answer("<think>so</think>two")]
    first, second = ChatRenderer(tok).response_row(chat[:2]), ChatRenderer(tok).response_row(chat)
    assert tok.decode(first[1]) == "<think>hm</think>one<|im_end|>"
    assert "hm" not in tok.decode(second[0])
    assert tok.decode(second[1]) == "<think>so</think>two<|im_end|>"


def test_a_rewritten_prompt_is_a_counted_skip(tokenizer: Tokenizers) -> None:
    with pytest.raises(RowError) as caught:
        ChatRenderer(tokenizer("rewrites")).response_row([ASK, answer("Yes")])
    assert caught.value.reason == "template rewrites the prompt"


def test_thinking_switch_reaches_every_render(tokenizer: Tokenizers) -> None:
    """FAULTS 7: one setting, seen by prompts and by recorded answers."""
    tok = tokenizer("history")
    off, on = ChatRenderer(tok, {"enable_thinking": False}), ChatRenderer(tok, {"enable_thinking": True})
    assert tok.decode(off.render([ASK])).endswith("assistant\n<think></think>")
    assert tok.decode(on.render([ASK])).endswith("assistant\n")
    prompt, response, _ = off.response_row([ASK, answer("<think></think>Yes")])
    assert prompt == off.render([ASK])
    assert tok.decode(response) == "Yes<|im_end|>"
    with pytest.raises(RowError, match="rewrites"):  # recorded with thinking, served without
        off.response_row([ASK, answer("<think>hm</think>Yes")])


def test_switches_are_checked(tokenizer: Tokenizers) -> None:
    assert ChatRenderer(tokenizer("history"), {"enable_thinkin": False, "x": 1}).unknown_switches() == ["x"]
    with pytest.raises(DataError, match="add_generation_prompt is set by adaflash"):
        ChatRenderer(tokenizer(), {"add_generation_prompt": False})


def test_answer_without_end_marker_is_cut(tokenizer: Tokenizers) -> None:
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    _, response, finish = ChatRenderer(tok).response_row([ASK, answer("Yes")])
    assert (tok.decode(response), finish) == ("Yes\n", "length")


def test_second_end_marker(tokenizer: Tokenizers) -> None:
    """End markers of the generation config count too; the first one met ends the answer."""
    tok = tokenizer()
    tok.chat_template = tok.chat_template.replace("<|im_end|>\n", "</think>\n")
    stop = tok.convert_tokens_to_ids("</think>")
    _, response, finish = ChatRenderer(tok, stop_ids=[stop]).response_row([ASK, answer("Yes")])
    assert (tok.decode(response), finish) == ("Yes</think>", "stop")


def test_template_errors_are_row_errors(tokenizer: Tokenizers) -> None:
    renderer = ChatRenderer(tokenizer("strict"))
    with pytest.raises(RowError, match=r"refused by the template.*must begin with user"):
        renderer.prompt(parse_row({"messages": [answer("hello"), ASK]}, "x:1"))
    assert ChatRenderer(tokenizer()).prompt(parse_row({"messages": [answer("hello"), ASK]}, "x:1")).tokens


def test_renders_do_not_depend_on_the_clock(tokenizer: Tokenizers) -> None:
    tok = tokenizer("date")
    assert tok.decode(ChatRenderer(tok).render([ASK])).startswith("Today is 26 Jul 2024.")


def test_tools_and_their_calls_reach_the_template(tokenizer: Tokenizers) -> None:
    tok = tokenizer("tools")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    chat = {"messages": [ASK, call, {"role": "tool", "content": "42"}], "tools": [{"function": {"name": "f"}}]}
    text = tok.decode(ChatRenderer(tok).prompt(parse_row(chat, "x:1")).tokens)
    assert text.startswith("[f]<|im_start|>user")
    assert "a=1;<|im_end|>" in text
    assert text.endswith("tool\n42<|im_end|>\n<|im_start|>assistant\n")


def test_rollout_ids_are_never_rebuilt(tokenizer: Tokenizers) -> None:
    """FAULTS 42: ids that decode to text which would be encoded differently stay as they are."""
    tok = tokenizer()
    end = list(map(ord, "<|im_end|>"))
    row = {
        "prompt_ids": [65, *end],
        "response_ids": [tok.bos_token_id, tok.bos_token_id, 66],
        "finish_reason": "length",
    }
    prompt = ChatRenderer(tok).prompt(parse_row(row, "x:1"))
    assert (prompt.tokens, prompt.response, prompt.finish) == (
        (65, *end),
        (tok.bos_token_id, tok.bos_token_id, 66),
        "length",
    )


def test_rollouts_of_another_model_are_refused(tokenizer: Tokenizers) -> None:
    row = parse_row({"prompt_ids": [65], "response_ids": [280]}, "x:1")
    with pytest.raises(RowError, match="another model"):
        ChatRenderer(tokenizer()).prompt(row)
    assert ChatRenderer(tokenizer(), vocab_size=300).prompt(row).response == (280,)  # a spare row of the embedding


def test_old_and_new_transformers_return(tokenizer: Tokenizers) -> None:
    """FAULTS 25: version 4 returned a list, version 5 returns something like a dict."""
    tok = tokenizer()
    new = ChatRenderer(tok).render([ASK])
    real = tok.apply_chat_template

    class Old:
        def __getattr__(self, name: str) -> Any:
            return getattr(tok, name)

        def __len__(self) -> int:
            return len(tok)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[int]:
            return list(real(*args, **kwargs)["input_ids"])

    assert ChatRenderer(Old()).render([ASK]) == new


def test_ids_of_a_rollout_are_never_decoded_and_encoded_again(tokenizer: Tokenizers) -> None:
    """FAULTS 42: the model wrote "a" and "b", the tokenizer would write "ab"; and its end is the rollout's end."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2, "<end>": 3}, merges=[("a", "b")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    merging = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    ids = [0, 1, 2]
    assert merging(merging.decode(ids))["input_ids"] != ids
    row = parse_row({"prompt_ids": ids, "response_ids": [0, 1, 3], "finish_reason": "stop"}, "x:1")
    prompt = ChatRenderer(merging).prompt(row)
    assert (prompt.tokens, prompt.response, prompt.finish) == ((0, 1, 2), (0, 1, 3), "stop")

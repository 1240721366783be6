"""The one place where prompts are rendered: training, validation and `generate` all see the same token ids."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adaflash.data.messages import Message
from adaflash.data.report import DataError, RowError
from adaflash.data.rows import Row
from adaflash.types import Prompt

RESERVED = {"add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors", "tools",
            "messages", "conversation", "padding", "truncation", "max_length"}  # fmt: skip
# Some templates print today's date. Runs must not depend on the clock, so they get this one.
TODAY = datetime.date(2024, 7, 26)


class ChatRenderer:
    """Messages -> token ids as a server would send them to the model.

    Args:
        tokenizer: A Hugging Face tokenizer.
        template_kwargs: Switches of the chat template, e.g. `{enable_thinking: false}`.
        max_prompt_tokens: Longer prompts are refused (RowError), never cut; None: no limit.
        stop_ids: End markers beside the tokenizer's eos; only recorded text answers need them.
        vocab_size: Token ids of rollouts must be below it; 0: the tokenizer's size.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        stop_ids: Sequence[int] = (),
        vocab_size: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.max_prompt_tokens = max_prompt_tokens
        self.stop_ids = {*stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        self.vocab_size = max(vocab_size, len(tokenizer))
        self.template = _without_clock(tokenizer.chat_template)
        _check_kwargs(self.template_kwargs)

    @property
    def name(self) -> str:
        """What messages call the tokenizer."""
        return str(getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__)

    def unknown_switches(self) -> list[str]:
        """Template switches that the template never mentions: most likely misspelt."""
        text = self.template if isinstance(self.template, str) else str(self.template)
        return [key for key in self.template_kwargs if key not in text]

    def prompt(self, row: Row) -> Prompt:
        """The prompt of a row, with its recorded response if it has one. Raises RowError if it cannot be used."""
        response, finish = row.response_ids, row.finish
        if row.prompt_ids:
            ids = list(row.prompt_ids)
            self._check_ids((*row.prompt_ids, *row.response_ids))
        elif row.answer is not None:
            ids, answer, finish = self.response_row([*row.messages, row.answer], row.tools)
            response = tuple(answer)
        elif row.plain and self.template is None:
            ids = self.render_text(row.messages[0]["content"])
        else:
            ids = self.render(row.messages, row.tools)
        return Prompt(row.id, row.domain, tuple(self._check_length(ids)), tuple(response), finish)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Token ids of a conversation, up to the header of the answer that is to come."""
        return self._apply(messages, tools, add_generation_prompt=True)

    def render_text(self, text: str) -> list[int]:
        """Token ids of bare text, for a tokenizer without a chat template: a BOS if it adds one, never an EOS."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        bos = self.tokenizer.bos_token_id
        adds_bos = bos is not None and bos in self.tokenizer("", add_special_tokens=True)["input_ids"][:1]
        return self._one_bos([bos, *ids] if adds_bos else ids)

    def response_row(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[list[int], list[int], str]:
        """Prompt ids, answer ids (end marker included) and finish ("stop", or "length" without a marker).

        The last message is the answer; its ids are what the full render adds to the prompt as it would be served.
        Raises RowError if the template writes the prompt differently once the answer is there.
        """
        prompt = self.render(messages[:-1], tools)
        whole = self._apply(messages, tools, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise RowError("template rewrites the prompt", "the rendered prompt does not begin the rendered answer")
        answer = whole[len(prompt) :]
        end = next((at for at, token in enumerate(answer) if token in self.stop_ids), None)
        if end is not None:
            answer = answer[: end + 1]  # what a template prints after the marker is never generated
        if not answer or end == 0:
            raise RowError("empty", "the template drops the answer")
        return prompt, answer, "length" if end is None else "stop"

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> list[int]:
        if self.template is None:
            raise DataError(
                f"the tokenizer of {self.name} has no chat template, so it cannot render `messages`. Use rows with a "
                "`prompt` string, or a target whose tokenizer has a template (chat_template.jinja beside it)."
            )
        try:
            out = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, chat_template=self.template,
                add_generation_prompt=add_generation_prompt, tokenize=True, **self.template_kwargs,
            )  # fmt: skip
        except Exception as error:  # templates raise all kinds of errors for conversations they do not take
            raise RowError("refused by the template", f"{type(error).__name__}: {error}") from error
        # transformers 5 returns a dict-like object, 4 a list
        return self._one_bos(list(out["input_ids"] if isinstance(out, Mapping) else out))

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Templates print the BOS and some tokenizers add it again: keep one."""
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def _check_length(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RowError("empty", "renders to no token")
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise RowError("longer than max_prompt_tokens", f"{len(ids)} > {self.max_prompt_tokens}")
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        if max(ids) >= self.vocab_size:
            raise RowError("token ids of another model", f"id {max(ids)}, but {self.name} has {self.vocab_size}")


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    taken = sorted(RESERVED & set(kwargs))
    if taken:
        raise DataError(
            f"data.template_kwargs: {', '.join(taken)} is set by adaflash itself; only template switches go here"
        )


def _without_clock(template: Any) -> Any:
    """Template with `strftime_now("...")` replaced by the fixed date."""
    if isinstance(template, Mapping):
        return {name: _without_clock(text) for name, text in template.items()}
    if not isinstance(template, str):
        return None
    call = r"strftime_now\(\s*(['\"])(.*?)\1\s*\)"
    return re.sub(call, lambda match: repr(TODAY.strftime(match[2])), template)

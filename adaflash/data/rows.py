"""One record of a data file -> one `Row`, or a `RowError` with a counted reason.

Shapes a record may have, first that applies:
    prompt_ids     token ids of a rollout, with `response_ids` and `finish_reason`; never decoded and encoded again
    messages       [{"role": "user", "content": "..."}, ...]; `tools` beside it reaches the template
    conversations  ShareGPT: [{"from": "human", "value": "..."}, ...]
    turns          user turns to be asked one after another: the first one is the prompt, the others are not used
    prompt         a string (one user turn) or a list of messages; `response` beside it is a recorded answer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaflash.data.messages import Message, from_sharegpt, read_messages
from adaflash.data.report import RowError

FORMS = ("prompt_ids", "messages", "conversations", "turns", "prompt")
STOPPED = {"stop", "eos", "eos_token", "stop_sequence", "end_turn", "tool_calls"}
CUT = {"length", "max_tokens", "content_filter"}


@dataclass(frozen=True)
class Row:
    """One prompt before rendering: either messages or token ids."""

    id: str
    domain: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    answer: Message | None = None  # recorded text answer to `messages`
    plain: bool = False  # a bare string: a tokenizer without a chat template can take it
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    finish: str = "length"


def count_answers(record: object) -> int:
    """How many rows a record gives when its recorded answers are wanted: one per answer that follows a user turn."""
    if isinstance(record, dict) and record.get("prompt_ids") is not None:
        return 1
    answers = _answer_indexes(_conversation(_mapping(record)))
    if not answers:
        raise RowError("no recorded answer", "the source says responses: true")
    return len(answers)


def parse_row(record: object, fallback_id: str, domain: str = "", answer: int = -1) -> Row:
    """Row of a record. `answer` picks the n-th recorded answer; -1 wants the prompt alone. Raises RowError."""
    row = _mapping(record)
    name = fallback_id if row.get("id") in (None, "") else str(row["id"])
    domain = domain or str(row.get("domain") or "default")
    if row.get("prompt_ids") is not None:
        return _token_row(row, name, domain, needs_response=answer >= 0)
    messages = _conversation(row)
    if answer >= 0:
        at = _answer_indexes(messages)[answer]
        history, recorded = messages[:at], messages[at]
    else:
        history, recorded = _without_last_answers(messages), None
    plain = isinstance(row.get("prompt"), str) and len(history) == 1
    return Row(name, domain, tuple(history), _tools(row), recorded, plain)


def _mapping(record: object) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise RowError("not an object", type(record).__name__)
    return record


def _conversation(row: dict[str, Any]) -> list[Message]:
    form = next((key for key in FORMS if row.get(key) is not None), None)
    if form is None:
        raise RowError(
            "no prompt", f"one of {', '.join(FORMS)} is needed, found {', '.join(list(row)[:6]) or 'nothing'}"
        )
    value = row[form]
    if form == "prompt" and isinstance(value, str):
        turns: list[Any] = [{"role": "user", "content": value}]
        recorded = row.get("response") if row.get("response") is not None else row.get("completion")
        turns += [{"role": "assistant", "content": recorded}] if recorded is not None else []
        return read_messages(turns)
    if not isinstance(value, list):
        raise RowError("not a list", f"{form} is {type(value).__name__}")
    if not value:
        raise RowError("empty", f"{form} is []")
    if form == "turns":
        return read_messages([{"role": "user", "content": value[0]}])
    return read_messages(from_sharegpt(value) if form == "conversations" else value)


def _without_last_answers(messages: list[Message]) -> list[Message]:
    """Everything up to the last turn that waits for an answer."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    history = messages[:end]
    if not any(message["role"] == "user" for message in history):
        raise RowError("no user turn")
    if history[-1]["role"] not in ("user", "tool"):
        raise RowError("nothing to answer", f"the last turn is of role {history[-1]['role']}")
    return history


def _answer_indexes(messages: list[Message]) -> list[int]:
    """Positions of assistant turns that answer a user or tool turn."""
    found, asked = [], False
    for at, message in enumerate(messages):
        asked = asked or message["role"] == "user"
        if message["role"] == "assistant" and asked and messages[at - 1]["role"] in ("user", "tool"):
            found.append(at)
    return found


def _tools(row: dict[str, Any]) -> tuple[Any, ...]:
    tools = row.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RowError("not a list", f"tools is {type(tools).__name__}")
    return tuple(tools)


def _token_row(row: dict[str, Any], name: str, domain: str, needs_response: bool) -> Row:
    prompt = _ids(row, "prompt_ids")
    response = _ids(row, "response_ids") if row.get("response_ids") is not None else ()
    if not prompt:
        raise RowError("empty", "prompt_ids is []")
    if needs_response and not response:
        raise RowError("no recorded answer", "response_ids is missing or []")
    return Row(name, domain, prompt_ids=prompt, response_ids=response, finish=_finish(row))


def _ids(row: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = row[key]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise RowError("broken token ids", f"{key} is not a list of integers >= 0")
    return tuple(ids)


def _finish(row: dict[str, Any]) -> str:
    reason = row.get("finish_reason") or "length"
    if reason in STOPPED:
        return "stop"
    if reason in CUT:
        return "length"
    raise RowError("unfinished response", f"finish_reason is {reason!r}")

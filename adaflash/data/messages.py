"""Chat messages of many dialects -> one plain form: a role, text, and what tool calls need."""

from __future__ import annotations

import json
from typing import Any

from adaflash.data.report import RowError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


def read_messages(turns: list[Any]) -> list[Message]:
    """Checked messages. Raises RowError: "empty", "not an object", "unknown role", "empty content", ..."""
    if not turns:
        raise RowError("empty", "no message")
    return [_message(turn) for turn in turns]


def from_sharegpt(turns: list[Any]) -> list[Any]:
    """`from` / `value` -> `role` / `content`; a row that already has roles is left as it is."""
    return [_from_sharegpt(turn) if isinstance(turn, dict) and "from" in turn else turn for turn in turns]


def _from_sharegpt(turn: dict[str, Any]) -> Message:
    speaker = turn["from"]
    if speaker not in SHAREGPT:
        raise RowError("unknown role", f"from: {speaker!r}, known: {', '.join(SHAREGPT)}")
    return {"role": SHAREGPT[speaker], "content": turn.get("value")}


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise RowError("not an object", f"a message is {type(turn).__name__}")
    role = turn.get("role")
    if role not in ROLES:
        raise RowError("unknown role", f"{role!r}, known: {', '.join(ROLES)}")
    message: Message = dict(turn)
    message["content"] = _text(turn.get("content"))
    if turn.get("tool_calls"):
        message["tool_calls"] = _tool_calls(turn["tool_calls"])
    elif role in ("user", "assistant") and not message["content"].strip():
        raise RowError("empty content", f"of role {role}")
    return message


def _text(content: Any) -> str:
    """Text of a string, of null, or of a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str):
        raise RowError("not text", f"content is {type(content).__name__}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise RowError("broken unicode", "a lone surrogate") from error
    return content


def _tool_calls(calls: Any) -> list[Any]:
    """Tool calls with arguments as objects: some writers put them in a string, and templates expect one form."""
    if not isinstance(calls, list):
        raise RowError("not a list", f"tool_calls is {type(calls).__name__}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        raise RowError("not an object", f"a tool call is {type(call).__name__}")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # text that is no JSON goes to the template as it is
    return {**call, "function": {**function, "arguments": arguments}}

"""Intake: good rows pass, bad ones are counted and named by file:line (FAULTS K3)."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from adaflash.data.report import DataError, RowError
from adaflash.data.rows import parse_row
from adaflash.data.sources import JsonlSource
from adaflash.errors import UserError

Write = Callable[..., str]
USER = {"role": "user", "content": "hi"}


def opened(path: Any, **kwargs: Any) -> JsonlSource:
    source = JsonlSource(path, **kwargs)
    source.open()
    return source


def reason(record: Any, **kwargs: Any) -> str:
    with pytest.raises(RowError) as caught:
        parse_row(record, "x:1", **kwargs)
    return caught.value.reason


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": []}, "empty"),
        ([USER], "not an object"),
        ("text", "not an object"),
        ({"messages": [{"role": "system", "content": "be nice"}]}, "no user turn"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "no user turn"),
        ({"messages": [{"role": "wizard", "content": "hello"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": "  \n"}]}, "empty content"),
        ({"messages": [{"role": "user", "content": None}]}, "empty content"),
        ({"messages": [{"role": "user", "content": 7}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"messages": ["hi"]}, "not an object"),
        ({"messages": "hi"}, "not a list"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "nothing to answer"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "broken unicode"),
        ({"conversations": [{"from": "martian", "value": "hi"}]}, "unknown role"),
        ({"turns": []}, "empty"),
        ({"turns": [None]}, "empty content"),
        ({"text": "no known key"}, "no prompt"),
        ({}, "no prompt"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1, -2]}, "broken token ids"),
        ({"prompt_ids": [1, 2.0]}, "broken token ids"),
        ({"prompt_ids": [True]}, "broken token ids"),
        ({"prompt_ids": [1], "response_ids": [2], "finish_reason": "error"}, "unfinished response"),
        ({"messages": [USER], "tools": "x"}, "not a list"),
    ],
)
def test_bad_rows_have_reasons(record: Any, expected: str) -> None:
    assert reason(record) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER]},
        {"messages": [USER, {"role": "assistant", "content": "yes"}]},  # its own answer is not part of the prompt
        {"messages": None, "prompt": "hi"},
        {"prompt": "hi"},
        {"prompt": [USER]},
        {"turns": ["hi", "and then?"]},  # the first turn is the prompt
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
    ],
)
def test_every_shape_gives_the_same_prompt(record: Any) -> None:
    assert parse_row(record, "x:1").messages == (USER,)


def test_earlier_turns_are_history() -> None:
    turns = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    row = parse_row({"messages": [*turns, {"role": "assistant", "content": "because"}]}, "x:1")
    assert list(row.messages) == turns


def test_domain_of_source_then_row_then_default() -> None:
    assert parse_row({"prompt": "hi", "domain": "math"}, "x:1", "code").domain == "code"
    assert parse_row({"prompt": "hi", "domain": "math"}, "x:1").domain == "math"
    assert parse_row({"prompt": "hi"}, "x:1").domain == "default"


def test_ids_of_rollouts_are_kept(write: Write) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [7, 8], "finish_reason": "stop", "messages": [USER], "id": 0}
    got = opened(write([row])).row(0)
    assert (got.prompt_ids, got.response_ids, got.finish, got.id) == ((5, 6), (7, 8), "stop", "0")


def test_tool_calls_in_both_dialects() -> None:
    def row(arguments: Any) -> dict[str, Any]:
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        return {"messages": [USER, call, {"role": "tool", "content": "42"}], "tools": [{"function": {"name": "f"}}]}

    as_object, as_string = parse_row(row({"a": 1}), "x:1"), parse_row(row('{"a": 1}'), "x:1")
    assert as_object == as_string
    assert as_object.messages[-1] == {"role": "tool", "content": "42"}
    assert as_object.tools


def test_lines_of_the_real_world(write: Write) -> None:
    """BOM, CRLF, blank and broken lines, U+2028 in a string, rows of other shapes, no newline at the end."""
    inside = json.dumps({"prompt": "a\u2028b\u0085c", "meta": {"x": 1}}, ensure_ascii=False)
    path = write(
        [b'\xef\xbb\xbf{"prompt": "first", "meta": "text"}', b"", b"  \t", inside, b'{"prompt": "cut',
         b'{"prompt": "\xff"}', [1, 2], {"conversations": [{"from": "human", "value": "last"}]}],
        end=b"\r\n",
    )  # fmt: skip
    with open(path, "ab") as file:
        file.write(b'{"prompt": "no newline"}')
    source = opened(path)
    assert [source.row(i).messages[0]["content"] for i in range(len(source))] == [
        "first", "a\u2028b\u0085c", "last", "no newline"]  # fmt: skip
    assert source.report is not None
    assert source.report.reasons == {"broken JSON": 1, "not UTF-8": 1, "not an object": 1}
    assert [place.split(":")[1] for place in source.report.places] == ["5", "6", "7"]
    assert f"{path}:5: broken JSON" in str(source.report)


def test_gzip_globs_and_lists(write: Write, tmp_path: Any) -> None:
    write([{"prompt": "b"}], "b.jsonl.gz")
    write([{"prompt": "a"}, {"prompt": "bad", "domain": "x"}], "a.jsonl")
    source = opened([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl*"])
    assert [source.row(i).messages[0]["content"] for i in range(len(source))] == ["a", "bad", "b"]
    assert source.where(2).endswith("b.jsonl.gz:1")
    assert source.row(1).id == "a.jsonl:2"


def test_a_source_travels_to_other_processes(write: Write) -> None:
    source = opened(write([{"prompt": f"{i}"} for i in range(5)], "data.jsonl.gz"))
    assert pickle.loads(pickle.dumps(source)).row(3).messages[0]["content"] == "3"


def test_cut_off_gzip_is_named(write: Write) -> None:
    path = write([{"prompt": "x" * 1000}], "data.jsonl.gz")
    os.truncate(path, 30)
    with pytest.raises(DataError, match=r"data\.jsonl\.gz: the gzip file is damaged"):
        opened(path)


def test_missing_files_and_folders_are_named(tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"no file matches 'nowhere/\*\.jsonl'"):
        opened("nowhere/*.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        opened(str(tmp_path))


def test_a_json_array_is_explained(write: Write) -> None:
    source = opened(write(["[", json.dumps({"prompt": "a"}) + ",", "]"]))
    assert source.report is not None
    assert "one JSON array" in str(source.report)
    with pytest.raises(DataError, match="no usable row is left"):
        source.report.check(0.5)


def test_share_of_dropped_rows_is_bounded(write: Write) -> None:
    report = opened(write([{"prompt": "a"}, {"prompt": ""}, {"prompt": ""}])).open()
    report.check(0.7)
    with pytest.raises(DataError, match=r"2 of 3 rows .* data\.max_dropped = 0\.5") as caught:
        report.check(0.5)
    assert "2 x empty content" in str(caught.value)
    assert "data.jsonl:2" in str(caught.value)


def test_report_names_the_first_places_and_counts_all(write: Write) -> None:
    report = opened(write([{"prompt": ""}] * 50 + [{"prompt": "a"}])).open()
    assert report.dropped == 50
    assert "... and 42 more" in str(report)


def test_limit_counts_good_rows(write: Write) -> None:
    path = write([{"prompt": ""}, *({"prompt": f"{i}"} for i in range(9))])
    assert [opened(path, limit=3).row(i).messages[0]["content"] for i in range(3)] == ["0", "1", "2"]


def test_columns_and_template(write: Write) -> None:
    path = write([{"question": "1 + 1?", "task": 7}, {"task": 8}])
    source = opened(path, columns={"id": "task"}, template="{question} Think {{hard}}.")
    assert (source.row(0).id, source.row(0).messages[0]["content"]) == ("7", "1 + 1? Think {hard}.")
    assert source.open().reasons == {"missing column": 1}


def test_recorded_answers_give_a_row_each(write: Write) -> None:
    chat = [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}]
    source = opened(write([{"id": "c", "messages": chat}, {"messages": [USER]}, {"prompt": "p", "response": "r"},
                           {"prompt_ids": [1], "response_ids": [2]}, {"prompt_ids": [1]}]), responses=True)  # fmt: skip
    rows = [source.row(i) for i in range(len(source))]
    assert [(row.id, len(row.messages), row.answer and row.answer["content"]) for row in rows[:3]] == [
        ("c", 1, "a"), ("c#1", 3, "b"), ("data.jsonl:3", 1, "r")]  # fmt: skip
    assert rows[3].response_ids == (2,)
    assert source.open().reasons == {"no recorded answer": 2}


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="weight"):
        JsonlSource("x", weight=0)
    with pytest.raises(UserError, match="limit"):
        JsonlSource("x", limit=0)


def test_fingerprint_follows_content(write: Write) -> None:
    one = opened(write([{"prompt": "a"}], "one.jsonl")).fingerprint()
    assert one == opened(write([{"prompt": "a"}], "copy.jsonl")).fingerprint()
    assert one != opened(write([{"prompt": "b"}], "two.jsonl")).fingerprint()


def test_many_lines_need_little_memory(write: Write) -> None:
    """20,000 lines of 1 KB: places only, no text stays in memory."""
    path = write([{"prompt": "x" * 1000}] * 20_000)
    tracemalloc.start()
    source = opened(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == 20_000
    assert peak < 3_000_000  # the file has 20 MB
    assert source.row(19_999).id == "data.jsonl:20000"


def test_row_errors_travel_between_processes() -> None:
    for error in (RowError("empty"), RowError("not a list", "tools (x) is str")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)

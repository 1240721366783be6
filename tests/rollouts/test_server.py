"""ServerRollout against a real `transformers serve`, and against a small real server that misbehaves on purpose."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from adaflash.decoding.engine import Engine
from adaflash.errors import UserError
from adaflash.length.fixed import FullBlock
from adaflash.rollouts import http
from adaflash.rollouts.base import Players
from adaflash.rollouts.live import LiveRollout
from adaflash.rollouts.server import ServerRollout
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt, Request

END = 0


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character, so that every text encodes in one way; id 0 ends."""
    letters = [*sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii()), "Ġ"]
    core = Tokenizer(BPE(vocab={token: i for i, token in enumerate(["<|end|>", *letters])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target as a directory that both sides load."""
    place = tmp_path_factory.mktemp("served")
    tokenizer = ascii_tokenizer()
    model = tiny.model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight[END] *= 1.4  # some answers end by themselves
    model.generation_config.eos_token_id = [END]
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def players(folder: Path) -> Players:
    target = HFTarget.load(str(folder))
    drafter = tiny.drafter(target, noise=0.05, mask_id=len(target.tokenizer) - 1)
    return Players(target, drafter, FullBlock(), updates=0, seed=7)


@pytest.fixture(scope="module")
def prompts(players: Players) -> list[Prompt]:
    texts = ["Hello there", "2 + 2 = ", "def f(x):", "x", "The quick brown fox", "why?", "because", "So..."]
    return [
        Prompt(f"p{i}", "abc"[i % 3], tuple(players.target.tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def expected(players: Players, prompts: list[Prompt]) -> list[Any]:
    """What the target says to the prompts."""
    made = LiveRollout(max_new_tokens=24).collect(prompts, players)
    assert {each.finish for each in made} == {"stop", "length"}  # both ways to end are tested
    return made


def same(answers: list[Any], expected: list[Any]) -> None:
    for one, other in zip(answers, expected, strict=True):
        assert (one.id, one.domain, one.error, one.finish) == (other.id, other.domain, "", other.finish)
        assert one.tokens.tolist() == other.tokens.tolist()
        rows, first = len(one.tokens) - 2, one.prompt_length
        close = {"rtol": 0, "atol": 3e-5 * float(other.context.abs().max())}
        torch.testing.assert_close(one.context[:rows], other.context[:rows], **close)
        close = {"rtol": 0, "atol": 3e-5 * float(other.teacher.abs().max())}
        torch.testing.assert_close(one.teacher[: rows + 1 - first], other.teacher[: rows + 1 - first], **close)


# ---- the real one ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve`, on the CPU."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "serve.log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--port", str(port),
               "--device", "cpu", "--dtype", "float32"]  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://localhost:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_transformers_serve_gives_the_targets_own_trajectories(
    served: str, folder: Path, players: Players, prompts: list[Prompt], expected: list[Any]
) -> None:
    rollout = ServerRollout(served, str(folder), max_new_tokens=24, concurrency=3, timeout=60)
    with pytest.warns(UserWarning, match="takes no token ids"):
        answers = rollout.collect(prompts, players)
    same(answers, expected)


def test_a_wrong_name_is_refused(served: str, players: Players, prompts: list[Prompt]) -> None:
    with warnings.catch_warnings(), pytest.raises(UserError, match="refuses a plain completion: status 400"):
        warnings.simplefilter("ignore")
        ServerRollout(served, "someone/else", max_new_tokens=24).collect(prompts, players)


# ---- one that misbehaves ----


class Scripted:
    """Serves the target's own greedy answers; `script` may change or withhold a reply."""

    def __init__(self, players: Players, known: dict[tuple[int, ...], Any]) -> None:
        self.engine, self.lock, self.known = Engine(players.target), threading.Lock(), known
        self.script: Callable[[int, dict[str, Any]], tuple[int, Any] | None] = lambda count, reply: None
        self.count, self.flying, self.most, self.asked = 0, 0, 0, []
        self.pause = 0.0

    def reply(self, request: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.count, self.flying = self.count + 1, self.flying + 1
            self.most, count = max(self.most, self.flying), self.count
            self.asked.append(request)
            prompt = tuple(request["prompt"])
            if prompt not in self.known:
                [self.known[prompt]] = self.engine.generate([Request(prompt, request["max_tokens"])])
            made = self.known[prompt]
        time.sleep(self.pause)
        choice = {"token_ids": made.response.tolist(), "text": "", "finish_reason": made.finish}
        reply = {"choices": [choice], "usage": {"completion_tokens": len(made.response)}}
        changed = self.script(count, reply)
        with self.lock:
            self.flying -= 1
        return changed or (200, reply)


@pytest.fixture(scope="module")
def known() -> dict[tuple[int, ...], Any]:
    """Answers by prompt: the target is asked once for each."""
    return {}


Server = tuple["Scripted", str]


@pytest.fixture
def scripted(players: Players, known: dict[tuple[int, ...], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    script = Scripted(players, known)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            self.send(*script.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def send(self, status: int, content: Any) -> None:
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(http, "LONGEST_PAUSE", 0.01)
    yield script, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def collect(url: str, players: Players, prompts: list[Prompt], **settings: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ServerRollout(url, **{"max_new_tokens": 24, "retries": 2, "timeout": 20, **settings}).collect(
            prompts, players
        )


def test_token_ids_are_taken_as_they_are(
    scripted: Any, players: Players, prompts: list[Prompt], expected: list[Any]
) -> None:
    script, url = scripted
    same(collect(url, players, prompts), expected)
    assert all(each["return_token_ids"] and each["model"] == "tiny" for each in script.asked)
    assert [tuple(each["prompt"]) for each in script.asked[:1]] == [prompts[0].tokens]


def test_no_more_are_on_their_way_than_allowed(scripted: Any, players: Players, prompts: list[Prompt]) -> None:
    script, url = scripted
    script.pause = 0.05
    collect(url, players, prompts, concurrency=3)
    assert 2 <= script.most <= 3


@pytest.mark.parametrize("trouble", [(429, {}), (503, {}), (500, {"error": "oops"}), (200, b"<html>"), (200, b"[1]")])
def test_passing_trouble_is_waited_out(
    scripted: Any, players: Players, prompts: list[Prompt], expected: list[Any], trouble: Any
) -> None:
    script, url = scripted
    script.script = lambda count, reply: trouble if count % 2 else None
    same(collect(url, players, prompts, concurrency=1), expected)
    assert script.count == 2 * len(prompts)


def test_a_server_that_died_is_told(scripted: Any, players: Players, prompts: list[Prompt]) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 does not answer after 3 tries.*--ckpt_path last"):
        collect("http://127.0.0.1:9", players, prompts, model="tiny")
    script, url = scripted
    script.script = lambda count, reply: (503, {}) if count > 3 else None  # in the midst of a rollout
    with pytest.raises(UserError, match=r"does not answer after 3 tries \(status 503"):
        collect(url, players, prompts)


def test_a_server_that_hangs_is_told(scripted: Any, players: Players, prompts: list[Prompt]) -> None:
    script, url = scripted
    script.pause = 0.5
    with pytest.raises(UserError, match=r"does not answer after 1 tries .*timed out"):
        collect(url, players, prompts, timeout=0.1, retries=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": []}, "the answer is empty"),
        ({"token_ids": [END], "finish_reason": "stop"}, "the answer is empty"),
        ({"token_ids": None, "text": ""}, "the answer is empty"),
        ({"token_ids": None, "text": "caf\u00e9"}, "does not survive encoding"),
        ({"token_ids": None, "text": "abc"}, "3 tokens when encoded again, the server made 24"),
    ],
)
def test_nothing_is_trained_on_a_bad_answer(
    scripted: Any, players: Players, prompts: list[Prompt], expected: list[Any], change: dict[str, Any], why: str
) -> None:
    script, url = scripted

    def spoil(count: int, reply: dict[str, Any]) -> None:
        if count == 1:
            reply["usage"]["completion_tokens"] = 24
            reply["choices"][0].update(change)

    script.script = spoil
    first, *rest = collect(url, players, prompts)
    assert (first.finish, len(first.response)) == ("error", 0) and why in first.error
    same(rest, expected[1:])
    script.count = 0
    script.script = lambda count, reply: (
        reply["choices"][0].update(change) or reply["usage"].update(completion_tokens=24)
    )
    with pytest.raises(UserError, match=r"8 of 8 answers .* Does it serve the target"):
        collect(url, players, prompts)


@pytest.mark.parametrize(
    "wrong", [{"url": "localhost:8000"}, {"max_new_tokens": 1}, {"concurrency": 0}, {"top_p": 0.0}]
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        ServerRollout(**{"url": "http://x", **wrong})

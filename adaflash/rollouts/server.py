"""Rollouts from a server that speaks the OpenAI protocol (vLLM, SGLang, `transformers serve`): it must serve the target.

What it must give: `POST /v1/completions`. Best are token ids both ways, as vLLM gives them (`prompt` as a list of ids,
`return_token_ids`). From a server of texts the prompt is sent as text that encodes to the very same ids, and the answer is
encoded once; where that is not a round trip, or not as many tokens as the server says it made, the answer is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from adaflash.errors import UserError
from adaflash.rollouts.base import Law, Players, RolloutFailed, RolloutSource, sampling_law, seed_of
from adaflash.rollouts.http import Api, Refused
from adaflash.rollouts.reading import bare, read_states
from adaflash.types import BlockLog, Prompt, Trajectory

KEY = "model.rollout.init_args"
ONE_AT_A_TIME = Lock()  # fast tokenizers refuse two threads at once


class Unusable(ValueError):
    """One answer that nothing can be learned from, and why."""


class ServerRollout(RolloutSource):
    """Ask a server for the responses; one read of the frozen target gives their context and teacher states.

    Args:
        url: Where it listens, e.g. `http://localhost:8000`.
        model: The name it serves the target under; empty: the only one it lists.
        max_new_tokens: Longest response.
        temperature: 0 is greedy.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass.
        concurrency: Requests on their way at once; the others wait here, not there.
        timeout: Seconds that one request may take.
        retries: How often a request that failed, or was put off (429, 503), is sent again, after 1, 2, 4, ... seconds.
        max_unusable: Largest share of a rollout's answers that may be unusable.
        read_rows: Tokens the target reads in one pass.
        api_key: Sent as a bearer token, if the server wants one.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        concurrency: int = 16,
        timeout: float = 300.0,
        retries: int = 5,
        max_unusable: float = 0.5,
        read_rows: int = 4096,
        api_key: str = "",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{KEY}.url is {url!r}; it begins with http:// or https://")
        if max_new_tokens < 2 or concurrency < 1 or timeout <= 0 or retries < 0 or read_rows < 1:
            allowed = "max_new_tokens >= 2, concurrency >= 1, timeout > 0, retries >= 0 and read_rows >= 1"
            raise UserError(f"{KEY}: allowed are {allowed}")
        if temperature < 0 or not 0 < top_p <= 1 or top_k < 0 or not 0 <= max_unusable <= 1:
            allowed = "temperature >= 0, 0 < top_p <= 1, top_k >= 0 and 0 <= max_unusable <= 1"
            raise UserError(f"{KEY}: allowed are {allowed}")
        self.api, self.model, self.concurrency = Api(url, timeout, retries, api_key), model, concurrency
        self.max_new_tokens, self.temperature, self.top_k, self.top_p = max_new_tokens, temperature, top_k, top_p
        self.max_unusable, self.read_rows = max_unusable, read_rows
        self._takes_ids = True  # until it says otherwise

    def collect(self, prompts: Sequence[Prompt], players: Players) -> list[Trajectory]:
        """Ask for all of them, `concurrency` at a time. Raises RolloutFailed once the server is gone or of no use."""
        self.model = self.model or self._only_model()
        ask = partial(self._answer, players=players)
        first = [ask(prompts[0])] if prompts else []  # alone: it finds out how the server wants to be asked
        with ThreadPoolExecutor(self.concurrency) as pool:
            trajectories = [*first, *pool.map(ask, prompts[1:])]
        self._check_use(trajectories)
        good = iter(read_states([each for each in trajectories if not each.error], players, self.read_rows))
        return [each if each.error else next(good) for each in trajectories]

    def _answer(self, prompt: Prompt, players: Players) -> Trajectory:
        """The response, without states yet; one that cannot be used carries an error and is never trained on."""
        try:
            response, finish = self._ask(prompt, players)
            return bare(replace(prompt, response=response, finish=finish), players, self.max_new_tokens)
        except Unusable as why:
            return _failed(prompt, players, str(why))

    def _ask(self, prompt: Prompt, players: Players) -> tuple[tuple[int, ...], str]:
        """Ids of the response, end marker included, and "stop" or "length"."""
        room = min(self.max_new_tokens, players.target.max_positions - len(prompt.tokens))
        if room < 1:
            raise Unusable(f"the prompt has {len(prompt.tokens)} tokens, more than the target's context holds")
        reply = self._complete(prompt, players, room)
        choice = (reply.get("choices") or [{}])[0]
        finish = "stop" if choice.get("finish_reason") == "stop" else "length"
        ids = choice.get("token_ids")
        if ids is None:
            ids = _encode(
                choice.get("text") or "", finish, (reply.get("usage") or {}).get("completion_tokens"), players
            )
        if not ids or (len(ids) == 1 and ids[0] in players.target.stop_ids):
            raise Unusable("the answer is empty")
        if finish == "stop" and ids[-1] not in players.target.stop_ids:
            ids = [*ids, _end_marker(players)]
        return tuple(int(token) for token in ids), finish

    def _complete(self, prompt: Prompt, players: Players, room: int) -> dict[str, Any]:
        settings = {
            "model": self.model, "max_tokens": room, "temperature": self.temperature, "top_p": self.top_p,
            "seed": seed_of(players.seed, prompt.id) % 2**31,
        }  # fmt: skip
        settings |= {"top_k": self.top_k} if self.top_k else {}
        if self._takes_ids:
            try:
                ids = {"prompt": list(prompt.tokens), "return_token_ids": True}
                return self.api.post("/v1/completions", {**settings, **ids})
            except Refused as refused:
                rank_zero_warn(
                    f"{self.api.url} takes no token ids ({refused}): it gets text. Answers are encoded again, and those "
                    "that do not come out as they were made are not used. vLLM takes and gives ids"
                )
                self._takes_ids = False
        try:
            return self.api.post("/v1/completions", {**settings, "prompt": _as_text(prompt, players)})
        except Refused as refused:
            raise UserError(f"{self.api.url} refuses a plain completion: {refused}") from refused

    def _only_model(self) -> str:
        names = [str(each.get("id")) for each in self.api.get("/v1/models").get("data") or []]
        if len(names) != 1:
            raise UserError(f"{KEY}.model: {self.api.url} lists {', '.join(names) or 'no model'}; name the target's")
        return names[0]

    def _check_use(self, trajectories: Sequence[Trajectory]) -> None:
        bad = [each for each in trajectories if each.error]
        if bad:
            rank_zero_warn(f"{len(bad)} of {len(trajectories)} answers are not used; {bad[0].id!r}: {bad[0].error}")
        if len(bad) > self.max_unusable * len(trajectories):
            raise RolloutFailed(
                f"{len(bad)} of {len(trajectories)} answers of {self.api.url} cannot be used, more than {KEY}.max_unusable "
                f"= {self.max_unusable:g} allows; the first, {bad[0].id!r}: {bad[0].error}. Does it serve the target, with "
                "the same tokenizer?"
            )

    def law(self) -> Law | None:
        return sampling_law(self.temperature, self.top_k, self.top_p)

    def describe(self) -> str:
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature}"
        return f"responses of {self.api.url}, {how}, up to {self.max_new_tokens} tokens"


def _failed(prompt: Prompt, players: Players, why: str) -> Trajectory:
    asked = bare(replace(prompt, response=()), players, 0)
    return replace(asked, finish="error", error=why, blocks=BlockLog.empty(players.drafter.block_size - 1))


def _as_text(prompt: Prompt, players: Players) -> str:
    """Text that the server's tokenizer turns into the ids of the prompt: it adds a BOS where ours does."""
    tokenizer = _tokenizer(players)
    for skipped in (0, 1):
        with ONE_AT_A_TIME:
            text = tokenizer.decode(list(prompt.tokens)[skipped:], clean_up_tokenization_spaces=False)
            if list(tokenizer(text)["input_ids"]) == list(prompt.tokens):
                return str(text)
    raise Unusable("no text encodes to the ids of this prompt")


def _encode(text: str, finish: str, made: int | None, players: Players) -> list[int]:
    """Ids of an answer that came as text, checked against what the server says it made."""
    if not text:
        raise Unusable("the answer is empty")
    tokenizer = _tokenizer(players)
    with ONE_AT_A_TIME:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        again = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if again != text:
        raise Unusable(f"the answer does not survive encoding: {text[:40]!r}")
    if made is not None and made not in (len(ids), len(ids) + (finish == "stop")):  # with or without the end marker
        raise Unusable(f"the answer has {len(ids)} tokens when encoded again, the server made {made}")
    return ids


def _end_marker(players: Players) -> int:
    """What the server took for the end: it leaves the marker out of the text."""
    stops, eos = players.target.stop_ids, _tokenizer(players).eos_token_id
    if eos in stops or not stops:
        return int(eos)
    return int(stops[0])


def _tokenizer(players: Players) -> Any:
    if players.target.tokenizer is None:
        raise UserError(
            "ServerRollout needs the target's tokenizer to speak with a server of texts; the target has none"
        )
    return players.target.tokenizer

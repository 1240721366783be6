"""JSON over HTTP with time-outs and retries; nothing but the standard library, and safe in threads."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from adaflash.rollouts.base import RolloutFailed

BUSY = {408, 429, 500, 502, 503, 504}  # worth another try; everything else in the 400s is not
LONGEST_PAUSE = 30.0  # seconds


class Refused(ValueError):
    """The server understood and said no (a status of the 400s)."""


class Api:
    """One server.

    Args:
        url: Its root; a trailing `/v1` is left out.
        timeout: Seconds that one request may take.
        retries: How often a failed request is sent again, after 1, 2, 4, ... seconds or what `Retry-After` says.
        key: Bearer token; empty: none.
    """

    def __init__(self, url: str, timeout: float, retries: int, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout, self.retries = timeout, retries
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def get(self, path: str) -> dict[str, Any]:
        """The reply to a GET. Raises as `post` does."""
        return self._patiently(urllib.request.Request(self.url + path, headers=self._headers))

    def post(self, path: str, content: Any) -> dict[str, Any]:
        """The reply to JSON.

        Raises:
            Refused: it will not do this, however often it is asked.
            RolloutFailed: it is gone, or no answer came in time.
        """
        data = json.dumps(content).encode()
        return self._patiently(urllib.request.Request(self.url + path, data=data, headers=self._headers))

    def _patiently(self, request: urllib.request.Request) -> dict[str, Any]:
        for attempt in range(self.retries + 1):
            try:
                return self._once(request)
            except urllib.error.HTTPError as error:
                why, pause = f"status {error.code}: {_reason(error)}", _number(error.headers.get("Retry-After"))
                if error.code not in BUSY:
                    raise Refused(why) from error
            except (OSError, ValueError) as error:  # refused, reset, timed out; a reply that is no JSON
                why, pause = f"{type(error).__name__}: {error}", None
            if attempt < self.retries:
                time.sleep(min(2.0**attempt if pause is None else pause, LONGEST_PAUSE))
        raise RolloutFailed(
            f"the server at {self.url} does not answer after {self.retries + 1} tries ({why}). Start it again and go on "
            "with --ckpt_path last"
        )

    def _once(self, request: urllib.request.Request) -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            content = json.loads(reply.read())
        if not isinstance(content, dict):
            raise ValueError(f"the reply is a {type(content).__name__}, not an object")
        return content


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode(errors="replace")
    except OSError:
        text = ""
    return " ".join(text.split())[:200] or str(error.reason)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:  # a date
        return None

"""Where the time of an update goes, by named part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Stopwatch:
    """Adds up wall time by part, as the host sees it.

    An accelerator works behind the host, so its time is counted where the host waits for it; `wait` is called at both
    ends of a part to make the split exact, at the price of that overlap.

    Attributes:
        seconds: Wall time by part since the start.
        wait: Called before the clock is read; nothing by default.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.wait: Callable[[], None] = _nothing
        self._running: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what happens inside."""
        self.start(part)
        try:
            yield
        finally:
            self.stop(part)

    def start(self, part: str) -> None:
        """Begin a part that ends in another hook."""
        self.wait()
        self._running[part] = time.perf_counter()

    def stop(self, part: str) -> None:
        """End it; one that was never begun counts nothing."""
        self.wait()
        now = time.perf_counter()
        self.seconds[part] += now - self._running.pop(part, now)  # type: ignore[assignment]


def timed(part: str) -> Callable[[Method], Method]:
    """Count a method under a part of its object's `watch`."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.watch(part):
                return method(self, *args, **kwargs)

        return inner  # type: ignore[return-value]

    return decorate


def _nothing() -> None:
    """Wait for nothing."""

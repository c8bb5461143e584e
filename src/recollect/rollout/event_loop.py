"""Clocks: what the time is and when to be woken. Tests bring their own (`recollect.testing.FakeClock`)."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A wake-up that can be taken back."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class LoopClock:
    """The event loop's own clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.time = loop.time
        self.call_at = loop.call_at


def checked_seconds(value: Any, name: str = "timeout") -> float:
    """Return a number of seconds; ValueError if it is negative, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: must be a number of seconds, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be finite and at least 0, got {value!r}; nothing here waits for ever")
    return float(value)


class Deadlines:
    """Many deadlines behind one timer: most are taken back long before they come.

    An entry is a list `[when, number, callback, argument]`; `take_back` empties it. Empty ones are swept once they
    are the greater part, so that memory stays with what is alive.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[list[Any]] = []
        self._n_empty = self._n_made = 0
        self._timer: Timer | None = None
        self._wakes_at = math.inf

    def put(self, when: float, callback: Callable[[Any], Any], argument: Any) -> list[Any]:
        """Call `callback(argument)` at `when` unless it is taken back."""
        self._n_made += 1
        entry = [when, self._n_made, callback, argument]
        heapq.heappush(self._heap, entry)
        if when < self._wakes_at:
            self._wake_at(when)
        return entry

    def take_back(self, entry: list[Any]) -> None:
        """Forget a deadline; one that has come or was taken back is no matter."""
        if entry[2] is None:
            return
        entry[2] = entry[3] = None
        self._n_empty += 1
        if self._n_empty > 64 and self._n_empty * 2 > len(self._heap):
            self._heap = [kept for kept in self._heap if kept[2] is not None]
            heapq.heapify(self._heap)
            self._n_empty = 0
            if not self._heap and self._timer is not None:  # an idle coordinator does not wake
                self._timer.cancel()
                self._wakes_at = math.inf

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = when
        self._timer = self._clock.call_at(when, self._due)

    def _due(self) -> None:
        now = self._clock.time()
        self._timer, self._wakes_at = None, math.inf
        while self._heap and (self._heap[0][2] is None or self._heap[0][0] <= now):
            _, _, callback, argument = entry = heapq.heappop(self._heap)
            if callback is None:
                self._n_empty -= 1
                continue
            entry[2] = entry[3] = None
            callback(argument)
        if self._heap and self._heap[0][0] < self._wakes_at:
            self._wake_at(self._heap[0][0])

    def close(self) -> None:
        """Forget all of them."""
        if self._timer is not None:
            self._timer.cancel()
        self._heap.clear()

"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class FakeTimer:
    """A wake-up of a FakeClock."""

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args

    def cancel(self) -> None:
        """Take it back."""
        self.callback = None


class FakeClock:
    """Time for tests: `advance(seconds)` runs whatever is due meanwhile, in order.

    >>> clock, seen = FakeClock(), []
    >>> timer = clock.call_at(2.0, seen.append, "two")
    >>> clock.advance(1.0), seen, clock.advance(1.0), seen
    (None, ['two'], None, ['two'])
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._n = 0

    def time(self) -> float:
        """What the time is."""
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> FakeTimer:
        """Call `callback(*args)` once the time is `when`."""
        self._n += 1
        timer = FakeTimer(callback, args)
        heapq.heappush(self._timers, (when, self._n, timer))
        return timer

    @property
    def n_timers(self) -> int:
        """How many wake-ups are due some day."""
        return sum(timer.callback is not None for *_, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if timer.callback is not None:
                timer.callback(*timer.args)
        self.now = end

"""A limit on a block of awaits, on any clock (`asyncio.timeout` knows only the loop's)."""

from __future__ import annotations

import asyncio
from typing import Self

from recollect.rollout.event_loop import Clock, Timer


class Limit:
    """`async with Limit(clock, seconds)` raises TimeoutError inside once the time is over."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.expired = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Limit: must be used in a task")
        self.task, self._before = task, task.cancelling()
        self._timer: Timer = self.clock.call_at(self.clock.time() + self.seconds, self._expire)
        return self

    def _expire(self) -> None:
        self.expired = True
        self.task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._timer.cancel()
        if self.expired and self.task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError

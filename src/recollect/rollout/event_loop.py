"""What asyncio leaves open: clocks, deadlines and limits on any clock, and threads for calls that block.

Tests bring their own clock (`recollect.testing.FakeClock`).
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, Self


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


_ThreadCall = tuple[asyncio.Future[Any], Callable[[], Any]]


class Threads:
    """As many threads as there are calls at once; each call's outcome comes back as a future of the loop.

    Concurrency: one event loop. Cancelling the future leaves the call running; its outcome is then dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.loop, self.name = loop, name
        self.idle: list[SimpleQueue[_ThreadCall | None]] = []
        self.closed = False
        self.n_started = 0

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Start `function(*args)` in a thread at once."""
        future: asyncio.Future[Any] = self.loop.create_future()
        job = (future, lambda: function(*args))
        if self.idle:
            self.idle.pop().put(job)
            return future
        self.n_started += 1
        inbox: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        inbox.put(job)
        threading.Thread(
            target=self._serve, args=(inbox,), name=f"{self.name}-{self.n_started}", daemon=True
        ).start()
        return future

    def _serve(self, inbox: SimpleQueue[_ThreadCall | None]) -> None:
        while (job := inbox.get()) is not None:
            future, work = job
            try:
                value, error = work(), None
            except BaseException as raised:
                value, error = None, raised
            try:
                self.loop.call_soon_threadsafe(self._done, future, value, error, inbox)
            except RuntimeError:  # the loop is closed, and no call waits
                return
            if self.closed:  # the loop may have stopped for good, and `_done` will not be called
                return
            del job, future, work, value, error

    def _done(
        self,
        future: asyncio.Future[Any],
        value: Any,
        error: BaseException | None,
        inbox: SimpleQueue[_ThreadCall | None],
    ) -> None:
        if self.closed:
            inbox.put(None)
        else:
            self.idle.append(inbox)
        if future.done():  # cancelled: the value is dropped
            return
        if error is None:
            future.set_result(value)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError(f"a call raised {error!r}"))
        else:
            future.set_exception(error)

    def close(self) -> None:
        """Let idle threads end now and busy ones when their call does."""
        self.closed = True
        for inbox in self.idle:
            inbox.put(None)
        self.idle.clear()

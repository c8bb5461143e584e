"""Threads for calls that may block: operators, sinks, the journal, sync workflows.

Why not ThreadPoolExecutor: a call that never returns must cost its own thread and nothing else. There it would hold
a worker of the pool and, at exit, the interpreter. These threads are daemons, are kept for the next call, and end
when nobody needs them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Job = tuple[asyncio.Future[Any], Callable[[], Any]]


class Threads:
    """As many threads as there are calls at once; each call's outcome comes back as a future of the loop.

    Concurrency: one event loop. Cancelling the future leaves the call running; its outcome is then dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.loop, self.name = loop, name
        self.idle: list[SimpleQueue[Job | None]] = []
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
        inbox: SimpleQueue[Job | None] = SimpleQueue()
        inbox.put(job)
        threading.Thread(
            target=self._serve, args=(inbox,), name=f"{self.name}-{self.n_started}", daemon=True
        ).start()
        return future

    def _serve(self, inbox: SimpleQueue[Job | None]) -> None:
        while (job := inbox.get()) is not None:
            future, work = job
            try:
                value, error = work(), None
            except BaseException as raised:
                value, error = None, raised
            try:
                self.loop.call_soon_threadsafe(self._done, future, value, error, inbox)
            except RuntimeError:  # the loop is closed; nobody waits
                return
            if self.closed:  # the loop may have stopped for good, and `_done` will not be called
                return
            del job, future, work, value, error

    def _done(
        self,
        future: asyncio.Future[Any],
        value: Any,
        error: BaseException | None,
        inbox: SimpleQueue[Job | None],
    ) -> None:
        if self.closed:
            inbox.put(None)
        else:
            self.idle.append(inbox)
        if future.done():  # cancelled: nobody wants it
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

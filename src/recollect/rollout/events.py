"""Events: what happened, for listeners that must never delay anybody."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from recollect.errors import ClosedError
from recollect.rollout.batch.state import BatchId

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `missed` events before it were lost because the listener was slow."""

    kind: str
    batch_id: BatchId | None
    task_id: BatchId | None
    run_id: int | None
    time_s: float
    detail: str = ""
    missed: int = 0


class Listener:
    """One `async for` over the events; keeps the newest 1,024."""

    def __init__(self, hub: Hub, batch_id: BatchId | None) -> None:
        self.hub, self.batch_id = hub, batch_id
        self.waiting: deque[Event] = deque()
        self.missed = 0
        self.future: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if len(self.waiting) == BACKLOG:
            self.waiting.popleft()
            self.missed += 1
        self.waiting.append(event)
        self.wake()

    def wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def stream(self) -> AsyncIterator[Event]:
        try:
            while True:
                while self.waiting:
                    event = self.waiting.popleft()
                    missed, self.missed = self.missed, 0
                    yield replace(event, missed=missed) if missed else event
                if self.hub.closed:
                    return
                self.future = asyncio.get_running_loop().create_future()
                await self.future
        finally:
            self.hub.listeners.discard(self)


class Hub:
    """Hands events to listeners. Without one an event costs a test."""

    def __init__(self) -> None:
        self.listeners: set[Listener] = set()
        self.closed = False

    def listen(self, batch_id: BatchId | None) -> AsyncIterator[Event]:
        if self.closed:
            raise ClosedError("events: the coordinator is closed; call prepare() first")
        listener = Listener(self, batch_id)
        self.listeners.add(listener)
        return listener.stream()

    def emit(self, kind: str, now: float, batch_id: Any = None, task_id: Any = None, run_id: Any = None,
             detail: str = "") -> None:  # fmt: skip
        event = Event(kind, batch_id, task_id, run_id, now, detail)
        for listener in self.listeners:
            if listener.batch_id is None or listener.batch_id == batch_id:
                listener.put(event)

    def close(self) -> None:
        self.closed = True
        for listener in list(self.listeners):
            listener.wake()

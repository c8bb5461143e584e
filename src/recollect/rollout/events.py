"""Events: what happened, for listeners that delay nothing, and slices of time for a Chrome trace."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recollect.errors import ClosedError
from recollect.rollout.batch.records import Attempt, Unit
from recollect.rollout.batch.state import BatchId
from recollect.rollout.event_loop import Clock

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

    def __init__(self, batch_id: BatchId | None) -> None:
        self.batch_id = batch_id
        self.waiting: deque[Event] = deque()
        self.missed = 0
        self.future: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if len(self.waiting) == BACKLOG:
            self.waiting.popleft()
            self.missed += 1
        self.waiting.append(event)
        self.wake()

    def take(self) -> Event:
        """Remove the oldest event; it says how many were lost before it."""
        event = self.waiting.popleft()
        missed, self.missed = self.missed, 0
        return replace(event, missed=missed) if missed else event

    def wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)


class EventHub:
    """Hands events to listeners. Without one an event costs a test."""

    def __init__(self) -> None:
        self.listeners: set[Listener] = set()
        self.closed = False

    def listen(self, batch_id: BatchId | None) -> AsyncIterator[Event]:
        if self.closed:
            raise ClosedError("events: the coordinator is closed; call prepare() first")
        listener = Listener(batch_id)
        self.listeners.add(listener)
        return self._stream(listener)

    async def _stream(self, listener: Listener) -> AsyncIterator[Event]:
        try:
            while True:
                while listener.waiting:
                    yield listener.take()
                if self.closed:
                    return
                listener.future = asyncio.get_running_loop().create_future()
                await listener.future
        finally:
            self.listeners.discard(listener)

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


SLICES_KEPT = 1024  # before they are written


class RolloutTrace:
    """Slices in Chrome's format; open the file in Perfetto or chrome://tracing.

    Ownership: the file is the caller's; it is whole JSON once `close` has ended it. Memory stays bounded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._kept: list[str] = []
        self._failure: OSError | None = None
        self.path.write_text('{"traceEvents": [\n')

    def add(self, name: str, start: float, end: float, lane: int = 0, **about: Any) -> None:
        """Record what took from one time to another, on a lane of its own."""
        event = {"name": f"rollout/{name}", "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6, "pid": 0,
                 "tid": lane, "args": about}  # fmt: skip
        self._kept.append(json.dumps(event, default=str))
        if len(self._kept) >= SLICES_KEPT:
            self._write("")

    def close(self) -> None:
        """Write the rest, and end the file; OSError if some of it could not be written."""
        self._kept.append(json.dumps({"name": "end", "ph": "M", "pid": 0}))
        self._write("\n]}")
        if self._failure is not None:
            raise self._failure

    def _write(self, end: str) -> None:
        """Write what is kept. A batch must not suffer from a full disk of its trace: `close` tells of that."""
        try:
            if self._failure is None:
                with self.path.open("a") as file:
                    file.write(",\n".join(self._kept) + (end or ",\n"))
        except OSError as error:
            self._failure = error
        self._kept.clear()


class Observer:
    """Tells listeners and the trace; costs a test while there is neither."""

    def __init__(self, clock: Clock, hub: EventHub, trace: RolloutTrace | None) -> None:
        self.clock, self.hub, self.trace = clock, hub, trace

    @property
    def listens(self) -> bool:
        return bool(self.hub.listeners) or self.trace is not None

    def event(self, kind: str, attempt: Attempt, detail: str = "") -> None:
        task = attempt.unit.task
        self.hub.emit(kind, self.clock.time(), task.batch.id, task.task_id, attempt.unit.run_ids[0], detail)

    def event_of(self, kind: str, batch_id: Any = None, task_id: Any = None, detail: str = "") -> None:
        if self.hub.listeners:
            self.hub.emit(kind, self.clock.time(), batch_id, task_id, None, detail)

    def attempt_started(self, attempt: Attempt, now: float) -> None:
        self.event("started", attempt, f"attempt {attempt.number} on runner {attempt.runner}")
        if self.trace is not None:
            self.trace.add("queue", attempt.unit.task.batch.submitted_at, now, attempt.runner)

    def attempt_ended(self, attempt: Attempt) -> None:
        unit = attempt.unit
        good = attempt.good == len(unit.run_ids)
        if attempt.is_live:
            self.event("finished" if good else "failed", attempt, "" if good else unit.error[-200:])
        if self.trace is not None:
            now, about = self.clock.time(), {"batch": unit.task.batch.id, "task": unit.task.task_id}
            stop = now if attempt.stopped_at is None else attempt.stopped_at
            self.trace.add("attempt", attempt.started_at, stop, attempt.runner, **about)
            if attempt.stopped_at is not None:
                self.trace.add("grace", stop, now, attempt.runner, **about)

    def retried(self, unit: Unit, pause: float) -> None:
        task, now = unit.task, self.clock.time()
        self.hub.emit("retried", now, task.batch.id, task.task_id, unit.run_ids[0], f"in {pause:.2f} s")
        if self.trace is not None:
            self.trace.add("backoff", now, now + pause)

    def model_call(self, method: str, start: float) -> None:
        """A model answered, or did not."""
        self.slice("model_call", start, method=method)

    def slice(self, name: str, start: float, **about: Any) -> None:
        if self.trace is not None:
            self.trace.add(name, start, self.clock.time(), **about)

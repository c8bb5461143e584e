"""Seeing what happens: records of counts, events for listeners, slices for a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recollect.rollout.batch.records import Attempt, Unit
from recollect.rollout.event_loop import Clock
from recollect.rollout.events import Hub
from recollect.rollout.models.replicas import ModelStats

SLICES_KEPT = 1024  # before they are written


@dataclass(slots=True)
class AttemptDoors:
    """Attempts: started = good + failed + timed_out + cancelled + lost + running."""

    started: int = 0
    good: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    lost: int = 0
    running: int = 0


@dataclass(slots=True)
class RunDoors:
    """Runs: submitted = delivered + filtered + unused + failed + cancelled + live."""

    submitted: int = 0
    delivered: int = 0
    filtered: int = 0
    unused: int = 0
    failed: int = 0
    cancelled: int = 0
    live: int = 0


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Runners: how many there should be, are, are free, and are fenced."""

    kind: str
    size: int
    alive: int
    free: int
    fenced: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """What waits: batches not admitted, batches alive, runs without a runner."""

    waiting_batches: int
    live_batches: int
    queued_runs: int


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of a coordinator; the records in it are copies."""

    runs: RunDoors
    attempts: AttemptDoors
    runners: RunnerStats
    queue: QueueStats
    staged_nbytes: int
    models: tuple[ModelStats, ...]
    loop_lag_s: float
    loop_lag_in: str
    payloads_refused: int
    model_version: int
    stale_dropped: int


class Trace:
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

    def __init__(self, clock: Clock, hub: Hub, trace: Trace | None) -> None:
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

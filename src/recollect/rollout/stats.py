"""What `stats()` returns: records of counts, each of one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What one model did: calls served, failed and under way, and attempts that hold it."""

    name: str
    served: int
    failed: int
    calls: int
    attempts: int
    resting: bool


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
class RunnerPoolStats:
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
    runners: RunnerPoolStats
    queue: QueueStats
    staged_nbytes: int
    models: tuple[ModelStats, ...]
    loop_lag_s: float
    loop_lag_in: str
    payloads_refused: int
    model_version: int
    stale_dropped: int

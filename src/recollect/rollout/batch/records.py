"""What the coordinator keeps of batches, tasks, units and attempts while they live.

Concurrency: all of it belongs to the coordinator's event loop.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.rollout.batch.state import BatchId, BatchState, TaskStatus
from recollect.rollout.event_loop import Timer

if TYPE_CHECKING:
    from recollect.rollout.tasks import RunOutcome, Task, Workflow

MOST_RUNS = 1 << 22
"""Runs that a batch of a journal may have: each takes memory when it is read."""


class TaskRecord:
    """One task of a live batch: its runs that are good, those that failed, and the units still open."""

    __slots__ = (
        "attempts", "batch", "data", "failed", "good", "group_id", "key", "max_retries", "n_runs",
        "position", "started", "status", "task_id", "timeout_s", "workflow",
    )  # fmt: skip

    def __init__(
        self,
        batch: BatchRecord,
        position: int,
        task: Task,
        workflow: Workflow,
        data: bytes,
        group_id: int,
        key: int,
    ) -> None:
        self.batch, self.position, self.workflow, self.data = batch, position, workflow, data
        self.task_id: BatchId = position if task.task_id is None else task.task_id
        self.n_runs, self.timeout_s, self.max_retries = task.repeat_times, task.timeout_s, task.max_retries
        self.group_id, self.key = group_id, key
        self.good: dict[int, RunOutcome] = {}
        self.failed: dict[int, str] = {}
        self.attempts = 0
        self.started = False
        self.status: TaskStatus | None = None

    @property
    def error(self) -> str | None:
        """How its first failed run failed."""
        return next(iter(self.failed.values()), None)

    @property
    def is_fine(self) -> bool:
        """Whether it ended with all runs good."""
        return self.status is not None and self.status.state == "ok"

    def is_good(self, partial: str, min_group_size: int) -> bool:
        """Whether it will be used: all runs are good, or enough of them if part of a group is kept."""
        if self.status is None:
            return False
        if self.status.state == "ok":
            return True
        return self.status.state == "partial" and self.is_kept(partial, min_group_size)

    def is_kept(self, partial: str, min_group_size: int) -> bool:
        """Whether its good runs are used without the others."""
        return partial == "keep" and len(self.good) >= min_group_size


class Unit:
    """Runs of one task that share an attempt; good ones are staged, the others tried again."""

    __slots__ = (
        "attempt",
        "attempts",
        "backs_off_until",
        "error",
        "last_runner",
        "losses",
        "run_ids",
        "task",
        "timer",
    )

    def __init__(self, task: TaskRecord, run_ids: tuple[int, ...]) -> None:
        self.task, self.run_ids = task, run_ids
        self.attempts = 0  # those that cost a retry
        self.losses = 0
        self.last_runner = -1
        self.attempt: Attempt | None = None
        self.backs_off_until: float | None = None
        self.timer: Timer | None = None
        self.error = ""


class Attempt:
    """One try of a unit on a runner. It is live until it ends, is told to stop, or its runner dies."""

    __slots__ = (
        "dynamic",
        "good",
        "id",
        "is_live",
        "limit",
        "number",
        "runner",
        "started_at",
        "stopped",
        "stopped_at",
        "timed_out",
        "timer",
        "unit",
    )  # fmt: skip

    def __init__(self, ident: int, unit: Unit, number: int, limit: float, dynamic: bool, now: float) -> None:
        self.id, self.unit, self.number = ident, unit, number
        self.limit, self.dynamic, self.started_at = limit, dynamic, now
        self.runner = -1
        self.is_live = True
        self.timed_out = False
        self.stopped_at: float | None = None  # when it was told to stop
        self.good = 0
        self.timer: list[Any] = []  # its deadline, then its grace
        self.stopped: list[asyncio.Future[None]] | None = (
            None  # one for each call that waits for its real end
        )


class BatchRecord:
    """A live batch."""

    def __init__(self, state: BatchState, serial: int, priority: int | None, config: Any) -> None:
        self.state, self.serial, self.config = state, serial, config
        self.order = (*step_of(state.batch_id, priority), state.batch_type == "eval", serial)
        self.priority = priority
        self.is_eval = state.batch_type == "eval"
        self.admitted = False
        self.tasks: list[TaskRecord] = []
        self.n_runs = 0
        self.next_task = 0
        self.next_run = 0
        self.retries: deque[Unit] = deque()
        self.backing_off: set[Unit] = set()
        self.running: set[Attempt] = set()
        self.n_queued = 0  # runs that wait for a runner
        self.counts = {"ok": 0, "partial": 0, "failed": 0}
        self.n_good = 0
        self.min_reached_at: float | None = None
        self.staged_nbytes = 0
        self.retry_count = self.timeout_count = self.requeue_count = self.late_count = (
            self.bad_metric_count
        ) = 0
        self.seconds: list[float] = []  # of good train runs, for the dynamic limit
        self.finalizers: set[Any] = set()
        self.cut: Cut | None = None
        self.passing: asyncio.Task[Any] | None = None
        self.outcome: asyncio.Future[Any] | None = None
        self.delivery: Any = None
        self.committing = False
        self.aborting: str | None = None  # why, while a kept part is being delivered
        self.abort_after_pass: str | None = None  # why, if the pass under way is the last one
        self.write_tried = False
        self.last_failure: str | None = None
        self.reason: str | None = None
        self.commit_id = ""
        self.submitted_at = 0.0
        self.k: int | None = None
        self.not_admitted = ""

    @property
    def id(self) -> BatchId:
        return self.state.batch_id

    def has_work(self) -> bool:
        """Whether a unit could start now."""
        return bool(self.retries) or self.next_task < len(self.tasks)

    def next_unit(self) -> Unit:
        """Take the next unit: retries first, then fresh ones in the order of tasks and runs."""
        if self.retries:
            return self.retries.popleft()
        task = self.tasks[self.next_task]
        first = self.next_run
        last = min(first + self.config.repeats_per_attempt, task.n_runs)
        if last == task.n_runs:
            self.next_task, self.next_run = self.next_task + 1, 0
        else:
            self.next_run = last
        return Unit(task, tuple(range(first, last)))


@dataclass(frozen=True, slots=True)
class Joined:
    """A carried task that has ended, taken out of its carrier by the cut of a later batch."""

    task: TaskRecord
    carrier: BatchRecord
    position: int  # that it had there
    is_used: bool


class Cut:
    """Which results of a batch count: the good tasks, in order, and what became of the others."""

    def __init__(self, tasks: list[TaskRecord], cancelled: int, carried: int) -> None:
        self.tasks, self.cancelled, self.carried = tasks, cancelled, carried
        self.carried_in: list[TaskRecord] = []


def step_of(batch_id: BatchId, priority: int | None) -> tuple[float]:
    """The step that a batch belongs to; ids without one come last."""
    if priority is not None:
        return (float(priority),)
    if isinstance(batch_id, int):
        return (float(batch_id),)
    found = re.match(r"-?\d+", batch_id)
    return (float(int(found[0])) if found else math.inf,)


@dataclass(eq=False, slots=True)
class Submission:
    """A batch that waits to be admitted."""

    batch: BatchRecord
    future: asyncio.Future[None]
    timer: Timer | None = None

    def answer(self, error: Exception | None = None) -> None:
        """Tell the caller how the wait ended, unless the call was cancelled."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(None) if error is None else self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """The last state of a batch, and why it was aborted if it was."""

    state: BatchState
    reason: str | None = None

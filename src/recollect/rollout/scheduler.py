"""The scheduler: which attempt starts next, how long it may take, which results are taken, and what is tried again.

Concurrency: everything happens in the coordinator's event loop, in callbacks that never wait. At most one attempt of
a unit is alive: the next is queued when the last has really ended, was killed or is fenced.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from recollect.rollout.batch.records import Attempt, BatchRecord, TaskRecord, Unit
from recollect.rollout.batch.state import TaskStatus
from recollect.rollout.event_loop import Clock, Deadlines
from recollect.rollout.events import Observer
from recollect.rollout.metrics import task_means
from recollect.rollout.stats import AttemptDoors
from recollect.rollout.tasks import AttemptSpec, RunOutcome, run_seed

if TYPE_CHECKING:
    from recollect.rollout.config import Config
    from recollect.rollout.journal.journal import Journal
    from recollect.rollout.runners.base import RunnerPool

LAST_RUNS = 1024


class Scheduler:
    """Live batches in order, their attempts on the runners, and the clock that bounds both."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        observer: Observer,
        journal: Journal | None,
        *,
        version: Callable[[], int],
        task_ended: Callable[[TaskRecord], None],
        room_made: Callable[[], None],
        runners_broken: Callable[[str], None],
    ) -> None:
        """`version` of the weights now; the others are called when what they name has happened."""
        self.config, self.clock, self.observer, self.journal = config, clock, observer, journal
        self.version, self.room_made = version, room_made
        self._task_ended, self._tell_broken = task_ended, runners_broken
        self.pool: RunnerPool
        self.batches: list[BatchRecord] = []
        self.attempts: dict[int, Attempt] = {}
        self.doors = AttemptDoors()
        self.deadlines = Deadlines(clock)
        self.n_eval_running = 0
        self.n_queued = 0
        self.staged_nbytes = 0
        self.is_paused = True
        self.broken: str | None = None
        self._next_id = 0
        self._random = random.Random(config.seed)
        self._seconds: deque[float] = deque(maxlen=LAST_RUNS)
        self._limit: float | None = None
        self.n_complete = 0  # train batches, for the warm-up of the dynamic limit

    # -- batches in and out

    def add(self, batch: BatchRecord) -> None:
        """Let the work of a batch start."""
        insort(self.batches, batch, key=lambda b: b.order)
        self.n_queued += batch.n_queued
        self.dispatch()

    def remove(self, batch: BatchRecord) -> None:
        """Forget a batch whose work was dropped."""
        if batch in self.batches:
            self.batches.remove(batch)

    def drop_work(self, batch: BatchRecord) -> list[Attempt]:
        """Take back what waits and stop what runs; return the attempts that are being stopped."""
        for unit in batch.backing_off:
            if unit.timer is not None:
                unit.timer.cancel()
        batch.backing_off.clear()
        batch.retries.clear()
        batch.next_task = len(batch.tasks)
        self.n_queued -= batch.n_queued
        batch.n_queued = 0
        running = list(batch.running)
        for attempt in running:
            self.stop(attempt)
        return running

    def complete(self, batch: BatchRecord) -> None:
        """A train batch was delivered: its runs count for the dynamic limit from now on."""
        self.n_complete += 1
        self._seconds.extend(batch.seconds)
        self._limit = None

    # -- starting

    def dispatch(self) -> None:
        """Start units while there are free runners and work that may start."""
        if self.is_paused:
            return
        before = self.n_queued
        n_free = self.pool.n_free
        while n_free() > 0:
            batch = self._pick()
            if batch is None:
                break
            self._start(batch.next_unit(), batch)
        if self.n_queued < before:
            self.room_made()

    def _pick(self) -> BatchRecord | None:
        full = self.staged_nbytes > self.config.max_staged_nbytes
        oldest = min((b.serial for b in self.batches), default=0) if full else 0
        for batch in self.batches:
            if not batch.has_work() or (full and not batch.finalizers and batch.serial != oldest):
                continue
            if batch.is_eval and self.n_eval_running >= self.eval_limit() and self._train_waits():
                continue
            return batch
        return None

    def eval_limit(self) -> int:
        """How many runners eval may hold while train work waits."""
        share: float = self.config.eval_share
        return math.ceil(share * self.pool.size)

    def _train_waits(self) -> bool:
        return any(not batch.is_eval and batch.has_work() for batch in self.batches)

    def _start(self, unit: Unit, batch: BatchRecord) -> None:
        task, now = unit.task, self.clock.time()
        unit.attempts += 1
        unit.backs_off_until = None
        self._next_id = ident = self._next_id + 1
        limit, dynamic = self._limit_of(task, len(unit.run_ids))
        spec = _spec_of(unit, ident, self.version())
        attempt = Attempt(ident, unit, unit.attempts, limit, dynamic, now)
        self.attempts[ident] = unit.attempt = attempt
        batch.running.add(attempt)
        batch.n_queued -= len(unit.run_ids)
        self.n_queued -= len(unit.run_ids)
        self.n_eval_running += batch.is_eval
        task.started = True
        task.attempts += 1
        self.doors.started += 1
        attempt.timer = self.deadlines.put(now + limit, self._overdue, attempt)
        attempt.runner = self.pool.launch(spec, task.workflow, unit.last_runner)
        unit.last_runner = attempt.runner
        if self.observer.listens:
            self.observer.attempt_started(attempt, now)

    def _limit_of(self, task: TaskRecord, n_runs: int) -> tuple[float, bool]:
        limit = self.config.attempt_timeout_s if task.timeout_s is None else task.timeout_s
        ratio = self.config.dynamic_timeout
        if ratio is None or task.batch.is_eval or self.n_complete < self.config.dynamic_timeout_warmup:
            return limit, False
        if self._limit is None and self._seconds:
            self._limit = ratio * float(np.percentile(np.array(self._seconds), 95))
        if self._limit is None or self._limit * n_runs >= limit:
            return limit, False
        return self._limit * n_runs, True

    # -- stopping

    def _overdue(self, attempt: Attempt) -> None:
        attempt.timed_out = True
        attempt.unit.task.batch.timeout_count += 1
        if self.observer.listens:
            self.observer.event("timed_out", attempt, f"after {attempt.limit:g} s")
        self.stop(attempt)

    def stop(self, attempt: Attempt) -> None:
        """Ask an attempt to stop; after the grace it is killed or fenced."""
        if not attempt.is_live:
            return
        attempt.is_live = False
        self.deadlines.take_back(attempt.timer)
        attempt.stopped_at = now = self.clock.time()
        attempt.timer = self.deadlines.put(now + self.config.cancel_grace_s, self.pool.kill, attempt.id)
        self.pool.cancel(attempt.id)

    def kill_all(self) -> None:
        """No more grace."""
        for ident in list(self.attempts):
            self.pool.kill(ident)

    async def stopped(self, attempts: list[Attempt]) -> None:
        """Return when attempts have really stopped, were killed or are fenced."""
        waiting = []
        for attempt in attempts:
            if attempt.id in self.attempts:
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                if attempt.stopped is None:
                    attempt.stopped = []
                attempt.stopped.append(future)
                waiting.append(future)
        if waiting:
            await asyncio.wait(waiting)

    # -- what the runners report

    def run_ended(self, attempt_id: int, outcome: RunOutcome) -> None:
        """Take the result of a run, once; one of an attempt that is no longer alive is refused and counted as late."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            return
        task = attempt.unit.task
        if not attempt.is_live or outcome.run_id not in attempt.unit.run_ids or outcome.run_id in task.good:
            task.batch.late_count += 1
            return
        if outcome.run_id in task.failed:
            return
        if outcome.ok:
            attempt.good += 1
            self._stage(task, outcome)
        else:
            attempt.unit.error = outcome.error
            if outcome.final:
                self._fail(task, outcome.run_id, outcome.error)

    def _stage(self, task: TaskRecord, outcome: RunOutcome) -> None:
        batch = task.batch
        task.good[outcome.run_id] = outcome
        batch.bad_metric_count += outcome.bad_metrics
        if outcome.payload is not None:
            self.stage_bytes(batch, len(outcome.payload))
            batch.seconds.append(outcome.seconds)
        if self.journal is not None:
            self.journal.record_run(task, outcome)

    def stage_bytes(self, batch: BatchRecord, nbytes: int) -> None:
        """Count bytes that a batch holds, or (negative) no longer holds."""
        batch.staged_nbytes += nbytes
        self.staged_nbytes += nbytes

    def attempt_ended(self, attempt_id: int, error: str = "") -> None:
        """Count how an attempt ended, and try the runs that are not good again if they may be."""
        attempt = self._take(attempt_id)
        if attempt is None:
            return
        unit, doors = attempt.unit, self.doors
        if attempt.good == len(unit.run_ids):
            doors.good += 1
            self._settle(unit.task)
        elif attempt.is_live:
            left = [run for run in unit.run_ids if run not in unit.task.good]
            if error:
                unit.error = error
            doors.failed += 1
            self._again(unit, left)
            self._settle(unit.task)
        elif attempt.timed_out:
            doors.timed_out += 1
            if attempt.dynamic:
                unit.task.batch.seconds.append(attempt.limit / len(unit.run_ids))
            if self._is_wanted(unit.task):
                unit.error = f"TimeoutError: the attempt was stopped at its limit of {attempt.limit:g} s"
                left = [run for run in unit.run_ids if run not in unit.task.good]
                self._again(unit, left)
                self._settle(unit.task)
        else:
            doors.cancelled += 1
        self._after(attempt)

    def runner_lost(self, runner: int, attempt_id: int | None, why: str) -> None:
        """A runner is dead; its unit goes to the front once, without cost."""
        self.observer.event_of("runner_died", detail=f"runner {runner}: {why}")
        attempt = None if attempt_id is None else self._take(attempt_id)
        if attempt is None:
            return
        self.doors.lost += 1
        unit = attempt.unit
        batch = unit.task.batch
        if attempt.is_live:
            unit.losses += 1
            left = [run for run in unit.run_ids if run not in unit.task.good and run not in unit.task.failed]
            if unit.losses > 1:
                for run in left:
                    self._fail(
                        unit.task, run, f"WorkerDiedError: runner {runner} died ({why}), the second one"
                    )
            elif left:
                unit.attempts -= 1
                unit.run_ids = tuple(left)
                batch.requeue_count += 1
                self._enqueue(unit, front=True)
                if self.observer.listens:
                    self.observer.event("requeued", attempt, why)
            self._settle(unit.task)
        elif attempt.timed_out and self._is_wanted(unit.task):
            unit.error = f"TimeoutError: the attempt was killed after its limit of {attempt.limit:g} s"
            self._again(unit, [run for run in unit.run_ids if run not in unit.task.good])
            self._settle(unit.task)
        self._after(attempt)

    def _take(self, attempt_id: int) -> Attempt | None:
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is None:
            return None
        self.deadlines.take_back(attempt.timer)
        batch = attempt.unit.task.batch
        batch.running.discard(attempt)
        self.n_eval_running -= batch.is_eval
        attempt.unit.attempt = None
        if self.observer.listens:
            self.observer.attempt_ended(attempt)
        return attempt

    def _after(self, attempt: Attempt) -> None:
        for future in attempt.stopped or ():
            if not future.done():
                future.set_result(None)
        self.dispatch()

    def runners_changed(self) -> None:
        """Start work on a runner that is new or free again."""
        self.broken = None
        self.dispatch()

    def runners_broken(self, why: str) -> None:
        """No runner can be started."""
        self.broken = why
        self._tell_broken(why)

    # -- retries

    def _again(self, unit: Unit, left: list[int]) -> None:
        """Try the runs that are not good again after a pause, or fail them."""
        task = unit.task
        left = [run for run in left if run not in task.failed]
        if not left:
            return
        most = self.config.max_retries if task.max_retries is None else task.max_retries
        if unit.attempts > most:
            error = unit.error or "RuntimeError: the workflow ended without a result for this run"
            for run in left:
                self._fail(task, run, error)
            return
        unit.run_ids = tuple(left)
        task.batch.retry_count += 1
        pause = min(self.config.retry_backoff_s * 2 ** (unit.attempts - 1), self.config.retry_backoff_max_s)
        pause *= 1 + self._random.uniform(-0.2, 0.2)
        if self.observer.listens:
            self.observer.retried(unit, pause)
        if pause <= 0:
            self._enqueue(unit)
            return
        unit.backs_off_until = self.clock.time() + pause
        task.batch.backing_off.add(unit)
        unit.timer = self.clock.call_at(unit.backs_off_until, self._rested, unit)
        task.batch.n_queued += len(unit.run_ids)
        self.n_queued += len(unit.run_ids)

    def _fail(self, task: TaskRecord, run_id: int, error: str) -> None:
        """A run has failed for good."""
        task.failed[run_id] = error
        if self.journal is not None:
            self.journal.record_run(task, RunOutcome(run_id, False, 0.0, error=error, final=True))

    def _is_wanted(self, task: TaskRecord) -> bool:
        return task.batch in self.batches

    def _rested(self, unit: Unit) -> None:
        unit.timer = None
        unit.task.batch.backing_off.discard(unit)
        unit.task.batch.retries.append(unit)
        self.dispatch()

    def _enqueue(self, unit: Unit, front: bool = False) -> None:
        batch = unit.task.batch
        (batch.retries.appendleft if front else batch.retries.append)(unit)
        batch.n_queued += len(unit.run_ids)
        self.n_queued += len(unit.run_ids)

    # -- tasks

    def _settle(self, task: TaskRecord) -> None:
        """Set the status of a task whose last run has ended."""
        n_good, n_failed = len(task.good), len(task.failed)
        if task.status is not None or n_good + n_failed < task.n_runs or not self._is_wanted(task):
            return
        self.finish(task)
        self._task_ended(task)

    def finish(self, task: TaskRecord) -> None:
        """Set the status of a task and count it in its batch."""
        n_good = len(task.good)
        state = "ok" if n_good == task.n_runs else "partial" if n_good else "failed"
        task.status = TaskStatus(state, n_good, task.n_runs, task.attempts, task_means(task), task.error)  # type: ignore[arg-type]
        batch = task.batch
        batch.state.statuses[task.task_id] = task.status
        batch.counts[state] += 1
        if task.is_good(self.config.partial_results, self.config.min_group_size):
            batch.n_good += 1
            if batch.n_good == (batch.state.min_wait_num or 0):
                batch.min_reached_at = self.clock.time()


def _spec_of(unit: Unit, attempt_id: int, version: int) -> AttemptSpec:
    """What a runner is told of the attempt that begins now."""
    task = unit.task
    state = task.batch.state
    seeds = tuple([run_seed(task.key, run_id) for run_id in unit.run_ids])
    return AttemptSpec(
        attempt_id, task.workflow.name, task.data, task.n_runs, task.task_id, state.batch_id,
        state.batch_type == "eval", unit.run_ids, unit.attempts, seeds, task.group_id, version,
    )  # fmt: skip

"""Finalizing: when a batch is ready, what its finalizers are told, and why a batch is not done yet."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.errors import BatchAborted, BatchFailed, DeadlineError, WorkerDiedError
from recollect.rollout.batch.cut import kept_unfinished
from recollect.rollout.batch.deliver import join_pass, pass_of
from recollect.rollout.batch.end import aborted, tell_finalizers
from recollect.rollout.batch.records import BatchRecord, TaskRecord
from recollect.rollout.batch.state import BatchId, BatchLifecycleState, check_id
from recollect.rollout.event_loop import Timer, checked_seconds

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext
    from recollect.rollout.scheduler import Scheduler

S = BatchLifecycleState


@dataclass(eq=False, slots=True)
class Finalizer:
    """A finalize call that waits for a batch to be ready."""

    future: asyncio.Future[Any]
    deadline: float
    below_min: str
    timer: Timer | None = None
    looks_at: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cut` now, `raise` an error, or look again `at` some time (or when a task ends)."""

    cut: bool = False
    error: Exception | None = None
    at: float | None = None


def verdict(batch: BatchRecord, finalizer: Finalizer, now: float) -> Verdict:
    """Decide for one finalizer; the rules are those of the contract, in its order."""
    state, config = batch.state, batch.config
    late = now >= finalizer.deadline
    if not batch.admitted:
        return Verdict(error=_deadline(batch)) if late else Verdict(at=finalizer.deadline)
    n, ended, good, least = (
        state.expected_task_count,
        state.completed_task_count,
        batch.n_good,
        state.min_wait_num,
    )
    if config.partial_results == "raise" and batch.counts["failed"] + batch.counts["partial"]:
        return Verdict(error=failed(batch, "every run of every task must be good (partial_results='raise')"))
    if ended == n:
        need = least or min(n, 1)
        if good >= need or finalizer.below_min == "accept":
            return Verdict(cut=True)
        return Verdict(error=failed(batch, f"at least {need} of {n} tasks must be good"))
    if late:
        good += len(kept_unfinished(batch, config, carries=True))
        need = least or n + 1
        if good >= need or (finalizer.below_min == "accept" and good):
            return Verdict(cut=True)
        return Verdict(error=_deadline(batch))
    if least is not None and good >= least and batch.min_reached_at is not None:
        enough = batch.min_reached_at + config.wait_after_min_s
        return Verdict(cut=True) if now >= enough else Verdict(at=min(enough, finalizer.deadline))
    return Verdict(at=finalizer.deadline)


def _deadline(batch: BatchRecord) -> DeadlineError:
    error = DeadlineError(f"batch {batch.id!r}: the deadline passed")
    error.finished, error.expected = batch.state.completed_task_count, batch.state.expected_task_count
    return error


def failed(batch: BatchRecord, rule: str) -> BatchFailed:
    """Say which tasks failed, with the first traceback."""
    errors = {task.task_id: error for task in batch.tasks if (error := task.error)}
    first = next(iter(errors.items()), None)
    text = f"; task {first[0]!r}:\n{first[1]}" if first else ""
    return BatchFailed(f"batch {batch.id!r}: {rule}, got {batch.n_good} good{text}", errors)


# -- waiting


async def finalize(
    context: RolloutContext, batch_id: BatchId, kind: str, timeout: float | None, below_min: str | None
) -> dict[str, Any]:
    """Wait until a batch is ready, join its pass, and return the caller's own copy of the result."""
    seconds = context.config.batch_timeout_s if timeout is None else checked_seconds(timeout)
    if below_min not in (None, "raise", "accept"):
        raise ValueError(f"below_min: must be 'raise' or 'accept', got {below_min!r}")
    check_id(batch_id)
    batch = context.batches.get(batch_id)
    if batch is None:
        return _stored(context, batch_id, kind)
    _check_kind(batch.state.batch_type, kind, batch_id)
    if batch.aborting is not None:
        raise aborted(batch, batch.aborting)
    if batch.state.state is S.FINALIZING or batch.cut is not None:
        return await join_pass(pass_of(context, batch))
    deadline = context.clock.time() + seconds
    finalizer = Finalizer(context.loop.create_future(), deadline, below_min or context.config.below_min)
    return await join_pass(await _ready(context, batch, finalizer))


async def _ready(context: RolloutContext, batch: BatchRecord, finalizer: Finalizer) -> asyncio.Future[Any]:
    """Return the outcome of the pass once there is one to wait for."""
    batch.finalizers.add(finalizer)
    decide(context, batch)
    if not finalizer.future.done():
        context.scheduler.dispatch()  # a batch being finalized may start work above the staging bound
    try:
        passing: asyncio.Future[Any] = await finalizer.future
    except DeadlineError as error:
        raise _with_reasons(context, error, batch) from None
    finally:
        batch.finalizers.discard(finalizer)
        if finalizer.timer is not None:
            finalizer.timer.cancel()
    return passing


def _with_reasons(context: RolloutContext, error: DeadlineError, batch: BatchRecord) -> DeadlineError:
    text = why_waiting(
        batch, context.scheduler, context.pipeline.stage_of(batch.commit_id), context.clock.time()
    )
    told = DeadlineError(f"batch {batch.id!r}: {text}")
    told.finished, told.expected = error.finished, error.expected
    return told


def _stored(context: RolloutContext, batch_id: BatchId, kind: str) -> dict[str, Any]:
    ending = context.history.get(batch_id)
    if ending is None:
        raise KeyError(f"batch_id: must be of a live or remembered batch, got {batch_id!r}")
    _check_kind(ending.state.batch_type, kind, batch_id)
    result = deepcopy(ending.state.final_result)
    if ending.state.state is S.ABORTED:
        raise BatchAborted(f"batch {batch_id!r}: was aborted: {ending.reason}", ending.reason or "", result)
    return result or {}


def _check_kind(have: str, want: str, batch_id: BatchId) -> None:
    if have != want:
        raise ValueError(f"batch_id: {batch_id!r} is of an {have} batch; call finalize_{have}_batch")


def decide(context: RolloutContext, batch: BatchRecord) -> None:
    """Decide for every finalizer of this batch."""
    if not batch.finalizers or batch.state.state is S.FINALIZING:
        return
    now = context.clock.time()
    for finalizer in list(batch.finalizers):
        if finalizer.future.done():
            continue
        decided = verdict(batch, finalizer, now)
        if decided.cut:
            pass_of(context, batch)
            return
        if decided.error is not None:
            finalizer.future.set_exception(decided.error)
        elif decided.at != finalizer.looks_at and decided.at is not None:
            if finalizer.timer is not None:
                finalizer.timer.cancel()
            finalizer.looks_at = decided.at
            finalizer.timer = context.clock.call_at(decided.at, _decide_again, context, finalizer, batch)


def _decide_again(context: RolloutContext, finalizer: Finalizer, batch: BatchRecord) -> None:
    finalizer.looks_at = None
    decide(context, batch)


# -- why a batch is not done


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a batch is not done, worst first; prints as sentences."""

    batch_id: Any
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


SHOWN = 8


def why_waiting(batch: BatchRecord, scheduler: Scheduler, stage: str | None, now: float) -> Waiting:
    """Return every reason that the batch has not been delivered."""
    state = batch.state
    if not batch.admitted:
        return Waiting(batch.id, (f"not admitted: {batch.not_admitted}",))
    reasons = [_count(batch)]
    if batch.last_failure is not None and state.state is not S.FINALIZING:
        return Waiting(batch.id, (f"the last pass failed: {batch.last_failure}",))
    if state.state is S.FINALIZING:
        return Waiting(batch.id, (f"in {stage}" if stage else "waiting for another pass",))
    if scheduler.broken is not None:
        reasons.append(f"no runner can be started: {scheduler.broken}")
    pool = scheduler.pool
    if pool.n_fenced >= pool.size:
        reasons.append(
            f'all {pool.size} runners are fenced: their code ignores its cancel; use runner="process"'
        )
    reasons += [
        _running(a, scheduler, now) for a in sorted(batch.running, key=lambda a: a.started_at)[:SHOWN]
    ]
    for unit in sorted(batch.backing_off, key=lambda u: u.backs_off_until or 0)[:SHOWN]:
        wait = (unit.backs_off_until or now) - now
        last = unit.error.strip().rpartition("\n")[2]
        reasons.append(f"{_named(unit)}: backing off for {wait:.1f} s after attempt {unit.attempts}, {last}")
    n_ready = batch.n_queued - sum(len(u.run_ids) for u in batch.backing_off)
    if n_ready:
        reasons.append(f"{n_ready} runs queued{_behind(batch, scheduler)}")
    if (
        state.min_wait_num
        and batch.min_reached_at is not None
        and state.completed_task_count < state.expected_task_count
    ):
        left = batch.min_reached_at + batch.config.wait_after_min_s - now
        reasons.append(f"waiting {max(left, 0):.1f} s for more after the minimum")
    if batch.running or n_ready or batch.backing_off:
        return Waiting(batch.id, tuple(reasons))
    return Waiting(batch.id, (*reasons, _what_is_left(batch)))


def _what_is_left(batch: BatchRecord) -> str:
    """What to do with a batch that has no work left: a finalize of it may have failed."""
    config, n = batch.config, batch.state.expected_task_count
    if config.partial_results == "raise" and batch.counts["failed"] + batch.counts["partial"]:
        return "a run failed, so finalize fails (partial_results='raise'): abort it"
    if config.below_min == "accept" or batch.n_good >= (batch.state.min_wait_num or min(n, 1)):
        return "it was not finalized yet"
    return "too few good tasks, so finalize fails: abort it, or finalize it with below_min='accept'"


def _count(batch: BatchRecord) -> str:
    need = batch.state.min_wait_num or batch.state.expected_task_count
    return f"{batch.n_good} of {need} good"


def _named(unit: Any) -> str:
    return f"task {unit.task.task_id} run {unit.run_ids[0]}"


def _running(attempt: Any, scheduler: Scheduler, now: float) -> str:
    config, task = scheduler.config, attempt.unit.task
    most = (config.max_retries if task.max_retries is None else task.max_retries) + 1
    doing = scheduler.pool.doing(attempt.id)
    text = f"{_named(attempt.unit)}: attempt {attempt.number} of {most} on runner {attempt.runner}"
    text += f", {now - attempt.started_at:.0f} s"
    text += f", in {doing}" if doing else ""
    return text if attempt.is_live else f"{text}, being stopped"


def _behind(batch: BatchRecord, scheduler: Scheduler) -> str:
    ahead = [b.id for b in scheduler.batches if b.order < batch.order and (b.has_work() or b.running)]
    if scheduler.staged_nbytes > scheduler.config.max_staged_nbytes:
        return f": {scheduler.staged_nbytes:,} bytes staged, over max_staged_nbytes; finalize an older batch"
    if batch.is_eval and scheduler.n_eval_running >= scheduler.eval_limit():
        return ": eval holds its share of the runners while train work waits"
    return f" behind {ahead}" if ahead else f": all {scheduler.pool.size} runners are busy"


# -- what the scheduler reports


def task_ended(context: RolloutContext, task: TaskRecord) -> None:
    """Decide for the finalizers of a batch whose task has ended, if that can change what they get."""
    batch, state = task.batch, task.batch.state
    if batch.finalizers and (
        len(state.statuses) == state.expected_task_count or state.min_wait_num or not task.is_fine
    ):
        decide(context, batch)


def runners_broken(context: RolloutContext, why: str) -> None:
    """Tell every finalizer that no runner can be started."""
    for batch in context.batches.values():
        tell_finalizers(batch, WorkerDiedError(f"runners: none could be started; {why}"))

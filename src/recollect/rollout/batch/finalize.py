"""Finalizing: who waits for a batch, when it is ready, and what they are told."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from recollect.errors import BatchAborted, BatchFailed, DeadlineError
from recollect.rollout.batch.cut import kept_unfinished
from recollect.rollout.batch.deliver import joined, pass_of
from recollect.rollout.batch.end import aborted
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchId, BatchLifecycleState
from recollect.rollout.context import Desk
from recollect.rollout.event_loop import Timer, checked_seconds
from recollect.rollout.submission import check_id
from recollect.rollout.waiting import why_waiting

S = BatchLifecycleState


@dataclass(eq=False, slots=True)
class Finalizer:
    """Somebody who waits for a batch to be ready."""

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
    desk: Desk, batch_id: BatchId, kind: str, timeout: float | None, below_min: str | None
) -> dict[str, Any]:
    """Wait until a batch is ready, join its pass, and return the caller's own copy of the result."""
    seconds = desk.config.batch_timeout_s if timeout is None else checked_seconds(timeout)
    if below_min not in (None, "raise", "accept"):
        raise ValueError(f"below_min: must be 'raise' or 'accept', got {below_min!r}")
    check_id(batch_id)
    batch = desk.batches.get(batch_id)
    if batch is None:
        return _stored(desk, batch_id, kind)
    _check_kind(batch.state.batch_type, kind, batch_id)
    if batch.aborting is not None:
        raise aborted(batch, batch.aborting)
    if batch.state.state is S.FINALIZING or batch.cut is not None:
        return await joined(pass_of(desk, batch))
    deadline = desk.clock.time() + seconds
    finalizer = Finalizer(desk.loop.create_future(), deadline, below_min or desk.config.below_min)
    return await joined(await _ready(desk, batch, finalizer))


async def _ready(desk: Desk, batch: BatchRecord, finalizer: Finalizer) -> asyncio.Future[Any]:
    """Return the outcome of the pass once there is one to wait for."""
    batch.finalizers.add(finalizer)
    look(desk, batch)
    if not finalizer.future.done():
        desk.scheduler.dispatch()  # a batch being finalized may start work above the staging bound
    try:
        passing: asyncio.Future[Any] = await finalizer.future
    except DeadlineError as error:
        raise _with_reasons(desk, error, batch) from None
    finally:
        batch.finalizers.discard(finalizer)
        if finalizer.timer is not None:
            finalizer.timer.cancel()
    return passing


def _with_reasons(desk: Desk, error: DeadlineError, batch: BatchRecord) -> DeadlineError:
    text = why_waiting(batch, desk.scheduler, desk.pipeline.stage_of(batch.commit_id), desk.clock.time())
    told = DeadlineError(f"batch {batch.id!r}: {text}")
    told.finished, told.expected = error.finished, error.expected
    return told


def _stored(desk: Desk, batch_id: BatchId, kind: str) -> dict[str, Any]:
    ending = desk.history.get(batch_id)
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


def look(desk: Desk, batch: BatchRecord) -> None:
    """Decide for everybody who waits for this batch."""
    if not batch.finalizers or batch.state.state is S.FINALIZING:
        return
    now = desk.clock.time()
    for finalizer in list(batch.finalizers):
        if finalizer.future.done():
            continue
        decided = verdict(batch, finalizer, now)
        if decided.cut:
            pass_of(desk, batch)
            return
        if decided.error is not None:
            finalizer.future.set_exception(decided.error)
        elif decided.at != finalizer.looks_at and decided.at is not None:
            if finalizer.timer is not None:
                finalizer.timer.cancel()
            finalizer.looks_at = decided.at
            finalizer.timer = desk.clock.call_at(decided.at, _look_again, desk, finalizer, batch)


def _look_again(desk: Desk, finalizer: Finalizer, batch: BatchRecord) -> None:
    finalizer.looks_at = None
    look(desk, batch)

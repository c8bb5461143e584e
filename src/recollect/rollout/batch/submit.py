"""Admission: a submitted batch waits until there is room for it and the weights are new enough."""

from __future__ import annotations

import asyncio
from typing import Any

from recollect.errors import DeadlineError
from recollect.rollout.batch.end import raise_in
from recollect.rollout.batch.finalize import look
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchId, BatchLifecycleState, move
from recollect.rollout.context import Desk
from recollect.rollout.submission import Submission, check_arguments, make_batch, no_room, plain_id
from recollect.rollout.tasks import Task


async def submit(desk: Desk, batch_id: BatchId, tasks: list[Task], batch_type: Any, min_wait_num: int | None,
                 priority: int | None) -> BatchRecord:  # fmt: skip
    """Register a batch and return it once it is admitted; a refused one leaves no trace."""
    check_arguments(batch_id, tasks, batch_type, min_wait_num, priority)
    batch_id = plain_id(batch_id)
    forget_cancelled(desk)
    if batch_id in desk.batches:
        raise ValueError(
            f"batch_id: must not be that of a live batch, got {batch_id!r}; finalize or abort it"
        )
    first, config = desk.next_group, desk.config
    batch = make_batch(batch_id, tasks, batch_type, min_wait_num, priority, desk.n_batches + 1, config, first)
    desk.n_batches += 1
    desk.next_group += len(tasks)
    batch.submitted_at = desk.clock.time()
    batch.commit_id = f"{config.name}-{batch_id}-g{first}-{desk.next_group - 1}"
    desk.batches[batch_id] = batch
    desk.observer.event_of("submitted", batch_id)
    await _admitted(desk, Submission(batch, desk.loop.create_future()))
    return batch


async def _admitted(desk: Desk, sub: Submission) -> None:
    """Wait for the admission of a batch, at most for `submit_timeout_s`."""
    desk.waiting.append(sub)
    admit(desk)
    if not sub.future.done():
        deadline = sub.batch.submitted_at + desk.config.submit_timeout_s
        if desk.clock.time() >= deadline:
            _refuse(desk, sub)
        else:
            sub.timer = desk.clock.call_at(deadline, _refuse, desk, sub)
    try:
        await sub.future
    except asyncio.CancelledError:
        if not sub.batch.admitted:
            withdraw(desk, sub, None)
        raise


def _refuse(desk: Desk, sub: Submission) -> None:
    batch = sub.batch
    withdraw(desk, sub, DeadlineError(f"batch {batch.id!r}: not admitted: {batch.not_admitted}"))


def withdraw(desk: Desk, sub: Submission, error: Exception | None) -> None:
    """Take a waiting submission back; nothing of it stays, and it holds up nobody behind it."""
    _take_back(desk, sub, error)
    if desk.is_open:
        admit(desk)


def _take_back(desk: Desk, sub: Submission, error: Exception | None) -> None:
    batch = sub.batch
    if desk.batches.get(batch.id) is batch and not batch.admitted:
        del desk.batches[batch.id]
        raise_in(batch, error or KeyError(f"batch {batch.id!r}: its submission was withdrawn"))
    leave(desk, sub, error)


def leave(desk: Desk, sub: Submission, error: Exception | None = None) -> None:
    """A submission waits no longer; its caller is told unless the call was cancelled."""
    if sub in desk.waiting:
        desk.waiting.remove(sub)
    if sub.timer is not None:
        sub.timer.cancel()
    if not sub.future.done():
        sub.future.set_result(None) if error is None else sub.future.set_exception(error)


def forget_cancelled(desk: Desk) -> None:
    """A cancelled submission is withdrawn in the turn of its cancel, before its own task hears of it."""
    for sub in [sub for sub in desk.waiting if sub.future.cancelled()]:
        _take_back(desk, sub, None)


def admit(desk: Desk) -> None:
    """Admit who waits, in order; one that capacity holds up holds up those behind it."""
    forget_cancelled(desk)
    full = ""
    for sub in list(desk.waiting):
        if sub not in desk.waiting:  # the one before it started work, which made room, which let it in
            continue
        live = [batch for batch in desk.batches.values() if batch.admitted]
        full = full or no_room(sub.batch, live, desk.scheduler.n_queued, desk.config)
        sub.batch.not_admitted = full or _too_early(desk, sub.batch)
        if not sub.batch.not_admitted:
            leave(desk, sub)
            _enter(desk, sub.batch)


def _too_early(desk: Desk, batch: BatchRecord) -> str:
    """On-policy bounds: a train batch waits until the weights are new enough for it."""
    most = desk.config.max_staleness
    if most is None or batch.is_eval:
        return ""
    needs = (desk.first_version or 0) + desk.k * desk.config.versions_per_batch - most
    if needs <= desk.version:
        return ""
    return f"max_staleness = {most} needs version {needs:g}, got {desk.version}; call sync_weights"


def _enter(desk: Desk, batch: BatchRecord) -> None:
    batch.admitted = True
    desk.history.pop(batch.id, None)
    if not batch.is_eval:
        batch.k, desk.k = desk.k, desk.k + 1
    desk.doors.submitted += batch.n_runs
    if desk.journal is not None:
        desk.journal.submitted(batch, desk.next_group, desk.k, desk.first_version or 0)
    desk.observer.event_of("admitted", batch.id)
    desk.observer.slice("admission", batch.submitted_at, batch=str(batch.id))
    if batch.tasks:
        move(batch.state, BatchLifecycleState.RUNNING)
        desk.scheduler.add(batch)
    look(desk, batch)

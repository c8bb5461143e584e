"""Aborting a batch at any moment of its life."""

from __future__ import annotations

import asyncio

from recollect.errors import BatchAborted
from recollect.rollout.batch.deliver import joined, pass_of
from recollect.rollout.batch.end import aborted, end, raise_in
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchLifecycleState
from recollect.rollout.batch.submit import leave
from recollect.rollout.context import Desk

S = BatchLifecycleState


async def abort(desk: Desk, batch: BatchRecord, reason: str, keeping: bool) -> None:
    """Stop a batch; `keeping` delivers the good tasks finished by now first.

    What an abort decides it decides in the turn of its call. After that it only waits, so to cancel it, or to abort
    the batch again meanwhile, changes nothing.
    """
    running = list(batch.running)
    if not batch.admitted:
        _abort_waiting(desk, batch, reason)
    elif keeping and batch.tasks:
        await _abort_keeping(desk, batch, reason)
    elif batch.passing is not None:
        await _abort_passing(batch, batch.passing, reason)
    else:
        end(desk, batch, S.ABORTED, reason=reason)
    await desk.scheduler.stopped(running)


async def unless_recorded(desk: Desk, batch: BatchRecord) -> None:
    """Wait until the journal has an admitted batch; if it cannot take it, abort the batch and raise."""
    if desk.journal is None:
        return
    try:
        await desk.journal.flush()
    except Exception as error:
        if desk.batches.get(batch.id) is batch:
            await abort(desk, batch, f"it could not be recorded ({error})", keeping=False)
        raise


def _abort_waiting(desk: Desk, batch: BatchRecord, reason: str) -> None:
    for sub in [sub for sub in desk.waiting if sub.batch is batch]:
        leave(desk, sub, aborted(batch, reason))  # first: the end lets in those who wait
    end(desk, batch, S.ABORTED, reason=reason)


async def _abort_passing(batch: BatchRecord, passing: asyncio.Task[object], reason: str) -> None:
    """The end of the pass is the end of the batch; a commit that has begun decides which."""
    if batch.abort_after_pass is None:
        batch.abort_after_pass = reason
    if not batch.committing:
        passing.cancel()
    await asyncio.wait([passing])


async def _abort_keeping(desk: Desk, batch: BatchRecord, reason: str) -> None:
    if batch.passing is None:
        raise_in(batch, aborted(batch, reason))
        outcome = pass_of(desk, batch, reason)
    else:
        outcome = pass_of(desk, batch)
    try:
        await joined(outcome)
    except BatchAborted:  # by another abort, which did not want to keep anything
        return

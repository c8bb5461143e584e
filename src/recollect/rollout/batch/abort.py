"""Aborting a batch at any moment of its life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from recollect.errors import BatchAborted
from recollect.rollout.batch.deliver import join_pass, pass_of
from recollect.rollout.batch.end import aborted, end, tell_finalizers
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchLifecycleState

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext

S = BatchLifecycleState


async def abort(context: RolloutContext, batch: BatchRecord, reason: str, keeping: bool) -> None:
    """Stop a batch; `keeping` delivers the good tasks finished by now first.

    What an abort decides it decides in the turn of its call. After that it only waits, so to cancel it, or to abort
    the batch again meanwhile, changes nothing.
    """
    running = list(batch.running)
    if not batch.admitted:
        _abort_waiting(context, batch, reason)
    elif keeping and batch.tasks:
        await _abort_keeping(context, batch, reason)
    elif batch.passing is not None:
        await _abort_passing(batch, batch.passing, reason)
    else:
        end(context, batch, S.ABORTED, reason=reason)
    await context.scheduler.stopped(running)


async def abort_unless_recorded(context: RolloutContext, batch: BatchRecord) -> None:
    """Wait until the journal has an admitted batch; if it cannot take it, abort the batch and raise."""
    if context.journal is None:
        return
    try:
        await context.journal.flush()
    except Exception as error:
        if context.batches.get(batch.id) is batch:
            await abort(context, batch, f"it could not be recorded ({error})", keeping=False)
        raise


def _abort_waiting(context: RolloutContext, batch: BatchRecord, reason: str) -> None:
    for sub in [sub for sub in context.waiting if sub.batch is batch]:
        context.waiting.remove(sub)  # first: the end admits batches that wait
        sub.answer(aborted(batch, reason))
    end(context, batch, S.ABORTED, reason=reason)


async def _abort_passing(batch: BatchRecord, passing: asyncio.Task[object], reason: str) -> None:
    """The end of the pass is the end of the batch; a commit that has begun decides which."""
    if batch.abort_after_pass is None:
        batch.abort_after_pass = reason
    if not batch.committing:
        passing.cancel()
    await asyncio.wait([passing])


async def _abort_keeping(context: RolloutContext, batch: BatchRecord, reason: str) -> None:
    if batch.passing is None:
        tell_finalizers(batch, aborted(batch, reason))
        outcome = pass_of(context, batch, reason)
    else:
        outcome = pass_of(context, batch)
    try:
        await join_pass(outcome)
    except BatchAborted:  # by another abort, which did not want to keep anything
        return

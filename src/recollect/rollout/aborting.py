"""Aborting a batch at any moment of its life."""

from __future__ import annotations

import asyncio

from recollect.rollout.desk import Desk
from recollect.rollout.ending import aborted, end, raise_in
from recollect.rollout.passing import joined, pass_of
from recollect.rollout.records import BatchRecord
from recollect.rollout.state import BatchLifecycleState

S = BatchLifecycleState


async def abort(desk: Desk, batch: BatchRecord, reason: str, keeping: bool) -> None:
    """Stop a batch; `keeping` delivers the good tasks finished by now first."""
    if batch.state.state is S.FINALIZING:
        if keeping or batch.committing:
            await _join_pass(batch, keeping)
            return
        await _stop_pass(batch, reason)
        if desk.batches.get(batch.id) is not batch or batch.state.state is S.FINALIZING:
            return
    if not batch.admitted:
        _abort_waiting(desk, batch, reason)
    elif keeping and batch.tasks:
        await _abort_keeping(desk, batch, reason)
    else:
        running = desk.scheduler.drop_work(batch)
        raise_in(batch, aborted(batch, reason))
        end(desk, batch, S.ABORTED, reason=reason)
        await desk.scheduler.stopped(running)


async def _join_pass(batch: BatchRecord, keeping: bool) -> None:
    """The pass decides; its failure is the abort's only if that wanted the results."""
    if batch.outcome is None:
        return
    await asyncio.wait([batch.outcome])
    if keeping and batch.outcome.exception() is not None:
        await joined(batch.outcome)


async def _stop_pass(batch: BatchRecord, reason: str) -> None:
    if batch.outcome is not None and not batch.outcome.done():
        batch.outcome.set_exception(aborted(batch, reason))
    if batch.passing is not None:
        passing = batch.passing
        passing.cancel()
        await asyncio.wait([passing])


def _abort_waiting(desk: Desk, batch: BatchRecord, reason: str) -> None:
    sub = next(sub for sub in desk.waiting if sub.batch is batch)
    desk.waiting.remove(sub)
    if sub.timer is not None:
        sub.timer.cancel()
    error = aborted(batch, reason)
    raise_in(batch, error)
    end(desk, batch, S.ABORTED, reason=reason)
    sub.future.set_exception(error)


async def _abort_keeping(desk: Desk, batch: BatchRecord, reason: str) -> None:
    raise_in(batch, aborted(batch, reason))
    running = list(batch.running)
    await joined(pass_of(desk, batch, reason))
    await desk.scheduler.stopped(running)

"""The end of a batch: every run is counted by its door, waiters are told, and its payloads are let go."""

from __future__ import annotations

from typing import Any

from recollect.errors import BatchAborted
from recollect.rollout.batch.cut import count_doors
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchLifecycleState, move
from recollect.rollout.context import Desk, Ending

S = BatchLifecycleState


def end(
    desk: Desk, batch: BatchRecord, state: S, result: dict[str, Any] | None = None, reason: str | None = None
) -> None:
    """Move to an end, tell waiters, stop what runs, count every run by its door, and let go of the payloads."""
    move(batch.state, state)
    if reason is not None:
        raise_in(batch, aborted(batch, reason))
    batch.state.final_result = result
    batch.reason = reason
    if batch.admitted:
        _settle(desk, batch, state, delivered=result is not None)
    desk.batches.pop(batch.id, None)
    _remember(desk, batch, reason)
    if desk.journal is not None and batch.admitted:
        desk.journal.ended(batch, reason, desk.k)
    kind = "finalized" if state is S.FINALIZED else "aborted"
    desk.observer.event_of(kind, batch.id, detail=reason or "")
    if desk.is_open:
        desk.scheduler.owner.room_made()
        desk.scheduler.dispatch()


def _settle(desk: Desk, batch: BatchRecord, state: S, delivered: bool) -> None:
    desk.scheduler.drop_work(batch)
    count_doors(desk.doors, batch, delivered)
    desk.scheduler.remove(batch)
    desk.scheduler.stage_bytes(batch, -batch.staged_nbytes)
    if state is S.ABORTED and not batch.is_eval:
        desk.k -= 1
    if state is S.FINALIZED and not batch.is_eval:
        desk.scheduler.complete(batch)


def _remember(desk: Desk, batch: BatchRecord, reason: str | None) -> None:
    if not desk.config.history:
        return
    desk.history[batch.id] = Ending(batch.state, reason)
    desk.history.move_to_end(batch.id)
    while len(desk.history) > desk.config.history:
        desk.history.popitem(last=False)


def forget(desk: Desk, batch: BatchRecord) -> None:
    """At shutdown with a journal: it is kept there, and its runs are live again after the next prepare."""
    desk.batches.pop(batch.id, None)
    desk.scheduler.remove(batch)
    desk.scheduler.stage_bytes(batch, -batch.staged_nbytes)
    if batch.admitted:
        desk.doors.submitted -= batch.n_runs


def raise_in(batch: BatchRecord, error: Exception) -> None:
    """Tell everybody who waits for a batch that it will not come."""
    for finalizer in batch.finalizers:
        if not finalizer.future.done():
            finalizer.future.set_exception(error)


def aborted(batch: BatchRecord, reason: str) -> BatchAborted:
    """The error that waiters of an aborted batch get."""
    return BatchAborted(f"batch {batch.id!r}: was aborted: {reason}", reason)

"""The end of a batch: every run is counted by the door it leaves by, finalizers are told, payloads are let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recollect.errors import BatchAborted
from recollect.rollout.batch.records import BatchRecord, EndedBatch, TaskRecord
from recollect.rollout.batch.state import BatchLifecycleState, move
from recollect.rollout.stats import RunDoors

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext

S = BatchLifecycleState


def end(
    context: RolloutContext,
    batch: BatchRecord,
    state: S,
    result: dict[str, Any] | None = None,
    reason: str | None = None,
) -> None:
    """Move to an end, tell waiters, stop what runs, count every run by its door, and let go of the payloads."""
    move(batch.state, state)
    if reason is not None:
        tell_finalizers(batch, aborted(batch, reason))
    batch.state.final_result = result
    batch.reason = reason
    if batch.admitted:
        _settle(context, batch, state, delivered=result is not None)
    context.batches.pop(batch.id, None)
    _remember(context, batch, reason)
    if context.journal is not None and batch.admitted:
        context.journal.record_end(batch, reason, context.k)
    kind = "finalized" if state is S.FINALIZED else "aborted"
    context.observer.event_of(kind, batch.id, detail=reason or "")
    if context.is_open:
        context.scheduler.room_made()
        context.scheduler.dispatch()


def _settle(context: RolloutContext, batch: BatchRecord, state: S, delivered: bool) -> None:
    context.scheduler.drop_work(batch)
    count_doors(context.doors, batch, delivered)
    context.scheduler.remove(batch)
    context.scheduler.stage_bytes(batch, -batch.staged_nbytes)
    if state is S.ABORTED and not batch.is_eval:
        context.k -= 1
    if state is S.FINALIZED and not batch.is_eval:
        context.scheduler.complete(batch)


def _remember(context: RolloutContext, batch: BatchRecord, reason: str | None) -> None:
    if not context.config.history:
        return
    context.history[batch.id] = EndedBatch(batch.state, reason)
    context.history.move_to_end(batch.id)
    while len(context.history) > context.config.history:
        context.history.popitem(last=False)


def forget(context: RolloutContext, batch: BatchRecord) -> None:
    """At shutdown with a journal: it is kept there, and its runs are live again after the next prepare."""
    context.batches.pop(batch.id, None)
    context.scheduler.remove(batch)
    context.scheduler.stage_bytes(batch, -batch.staged_nbytes)
    if batch.admitted:
        context.doors.submitted -= batch.n_runs


def tell_finalizers(batch: BatchRecord, error: Exception) -> None:
    """Raise an error in every finalize call that waits for a batch."""
    for finalizer in batch.finalizers:
        if not finalizer.future.done():
            finalizer.future.set_exception(error)


def aborted(batch: BatchRecord, reason: str) -> BatchAborted:
    """The error that waiters of an aborted batch get."""
    return BatchAborted(f"batch {batch.id!r}: was aborted: {reason}", reason)


def count_doors(doors: RunDoors, batch: BatchRecord, delivered: bool) -> None:
    """Count every run of a batch that ends by the door it leaves by."""
    cut = batch.cut
    used: set[TaskRecord] = set()
    extra: list[TaskRecord] = []
    if cut is not None:
        extra = cut.carried_in
        if delivered:
            used = {*cut.tasks, *extra}
    n_used = 0
    for task in (*batch.tasks, *extra):
        n_good, n_failed = len(task.good), len(task.failed)
        doors.failed += n_failed
        doors.cancelled += task.n_runs - n_good - n_failed
        if task in used:
            n_used += n_good
        else:
            doors.unused += n_good
    n_out = n_used if batch.is_eval or batch.delivery is None else batch.delivery.runs_out
    doors.delivered += n_out
    doors.filtered += n_used - n_out

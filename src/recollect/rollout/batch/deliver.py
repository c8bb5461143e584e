"""The cut and the pass: which results count is fixed, and they go through the operators into the sink."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from functools import partial
from typing import Any

from recollect.errors import ClosedError, PipelineError
from recollect.rollout.batch import cut as cutting
from recollect.rollout.batch.end import aborted, end
from recollect.rollout.batch.records import BatchRecord, Joined, TaskRecord
from recollect.rollout.batch.state import BatchLifecycleState, move
from recollect.rollout.context import Desk

S = BatchLifecycleState


def pass_of(desk: Desk, batch: BatchRecord, reason: str | None = None) -> asyncio.Future[Any]:
    """Return the outcome of the batch's pass, starting one if none is under way.

    With a `reason` the batch is being aborted: it ends there, and its finalizers were told already.
    """
    if batch.passing is None:
        if batch.cut is None:
            _cut(desk, batch, carries=reason is None)
        move(batch.state, S.FINALIZING)
        batch.aborting = reason
        batch.outcome = desk.loop.create_future()
        batch.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        batch.passing = desk.loop.create_task(_deliver(desk, batch))
        batch.passing.add_done_callback(partial(_after, desk, batch, batch.outcome, desk.clock.time()))
        desk.scheduler.owner.room_made()  # by what the cut took back
    outcome = batch.outcome
    if outcome is None:
        raise RuntimeError(f"batch {batch.id!r}: a pass without an outcome")
    if reason is None:
        for finalizer in batch.finalizers:
            if not finalizer.future.done():
                finalizer.future.set_result(outcome)
    return outcome


async def joined(outcome: asyncio.Future[Any]) -> dict[str, Any]:
    """Wait for a pass that others wait for too; being cancelled here does not stop it."""
    try:
        result: dict[str, Any] = deepcopy(await asyncio.shield(outcome))
    except PipelineError as error:
        raise PipelineError(str(error)) from error.__cause__
    return result


# -- the cut


def _cut(desk: Desk, batch: BatchRecord, carries: bool) -> None:
    """Fix which results count; stragglers are cancelled, or carried if they have started."""
    scheduler = desk.scheduler
    for task in cutting.kept_unfinished(batch, desk.config, carries):
        scheduler.finish(task)
    batch.cut = cutting.cut_of(batch, desk.config, carries)
    carrier = cutting.carrier_of(batch, desk.config) if batch.cut.carried else None
    scheduler.remove(batch)
    if carrier is not None:
        scheduler.n_queued -= carrier.n_queued  # add counts them again
        desk.carriers.append(carrier)
    scheduler.drop_work(batch)
    if carrier is not None:
        scheduler.add(carrier)
    joined: list[Joined] = []
    if not batch.is_eval:
        for other in list(desk.carriers):
            joined += _take_carried(desk, batch, other)
    desk.observer.event_of("cut", batch.id, detail=f"{len(batch.cut.tasks)} tasks")
    if desk.journal is not None:
        desk.journal.cut(batch, carrier, joined)


def _take_carried(desk: Desk, batch: BatchRecord, carrier: BatchRecord) -> list[Joined]:
    """Tasks of an earlier batch that have ended since join this one."""
    joined = []
    for task in [task for task in carrier.tasks if task.status is not None]:
        carrier.tasks.remove(task)
        carrier.next_task = len(carrier.tasks)
        carrier.n_runs -= task.n_runs
        nbytes = sum(len(outcome.payload or b"") for outcome in task.good.values())
        desk.scheduler.stage_bytes(carrier, -nbytes)
        joined.append(_join(desk, batch, task, nbytes))
    if not carrier.tasks:
        desk.carriers.remove(carrier)
        desk.scheduler.remove(carrier)
    return joined


def _join(desk: Desk, batch: BatchRecord, task: TaskRecord, nbytes: int) -> Joined:
    carrier, position = task.batch, task.position
    if batch.cut is None or not task.is_good(desk.config.partial_results, desk.config.min_group_size):
        desk.doors.failed += len(task.failed)
        desk.doors.unused += len(task.good)
        return Joined(task, carrier, position, is_used=False)
    task.position = batch.state.expected_task_count + len(batch.cut.carried_in)  # which no other has
    batch.cut.carried_in.append(task)
    batch.n_runs += task.n_runs
    desk.scheduler.stage_bytes(batch, nbytes)
    return Joined(task, carrier, position, is_used=True)


# -- the pass


def _after(
    desk: Desk, batch: BatchRecord, outcome: asyncio.Future[Any], start: float, passing: asyncio.Task[Any]
) -> None:
    """A pass is over, was stopped, or never began: here alone its batch moves on, and waiters are told."""
    batch.passing, batch.committing = None, False
    reason, batch.aborting = batch.aborting, None
    try:
        result = passing.result()
    except BaseException as error:
        outcome.set_exception(_leave(desk, batch, error))
        return
    desk.observer.slice("pass", start, batch=str(batch.id))
    desk.observer.event_of("delivered", batch.id, detail=f"{result['experience_count']} experiences")
    end(desk, batch, S.FINALIZED if reason is None else S.ABORTED, result, reason)
    outcome.set_result(result)


def _leave(desk: Desk, batch: BatchRecord, error: BaseException) -> Exception:
    """Undo a pass that did not deliver, or end its batch if that was aborted; return the error for waiters."""
    told = None if isinstance(error, asyncio.CancelledError) else _pipeline_error(error)
    if told is not None:
        batch.last_failure = str(told)
    reason = batch.abort_after_pass
    if reason is not None:
        end(desk, batch, S.ABORTED, reason=reason)
        return told or aborted(batch, reason)
    move(batch.state, S.RUNNING if batch.tasks else S.PENDING)
    return told or ClosedError("coordinator: the pass was stopped by shutdown")


def _pipeline_error(error: BaseException) -> PipelineError:
    if isinstance(error, PipelineError):
        return error
    failure = PipelineError(f"pass: failed with {error!r}")
    failure.__cause__ = error
    return failure


async def _deliver(desk: Desk, batch: BatchRecord) -> dict[str, Any]:
    cut = batch.cut
    if cut is None:
        raise RuntimeError(f"batch {batch.id!r}: has no cut")
    if batch.is_eval:
        return cutting.eval_result(batch, cut)
    if desk.journal is not None:
        await desk.journal.flush()  # what is not recorded is not delivered

    def begin() -> None:
        batch.committing = batch.write_tried = True

    delivery = await desk.pipeline.run(
        cutting.payloads_of(cut), batch.commit_id, desk.version, maybe_written=batch.write_tried,
        begin_commit=begin,
    )  # fmt: skip
    if "pipeline/sink/s" in delivery.metrics:
        desk.observer.slice("sink", desk.clock.time() - delivery.metrics["pipeline/sink/s"], batch=batch.id)
    desk.stale_dropped += delivery.stale
    batch.delivery = delivery
    return cutting.train_result(batch, cut, delivery, desk.version)


async def pass_payloads(desk: Desk, payloads: list[bytes]) -> dict[str, float]:
    """Take payloads of other code through a pass of their own; a commit that has begun is finished."""
    commit_id = f"{desk.config.name}-payloads-{desk.next_group}"  # like a group id, never used twice
    desk.next_group += 1
    passing = desk.loop.create_task(
        desk.pipeline.run(
            payloads, commit_id, desk.version, begin_commit=lambda: desk.other_passes.update({passing: True})
        )
    )
    desk.other_passes[passing] = False
    passing.add_done_callback(partial(_forget_payloads, desk))
    try:
        delivery = await asyncio.shield(passing)
    except asyncio.CancelledError:
        if passing.cancelled():
            raise ClosedError("coordinator: the pass was stopped by shutdown") from None
        if not desk.other_passes.get(passing, True):
            passing.cancel()
        raise
    return delivery.metrics


def _forget_payloads(desk: Desk, passing: asyncio.Task[Any]) -> None:
    del desk.other_passes[passing]
    if not passing.cancelled():
        passing.exception()  # its caller may have been cancelled


async def stop_passes(desk: Desk) -> None:
    """A commit that has begun is finished; any other pass is stopped."""
    of_batches = {batch.passing: batch.committing for batch in desk.batches.values() if batch.passing}
    passes = of_batches | desk.other_passes
    for passing, commits in passes.items():
        if not commits:
            passing.cancel()
    if passes:
        _, late = await asyncio.wait(passes, timeout=2.0)
        for passing in late:
            passing.cancel()
        if late:
            await asyncio.wait(late, timeout=0.5)

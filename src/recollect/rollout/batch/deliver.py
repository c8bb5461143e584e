"""Delivering a batch: one pass takes the results that count through the operators into the sink.

Payloads of other code (`process_experiences`) take a pass of their own.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from recollect.errors import ClosedError, PipelineError
from recollect.rollout.batch.cut import cut_batch, payloads_of
from recollect.rollout.batch.end import aborted, end
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchLifecycleState, move
from recollect.rollout.metrics import eval_result, train_result

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext

S = BatchLifecycleState


def pass_of(context: RolloutContext, batch: BatchRecord, reason: str | None = None) -> asyncio.Future[Any]:
    """Return the outcome of the batch's pass, starting one if none is under way.

    With a `reason` the batch is being aborted: it ends there, and its finalizers were told already.
    """
    if batch.passing is None:
        if batch.cut is None:
            cut_batch(context, batch, carries=reason is None)
        move(batch.state, S.FINALIZING)
        batch.aborting = reason
        batch.outcome = context.loop.create_future()
        batch.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        batch.passing = context.loop.create_task(_deliver(context, batch))
        batch.passing.add_done_callback(
            partial(_pass_ended, context, batch, batch.outcome, context.clock.time())
        )
        context.scheduler.room_made()  # by what the cut took back
    outcome = batch.outcome
    if outcome is None:
        raise RuntimeError(f"batch {batch.id!r}: a pass without an outcome")
    if reason is None:
        for finalizer in batch.finalizers:
            if not finalizer.future.done():
                finalizer.future.set_result(outcome)
    return outcome


async def join_pass(outcome: asyncio.Future[Any]) -> dict[str, Any]:
    """Wait for a pass that others wait for too; being cancelled here does not stop it."""
    try:
        result: dict[str, Any] = deepcopy(await asyncio.shield(outcome))
    except PipelineError as error:
        raise PipelineError(str(error)) from error.__cause__
    return result


def _pass_ended(
    context: RolloutContext,
    batch: BatchRecord,
    outcome: asyncio.Future[Any],
    start: float,
    passing: asyncio.Task[Any],
) -> None:
    """A pass is over, was stopped, or never began: here alone its batch moves on, and waiters are told."""
    batch.passing, batch.committing = None, False
    reason, batch.aborting = batch.aborting, None
    try:
        result = passing.result()
    except BaseException as error:
        outcome.set_exception(_pass_failed(context, batch, error))
        return
    context.observer.slice("pass", start, batch=str(batch.id))
    context.observer.event_of("delivered", batch.id, detail=f"{result['experience_count']} experiences")
    end(context, batch, S.FINALIZED if reason is None else S.ABORTED, result, reason)
    outcome.set_result(result)


def _pass_failed(context: RolloutContext, batch: BatchRecord, error: BaseException) -> Exception:
    """Undo a pass that did not deliver, or end its batch if that was aborted; return the error for waiters."""
    told = None if isinstance(error, asyncio.CancelledError) else _pipeline_error(error)
    if told is not None:
        batch.last_failure = str(told)
    reason = batch.abort_after_pass
    if reason is not None:
        end(context, batch, S.ABORTED, reason=reason)
        return told or aborted(batch, reason)
    move(batch.state, S.RUNNING if batch.tasks else S.PENDING)
    return told or ClosedError("coordinator: the pass was stopped by shutdown")


def _pipeline_error(error: BaseException) -> PipelineError:
    if isinstance(error, PipelineError):
        return error
    failure = PipelineError(f"pass: failed with {error!r}")
    failure.__cause__ = error
    return failure


async def _deliver(context: RolloutContext, batch: BatchRecord) -> dict[str, Any]:
    cut = batch.cut
    if cut is None:
        raise RuntimeError(f"batch {batch.id!r}: has no cut")
    if batch.is_eval:
        return eval_result(batch, cut)
    if context.journal is not None:
        await context.journal.flush()  # what is not recorded is not delivered

    def begin() -> None:
        batch.committing = batch.write_tried = True

    delivery = await context.pipeline.run(
        payloads_of(cut), batch.commit_id, context.version, maybe_written=batch.write_tried,
        begin_commit=begin,
    )  # fmt: skip
    if "pipeline/sink/s" in delivery.metrics:
        context.observer.slice(
            "sink", context.clock.time() - delivery.metrics["pipeline/sink/s"], batch=batch.id
        )
    context.stale_dropped += delivery.stale
    batch.delivery = delivery
    return train_result(batch, cut, delivery, context.version)


async def pass_payloads(context: RolloutContext, payloads: list[bytes]) -> dict[str, float]:
    """Take payloads of other code through a pass of their own; a commit that has begun is finished."""
    commit_id = f"{context.config.name}-payloads-{context.next_group}"  # like a group id, never used twice
    context.next_group += 1
    passing = context.loop.create_task(
        context.pipeline.run(
            payloads,
            commit_id,
            context.version,
            begin_commit=lambda: context.other_passes.update({passing: True}),
        )
    )
    context.other_passes[passing] = False
    passing.add_done_callback(partial(_forget_payloads, context))
    try:
        delivery = await asyncio.shield(passing)
    except asyncio.CancelledError:
        if passing.cancelled():
            raise ClosedError("coordinator: the pass was stopped by shutdown") from None
        if not context.other_passes.get(passing, True):
            passing.cancel()
        raise
    return delivery.metrics


def _forget_payloads(context: RolloutContext, passing: asyncio.Task[Any]) -> None:
    del context.other_passes[passing]
    if not passing.cancelled():
        passing.exception()  # its caller may have been cancelled


async def stop_passes(context: RolloutContext) -> None:
    """A commit that has begun is finished; any other pass is stopped."""
    of_batches = {batch.passing: batch.committing for batch in context.batches.values() if batch.passing}
    passes = of_batches | context.other_passes
    for passing, commits in passes.items():
        if not commits:
            passing.cancel()
    if passes:
        _, late = await asyncio.wait(passes, timeout=2.0)
        for passing in late:
            passing.cancel()
        if late:
            await asyncio.wait(late, timeout=0.5)

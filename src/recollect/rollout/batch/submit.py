"""Submitting: what is checked before a batch exists, and until when a submitted batch waits.

A batch is admitted when there is room for it and the weights are new enough.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec

from recollect.errors import DeadlineError, class_name
from recollect.rollout.batch.end import tell_finalizers
from recollect.rollout.batch.finalize import decide
from recollect.rollout.batch.records import MOST_RUNS, BatchRecord, Submission, TaskRecord
from recollect.rollout.batch.state import (
    BatchId,
    BatchLifecycleState,
    BatchState,
    check_holdable,
    check_id,
    move,
    plain_id,
)
from recollect.rollout.config import Config
from recollect.rollout.tasks import Task, Workflow, find_workflow, task_key

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext


def check_arguments(batch_id: Any, tasks: Any, batch_type: Any, min_wait_num: Any, priority: Any) -> None:
    """Check what needs no knowledge of other batches."""
    check_id(batch_id)
    if not isinstance(tasks, list):
        raise TypeError(f"tasks: must be a list of rr.Task, got {class_name(tasks)}")
    for position, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{position}]: must be a rr.Task, got {class_name(task)}")
    if batch_type not in ("train", "eval"):
        raise ValueError(f"batch_type: must be 'train' or 'eval', got {batch_type!r}")
    if min_wait_num is not None:
        if isinstance(min_wait_num, bool) or not isinstance(min_wait_num, int):
            raise TypeError(f"min_wait_num: must be an int or None, got {type(min_wait_num).__name__}")
        if not 1 <= min_wait_num <= len(tasks):
            raise ValueError(f"min_wait_num: must be from 1 to {len(tasks)} (tasks), got {min_wait_num}")
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority: must be an int or None, got {type(priority).__name__}")
        check_holdable(priority, "priority")


def make_batch(
    batch_id: BatchId,
    tasks: list[Task],
    batch_type: Any,
    min_wait_num: int | None,
    priority: int | None,
    serial: int,
    config: Config,
    first_group: int,
) -> BatchRecord:
    """Return the record of a checked batch; ValueError for equal task ids or an unknown workflow."""
    if min_wait_num is None and config.over_rollout > 0 and tasks and batch_type == "train":
        min_wait_num = max(1, math.ceil(len(tasks) * (1 - config.over_rollout)))
    least = None if min_wait_num is None else int(min_wait_num)
    state = BatchState(batch_id, batch_type, len(tasks), min_wait_num=least)
    batch = BatchRecord(state, serial, None if priority is None else int(priority), config)
    by_name = config.runner != "local" or config.journal is not None
    flows: dict[Any, Workflow] = {}
    seen: set[BatchId] = set()
    for position, task in enumerate(tasks):
        flow = flows.get(task.workflow) if task.workflow.__hash__ is not None else None
        if flow is None:
            flow = flows[task.workflow] = find_workflow(
                task.workflow, by_name=by_name, modules=config.workflow_modules
            )
            _check_importable(flow, config)
        record = TaskRecord(batch, position, task, flow, _packed(task, position), first_group + position, 0)
        _check_task_id(record.task_id, position, seen)
        record.task_id = plain_id(record.task_id)
        record.key = task_key(config.seed, batch_id, record.task_id)
        batch.tasks.append(record)
        batch.n_runs += task.repeat_times
    batch.n_queued = batch.n_runs
    if config.journal is not None and batch.n_runs > MOST_RUNS:
        raise ValueError(
            f"tasks: a batch of a journal must have at most {MOST_RUNS} runs, got {batch.n_runs}"
        )
    return batch


def _check_importable(flow: Workflow, config: Config) -> None:
    """A runner elsewhere imports modules; the program that was started is none of them."""
    in_program = getattr(flow.function, "__module__", "") == "__main__"
    if config.runner == "local" or not in_program:
        return
    if not config.workflow_modules or flow.name.startswith("__main__:"):
        raise TypeError(
            f"workflow: must be of a module that runners can import, got {flow.name!r} of the program itself "
            "(__main__); put it into a module of its own and name that in workflow_modules"
        )


def _check_task_id(task_id: Any, position: int, seen: set[BatchId]) -> None:
    if isinstance(task_id, bool) or not isinstance(task_id, int | str):
        raise TypeError(f"tasks[{position}].task_id: must be an int or str, got {type(task_id).__name__}")
    check_holdable(task_id, f"tasks[{position}].task_id")
    if task_id in seen:
        raise ValueError(f"tasks[{position}].task_id: must differ within a batch, got {task_id!r} twice")
    seen.add(task_id)


def _packed(task: Task, position: int) -> bytes:
    """The data of a task as bytes: each run gets a copy of its own, in whatever process it is."""
    try:
        return msgspec.msgpack.encode((task.data, task.args))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"tasks[{position}].data: must be JSON-like, got {error}; convert it") from None


def no_room(batch: BatchRecord, live: list[BatchRecord], n_queued: int, config: Config) -> str:
    """Which bound on live work keeps a batch waiting; empty if none does."""
    if not live:
        return ""
    if len(live) >= config.max_batches:
        return (
            f"{len(live)} batches are live, max_batches is {config.max_batches}; finalize or abort one, "
            "or allow more"
        )
    if n_queued + batch.n_runs > config.max_queued_runs:
        over = n_queued + batch.n_runs - config.max_queued_runs
        return f"{n_queued} runs wait, with {batch.n_runs} more they are {over} over max_queued_runs"
    return ""


async def submit(
    context: RolloutContext,
    batch_id: BatchId,
    tasks: list[Task],
    batch_type: Any,
    min_wait_num: int | None,
    priority: int | None,
) -> BatchRecord:
    """Register a batch and return it once it is admitted; a refused one leaves no trace."""
    check_arguments(batch_id, tasks, batch_type, min_wait_num, priority)
    batch_id = plain_id(batch_id)
    forget_cancelled(context)
    if batch_id in context.batches:
        raise ValueError(
            f"batch_id: must not be that of a live batch, got {batch_id!r}; finalize or abort it"
        )
    first, config = context.next_group, context.config
    batch = make_batch(
        batch_id, tasks, batch_type, min_wait_num, priority, context.n_batches + 1, config, first
    )
    context.n_batches += 1
    context.next_group += len(tasks)
    batch.submitted_at = context.clock.time()
    batch.commit_id = f"{config.name}-{batch_id}-g{first}-{context.next_group - 1}"
    context.batches[batch_id] = batch
    context.observer.event_of("submitted", batch_id)
    await _admitted(context, Submission(batch, context.loop.create_future()))
    return batch


async def _admitted(context: RolloutContext, sub: Submission) -> None:
    """Wait for the admission of a batch, at most for `submit_timeout_s`."""
    context.waiting.append(sub)
    admit(context)
    if not sub.future.done():
        deadline = sub.batch.submitted_at + context.config.submit_timeout_s
        if context.clock.time() >= deadline:
            _refuse(context, sub)
        else:
            sub.timer = context.clock.call_at(deadline, _refuse, context, sub)
    try:
        await sub.future
    except asyncio.CancelledError:
        if not sub.batch.admitted:
            withdraw(context, sub, None)
        raise


def _refuse(context: RolloutContext, sub: Submission) -> None:
    batch = sub.batch
    withdraw(context, sub, DeadlineError(f"batch {batch.id!r}: not admitted: {batch.not_admitted}"))


def withdraw(context: RolloutContext, sub: Submission, error: Exception | None) -> None:
    """Take a waiting submission back; nothing of it stays, and it no longer delays those behind it."""
    _take_back(context, sub, error)
    if context.is_open:
        admit(context)


def _take_back(context: RolloutContext, sub: Submission, error: Exception | None) -> None:
    batch = sub.batch
    if context.batches.get(batch.id) is batch and not batch.admitted:
        del context.batches[batch.id]
        tell_finalizers(batch, error or KeyError(f"batch {batch.id!r}: its submission was withdrawn"))
    _stop_waiting(context, sub, error)


def _stop_waiting(context: RolloutContext, sub: Submission, error: Exception | None = None) -> None:
    """A submission waits no longer; its caller is told unless the call was cancelled."""
    if sub in context.waiting:
        context.waiting.remove(sub)
    sub.answer(error)


def forget_cancelled(context: RolloutContext) -> None:
    """A cancelled submission is withdrawn in the turn of its cancel, before its own task hears of it."""
    for sub in [sub for sub in context.waiting if sub.future.cancelled()]:
        _take_back(context, sub, None)


def admit(context: RolloutContext) -> None:
    """Admit waiting batches in order; one for which there is no room delays those behind it."""
    forget_cancelled(context)
    full = ""
    for sub in list(context.waiting):
        if sub not in context.waiting:  # the one before it started work, which made room, which let it in
            continue
        live = [batch for batch in context.batches.values() if batch.admitted]
        full = full or no_room(sub.batch, live, context.scheduler.n_queued, context.config)
        sub.batch.not_admitted = full or _too_early(context, sub.batch)
        if not sub.batch.not_admitted:
            _stop_waiting(context, sub)
            _enter(context, sub.batch)


def _too_early(context: RolloutContext, batch: BatchRecord) -> str:
    """On-policy bounds: a train batch waits until the weights are new enough for it."""
    most = context.config.max_staleness
    if most is None or batch.is_eval:
        return ""
    needs = (context.first_version or 0) + context.k * context.config.versions_per_batch - most
    if needs <= context.version:
        return ""
    return f"max_staleness = {most} needs version {needs:g}, got {context.version}; call sync_weights"


def _enter(context: RolloutContext, batch: BatchRecord) -> None:
    batch.admitted = True
    context.history.pop(batch.id, None)
    if not batch.is_eval:
        batch.k, context.k = context.k, context.k + 1
    context.doors.submitted += batch.n_runs
    if context.journal is not None:
        context.journal.record_batch(batch, context.next_group, context.k, context.first_version or 0)
    context.observer.event_of("admitted", batch.id)
    context.observer.slice("admission", batch.submitted_at, batch=str(batch.id))
    if batch.tasks:
        move(batch.state, BatchLifecycleState.RUNNING)
        context.scheduler.add(batch)
    decide(context, batch)


def room_made(context: RolloutContext) -> None:
    """Admit batches that wait: work has started or has ended."""
    if context.waiting and context.is_open:
        admit(context)

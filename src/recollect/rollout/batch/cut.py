"""The cut of a batch: which results count, what is cancelled, and what is carried into a later batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.rollout.batch.records import BatchRecord, Cut, Joined, TaskRecord, Unit
from recollect.rollout.batch.state import BatchLifecycleState, BatchState
from recollect.rollout.config import Config

if TYPE_CHECKING:
    from recollect.rollout.context import RolloutContext


def kept_unfinished(batch: BatchRecord, config: Config, carries: bool) -> list[TaskRecord]:
    """The tasks whose good runs would be used if a cut came now, though other runs of theirs have not ended."""
    if config.partial_results != "keep" or _carries(batch, config, carries):
        return []
    left = (task for task in batch.tasks if task.status is None)
    return [task for task in left if task.is_kept(config.partial_results, config.min_group_size)]


def _carries(batch: BatchRecord, config: Config, carries: bool) -> bool:
    return carries and config.stragglers == "carry" and not batch.is_eval


def cut_of(batch: BatchRecord, config: Config, carries: bool) -> Cut:
    """Fix which tasks count; tasks that have not ended are cancelled, or carried on if they have started."""
    good = [task for task in batch.tasks if task.is_good(config.partial_results, config.min_group_size)]
    left = [task for task in batch.tasks if task.status is None]
    carried = sum(task.started for task in left) if _carries(batch, config, carries) else 0
    return Cut(good, len(left) - carried, carried)


def carrier_of(batch: BatchRecord, config: Config) -> BatchRecord:
    """Move tasks that have started but not ended to a record of their own, attempts and all."""
    state = BatchState(batch.id, "train", 0, state=BatchLifecycleState.RUNNING)
    carrier = BatchRecord(state, batch.serial, batch.priority, config)
    carrier.admitted, carrier.submitted_at = True, batch.submitted_at
    moved = {task for task in batch.tasks if task.status is None and task.started}
    if batch.next_run:  # some runs of this task have not become units yet
        task = batch.tasks[batch.next_task]
        size = config.repeats_per_attempt
        for first in range(batch.next_run, task.n_runs, size):
            batch.retries.append(Unit(task, tuple(range(first, min(first + size, task.n_runs)))))
        batch.next_task, batch.next_run = batch.next_task + 1, 0
    for unit in [unit for unit in batch.retries if unit.task in moved]:
        batch.retries.remove(unit)
        carrier.retries.append(unit)
    for unit in [unit for unit in batch.backing_off if unit.task in moved]:
        batch.backing_off.remove(unit)
        carrier.backing_off.add(unit)
    for attempt in [attempt for attempt in batch.running if attempt.unit.task in moved]:
        batch.running.remove(attempt)
        carrier.running.add(attempt)
    carrier.tasks = [task for task in batch.tasks if task in moved]
    batch.tasks = [task for task in batch.tasks if task not in moved]
    carrier.next_task = len(carrier.tasks)
    state.expected_task_count = len(carrier.tasks)
    waiting = sum(len(unit.run_ids) for unit in (*carrier.retries, *carrier.backing_off))
    n_runs = sum(task.n_runs for task in carrier.tasks)
    nbytes = sum(len(o.payload or b"") for task in carrier.tasks for o in task.good.values())
    carrier.n_queued, carrier.n_runs, carrier.staged_nbytes = waiting, n_runs, nbytes
    batch.n_queued -= waiting
    batch.n_runs -= n_runs
    batch.staged_nbytes -= nbytes
    for task in carrier.tasks:
        task.batch = carrier
    return carrier


def payloads_of(cut: Cut) -> list[bytes]:
    """What the pass is given: in the order of task, run and step; carried tasks come last."""
    return [
        outcome.payload
        for task in (*cut.tasks, *cut.carried_in)
        for _, outcome in sorted(task.good.items())
        if outcome.payload is not None
    ]


def cut_batch(context: RolloutContext, batch: BatchRecord, carries: bool) -> None:
    """Fix which results count; stragglers are cancelled, or carried if they have started."""
    scheduler = context.scheduler
    for task in kept_unfinished(batch, context.config, carries):
        scheduler.finish(task)
    batch.cut = cut_of(batch, context.config, carries)
    carrier = carrier_of(batch, context.config) if batch.cut.carried else None
    scheduler.remove(batch)
    if carrier is not None:
        scheduler.n_queued -= carrier.n_queued  # add counts them again
        context.carriers.append(carrier)
    scheduler.drop_work(batch)
    if carrier is not None:
        scheduler.add(carrier)
    joined_tasks: list[Joined] = []
    if not batch.is_eval:
        for other in list(context.carriers):
            joined_tasks += _take_carried(context, batch, other)
    context.observer.event_of("cut", batch.id, detail=f"{len(batch.cut.tasks)} tasks")
    if context.journal is not None:
        context.journal.record_cut(batch, carrier, joined_tasks)


def _take_carried(context: RolloutContext, batch: BatchRecord, carrier: BatchRecord) -> list[Joined]:
    """Tasks of an earlier batch that have ended since join this one."""
    joined = []
    for task in [task for task in carrier.tasks if task.status is not None]:
        carrier.tasks.remove(task)
        carrier.next_task = len(carrier.tasks)
        carrier.n_runs -= task.n_runs
        nbytes = sum(len(outcome.payload or b"") for outcome in task.good.values())
        context.scheduler.stage_bytes(carrier, -nbytes)
        joined.append(_join(context, batch, task, nbytes))
    if not carrier.tasks:
        context.carriers.remove(carrier)
        context.scheduler.remove(carrier)
    return joined


def _join(context: RolloutContext, batch: BatchRecord, task: TaskRecord, nbytes: int) -> Joined:
    carrier, position = task.batch, task.position
    if batch.cut is None or not task.is_good(context.config.partial_results, context.config.min_group_size):
        context.doors.failed += len(task.failed)
        context.doors.unused += len(task.good)
        return Joined(task, carrier, position, is_used=False)
    task.position = batch.state.expected_task_count + len(batch.cut.carried_in)  # which no other has
    batch.cut.carried_in.append(task)
    batch.n_runs += task.n_runs
    context.scheduler.stage_bytes(batch, nbytes)
    return Joined(task, carrier, position, is_used=True)

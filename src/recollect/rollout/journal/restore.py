"""Restoring live batches from the journal with their finished runs; only what had not finished runs again."""

from __future__ import annotations

import sys

from recollect.errors import FormatError
from recollect.files.record import brief, damage_in
from recollect.rollout.batch.records import MOST_RUNS, BatchRecord, Cut, TaskRecord, Unit
from recollect.rollout.batch.state import BatchLifecycleState, BatchState, move
from recollect.rollout.config import Config
from recollect.rollout.context import RolloutContext
from recollect.rollout.journal.format import JournalBatch, SavedTask
from recollect.rollout.journal.journal import Journal
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.tasks import Task, Workflow, find_workflow, is_registered, task_key


def restore(context: RolloutContext, journal: Journal) -> None:
    """Bring back what the journal holds: live batches with their finished runs, history, and counters."""
    kept = journal.restored
    for one in kept.batches:  # before anything is changed
        _check(one, journal.path)
        for task in one.batch.tasks:
            _find(task.workflow, context.config)  # it may be unknown here
    with damage_in(journal.path):
        batches = [
            restored_batch(one, context.n_batches + 1 + n, context.config, context.scheduler, journal)
            for n, one in enumerate(kept.batches)
        ]
    context.n_batches += len(batches)
    context.next_group = max(context.next_group, kept.next_group)
    context.k = max(context.k, kept.k)
    if kept.first_version is not None:
        context.first_version = kept.first_version
    for batch_id, ending in kept.history.items():
        context.history.setdefault(batch_id, ending)
    for one, batch in zip(kept.batches, batches):
        batch.submitted_at = context.clock.time()
        if one.batch.is_carrier:
            context.carriers.append(batch)
        else:
            context.batches[batch.id] = batch
        context.doors.submitted += batch.n_runs
        if batch.cut is None and batch.tasks:
            context.scheduler.add(batch)


def _check(kept: JournalBatch, path: str) -> None:
    """Raise FormatError for a batch whose parts do not belong together."""
    tasks = kept.batch.tasks
    n_runs = {
        place if one.position < 0 else one.position: one.repeat_times for place, one in enumerate(tasks)
    }
    cut = [] if kept.cut is None else [*kept.cut.tasks, *kept.cut.carried_in]
    if (
        len(n_runs) < len(tasks)
        or sum(n_runs.values()) > MOST_RUNS
        or any(position not in n_runs for position in cut)
        or any(not 0 <= outcome.run_id < n_runs.get(position, 0) for position, outcome in kept.runs)
    ):
        raise FormatError(
            f"{path}: batch {brief(kept.batch.batch_id)} lacks or garbles its tasks; it is damaged"
        )


def restored_batch(
    kept: JournalBatch, serial: int, config: Config, scheduler: Scheduler, journal: Journal
) -> BatchRecord:
    """Return the record of a batch that a journal kept; its work is not started yet."""
    saved = kept.batch
    n_tasks = len(saved.tasks) if saved.expected < 0 else saved.expected
    state = BatchState(saved.batch_id, saved.batch_type, n_tasks, min_wait_num=saved.min_wait_num)
    batch = BatchRecord(state, serial, saved.priority, config)
    batch.admitted, batch.commit_id, batch.k = True, saved.commit_id, saved.k
    found: dict[int, TaskRecord] = {}
    for place, one in enumerate(saved.tasks):
        record = _task_of(one, batch, place if one.position < 0 else one.position)
        found[record.position] = record
        batch.n_runs += one.repeat_times
        if not one.carried_in:
            batch.tasks.append(record)
    for position, outcome in kept.runs:
        task_record = found[position]
        task_record.started = True
        if outcome.ok:
            task_record.good[outcome.run_id] = outcome
            scheduler.stage_bytes(batch, len(outcome.payload or b""))
        else:
            task_record.failed[outcome.run_id] = outcome.error
    if batch.tasks:
        move(state, BatchLifecycleState.RUNNING)
    for record in batch.tasks:
        _resume(record, batch, scheduler, config)
    batch.next_task = len(batch.tasks)
    if kept.cut is not None:
        batch.cut = Cut([found[i] for i in kept.cut.tasks], kept.cut.cancelled, kept.cut.carried)
        batch.cut.carried_in += [found[i] for i in kept.cut.carried_in]
        for record in batch.cut.tasks:
            if record.status is None:  # its good runs count, though others of it had not ended
                scheduler.finish(record)
        batch.write_tried = True  # by a process that is gone, perhaps: the sink is asked
        batch.retries.clear()
        batch.n_queued = 0
    journal.resume_batch(batch, kept.serial)
    return batch


def _task_of(saved: SavedTask, batch: BatchRecord, position: int) -> TaskRecord:
    task = Task(
        saved.workflow, repeat_times=saved.repeat_times, task_id=saved.task_id, timeout_s=saved.timeout_s,
        max_retries=saved.max_retries,
    )  # fmt: skip
    flow = _find(saved.workflow, batch.config)
    key = task_key(batch.config.seed, batch.id, saved.task_id)
    return TaskRecord(batch, position, task, flow, saved.data, saved.group_id, key)


def _find(name: str, config: Config) -> Workflow:
    """The workflow that a journal names.

    A file must not say what is imported, and so run: besides registered names only those of `workflow_modules`, and of
    modules that this program has imported itself, are looked up.
    """
    module = name.partition(":")[0]
    is_ours = module in sys.modules and module.partition(".")[0] not in sys.stdlib_module_names
    if ":" in name and module not in config.workflow_modules and not is_ours and not is_registered(name):
        raise ValueError(
            f"workflow: must be of a module that this program imports, got {brief(name)} in the journal; import "
            f"{brief(module)} first, or name it in workflow_modules"
        )
    return find_workflow(name, modules=config.workflow_modules)


def _resume(task: TaskRecord, batch: BatchRecord, scheduler: Scheduler, config: Config) -> None:
    left = [run for run in range(task.n_runs) if run not in task.good and run not in task.failed]
    if not left:
        scheduler.finish(task)
        return
    size = config.repeats_per_attempt
    for first in range(0, len(left), size):
        unit = Unit(task, tuple(left[first : first + size]))
        batch.retries.append(unit)
        batch.n_queued += len(unit.run_ids)

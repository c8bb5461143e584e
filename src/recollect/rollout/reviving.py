"""From the journal back to life: a batch with its finished runs; only what had not finished runs again."""

from __future__ import annotations

from recollect.rollout.config import Config
from recollect.rollout.desk import Desk
from recollect.rollout.journal import Journal
from recollect.rollout.records import BatchRecord, Cut, TaskRecord, Unit
from recollect.rollout.saved import Kept
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.state import BatchLifecycleState, BatchState, move
from recollect.rollout.tasks import Task, find_workflow, task_key


def restore(desk: Desk, journal: Journal) -> None:
    """Bring back what the journal holds: live batches with their finished runs, history, and counters."""
    kept = journal.restored
    desk.next_group = max(desk.next_group, kept.next_group)
    desk.k = max(desk.k, kept.k)
    if kept.first_version is not None:
        desk.first_version = kept.first_version
    for batch_id, ending in kept.history.items():
        desk.history.setdefault(batch_id, ending)
    for kept_batch in kept.batches:
        desk.n_batches += 1
        batch = revive(kept_batch, desk.n_batches, desk.config, desk.scheduler, journal)
        batch.submitted_at = desk.clock.time()
        desk.batches[batch.id] = batch
        desk.doors.submitted += batch.n_runs
        if batch.cut is None and batch.tasks:
            desk.scheduler.add(batch)


def revive(kept: Kept, serial: int, config: Config, scheduler: Scheduler, journal: Journal) -> BatchRecord:
    """Return the record of a batch that a journal kept; its work is not started yet."""
    saved = kept.batch
    state = BatchState(saved.batch_id, saved.batch_type, len(saved.tasks), min_wait_num=saved.min_wait_num)  # type: ignore[arg-type]
    batch = BatchRecord(state, serial, saved.priority, config)
    batch.admitted, batch.commit_id, batch.k = True, saved.commit_id, saved.k
    for position, one in enumerate(saved.tasks):
        task = Task(
            one.workflow, repeat_times=one.repeat_times, task_id=one.task_id, timeout_s=one.timeout_s,
            max_retries=one.max_retries,
        )  # fmt: skip
        flow = find_workflow(one.workflow)
        key = task_key(config.seed, saved.batch_id, one.task_id)
        batch.tasks.append(TaskRecord(batch, position, task, flow, one.data, one.group_id, key))
        batch.n_runs += one.repeat_times
    for position, outcome in kept.runs:
        task_record = batch.tasks[position]
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
        batch.cut = Cut([batch.tasks[i] for i in kept.cut.tasks], kept.cut.cancelled, kept.cut.carried)
        batch.write_tried = True  # by a process that is gone, perhaps: the sink is asked
        batch.retries.clear()
        batch.n_queued = 0
    journal.revived(batch, kept.serial)
    return batch


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

"""The cut and what comes of it: which tasks count, what is carried on, results, and the doors of all runs."""

from __future__ import annotations

from typing import Any

from recollect.rollout.batch.records import BatchRecord, Cut, TaskRecord, Unit
from recollect.rollout.batch.state import BatchLifecycleState, BatchState
from recollect.rollout.config import Config
from recollect.rollout.experience.pipeline import Delivery
from recollect.rollout.metrics import counts, eval_metrics, eval_name, train_metrics
from recollect.rollout.stats import RunDoors

ERRORS_SHOWN = 8


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


def eval_result(batch: BatchRecord, cut: Cut) -> dict[str, Any]:
    """The result of an eval batch."""
    result = _result(batch, cut, 0)
    prefix = f"eval/{eval_name(batch.id)}"
    result["metrics"] = eval_metrics(cut.tasks, batch.id) | counts(result, prefix) | _troubles(batch, prefix)
    return result


def train_result(batch: BatchRecord, cut: Cut, delivery: Delivery, version: int) -> dict[str, Any]:
    """The result of a train batch."""
    result = _result(batch, cut, delivery.n_out)
    metrics = train_metrics(cut.tasks, version) | counts(result, "rollout") | _troubles(batch, "rollout")
    if cut.carried_in:
        metrics["rollout/carried_in_count"] = float(len(cut.carried_in))
    result["metrics"] = metrics | delivery.metrics
    return result


def _result(batch: BatchRecord, cut: Cut, n_experiences: int) -> dict[str, Any]:
    state, by = batch.state, batch.counts
    errors = [(task.task_id, task.error) for task in batch.tasks if task.failed]
    return {
        "batch_id": state.batch_id,
        "batch_type": state.batch_type,
        "finished_task_count": by["ok"] + by["partial"] + by["failed"],
        "metrics": {},
        "expected_task_count": state.expected_task_count,
        "ok_task_count": by["ok"],
        "partial_task_count": by["partial"],
        "failed_task_count": by["failed"],
        "cancelled_task_count": cut.cancelled,
        "carried_task_count": cut.carried,
        "experience_count": n_experiences,
        "errors": dict(errors[:ERRORS_SHOWN]),
    }


def _troubles(batch: BatchRecord, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/retry_count": float(batch.retry_count),
        f"{prefix}/timeout_count": float(batch.timeout_count),
        f"{prefix}/requeue_count": float(batch.requeue_count),
        f"{prefix}/late_count": float(batch.late_count),
        f"{prefix}/bad_metric_count": float(batch.bad_metric_count),
    }


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

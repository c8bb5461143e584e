"""What a batch's result says: counts, and numbers over good tasks, each by the mean of its good runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from recollect.rollout.batch.state import BatchId

if TYPE_CHECKING:
    from recollect.rollout.batch.records import BatchRecord, Cut, TaskRecord
    from recollect.rollout.experience.pipeline import Delivery
    from recollect.rollout.tasks import RunOutcome

ERRORS_SHOWN = 8


def run_metrics(outcome: RunOutcome) -> dict[str, float]:
    """The numbers of one good run."""
    found = dict(outcome.metrics)
    if outcome.reward is not None:
        found.setdefault("reward", outcome.reward)
    if outcome.response_length is not None:
        found.setdefault("response_length", float(outcome.response_length))
    found["run_s"] = outcome.seconds
    return found


def task_means(task: TaskRecord) -> dict[str, float]:
    """Each metric's mean over the good runs of a task."""
    if len(task.good) == 1:
        [outcome] = task.good.values()
        means = run_metrics(outcome)
    else:
        values: dict[str, list[float]] = {}
        for outcome in task.good.values():
            for name, value in run_metrics(outcome).items():
                values.setdefault(name, []).append(value)
        means = {name: math.fsum(column) / len(column) for name, column in values.items()}
    means["attempts"] = float(task.attempts)
    return means


def summarized(rows: Iterable[dict[str, float]], prefix: str) -> dict[str, float]:
    """`<prefix>/<m>/{mean,min,max,std}` over rows; the standard deviation is that of the population."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    found = {}
    for name, column in columns.items():
        array = np.array(column)
        with np.errstate(over="ignore"):
            found[f"{prefix}/{name}/mean"] = float(array.mean())
            found[f"{prefix}/{name}/min"] = float(array.min())
            found[f"{prefix}/{name}/max"] = float(array.max())
            found[f"{prefix}/{name}/std"] = float(array.std())
    return found


def best_of(values: list[float], k: int) -> tuple[float, float]:
    """The exact means of the best and of the worst over all k-subsets.

    >>> best_of([0.0, 1.0, 2.0], 2)
    (1.6666666666666667, 0.3333333333333333)
    """
    n, ordered = len(values), sorted(values)
    weights = [math.comb(i, k - 1) for i in range(n)]  # subsets in which ordered[i] is the greatest
    total = math.comb(n, k)
    best = math.fsum(w * v for w, v in zip(weights, ordered)) / total
    worst = math.fsum(w * v for w, v in zip(weights, reversed(ordered))) / total
    return best, worst


def eval_name(batch_id: BatchId) -> str:
    """The name of an eval batch: the id after its first `/`, else all of it."""
    return str(batch_id).partition("/")[2] or str(batch_id)


def eval_metrics(tasks: list[TaskRecord], batch_id: BatchId) -> dict[str, float]:
    """Summaries of an eval batch, with best@k and worst@k where tasks are repeated."""
    prefix = f"eval/{eval_name(batch_id)}"
    found = summarized((task.status.metrics for task in tasks if task.status), prefix)
    columns: dict[str, list[float]] = {}
    for task in tasks:
        if len(task.good) < 2:
            continue
        runs = [run_metrics(outcome) for outcome in task.good.values()]
        for name in {name for run in runs for name in run}:
            values = [run[name] for run in runs if name in run]
            k = 2
            while k <= len(values):
                best, worst = best_of(values, k)
                columns.setdefault(f"{prefix}/{name}/best@{k}", []).append(best)
                columns.setdefault(f"{prefix}/{name}/worst@{k}", []).append(worst)
                k *= 2
    return found | {name: math.fsum(column) / len(column) for name, column in columns.items()}


def train_metrics(tasks: list[TaskRecord], version: int) -> dict[str, float]:
    """Summaries of a train batch, staleness included: versions between an experience and the weights now."""
    rows = []
    for task in tasks:
        ages = [version - outcome.version for outcome in task.good.values()]
        rows.append((task.status.metrics if task.status else {}) | {"staleness": math.fsum(ages) / len(ages)})
    found = summarized(rows, "rollout")
    runs = [outcome for task in tasks for outcome in task.good.values()]
    found["rollout/reward/missing"] = float(sum(outcome.reward is None for outcome in runs))
    return found


def counts(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """Counts of the result as metrics."""
    return {f"{prefix}/{name}": float(value) for name, value in record.items() if name.endswith("_count")}


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

"""Numbers about a batch: over good tasks, each by the mean of its good runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from recollect.rollout.batch.records import TaskRecord
from recollect.rollout.batch.state import BatchId
from recollect.rollout.runners.execute import Outcome


def run_metrics(outcome: Outcome) -> dict[str, float]:
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
    return summarized(rows, "rollout")


def counts(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """Counts of the result as metrics."""
    return {f"{prefix}/{name}": float(value) for name, value in record.items() if name.endswith("_count")}

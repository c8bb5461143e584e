"""Submissions: what is checked before a batch exists, and what keeps one waiting."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from recollect.errors import class_name
from recollect.rollout.batch.records import MOST_RUNS, BatchRecord, TaskRecord
from recollect.rollout.batch.state import BatchId, BatchState
from recollect.rollout.config import Config
from recollect.rollout.event_loop import Timer
from recollect.rollout.tasks import Task, Workflow, find_workflow, task_key
from recollect.text import is_safe


@dataclass(eq=False, slots=True)
class Submission:
    """A batch that waits to be admitted."""

    batch: BatchRecord
    future: asyncio.Future[None]
    timer: Timer | None = None


def check_id(batch_id: Any) -> None:
    """TypeError unless it is an int or str (a bool is neither); ValueError for the empty str."""
    if isinstance(batch_id, bool) or not isinstance(batch_id, int | str):
        raise TypeError(f"batch_id: must be an int or str, got {type(batch_id).__name__}")
    if batch_id == "":
        raise ValueError("batch_id: must not be empty, got ''")
    _check_holdable(batch_id, "batch_id")


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
        _check_holdable(priority, "priority")


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


def _check_task_id(task_id: Any, position: int, seen: set[BatchId]) -> None:
    if isinstance(task_id, bool) or not isinstance(task_id, int | str):
        raise TypeError(f"tasks[{position}].task_id: must be an int or str, got {type(task_id).__name__}")
    _check_holdable(task_id, f"tasks[{position}].task_id")
    if task_id in seen:
        raise ValueError(f"tasks[{position}].task_id: must differ within a batch, got {task_id!r} twice")
    seen.add(task_id)


def plain_id(ident: BatchId) -> BatchId:
    """The same as an int or a str itself, not of a class derived from them: no message and no record holds such."""
    return int(ident) if isinstance(ident, int) else str.__str__(ident)


def _check_holdable(ident: BatchId, name: str) -> None:
    """An id comes back as it was given, so what no message holds is refused rather than changed."""
    if isinstance(ident, int) and not -(2**63) <= ident < 2**64:
        raise ValueError(f"{name}: must be an int of 64 bits, got {ident}; take a smaller one")
    if isinstance(ident, str) and not is_safe(ident):
        raise ValueError(
            f"{name}: must be text that UTF-8 can hold, got {ident!r}; do not cut inside a character"
        )


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

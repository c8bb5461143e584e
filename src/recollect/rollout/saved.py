"""What the journal keeps of batches, cuts, runs and endings, as msgpack in its columns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from recollect.rollout.desk import Ending
from recollect.rollout.execute import Outcome
from recollect.rollout.records import BatchRecord, Cut
from recollect.rollout.state import BatchId, BatchLifecycleState, BatchState, TaskStatus


class SavedTask(msgspec.Struct, array_like=True):
    """A task as it is recorded."""

    workflow: str
    data: bytes
    repeat_times: int
    task_id: BatchId
    timeout_s: float | None
    max_retries: int | None
    group_id: int


class SavedBatch(msgspec.Struct, array_like=True):
    """A batch as it is recorded."""

    batch_id: BatchId
    batch_type: str
    min_wait_num: int | None
    priority: int | None
    commit_id: str
    k: int | None
    tasks: list[SavedTask]
    counts: dict[str, int] = {}


class SavedCut(msgspec.Struct, array_like=True):
    """Which tasks count, by position, and what became of the others."""

    tasks: list[int]
    cancelled: int
    carried: int


class SavedEnding(msgspec.Struct, array_like=True):
    """How a batch ended."""

    batch_id: BatchId
    batch_type: str
    expected: int
    statuses: list[tuple[BatchId, TaskStatus]]
    min_wait_num: int | None
    state: str
    result: dict[str, Any] | None
    reason: str | None


@dataclass
class Kept:
    """A live batch of the journal."""

    serial: int
    batch: SavedBatch
    cut: SavedCut | None
    runs: list[tuple[int, Outcome]]


@dataclass
class Restored:
    """What a journal held when it was opened."""

    batches: list[Kept] = field(default_factory=list)
    history: OrderedDict[BatchId, Ending] = field(default_factory=OrderedDict)
    next_group: int = 0
    k: int = 0
    first_version: int | None = None


encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(SavedBatch).decode
decode_cut = msgspec.msgpack.Decoder(SavedCut).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_decode_ending = msgspec.msgpack.Decoder(SavedEnding).decode


def saved_batch(batch: BatchRecord) -> bytes:
    """A batch that was admitted."""
    state = batch.state
    tasks = [
        SavedTask(t.workflow.name, t.data, t.n_runs, t.task_id, t.timeout_s, t.max_retries, t.group_id)
        for t in batch.tasks
    ]
    saved = SavedBatch(
        state.batch_id, state.batch_type, state.min_wait_num, batch.priority, batch.commit_id, batch.k, tasks
    )
    return encode(saved)


def saved_cut(cut: Cut) -> bytes:
    """Which results count."""
    return encode(SavedCut([task.position for task in cut.tasks], cut.cancelled, cut.carried))


def saved_ending(state: BatchState, reason: str | None) -> bytes:
    """How a batch ended."""
    saved = SavedEnding(
        state.batch_id, state.batch_type, state.expected_task_count, list(state.statuses.items()),
        state.min_wait_num, state.state.value, state.final_result, reason,
    )  # fmt: skip
    return encode(saved)


def read_ending(data: bytes) -> Ending:
    """The ending that was saved."""
    saved = _decode_ending(data)
    state = BatchState(
        saved.batch_id, saved.batch_type, saved.expected, dict(saved.statuses), saved.min_wait_num,  # type: ignore[arg-type]
        BatchLifecycleState(saved.state), saved.result,
    )  # fmt: skip
    return Ending(state, saved.reason)

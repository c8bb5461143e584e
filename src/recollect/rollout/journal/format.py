"""What the journal keeps of batches, cuts, runs and endings, as msgpack in its columns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from recollect.rollout.batch.records import MOST_RUNS, BatchRecord, Cut, EndedBatch, TaskRecord
from recollect.rollout.batch.state import BatchId, BatchLifecycleState, BatchState, TaskStatus
from recollect.rollout.tasks import RunOutcome
from recollect.text import encoded

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class SavedTask(msgspec.Struct, array_like=True):
    """A task as it is recorded."""

    workflow: str
    data: bytes
    repeat_times: Annotated[int, Meta(ge=1, le=MOST_RUNS)]
    task_id: BatchId
    timeout_s: float | None
    max_retries: int | None
    group_id: int
    position: Annotated[
        int, Meta(ge=-1, le=1 << 62)
    ] = -1  # by which its runs are found; -1: the place in the list
    carried_in: bool = False  # it began in an earlier batch


class SavedBatch(msgspec.Struct, array_like=True):
    """A batch as it is recorded."""

    batch_id: BatchId
    batch_type: Literal["train", "eval"]
    min_wait_num: int | None
    priority: int | None
    commit_id: str
    k: int | None
    tasks: list[SavedTask]
    counts: dict[str, int] = {}
    expected: int = -1  # tasks it was submitted with; -1: those of the list
    is_carrier: bool = False  # tasks that outlived the cut of their batch


class SavedCut(msgspec.Struct, array_like=True):
    """Which tasks count, by position, and what became of the others."""

    tasks: list[int]
    cancelled: Count
    carried: Count
    carried_in: list[int] = []


class SavedEnding(msgspec.Struct, array_like=True):
    """How a batch ended."""

    batch_id: BatchId
    batch_type: Literal["train", "eval"]
    expected: Count
    statuses: list[tuple[BatchId, TaskStatus]]
    min_wait_num: int | None
    state: str
    result: dict[str, Any] | None
    reason: str | None


class SavedMeta(msgspec.Struct):
    """The counters of a journal."""

    next_group: Count = 0
    k: Count = 0
    first_version: int | None = None


@dataclass
class JournalBatch:
    """A live batch of the journal."""

    serial: int
    batch: SavedBatch
    cut: SavedCut | None
    runs: list[tuple[int, RunOutcome]]


@dataclass
class JournalContents:
    """What a journal held when it was opened."""

    batches: list[JournalBatch] = field(default_factory=list)
    history: OrderedDict[BatchId, EndedBatch] = field(default_factory=OrderedDict)
    next_group: int = 0
    k: int = 0
    first_version: int | None = None


_encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(SavedBatch).decode
decode_cut = msgspec.msgpack.Decoder(SavedCut).decode
decode_outcome = msgspec.msgpack.Decoder(RunOutcome).decode
_decode_ending = msgspec.msgpack.Decoder(SavedEnding).decode


def encode(record: msgspec.Struct) -> bytes:
    """Return a record as bytes, whatever its texts are."""
    return encoded(_encode, record)


def saved_batch(batch: BatchRecord, is_carrier: bool = False) -> bytes:
    """A batch that was admitted, or tasks that were carried on."""
    state = batch.state
    tasks = [_saved_task(task, False) for task in batch.tasks]
    if batch.cut is not None:
        tasks += [_saved_task(task, True) for task in batch.cut.carried_in]
    saved = SavedBatch(
        state.batch_id, state.batch_type, state.min_wait_num, batch.priority, batch.commit_id, batch.k, tasks,
        expected=state.expected_task_count, is_carrier=is_carrier,
    )  # fmt: skip
    return encode(saved)


def _saved_task(t: TaskRecord, carried_in: bool) -> SavedTask:
    return SavedTask(
        t.workflow.name, t.data, t.n_runs, t.task_id, t.timeout_s, t.max_retries, t.group_id, t.position,
        carried_in,
    )  # fmt: skip


def saved_cut(cut: Cut) -> bytes:
    """Which results count."""
    positions = [[task.position for task in tasks] for tasks in (cut.tasks, cut.carried_in)]
    return encode(SavedCut(positions[0], cut.cancelled, cut.carried, positions[1]))


def saved_ending(state: BatchState, reason: str | None) -> bytes:
    """How a batch ended."""
    saved = SavedEnding(
        state.batch_id, state.batch_type, state.expected_task_count, list(state.statuses.items()),
        state.min_wait_num, state.state.value, state.final_result, reason,
    )  # fmt: skip
    return encode(saved)


def read_ending(data: bytes) -> EndedBatch:
    """The ending that was saved."""
    saved = _decode_ending(data)
    state = BatchState(
        saved.batch_id, saved.batch_type, saved.expected, dict(saved.statuses), saved.min_wait_num,
        BatchLifecycleState(saved.state), saved.result,
    )  # fmt: skip
    return EndedBatch(state, saved.reason)

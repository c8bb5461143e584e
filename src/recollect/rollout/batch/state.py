"""The states of a batch, the moves between them, and what is known of one batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import msgspec

from recollect.text import is_safe

BatchId = int | str
BatchType = Literal["train", "eval"]


class BatchLifecycleState(str, Enum):  # noqa: UP042 (the bases are those of the API page)
    """Where a submitted batch is in its life; `MOVES` says which moves there are."""

    PENDING = "pending"
    RUNNING = "running"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    ABORTED = "aborted"


_S = BatchLifecycleState

# No other move exists. An empty batch goes from PENDING to the pass and, if that fails, back.
MOVES: dict[BatchLifecycleState, frozenset[BatchLifecycleState]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.FINALIZING, _S.ABORTED}),
    _S.RUNNING: frozenset({_S.FINALIZING, _S.ABORTED}),
    _S.FINALIZING: frozenset({_S.FINALIZED, _S.ABORTED, _S.RUNNING, _S.PENDING}),
    _S.FINALIZED: frozenset(),
    _S.ABORTED: frozenset(),
}
ENDED = frozenset({_S.FINALIZED, _S.ABORTED})


class TaskStatus(msgspec.Struct, frozen=True):
    """How a task ended: `ok` (all runs good), `partial` (some) or `failed` (none)."""

    state: Literal["ok", "partial", "failed"]
    completed_runs: int
    total_runs: int
    attempts: int
    metrics: dict[str, float] = {}
    error: str | None = None


@dataclass
class BatchState:
    """What is known of one train or eval batch.

    >>> state = BatchState(7, "train", 2)
    >>> state.state, state.completed_task_count
    (<BatchLifecycleState.PENDING: 'pending'>, 0)
    """

    batch_id: BatchId
    batch_type: BatchType
    expected_task_count: int
    statuses: dict[BatchId, Any] = field(default_factory=dict)
    min_wait_num: int | None = None
    state: BatchLifecycleState = BatchLifecycleState.PENDING
    final_result: dict[str, Any] | None = None
    finalize_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def completed_task_count(self) -> int:
        """How many tasks have ended, well or badly."""
        return len(self.statuses)


def move(state: BatchState, to: BatchLifecycleState) -> None:
    """Make one move of the table; any other is a bug in this library and raises RuntimeError."""
    if to not in MOVES[state.state]:
        raise RuntimeError(f"batch {state.batch_id!r}: no move from {state.state.value} to {to.value}")
    state.state = to


def copied(state: BatchState) -> BatchState:
    """Return the caller's own copy; its lock is a fresh one."""
    from copy import deepcopy

    return BatchState(
        state.batch_id,
        state.batch_type,
        state.expected_task_count,
        {task: _copied_status(status) for task, status in state.statuses.items()},
        state.min_wait_num,
        state.state,
        deepcopy(state.final_result),
    )


def _copied_status(status: TaskStatus) -> TaskStatus:
    return msgspec.structs.replace(status, metrics=dict(status.metrics))


def check_id(batch_id: Any) -> None:
    """TypeError unless it is an int or str (a bool is neither); ValueError for the empty str."""
    if isinstance(batch_id, bool) or not isinstance(batch_id, int | str):
        raise TypeError(f"batch_id: must be an int or str, got {type(batch_id).__name__}")
    if batch_id == "":
        raise ValueError("batch_id: must not be empty, got ''")
    check_holdable(batch_id, "batch_id")


def plain_id(ident: BatchId) -> BatchId:
    """The same as an int or a str itself, not of a class derived from them: no message and no record holds such."""
    return int(ident) if isinstance(ident, int) else str.__str__(ident)


def check_holdable(ident: BatchId, name: str) -> None:
    """An id comes back as it was given, so what no message holds is refused rather than changed."""
    if isinstance(ident, int) and not -(2**63) <= ident < 2**64:
        raise ValueError(f"{name}: must be an int of 64 bits, got {ident}; take a smaller one")
    if isinstance(ident, str) and not is_safe(ident):
        raise ValueError(
            f"{name}: must be text that UTF-8 can hold, got {ident!r}; do not cut inside a character"
        )

"""Packing one tick: draw rows of the replay buffer into a slot, in the learner's thread or in a collector."""

from __future__ import annotations

import queue
from contextlib import suppress
from functools import lru_cache
from time import monotonic, monotonic_ns
from typing import Any

from recollect import _core, checks, interrupts
from recollect.errors import ClosedError, EmptyError, RecollectError
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines.reports import PipelineTrace
from recollect.ipc.replay_pipelines.slots import (
    ASKED_AT,
    READY_AT,
    SLICE_S,
    STOP_AT,
    PackRequest,
    PackResult,
    PackSlots,
    Wakeup,
)
from recollect.memory.rows import packed_codec

REACHED, TIMED_OUT, CLOSED, STOPPED = range(4)  # what `wait_added` returns
_codec = lru_cache(packed_codec)


def memory_of(buffer: ReplayBuffer) -> _core.RowMemory:
    """The native memory of an open buffer; not to be kept, since lanes go with it."""
    found: _core.RowMemory = buffer._native().memory()
    return found


def pack(
    buffer: ReplayBuffer,
    slots: PackSlots,
    slot: int,
    seed: int,
    headroom: int,
    snapshot: _core.PackSnapshot | None = None,
) -> PackResult:
    """Draw a batch by `seed` into a slot, from a snapshot taken earlier or now.

    Draw i is number i of `IndexStream(seed)`: while nothing is overwritten, what `buffer.sample(n, seed=seed)` gives.
    """
    memory, start = memory_of(buffer), monotonic_ns()
    found = _core.take_snapshot(memory, headroom) if snapshot is None else snapshot
    codec, n = _codec(slots.row_bytes), slots.sample_count
    redrawn = _core.pack(memory, found, headroom, codec, seed, n, *slots.place(slot))
    if found.size == 0:
        raise EmptyError(f"tick: there are no rows to draw from (headroom {headroom}); add some first")
    return PackResult(found.ptr, found.size, redrawn, monotonic_ns() - start)


def wait_for_rows(buffer: ReplayBuffer, slots: PackSlots, floor: int, timeout: float) -> int:
    """Sleep until `floor` rows were ever added; one of REACHED, TIMED_OUT, CLOSED, STOPPED."""
    return _core.wait_added(memory_of(buffer), floor, timeout, slots.mapping, STOP_AT)


def make_collector_pack(replay_buffer: ReplayBuffer, sample_count: int) -> tuple[Wakeup, Wakeup, PackSlots]:
    """Make request queue, ready queue and slots for a pipeline whose batches a collector packs.

    Ownership: the caller's; `slots.cleanup()` ends all three. They go to the collector as process arguments.
    """
    checks.count("sample_count", sample_count)
    slots = PackSlots(sample_count, replay_buffer.row_nbytes)
    return Wakeup(slots, ASKED_AT), Wakeup(slots, READY_AT), slots


def serve_pack_requests(
    replay_buffer: ReplayBuffer,
    request: Any,
    ready: Any,
    slots: PackSlots,
    timeout: float = 0.0,
    *,
    trace_recorder: Any = None,
) -> int:
    """Pack what the learner asks for; return how many batches. For the collector, after each `add` and while idle.

    It waits up to `timeout` seconds for the first. With 0.0 it never waits: a request whose rows are not there yet
    stays open until the next call.
    What goes wrong while packing is raised in the learner, not here. One process packs; LaneBusyError for another.
    """
    end, served = monotonic() + checks.timeout(timeout, 0.0), 0
    trace = PipelineTrace(trace_recorder)
    slots.enlist()
    while True:
        done = _serve_one(replay_buffer, ready, slots, end, trace)
        served += done
        if done:
            continue
        left = end - monotonic()
        if served or left <= 0:
            return served
        if slots.request() is None:
            _sleep(request, min(left, SLICE_S))


def _sleep(request: Any, seconds: float) -> None:
    with suppress(queue.Empty):
        request.get(True, seconds)


def _serve_one(buffer: ReplayBuffer, ready: Any, slots: PackSlots, end: float, trace: PipelineTrace) -> bool:
    request = slots.request()
    if request is None:
        return False
    left = min(max(0.0, end - monotonic()), SLICE_S)
    if wait_for_rows(buffer, slots, request.floor, left) != REACHED:
        return False
    with interrupts.deferred():  # what is taken is answered: nobody else may
        return slots.take(request.number) and _serve_taken(buffer, ready, slots, request, trace)


def _serve_taken(
    buffer: ReplayBuffer, ready: Any, slots: PackSlots, request: PackRequest, trace: PipelineTrace
) -> bool:
    start = monotonic_ns()
    try:
        packed = pack(buffer, slots, request.slot, request.sample_seed, request.headroom)
    except Exception as error:
        slots.fail(request.number, error)
        ready.put(request.number)
        if isinstance(error, ClosedError) or not isinstance(error, RecollectError):
            raise
        return True
    slots.done(request.number, packed)
    ready.put(request.number)
    trace.slice("pack", start, rows=slots.sample_count, redrawn=packed.redrawn)
    return True

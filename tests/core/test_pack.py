"""Snapshots with headroom, draws from them, and waiting for rows."""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ipc.replay_pipelines.make import N, add, buffer, ids, transitions
from tests.timing import Stopwatch

from recollect import _core
from recollect.ipc.replay_pipelines.slots import STOP_AT, PackSlots
from recollect.ipc.transitions import fields_of
from recollect.memory.rows import packed_codec

REACHED, TIMED_OUT, CLOSED, STOPPED = range(4)


def memory(buf: Any) -> _core.RowMemory:
    return buf._native().memory()


def pack(buf: Any, snapshot: Any, slots: PackSlots, seed: int, headroom: int = 0) -> tuple[list[int], int]:
    codec = packed_codec(buf.row_nbytes)
    redrawn = _core.pack(memory(buf), snapshot, headroom, codec, seed, N, *slots.place(0))
    return ids(fields_of(slots.slot(0), buf.layout)), redrawn


@given(st.lists(st.integers(1, 30), max_size=6), st.integers(0, 15), st.integers(1, 2))
def test_a_snapshot_leaves_out_what_headroom_rows_would_overwrite(
    blocks: list[int], headroom: int, lanes: int
) -> None:
    with buffer(capacity=16 * lanes, num_lanes=lanes) as buf:
        on, counts = [buf.on_lane(k) for k in range(lanes)], [0] * lanes
        for i, n in enumerate(blocks):
            on[i % lanes].add(**transitions(range(n)))
            counts[i % lanes] += n
        taken = _core.take_snapshot(memory(buf), headroom)
        sizes = [min(n, 16, max(0, 16 - headroom)) if n + headroom > 16 else n for n in counts]
        assert taken.ptr == sum(counts) == buf.ptr
        assert [end - low for low, end in taken.windows] == sizes and taken.size == sum(sizes)
        for handle in on:
            handle.close()


@given(st.integers(0, 15), st.integers(0, 15))
def test_a_snapshot_is_what_is_packed_while_writers_stay_within_headroom(headroom: int, more: int) -> None:
    with buffer(40, capacity=16) as buf, PackSlots(N, buf.row_nbytes) as slots:
        taken = _core.take_snapshot(memory(buf), headroom)
        before, redrawn = pack(buf, taken, slots, 7, headroom)
        assert redrawn == 0 and min(before) >= 40 - 16 + headroom
        add(buf, more)
        again, redrawn = pack(buf, taken, slots, 7, headroom)
        if more <= headroom:
            assert again == before and redrawn == 0 and (taken.ptr, taken.size) == (40, 16 - headroom)
        else:  # what was overwritten is drawn again, and only that
            kept = [a == b for a, b in zip(again, before)]
            assert kept.count(False) <= redrawn and min(again) >= 40 + more - 16
            assert all(same for same, old in zip(kept, before) if old >= 40 + more - 16)


def test_a_snapshot_of_which_nothing_is_left_is_taken_anew() -> None:
    with buffer(16, capacity=16) as buf, PackSlots(N, buf.row_nbytes) as slots:
        taken = _core.take_snapshot(memory(buf), 4)
        add(buf, 16)
        found, redrawn = pack(buf, taken, slots, 3, 4)
        assert (taken.ptr, taken.size) == (32, 12) and min(found) >= 20 and redrawn == N


def test_an_oversized_block_is_counted_and_taken_anew() -> None:
    with buffer(10, capacity=16) as buf, PackSlots(N, buf.row_nbytes) as slots:
        taken = _core.take_snapshot(memory(buf))
        add(buf, 100)
        found, _ = pack(buf, taken, slots, 3)
        assert taken.ptr == 110 == buf.ptr and taken.size == 16 and min(found) >= 94


def test_draws_are_those_of_sample() -> None:
    with buffer(40, capacity=64) as buf, PackSlots(N, buf.row_nbytes) as slots:
        found, _ = pack(buf, _core.take_snapshot(memory(buf)), slots, 99)
        assert found == ids(buf.sample(N, seed=99))


def test_a_pack_that_does_not_fit_is_refused() -> None:
    with buffer(4) as buf, buffer(4, num_lanes=2) as other, PackSlots(N, buf.row_nbytes) as slots:
        taken, to = _core.take_snapshot(memory(buf)), slots.mapping
        codec = packed_codec(buf.row_nbytes)
        with pytest.raises(ValueError, match="slot must lie in"):
            _core.pack(memory(buf), taken, 0, codec, 0, N, to, to.nbytes - 8)
        with pytest.raises(ValueError, match="slot must lie in"):
            _core.pack(memory(buf), taken, 0, codec, 0, 1 << 62, *slots.place(0))
        with pytest.raises(ValueError, match="must be of these rows"):
            _core.pack(memory(other), taken, 0, codec, 0, N, *slots.place(0))
        with pytest.raises(ValueError, match="must be of these rows"):
            _core.pack(memory(buf), taken, 0, packed_codec(buf.row_nbytes + 8), 0, N, *slots.place(0))


# -- waiting


def waiter(buf: Any, slots: PackSlots, floor: int, out: list[Any]) -> threading.Thread:
    """A thread that waits for rows; `out` has a watch, and gets what the wait returned, and when."""

    def run() -> None:
        found = _core.wait_added(memory(buf), floor, 30.0, slots.mapping, STOP_AT)
        out.extend([found, out[0].s])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def asleep(buf: Any) -> None:
    """Return once somebody sleeps on these rows."""
    end = time.monotonic() + 10
    while not buf._open().mapping.load(_core.SHARED_WORDS) >> 32:
        assert time.monotonic() < end, "nobody waits"


@pytest.mark.parametrize("end", ["rows", "close", "stop"])
def test_whoever_waits_for_rows_is_woken_at_once(end: str) -> None:
    """By a wake-up, not at the end of the 100 ms it sleeps for."""
    assert median(seconds_until_woken(end) for _ in range(5)) < 0.09


def seconds_until_woken(end: str) -> float:
    with buffer(4) as buf, PackSlots(N, buf.row_nbytes) as slots:
        out: list[Any] = [Stopwatch()]
        thread = waiter(buf, slots, 10, out)
        asleep(buf)
        add(buf, 5)  # not enough: it goes on to sleep
        asleep(buf)
        assert len(out) == 1
        out[0] = Stopwatch()
        if end == "rows":
            add(buf, 1)
        elif end == "close":
            buf.cleanup()
        else:
            slots.mapping.store(STOP_AT, 1)
            _core.wake_waiters(memory(buf))
        thread.join(10)
        assert out[1] == {"rows": REACHED, "close": CLOSED, "stop": STOPPED}[end]
        return float(out[2])


def test_a_wait_ends() -> None:
    with buffer(4) as buf, PackSlots(N, buf.row_nbytes) as slots:
        start = time.monotonic()
        assert _core.wait_added(memory(buf), 5, 0.05, slots.mapping, STOP_AT) == TIMED_OUT
        assert 0.05 <= time.monotonic() - start < 5
        assert _core.wait_added(memory(buf), 4, 0.0, slots.mapping, STOP_AT) == REACHED
        with pytest.raises(IndexError):
            _core.wait_added(memory(buf), 5, 0.0, slots.mapping, slots.mapping.nbytes)


def test_writers_are_gone_only_if_there_were_some() -> None:
    with buffer(num_lanes=2) as buf:
        assert not _core.writers_gone(memory(buf))
        add(buf, 1)
        assert not _core.writers_gone(memory(buf))
        dead = 1 << 32 | 4_000_000  # no process has this number
        at = _core.HEADER_NBYTES + 32
        mine = buf._open().mapping.load(at)
        buf._open().mapping.store(at + _core.LANE_NBYTES, dead)
        assert not _core.writers_gone(memory(buf))
        buf._open().mapping.store(at, 0)
        assert _core.writers_gone(memory(buf))
        buf._open().mapping.store(at, mine)
        assert np.isfinite(buf.ptr)

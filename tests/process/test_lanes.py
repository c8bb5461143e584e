"""Lanes between processes: a stalled writer blocks nobody, a live one keeps its lane, a dead one's is free."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.process import rows
from tests.process.killing import in_child
from tests.timing import Stopwatch

import recollect as rc

pytestmark = pytest.mark.process


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A forked child at work; killed at the end if it still lives."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)


def shared(lanes: int = 2, capacity: int = 512) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create("shared", rows.SPACE, capacity=capacity, num_lanes=lanes, multiprocessing=True,
                                  maintain_segment_metadata=True)  # fmt: skip


def until(condition: Callable[[], Any], timeout_s: float = 200.0) -> None:
    """Come back when it holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        os.sched_yield()


def write_for_ever(buffer: rc.ReplayBuffer, lane: int) -> None:
    with buffer.on_lane(lane) as out:
        n = 0
        while True:
            out.extend(rows.block(lane, n, 7))
            out.append(rows.row(lane, n + 7))
            out.mark_segment_end()
            n += 8


def test_stalled_writer_blocks_nobody() -> None:
    with shared() as buffer, buffer.on_lane(1) as mine, child(lambda: write_for_ever(buffer, 0)) as pid:
        sampler = rc.StepSampler(buffer, 64, seed=0)
        until(lambda: buffer.stats().evicted > 1000)  # the ring is full: each write displaces
        n = 0
        for _ in range(25):  # stalled wherever it happens to be
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            start = Stopwatch()
            batch = buffer[...]
            rows.check_whole(batch)
            rows.check_order(batch)
            rows.check_whole(sampler.sample())
            buffer.get_segments()
            buffer.locate(...)
            mine.extend(rows.block(1, n, 16))
            mine.append(rows.row(1, n + 16))
            n += 17
            mine.mark_segment_end()
            assert start.s < 1.0
            with pytest.raises(rc.LaneBusyError, match=str(pid)):  # stalled is not dead
                buffer.on_lane(0)
            stalled_at = buffer.stats().offered
            os.kill(pid, signal.SIGCONT)
            os.waitid(os.P_PID, pid, os.WCONTINUED)
            until(lambda: buffer.stats().offered > stalled_at)  # noqa: B023


def test_dead_writers_lane_is_free_and_its_segment_ended() -> None:
    with shared() as buffer:
        ready, told = os.pipe()

        def work() -> None:
            buffer.append(rows.row(0, 0))
            buffer.append(rows.row(0, 1))
            os.write(told, b"x")
            signal.pause()

        with child(work) as pid:
            os.read(ready, 1)
            assert buffer.get_segments() == []  # open
            with pytest.raises(rc.SegmentOpenError, match="mark_segment_end"):
                buffer.dumps("/nowhere")
            with pytest.raises(rc.LaneBusyError, match=str(pid)):
                buffer.on_lane(0)
            with pytest.raises(rc.LaneBusyError, match=str(pid)):
                buffer.remove_at(0)
        assert buffer.get_segments() == [(0, 2)]  # ended at its last committed row
        with buffer.on_lane(0) as lane:
            assert lane.open_segment is None
            lane.append(rows.row(0, 2))
            lane.mark_segment_end()
        assert buffer.get_segments() == [(0, 2), (2, 3)]
        assert len(set(buffer.locate(...).segment.tolist())) == 2
        os.close(ready)
        os.close(told)


def test_every_lane_taken_is_said_with_the_pid() -> None:
    with shared(1) as buffer:
        ready, told = os.pipe()

        def work() -> None:
            buffer.append(rows.row(0, 0))
            os.write(told, b"x")
            signal.pause()

        with child(work) as pid:
            os.read(ready, 1)
            with pytest.raises(rc.LaneBusyError, match=f"{pid}.*num_lanes"):
                buffer.append(rows.row(0, 1))
        buffer.append(rows.row(0, 1))
        assert buffer[...]["number"].tolist() == [0, 1]
        os.close(ready)
        os.close(told)


def test_who_closes_without_having_written_leaves_the_lanes_of_others() -> None:
    def refused() -> None:
        with pytest.raises(rc.LaneBusyError, match=str(os.getppid())):
            buffer.append(rows.row(0, 1))

    with shared(1) as buffer:
        buffer.append(rows.row(0, 0))
        in_child(buffer.close)
        in_child(refused)


def test_index_order_is_lane_by_lane() -> None:
    with shared(3, 12) as buffer:
        for lane in (2, 0, 1):
            with buffer.on_lane(lane) as out:
                for n in range(6):
                    out.append(rows.row(lane, n))
        batch = buffer[...]
        assert batch["lane"].tolist() == np.repeat([0, 1, 2], 4).tolist()
        assert batch["number"].tolist() == [2, 3, 4, 5] * 3
        assert buffer.get_segments() == [(0, 4), (4, 8), (8, 12)]


def test_slices_beside_a_fast_writer_never_raise_index_errors() -> None:
    """A slice, `...` and negative indices mean the buffer of one moment, though its length dips at each write."""
    with shared(1, 64) as buffer, child(lambda: write_for_ever(buffer, 0)):
        until(lambda: buffer.stats().evicted > 1000)
        for _ in range(3000):
            rows.check_order(buffer[-20:])
            assert buffer[-1]["lane"] == 0
            buffer.locate(slice(-3, None))
            buffer.get_column("number")[-5:]

"""Forked children, other processes and threads: who may write where, and what they see."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.meanwhile import at_moment
from tests.replay.make import ROW_KINDS, block, create, numbers, sample

from recollect.errors import LaneBusyError, ReadOnlyError
from recollect.replay import ReplayBuffer

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.process


def run(context: Any, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns, or the error it raises, in another process."""
    mine, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, work, args), daemon=True)
    child.start()
    theirs.close()
    found = mine.recv() if mine.poll(30) else TimeoutError("the child said nothing")
    child.join()
    child.close()
    mine.close()
    if isinstance(found, Exception):
        raise found
    return found


def _child(pipe: Any, work: Callable[..., Any], args: Any) -> None:
    try:
        pipe.send(work(*args))
    except Exception as error:
        pipe.send(error)
    pipe.close()


class Peer:
    """Another process that does as it is told, so that the test decides who holds what and when."""

    def __init__(self, context: Any, buffer: ReplayBuffer) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, buffer), daemon=True)
        self.process.start()
        theirs.close()

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        self.pipe.send((work, args))
        if not self.pipe.poll(30):
            raise TimeoutError("the peer said nothing")
        found = self.pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(30)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()


def _serve(pipe: Any, buffer: ReplayBuffer) -> None:
    while (told := pipe.recv()) is not None:
        work, args = told
        try:
            pipe.send(work(buffer, *args))
        except Exception as error:
            pipe.send(error)


def append_all(buffer: ReplayBuffer, values: list[int]) -> int:
    for v in values:
        buffer.append(sample(v))
    return os.getpid()


def extend_one(buffer: ReplayBuffer, values: list[int]) -> None:
    buffer.extend(block(values))


def claim_and_append(buffer: ReplayBuffer, k: int, v: int) -> None:
    buffer.on_lane(k).append(sample(v))


def overwrite_first(buffer: ReplayBuffer, v: int) -> None:
    buffer.set_at(0, sample(v))


def drop_first(buffer: ReplayBuffer) -> None:
    buffer.remove_at(0)


# -- fork of memory that belongs to one process


@pytest.mark.parametrize("capacity", [4, None])
def test_a_forked_child_reads_what_it_inherited(capacity: int | None) -> None:
    with create("memory", directory="", capacity=capacity, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([1, 2]))
        buffer.append(sample(3))

        def look() -> Any:
            place = buffer.locate(...)
            return numbers(buffer), buffer.get_segments(), place.step.tolist(), buffer.stats().live

        assert run(FORK, look) == ([1, 2, 3], [(0, 2)], [0, 1, 0], 3)


def test_writing_in_a_forked_child_raises() -> None:
    with create("memory", directory="", maintain_segment_metadata=True) as buffer:
        buffer.append(sample(1))
        buffer.mark_segment_end()
        writes: list[Callable[[], Any]] = [
            lambda: buffer.append(sample(2)),
            lambda: buffer.extend(block([2])),
            lambda: buffer.set_at(0, sample(2)),
            lambda: buffer.remove_at(0),
            lambda: buffer.clear(),
            lambda: buffer.on_lane(0),
        ]
        for write in writes:
            with pytest.raises(ReadOnlyError, match="process that made it"):
                run(FORK, write)
        buffer.append(sample(3))  # the parent's own is as it was
        assert numbers(buffer) == [1, 3]


# -- lanes between processes


@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_a_lane_belongs_to_one_live_process(kind: str, context: Any, tmp_path: Path) -> None:
    with create(
        kind, directory=tmp_path, capacity=8, multiprocessing=True, maintain_segment_metadata=True
    ) as buffer:
        with Peer(context, buffer) as peer:
            pid = peer.do(append_all, [1, 2])
            for write in (
                lambda: buffer.append(sample(9)), lambda: buffer.extend(block([9])), lambda: buffer.on_lane(0),
                lambda: buffer.set_at(0, sample(9)), lambda: buffer.remove_at(0), lambda: buffer.clear(),
            ):  # fmt: skip
                with pytest.raises(LaneBusyError, match=str(pid)):
                    write()
            assert numbers(buffer) == [1, 2] and buffer.get_segments() == [] and buffer.open_segment is None
        buffer.append(sample(3))  # it has ended: its lane is free and its segment closed
        assert numbers(buffer) == [1, 2, 3]
        assert buffer.get_segments() == [(0, 2)] and buffer.open_segment == (2, 3)


def test_each_process_claims_a_lane_of_its_own() -> None:
    with create("shared", directory="", capacity=12, num_lanes=3, multiprocessing=True,
                maintain_segment_metadata=True) as buffer:  # fmt: skip
        buffer.append(sample(1))
        with Peer(FORK, buffer) as one, Peer(SPAWN, buffer) as two:
            one.do(append_all, [10, 11])
            two.do(append_all, [20])
            buffer.append(sample(2))
            assert numbers(buffer) == [1, 2, 10, 11, 20]
            assert buffer.open_segment == (0, 2) and buffer.get_segments() == []
            with Peer(FORK, buffer) as three, pytest.raises(LaneBusyError, match="no lane is free"):
                three.do(append_all, [30])
            with pytest.raises(LaneBusyError, match="lane 1"):
                buffer.on_lane(1)
            one.do(extend_one_after_end, [12])
            assert buffer.get_segments() == [(2, 4), (4, 5)]


def extend_one_after_end(buffer: ReplayBuffer, values: list[int]) -> None:
    buffer.mark_segment_end()
    buffer.extend(block(values))


def test_a_killed_process_loses_its_lane_and_its_segment_ends() -> None:
    kept: dict[str, Any] = {"multiprocessing": True, "maintain_segment_metadata": True}
    with (
        create("shared", directory="", capacity=8, num_lanes=2, **kept) as buffer,
        Peer(SPAWN, buffer) as peer,
    ):
        peer.do(claim_and_append, 1, 5)
        with pytest.raises(LaneBusyError, match=str(peer.process.pid)):
            buffer.on_lane(1)
        peer.kill()
        assert buffer.get_segments() == [(0, 1)]
        with buffer.on_lane(1) as lane:
            lane.append(sample(6))
            assert numbers(buffer) == [5, 6]
            assert lane.open_segment == (1, 2) and buffer.locate(1).step == 0


def forked(work: Callable[[], Any]) -> int:
    """How a forked child ends that does `work` and is not done within ten seconds if it waits for ever."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own would wait for Python to go on
        signal.alarm(10)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_thread_had_locked_when_it_was_forked_does_not_hold_up_a_child() -> None:
    """Forked at each moment of a change in place, which holds its lanes: the child looks at them for a free one."""
    with create("shared", directory="", capacity=12, num_lanes=3, multiprocessing=True) as buffer:
        buffer.extend(block([1, 2, 3]))
        ended: list[int] = []

        def append_and_change() -> None:
            buffer.append(sample(8))
            buffer.set_at(-1, sample(9))

        for n in range(100):
            with at_moment(n, lambda: ended.append(forked(append_and_change))) as meanwhile:
                buffer.set_at([0, 2], block([n, n]))
            if not meanwhile.happened:
                break
            assert set(ended) == {0} and numbers(buffer)[:3] == [n, 2, n] and 9 in numbers(buffer)
        assert n == len(ended) >= 4


def test_rows_that_another_process_made_room_for_are_read(tmp_path: Path) -> None:
    """A file without bound grows by pieces; a reader has mapped none of those that came later."""
    with (
        create("memmap", directory=tmp_path, capacity=None, multiprocessing=True) as buffer,
        Peer(FORK, buffer) as peer,
    ):
        for first in range(0, 6_000, 1_500):
            peer.do(append_all, list(range(first, first + 1_500)))
            assert numbers(buffer) == list(range(first + 1_500))
            assert buffer.storage.get([first])["x"].tolist() == [first]


def test_edits_reach_lanes_that_nobody_holds() -> None:
    with create("shared", directory="", capacity=8, num_lanes=2, multiprocessing=True) as buffer:
        buffer.append(sample(1))
        with buffer.on_lane(1) as lane:
            lane.extend(block([2, 3]))
        with Peer(FORK, buffer) as peer:
            with pytest.raises(LaneBusyError, match=str(os.getpid())):
                peer.do(overwrite_first, 9)
            with pytest.raises(LaneBusyError, match=str(os.getpid())):
                peer.do(drop_first)
            peer.do(append_all, [4])  # lane 1 is free
        buffer.set_at([0, -1], block([7, 8]))
        assert numbers(buffer) == [7, 2, 3, 8]


def test_a_forked_child_gives_back_a_lane_that_its_parent_had_kept() -> None:
    with create("shared", directory="", capacity=8, num_lanes=2, multiprocessing=True) as buffer:
        with buffer.on_lane(1) as lane:
            lane.extend(block([5]))
            peer = Peer(FORK, buffer)
        with peer:
            peer.do(overwrite_first, 9)
            with buffer.on_lane(1) as lane:  # it was borrowed for the change alone
                lane.append(sample(6))
        assert numbers(buffer) == [9, 6]


def test_a_row_is_written_by_its_number_only_where_its_lane_is_free() -> None:
    with create("shared", directory="", capacity=8, num_lanes=2, multiprocessing=True) as buffer:
        with Peer(FORK, buffer) as peer:
            peer.do(claim_and_append, 1, 5)
            with pytest.raises(LaneBusyError, match=str(peer.process.pid)):
                buffer.storage.set(4, sample(9))
            assert numbers(buffer) == [5]
        buffer.storage.set(4, sample(9))
        assert numbers(buffer) == [9]


def test_a_change_gives_back_a_lane_that_was_kept_before() -> None:
    with create("shared", directory="", capacity=8, num_lanes=2, multiprocessing=True) as buffer:
        with buffer.on_lane(1) as lane:
            lane.extend(block([5]))
        buffer.set_at(0, sample(9))
        with Peer(FORK, buffer) as peer:
            peer.do(claim_and_append, 1, 6)
        assert numbers(buffer) == [9, 6]


def test_a_forked_child_has_no_open_segment_yet() -> None:
    with create("shared", directory="", capacity=8, num_lanes=2, multiprocessing=True,
                maintain_segment_metadata=True) as buffer:  # fmt: skip
        buffer.append(sample(1))
        with Peer(FORK, buffer) as peer:
            assert peer.do(open_segment) is None
            peer.do(append_all, [2, 3])
            assert peer.do(open_segment) == (1, 3) and buffer.open_segment == (0, 1)


def open_segment(buffer: ReplayBuffer) -> tuple[int, int] | None:
    return buffer.open_segment


def test_counts_are_of_all_processes_together() -> None:
    with create("shared", directory="", capacity=4, num_lanes=2, multiprocessing=True) as buffer:
        buffer.extend(block([1, 2, 3]))
        with Peer(FORK, buffer) as peer:
            peer.do(append_all, [4, 5, 6])
            with pytest.raises(ValueError, match="y"):
                peer.do(append_wrong)
        stats = buffer.stats()
        assert (stats.offered, stats.live, stats.evicted, stats.rejected) == (7, 4, 2, 1)


def append_wrong(buffer: ReplayBuffer) -> None:
    buffer.append({"x": 1})


# -- threads


def in_threads(*works: Callable[[], Any]) -> None:
    """Run these at the same time; raise what any of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def guarded(work: Callable[[], Any]) -> None:
        try:
            start.wait(30)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for t in threads:
        t.start()
    for t in threads:
        t.join(50)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", [*ROW_KINDS, "test-list"])
def test_threads_share_a_lane_and_each_call_is_whole(kind: str, tmp_path: Path) -> None:
    n, size = 60, 5
    with create(kind, directory=tmp_path, capacity=4 * n * size, maintain_segment_metadata=True) as buffer:

        def work(t: int) -> Callable[[], None]:
            def extend_all() -> None:
                for i in range(n):
                    first = (t * n + i) * size
                    buffer.extend(block(list(range(first, first + size))))

            return extend_all

        in_threads(*map(work, range(4)))
        blocks = np.array(numbers(buffer)).reshape(-1, size)
        assert np.array_equal(blocks - blocks[:, :1], np.tile(np.arange(size), (4 * n, 1)))
        assert sorted(blocks[:, 0].tolist()) == list(range(0, 4 * n * size, size))
        assert buffer.get_segments() == [(i, i + size) for i in range(0, 4 * n * size, size)]
        for t in range(4):  # each thread's blocks in its own order
            own = [b for b in (blocks[:, 0] // size).tolist() if b // n == t]
            assert own == sorted(own)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_threads_with_lanes_of_their_own(kind: str, tmp_path: Path) -> None:
    with create(
        kind, directory=tmp_path, capacity=300, num_lanes=3, maintain_segment_metadata=True
    ) as buffer:

        def work(k: int) -> Callable[[], None]:
            def fill() -> None:
                with buffer.on_lane(k) as lane:
                    for i in range(150):
                        lane.append(sample(1_000 * k + i))
                        if i % 10 == 9:
                            lane.mark_segment_end()

            return fill

        in_threads(*map(work, range(3)))
        assert numbers(buffer) == [1_000 * k + i for k in range(3) for i in range(50, 150)]
        assert buffer.get_segments() == [(i, i + 10) for i in range(0, 300, 10)]
        assert buffer.locate(...).step.tolist() == list(range(10)) * 30


@pytest.mark.parametrize("kind", ["memory", "test-list"])
def test_readers_beside_a_writer_see_whole_samples_at_one_moment(kind: str) -> None:
    done = threading.Event()
    with create(kind, directory="", capacity=64) as buffer:
        buffer.extend(block(list(range(64))))

        def write() -> None:
            try:
                for v in range(64, 1_500):
                    buffer.append(sample(v))
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                found = numbers(buffer)  # checks each sample
                assert found == list(range(found[0], found[0] + len(found)))
                assert len(found) >= 32

        in_threads(write, read, read)
        assert numbers(buffer) == list(range(1_436, 1_500))

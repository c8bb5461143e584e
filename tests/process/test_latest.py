"""Latest between processes: attach from anywhere, one writer, deaths at every step, full speed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.means import needs_linux
from tests.meanwhile import at_every_moment, at_moment
from tests.process.actor import Actor
from tests.process.killing import in_child, killed_at, steps
from tests.timing import Stopwatch

import recollect as rc
from recollect import _core
from recollect.memory import segment as segments
from recollect.memory.latest import Latest, offsets_of
from recollect.memory.segment import registry

pytestmark = pytest.mark.process
LONG = 40.0
STAMPS_AT = segments.WORDS_AT + 64
HOLD_AT = segments.WORDS_AT + 4 * 64
WORDS = 4096


def value(n: int) -> list[Any]:
    return [np.full(WORDS, n, np.int64), np.full(3, n, np.int64)]


def empty() -> list[Any]:
    return value(-1)


def key(pid: int | None = None) -> int:
    """What a hold of a process's main thread has above the slot; of this process unless another is named."""
    pid = pid or os.getpid()
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) % (2**26 - 1) + 1
    return _core.own_word() >> 48 << 50 | start << 24 | pid << 2


def make(**kwargs: Any) -> Latest:
    return Latest.create([8 * WORDS, 24], **kwargs)


def read(box: Latest) -> tuple[int, int]:
    out = empty()
    version = box.latest(out)
    n = int(out[0][0])
    assert all((piece == n).all() for piece in out), "torn"
    return version, n


# -- attaching


def read_and_write(box: Latest) -> None:
    """In another process."""
    with box:
        assert read(box) == (1, 5)
        box.publish(value(6))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_attach_from(method: str) -> None:
    with make() as box:
        box.publish(value(5))
        box.release_lane()
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=read_and_write, args=(box,), daemon=True)
        child.start()
        child.join(LONG)
        assert child.exitcode == 0
        child.close()
        assert read(box) == (2, 6)


def test_attach_from_an_unrelated_process() -> None:
    script = (
        "import sys, numpy as np; from recollect.memory.latest import Latest; b = Latest.attach(sys.argv[1]);"
        "out = [np.zeros(4096, 'i8'), np.zeros(3, 'i8')]; print(b.latest(out), out[1].tolist())"
    )
    with make() as box:
        box.publish(value(5))
        command = [sys.executable, "-c", script, box.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
        assert done.stdout.strip() == "1 [5, 5, 5]"


def test_a_dead_owner_is_said() -> None:
    ours, theirs = os.pipe()
    in_child(lambda: os.write(theirs, pickle.dumps(make())))
    handle = os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    with pytest.raises(rc.AttachError, match="gone or closed it"):
        pickle.loads(handle)


# -- one writer


def test_another_live_writer_is_refused_by_name() -> None:
    with make() as box:
        box.publish(value(1))

        def work() -> None:
            with pytest.raises(rc.LaneBusyError, match=f"process {os.getppid()} writes this"):
                box.publish(value(2))
            assert read(box) == (1, 1)

        in_child(work)
        assert box.stats().writer_pid == os.getpid()
        box.release_lane()
        assert box.stats().writer_pid is None
        in_child(lambda: box.publish(value(2)))
        assert box.publish(value(3)) == 3  # a dead writer is replaced silently


def test_a_child_forked_while_a_thread_publishes_is_not_held_up() -> None:
    with make() as box:
        done = threading.Event()

        def publish() -> None:
            while not done.is_set():
                box.publish(value(1))

        def work() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            with pytest.raises(rc.LaneBusyError, match=str(os.getppid())):
                box.publish(value(2))

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            while not box.version:
                os.sched_yield()
            for _ in range(5):
                in_child(work)
        finally:
            done.set()
            thread.join()


def test_closing_lets_another_write() -> None:
    with make() as box:
        with pickle.loads(pickle.dumps(box)) as same:
            same.publish(value(1))
        name = box.name

        def refused() -> None:  # the process that published still has it open
            with pytest.raises(rc.LaneBusyError):
                box.publish(value(2))

        in_child(refused)

        def work() -> None:
            registry.clear()
            with Latest.attach(name) as mine:
                mine.publish(value(2))
            assert mine is not box and box.publish(value(3)) == 3  # of the same process, after close

        box.release_lane()
        in_child(work)


def test_a_process_that_closed_and_lives_on_is_no_writer() -> None:
    with make() as box:
        child = Actor(publish=lambda n: box.publish(value(n)), end=box.close)
        child.do("publish", 1)
        with pytest.raises(rc.LaneBusyError, match=str(child.pid)):
            box.publish(value(2))
        child.do("end")
        assert box.publish(value(2)) == 2 and read(box) == (2, 2)
        child.kill()


def test_who_does_not_write_gives_up_nothing() -> None:
    with make() as box:
        box.publish(value(1))
        for leave in (box.release_lane, box.close):
            in_child(leave)
        assert box.stats().writer_pid == os.getpid()


def test_in_another_process_cleanup_is_close() -> None:
    with make() as box:
        in_child(box.cleanup)
        box.publish(value(1))
        assert read(box) == (1, 1)


def test_a_waiter_hears_of_the_writers_death() -> None:
    with make() as box:
        ready, go = os.pipe(), os.pipe()

        def work() -> None:
            box.publish(value(1))
            os.write(ready[1], b"x")
            os.read(go[0], 1)

        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        assert not box.wait_newer(1, 0.15)  # alive, and looked at
        os.kill(pid, signal.SIGKILL)
        start = Stopwatch()
        with pytest.raises(rc.PeerDiedError, match=f"process {pid} is gone"):
            box.wait_newer(1, LONG)
        assert start.s < 1.0
        box.watch(lambda: False)
        with pytest.raises(rc.PeerDiedError, match=f"process {pid} is gone"):
            box.wait_newer(1, LONG)
        box.watch(lambda: True)  # somebody who starts another
        assert not box.wait_newer(1, 0.15)
        os.waitpid(pid, 0)
        assert read(box) == (1, 1)
        for fd in (*ready, *go):
            os.close(fd)


def test_a_waiter_hears_of_the_owners_death_if_nobody_writes() -> None:
    made: list[Latest] = []

    def begin() -> str:
        made.append(make())
        return made[0].name

    child = Actor(begin=begin)
    with Latest.attach(child.do("begin")) as box:
        assert not box.wait_newer(0, 0.15)  # alive, and looked at
        child.kill()
        start = Stopwatch()
        with pytest.raises(rc.PeerDiedError, match=f"owner: process {child.pid} is gone"):
            box.wait_newer(0, LONG)
        assert start.s < 1.0


# -- killed at every step


def test_a_writer_killed_at_every_step() -> None:
    with make() as box:
        in_child(lambda: box.publish(value(0)))
        version, last = 1, 0
        for step in steps():
            n = step + 1
            killed = killed_at(step, lambda n=n: box.publish(value(n)))
            found = read(box)
            assert found in ((version, last), (version + 1, n)), f"step {step}"
            version, last = found
            if not killed:
                assert found[1] == n and step >= 5
                break
        assert box.publish(value(77)) == version + 1 and read(box)[1] == 77


@pytest.mark.parametrize("patience", [2, 0])
def test_a_reader_killed_at_every_step(patience: int) -> None:
    """With no patience a reader holds its slot at once: it is killed with the hold, before it and after it."""
    with make() as box:
        box.native.set_patience(patience)
        left = set()
        for step in steps():
            box.publish(value(step))
            killed = killed_at(step, lambda: read(box))
            left.add(box.segment().mapping.load(HOLD_AT) != 0)
            for n in range(step + 1, step + 6):
                assert (
                    box.publish(value(n)) and read(box)[1] == n
                )  # with no patience this one steals the hold
            if not killed:
                assert step >= 2
                break
        assert box.segment().mapping.load(HOLD_AT) == 0 and left == ({False} if patience else {False, True})
        assert (box.stats().steals > 0) is (patience == 0)


@needs_linux
def test_a_live_readers_hold_is_left_alone() -> None:
    with make() as box:
        box.publish(value(3))
        mapping = box.segment().mapping
        alive = key(os.getppid())
        mapping.store(HOLD_AT, alive | 2)
        box.native.set_patience(0)
        assert read(box) == (1, 3) and mapping.load(HOLD_AT) == alive | 2  # nobody overtook: no need to steal
        del mapping


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_dead_readers_hold_stops_nobody(slot: int) -> None:
    with make() as box:
        mapping = box.segment().mapping
        in_child(lambda: box.segment().mapping.store(HOLD_AT, key() | slot + 1))
        hold = mapping.load(HOLD_AT)
        assert hold & 3 == slot + 1
        for n in range(20):
            box.publish(value(n))
            assert read(box) == (n + 1, n)
        assert mapping.load(HOLD_AT) == hold  # nobody needed it
        del mapping


def test_a_hold_that_was_taken_away_is_noticed() -> None:
    """While a reader copies much, its hold goes and the writer comes round to its slot, to the end of it."""
    sizes, end = [1 << 24, 8], time.monotonic() + 2 * LONG
    with Latest.create(sizes) as box:
        box.native.set_patience(0)
        mapping, offsets = box.segment().mapping, offsets_of(box.sizes)[1:]
        out: list[Any] = [np.empty(1 << 24, np.uint8), np.empty(1, np.int64)]
        for n in range(1, 4):
            box.publish([np.zeros(1 << 24, np.uint8), np.array([n])])
        n = 4
        while n < 28 or not box.stats().overtaken:  # where cores are few it may be done before anybody looks
            assert time.monotonic() < end
            seen: list[int] = []
            reader = threading.Thread(target=lambda seen=seen: seen.append(box.latest(out)))
            reader.start()
            while reader.is_alive() and not mapping.load(HOLD_AT):
                pass
            mapping.store(HOLD_AT, 0)
            for version in range(n, n + 3):
                box.native.publish([np.array([version])], offsets, [8])
            reader.join()
            assert seen == out[1].tolist(), "of another version than it says"
            n += 3


def test_neither_a_held_slot_nor_the_latest_is_written() -> None:
    with make() as box:
        mapping = box.segment().mapping
        data_at = box.segment().data_at
        for n in range(5):
            box.publish(value(n))
        slot = mapping.load(segments.WORDS_AT) & 3
        mapping.store(HOLD_AT, os.getpid() << 2 | slot + 1)
        for n in range(5, 20):
            latest = mapping.load(segments.WORDS_AT) & 3
            box.publish(value(n))
            assert mapping.load(segments.WORDS_AT) & 3 not in (slot, latest)
            held = mapping.view(data_at + slot * (8 * WORDS + 4096), 8 * WORDS).view(np.int64)
            assert (held == 4).all() and read(box) == (n + 1, n)
        del held, mapping


# -- at a moment of a read or of a write


def come_round(box: Latest, to_the_end: bool = True) -> None:
    """Two values, and a third to where the oldest is: that one whole, or all of it but the word that says so."""
    for _ in range(2):
        box.publish(value(box.version))
    if to_the_end:
        box.publish(value(box.version))
    else:
        box.release_lane()
        assert killed_at(1, lambda: box.publish(value(box.version)))


class Later:
    """Does `work` at every second moment: those of a read, but for the first one of each of its tries."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.passed = work, 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed % 2 == 0:
            self.work()


def load(box: Latest, at: int) -> int:
    return box.segment().mapping.load(at)


def store(box: Latest, at: int, word: int) -> None:
    box.segment().mapping.store(at, word)


@pytest.mark.parametrize("to_the_end", [True, False], ids=["whole", "half written"])
@pytest.mark.parametrize("patience", [2, 0])
def test_a_reader_notices_that_the_writer_came_round(patience: int, to_the_end: bool) -> None:
    for n in range(100):
        with make() as box:
            box.native.set_patience(patience)
            box.publish(value(0))
            with at_moment(n, lambda: come_round(box, to_the_end)) as meanwhile:
                version, found = read(box)
            assert found == version - 1, "of another version than it says"
        if not meanwhile.happened:
            break
    assert n >= 2


def test_a_reader_overtaken_twice_holds_its_slot() -> None:
    with make() as box:
        box.publish(value(0))
        with at_every_moment(Later(lambda: come_round(box))):
            assert read(box) == (7, 6)
        stats = box.stats()
        assert (stats.version, stats.overtaken, stats.holds, stats.steals, stats.reads) == (10, 2, 1, 0, 1)
        assert load(box, HOLD_AT) == 0


def test_the_hold_of_a_reader_that_lives_and_does_not_end_is_taken_over() -> None:
    with make() as box:
        box.publish(value(0))
        store(box, HOLD_AT, key(os.getppid()) | 2)
        end = time.monotonic() + LONG
        with at_every_moment(Later(lambda: come_round(box) if time.monotonic() < end else None)):
            version, found = read(box)
        assert found == version - 1 and (box.stats().steals, box.stats().holds) == (1, 1)


def test_a_held_value_is_whole_though_the_writer_stamps_its_slot_for_a_while() -> None:
    with make() as box:
        box.native.set_patience(0)
        box.publish(value(0))
        at = STAMPS_AT + 64 * (load(box, segments.WORDS_AT) & 3)
        stamp = load(box, at)
        with at_every_moment(Later(lambda: store(box, at, load(box, at) ^ 1))):
            assert read(box) == (1, 0)
        assert load(box, at) == stamp | 1 and box.stats().overtaken == 0


def test_a_reader_gives_up_no_hold_but_its_own() -> None:
    with make() as box:
        box.native.set_patience(0)
        box.publish(value(0))
        others = key(os.getppid()) | 2
        with at_moment(1, lambda: store(box, HOLD_AT, others)) as meanwhile:
            assert read(box) == (1, 0)
        assert meanwhile.happened and load(box, HOLD_AT) == others


def test_a_slot_that_is_held_once_it_was_chosen_stays_as_it_was() -> None:
    with make() as box:
        for n in range(3):
            box.publish(value(n))
        slot = ((load(box, segments.WORDS_AT) & 3) + 1) % 3
        stamp = load(box, STAMPS_AT + 64 * slot)
        with at_moment(0, lambda: store(box, HOLD_AT, key() | slot + 1)) as meanwhile:
            assert box.publish(value(3)) == 4
        at = box.segment().data_at + slot * (8 * WORDS + 4096)
        assert meanwhile.happened and load(box, at) == 0 and load(box, STAMPS_AT + 64 * slot) == stamp
        assert read(box) == (4, 3)


# -- full speed


def write_for_ever(box: Latest, go: Any) -> None:
    n = box.version
    while not go.poll():
        box.publish(value(n))
        n += 1


def read_for_ever(box: Latest, pipe: Any, seconds: float) -> None:
    end, before, reads = time.monotonic() + seconds, 0, 0
    try:
        while time.monotonic() < end:
            version, n = read(box)
            assert version >= before and (version == 0 or n == version - 1), (before, version, n)
            before, reads = version, reads + 1
        pipe.send((reads, box.stats()))
    except BaseException as error:
        pipe.send(repr(error))


def full_speed(seconds: float, patience: int) -> None:
    context = multiprocessing.get_context("fork")
    with make() as box:
        box.native.set_patience(patience)
        stop, stopped = context.Pipe(), []
        writer = context.Process(target=write_for_ever, args=(box, stop[1]))
        writer.start()
        pipes = [context.Pipe() for _ in range(3)]
        readers = [context.Process(target=read_for_ever, args=(box, theirs, seconds)) for _, theirs in pipes]
        for reader in readers:
            reader.start()
        for (ours, _), reader in zip(pipes, readers):
            assert ours.poll(seconds + LONG)
            found = ours.recv()
            assert not isinstance(found, str), found
            stopped.append(found)
            reader.join(LONG)
        stop[0].send(None)
        writer.join(LONG)
        for process in (writer, *readers):
            assert process.exitcode == 0
            process.close()
        for ours, theirs in [*pipes, stop]:
            ours.close()
            theirs.close()
        assert box.version > 100 and all(reads > 20 for reads, _ in stopped)
        assert patience or all(stats.holds > 0 for _, stats in stopped)


@pytest.mark.parametrize("patience", [2, 0])
def test_a_writer_at_full_speed_and_three_readers(patience: int) -> None:
    full_speed(0.7, patience)


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize("patience", [2, 0])
def test_a_minute_of_full_speed(patience: int) -> None:
    full_speed(60.0, patience)


def test_an_overtaken_reader_holds_and_ends() -> None:
    """A value so long that two writes fit into one copy of a reader that keeps being stopped."""
    context = multiprocessing.get_context("fork")
    with Latest.create([1 << 22]) as box:
        stop = context.Pipe()

        def write() -> None:
            n = 0
            while not stop[1].poll():
                box.publish([np.full(1 << 22, n % 251, np.uint8)])
                n += 1

        writer = context.Process(target=write)
        writer.start()
        assert box.wait_newer(0, LONG)
        ours, theirs = context.Pipe()

        def look() -> None:
            out = np.zeros(1 << 22, np.uint8)
            end = time.monotonic() + LONG
            while box.stats().holds == 0 and time.monotonic() < end:
                version = box.latest([out])
                assert (out == (version - 1) % 251).all()
            theirs.send(box.stats())

        reader = context.Process(target=look)
        reader.start()
        while reader.is_alive() and not ours.poll():
            os.kill(reader.pid, signal.SIGSTOP)  # type: ignore[arg-type]
            version = box.version
            box.wait_newer(version + 2, LONG)
            os.kill(reader.pid, signal.SIGCONT)  # type: ignore[arg-type]
            ours.poll(0.0005)
        stats = ours.recv()
        stop[0].send(None)
        for process in (reader, writer):
            process.join(LONG)
            assert process.exitcode == 0
            process.close()
        for end in (ours, theirs, *stop):
            end.close()
        assert stats.holds > 0 and stats.overtaken >= 2 and stats.reads > 0

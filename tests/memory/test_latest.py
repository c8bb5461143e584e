"""Latest: newest whole value; against a model, between threads, under bad input and after close."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.asleep import asleep_at

import recollect as rc
from recollect.memory.latest import Latest, latest_nbytes
from recollect.system import is_portable

pytestmark = pytest.mark.process
LONG = 30.0


def value(n: int) -> list[Any]:
    """Two pieces that both say which value they are of."""
    return [np.full(3, n, np.int64), np.full(5, n % 251, np.uint8)]


def empty() -> list[Any]:
    return [np.full(3, -1, np.int64), np.full(5, 255, np.uint8)]


def number_in(out: list[Any]) -> int:
    n = int(out[0][0])
    expected = value(n) if n >= 0 else empty()
    assert all(np.array_equal(a, b) for a, b in zip(out, expected)), out
    return n


def make(**kwargs: Any) -> Latest:
    return Latest.create([24, 5], **kwargs)


# -- against a model


class Machine(RuleBasedStateMachine):
    """Several objects over one segment, opened and closed at will; the model is the last number published."""

    def __init__(self) -> None:
        super().__init__()
        first = make()
        self.boxes, self.closed = [first], []
        self.version, self.newest, self.is_over = 0, -1, False

    def box(self, data: st.DataObject) -> Latest:
        return data.draw(st.sampled_from(self.boxes), label="box")

    @precondition(lambda self: self.boxes and not self.is_over)
    @rule(data=st.data(), n=st.integers(0, 1 << 40))
    def publish(self, data: st.DataObject, n: int) -> None:
        self.version += 1
        self.newest = n
        assert self.box(data).publish(value(n)) == self.version

    @precondition(lambda self: self.boxes and not self.is_over)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        out, box = empty(), self.box(data)
        assert box.latest(out) == self.version == box.version
        assert number_in(out) == self.newest

    @precondition(lambda self: self.boxes and not self.is_over)
    @rule(data=st.data(), behind=st.integers(0, 3))
    def wait(self, data: st.DataObject, behind: int) -> None:
        seen = max(0, self.version - behind)
        assert self.box(data).wait_newer(seen, 0.0) is (self.version > seen)

    @precondition(lambda self: self.boxes and not self.is_over)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        box = self.box(data)
        self.boxes.append(
            pickle.loads(pickle.dumps(box)) if data.draw(st.booleans()) else Latest.attach(box.name)
        )

    @precondition(lambda self: self.boxes and not self.is_over)
    @rule(data=st.data(), wrong=st.sampled_from(["pieces", "bytes", "strided"]))
    def refuse(self, data: st.DataObject, wrong: str) -> None:
        bad = value(7)
        if wrong == "pieces":
            bad = bad[:1]
        elif wrong == "bytes":
            bad[1] = np.zeros(6, np.uint8)
        else:
            bad[0] = np.zeros(6, np.int64)[::2]
        with pytest.raises(ValueError):
            self.box(data).publish(bad)

    @precondition(lambda self: len(self.boxes) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        box = self.box(data)
        self.boxes.remove(box)
        self.closed.append(box)
        box.close()
        box.close()

    @precondition(lambda self: len(self.boxes) > 1 and self.version > 5)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        box = self.box(data)
        self.boxes.remove(box)
        self.closed.append(box)
        box.cleanup()
        self.is_over = True

    @precondition(lambda self: self.is_over)
    @rule()
    def begin_again(self) -> None:
        self.teardown()
        self.__init__()  # type: ignore[misc]

    @invariant()
    def closed_ones_say_so(self) -> None:
        for box in self.closed[-2:] + (self.boxes if self.is_over else []):
            for call in (lambda: box.version, lambda: box.latest(empty()), lambda: box.publish(value(1)),  # noqa: B023
                         lambda: box.wait_newer(0, 0.0), box.stats, lambda: box.name, lambda: box.nbytes,  # noqa: B023
                         lambda: box.schema, lambda: pickle.dumps(box)):  # noqa: B023  # fmt: skip
                with pytest.raises(rc.ClosedError):
                    call()

    def teardown(self) -> None:
        for box in self.boxes:
            box.cleanup()


TestMachine = Machine.TestCase


# -- sizes and bad input


def test_sizes() -> None:
    with make(schema={"what": ["é"]}) as box:
        assert box.schema == {"what": ["é"]} and box.sizes == [24, 5]
        assert box.nbytes == latest_nbytes([24, 5], {"what": ["é"]}) == 4096 + 4096 + 3 * 4096
        assert len(pickle.dumps(box)) < 300


def test_stats_are_a_frozen_record() -> None:
    with make() as box:
        box.publish(value(1))
        box.latest(empty())
        s = box.stats()
        assert (s.version, s.nbytes, s.writer_pid, s.reads) == (1, box.nbytes, os.getpid(), 1)
        with pytest.raises(AttributeError):
            s.version = 2  # type: ignore[misc]


def test_a_value_of_nothing() -> None:
    with Latest.create([]) as box:
        assert [box.publish([]), box.publish([]), box.latest([])] == [1, 2, 2]


@pytest.mark.parametrize("sizes", [[-1], [1.5], ["a"]])
def test_bad_sizes(sizes: Any) -> None:
    with pytest.raises(ValueError, match="sizes"):
        Latest.create(sizes)


@pytest.mark.parametrize("timeout", [-1, -0.1, math.nan, math.inf, "1", True])
def test_bad_timeouts(timeout: Any) -> None:
    with make() as box, pytest.raises(ValueError, match="timeout"):
        box.wait_newer(0, timeout)
    with pytest.raises(ValueError, match="deadline"):
        make(deadline=timeout)


def test_reading_before_the_first_value_touches_nothing() -> None:
    with make() as box:
        out = empty()
        assert box.latest(out) == 0 and number_in(out) == -1


def test_a_read_only_destination_is_refused() -> None:
    with make() as box:
        box.publish(value(1))
        out = empty()
        out[0].setflags(write=False)
        with pytest.raises((ValueError, BufferError)):
            box.latest(out)


# -- threads and waits


def test_threads_take_turns_to_write() -> None:
    with make() as box:
        threads = [
            threading.Thread(target=lambda k=k: [box.publish(value(100 * k + i)) for i in range(50)])
            for k in range(4)
        ]
        for t in threads:
            t.start()
        seen = [0]
        while any(t.is_alive() for t in threads):
            out = empty()
            seen.append(box.latest(out))
            number_in(out)
        for t in threads:
            t.join()
        assert box.version == 200 and seen == sorted(seen)


def test_a_waiter_is_woken_by_a_value() -> None:
    with make(deadline=LONG) as box:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append((box.wait_newer(0), box.latest(empty()))))
        thread.start()
        segment = box.segment()
        while not segment.mapping.wake(256 + 5 * 64) and not is_portable():  # it sleeps
            os.sched_yield()
        start = time.monotonic()
        box.publish(value(3))
        thread.join(LONG)
        assert answers == [(True, 1)] and time.monotonic() - start < 5


def test_a_value_and_a_close_wake_who_sleeps() -> None:
    """The sleeper here has nothing but the wake-up: it does not look again every 100 ms as a wait does."""
    box, at = make(), 256 + 5 * 64
    for act in (lambda: box.publish(value(3)), box.cleanup):
        mapping = box.segment().mapping
        sleeper = asleep_at(mapping, at)
        act()
        sleeper.join(5)
        assert not sleeper.is_alive()
    del mapping, sleeper


def sleeping_in(box: Latest) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that sleeps in a wait for the first value, and the ClosedErrors that it got."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            box.wait_newer(0)
        except rc.ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mapping = box.segment().mapping
    while not mapping.wake(256 + 5 * 64) and not is_portable():
        os.sched_yield()
    return thread, errors


def test_a_waiter_hears_that_the_owner_closed() -> None:
    box = make(deadline=LONG)
    with pickle.loads(pickle.dumps(box)) as other:
        thread, errors = sleeping_in(other)
        box.cleanup()
        thread.join(5)
        assert len(errors) == 1


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "one of two objects"])
def test_a_waiter_hears_that_its_own_process_closed(shared: bool) -> None:
    box = make(deadline=LONG)
    other = pickle.loads(pickle.dumps(box)) if shared else None
    thread, errors = sleeping_in(box)
    box.close()
    thread.join(5)
    assert len(errors) == 1
    if other is not None:
        assert other.publish(value(1)) == 1  # that one goes on
        other.close()


def test_a_wait_ends_at_its_deadline() -> None:
    with make(deadline=0.02) as box:
        for timeout in (None, 0.0, 0.03):
            start = time.monotonic()
            assert box.wait_newer(0, timeout) is False
            assert time.monotonic() - start >= (0.02 if timeout is None else timeout)


def test_a_signal_is_heard_while_waiting() -> None:
    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with make(deadline=LONG) as box:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            start = time.monotonic()
            with pytest.raises(Stop):
                box.wait_newer(0)
            assert time.monotonic() - start < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

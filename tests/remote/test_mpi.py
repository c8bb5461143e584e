"""MpiCarrier without MPI: the contract, how a wait sleeps, and what is said when MPI is not there.

`Mpi` stands for mpi4py's module; a message is a tuple in its receiver's list. Real ranks are in `test_jobs`.
"""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recollect.errors import ClosedError, DeadlineError, MissingExtraError
from recollect.remote import MpiCarrier
from recollect.remote.carriers import mpi
from recollect.remote.carriers.by_name import carrier_of
from recollect.testing import CarrierContract
from recollect.testing.carrier_contract import eventually


class Request:
    """A send or a duplication; complete once `is_over` says so."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.Test = is_over


class Cut(RuntimeError):
    """What MPI says of a message that did not fit."""


class Message:
    def __init__(self, frame: bytes) -> None:
        self.frame = frame

    def Recv(self, into: Any) -> None:
        if len(into[0]) < len(self.frame):
            raise Cut("Message truncated")
        into[0][:] = memoryview(self.frame)


class Status:
    found: tuple[int, int, int]

    def Get_source(self) -> int:
        return self.found[0]

    def Get_tag(self) -> int:
        return self.found[1]

    def Get_count(self, unit: Any) -> int:
        return self.found[2]


class Comm:
    """One rank's end of a world of lists; a long message leaves when it is received, as MPI's do.

    `own` is the world of its duplicate.
    """

    def __init__(self, world: list[Any], rank: int, own: list[Any] | None = None) -> None:
        self.world, self.rank, self.own = world, rank, own
        self.all_came = True

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.world)

    def Idup(self) -> tuple[Comm, Request]:
        return Comm(self.own or [[] for _ in self.world], self.rank), Request(lambda: self.all_came)

    def Isend(self, message: Any, dest: int, tag: int) -> Request:
        entry = (self.rank, tag, bytes(message[0]))
        self.world[dest].append(entry)
        is_short = len(entry[2]) < 4096
        return Request(lambda: is_short or not any(e is entry for e in self.world[dest]))

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:
        for i, (its_source, its_tag, frame) in enumerate(self.world[self.rank]):
            if source in (-1, its_source) and tag in (-1, its_tag):
                del self.world[self.rank][i]
                status.found = (its_source, its_tag, len(frame))
                return Message(frame)
        return None


class Mpi(ModuleType):
    BYTE, ANY_SOURCE, ANY_TAG, THREAD_SERIALIZED = "byte", -1, -1, 2
    Status, Exception = Status, Cut
    level = 2
    is_initialized, is_finalized = True, False

    def Is_initialized(self) -> bool:
        return self.is_initialized

    def Is_finalized(self) -> bool:
        return self.is_finalized

    def Query_thread(self) -> int:
        return self.level


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Mpi:
    made = Mpi("mpi4py.MPI")
    made.COMM_WORLD = Comm([[]], 0)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=made))
    return made


def ends(n: int) -> list[MpiCarrier]:
    world, own = ([[] for _ in range(n)] for _ in range(2))
    world[0].append((0, 0, b"a message of the job"))
    return [MpiCarrier(Comm(world, rank, own), max_frame=2 << 20) for rank in range(n)]


def without_flusher(module: Mpi) -> None:
    """Let the thread end that sends what is left, as it does once MPI is finalised."""
    module.is_finalized = True
    eventually(lambda: not flushers())


def flushers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "recollect-mpi"]


class TestContract(CarrierContract):
    sees_close = False

    def make(self, n: int) -> list[Any]:
        return ends(n)


class Clock:
    """A clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.naps, self.yields = 0.0, [], []
        monkeypatch.setattr(mpi, "monotonic", lambda: self.now)
        monkeypatch.setattr(mpi, "sleep", self._nap)
        monkeypatch.setattr(mpi.os, "sched_yield", self._give_way)

    def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds

    def _give_way(self) -> None:
        self.yields.append(self.now)
        self.now += 0.0001


def test_a_wait_yields_for_two_milliseconds_and_then_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    (end,) = ends(1)
    clock = Clock(monkeypatch)
    with pytest.raises(DeadlineError, match=r"tag 3.*rank 0.*0\.1005 s"):
        end.recv(0, 3, 0.1005)
    assert clock.yields and max(clock.yields) < 0.002
    assert max(clock.naps) <= 0.001 and sum(clock.naps) == pytest.approx(0.0985, abs=0.001)
    assert clock.now == pytest.approx(0.1005)  # the last nap ends with the time


@pytest.mark.parametrize(("n_looks", "is_done"), [(20, True), (10**9, False)])
def test_frames_on_their_way_have_a_moment_when_a_carrier_is_closed(
    module: Mpi, monkeypatch: pytest.MonkeyPatch, n_looks: int, is_done: bool
) -> None:
    looks = count()
    monkeypatch.setattr(Comm, "Isend", lambda *args, **kw: Request(lambda: next(looks) > n_looks))
    a, _ = ends(2)
    handle = a.isend(1, 0, [bytes(8192)])
    without_flusher(module)
    looks = count()
    clock = Clock(monkeypatch)
    a.close()
    assert handle.is_done is is_done and max(clock.naps) <= 0.001 and clock.now <= 2.001


def test_a_send_that_is_not_received_ends_in_a_deadline_that_names_the_rank() -> None:
    a, b = ends(2)
    with pytest.raises(DeadlineError, match="send to rank 1"):
        a.send(1, 0, [bytes(8192)], 0.01)
    handle = a.isend(1, 0, [bytes(8192)])
    with pytest.raises(DeadlineError, match="send to rank 1"):
        handle.wait(0.01)
    for _ in range(2):
        b.recv(0, timeout=1.0)
    handle.wait(1.0)
    assert handle.frame is None  # its memory is free
    a.close()
    b.close()


def test_messages_of_the_job_are_never_seen() -> None:
    a, b = ends(2)
    with pytest.raises(DeadlineError):
        a.recv(timeout=0.0)
    b.send(0, 0, [b"a frame"])
    assert bytes(a.recv(timeout=1.0)[2]) == b"a frame"
    a.close()
    b.close()


def test_a_frame_moves_on_without_another_call() -> None:
    a, b = ends(2)
    handle = a.isend(1, 0, [bytes(8192)])
    b.recv(0, timeout=1.0)
    eventually(lambda: handle.is_done and not flushers())
    a.close()
    b.close()


def test_a_receive_lets_what_is_being_sent_move_on(module: Mpi) -> None:
    a, b = ends(2)
    handle = a.isend(1, 0, [bytes(8192)])
    without_flusher(module)
    b.recv(0, timeout=1.0)
    assert not handle.is_done
    with pytest.raises(DeadlineError):
        a.recv(timeout=0.0)
    assert handle.is_done
    a.close()
    b.close()


def test_too_large_a_frame_takes_no_memory_and_is_counted() -> None:
    a, b = ends(2)
    a.max_frame = 1 << 30
    for frame in (b"before", bytes((2 << 20) + 1), b"after"):
        a.isend(1, 0, [frame])
    tracemalloc.start()
    assert [bytes(b.recv(0, timeout=1.0)[2]) for _ in range(2)] == [b"before", b"after"]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert b.malformed == {0: 1}
    a.close()
    b.close()


def test_a_rank_that_never_makes_its_carrier_is_waited_for_a_while() -> None:
    comm = Comm([[], [], []], 0)
    comm.all_came = False
    with pytest.raises(DeadlineError, match="all 3 ranks"):
        MpiCarrier(comm, open_s=0.01)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("is_initialized", False, "initialised"),
        ("is_finalized", True, "initialised"),
        ("level", 1, "threads"),
    ],
)
def test_mpi_must_be_ready_for_it(module: Mpi, name: str, value: Any, text: str) -> None:
    setattr(module, name, value)
    with pytest.raises(RuntimeError, match=text):
        MpiCarrier()


def test_the_name_is_one_carrier_over_the_world(module: Mpi) -> None:
    first = carrier_of("mpi")
    assert first is carrier_of("mpi") and (first.rank, first.size) == (0, 1)
    first.close()
    second = carrier_of("mpi")
    assert second is not first
    second.close()


def test_two_threads_that_ask_for_it_at_once_make_one(module: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks make one: a second would wait for them in vain."""
    both, duplicate = threading.Barrier(2), Comm.Idup

    def slow(comm: Comm) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread, in vain
        return duplicate(comm)

    monkeypatch.setattr(Comm, "Idup", slow)
    with ThreadPoolExecutor() as pool:
        a, b = pool.map(carrier_of, ["mpi", "mpi"])
    assert a is b
    a.close()


def test_mpi_is_entered_by_one_thread_at_a_time_whatever_their_carriers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, both, probe = [0, 0], threading.Barrier(2), Comm.Improbe

    def slow(comm: Comm, *args: Any) -> Any:
        inside[0] += 1
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # for the other thread, in vain
        inside[1] = max(inside)
        inside[0] -= 1
        return probe(comm, *args)

    monkeypatch.setattr(Comm, "Improbe", slow)
    made = [*ends(1), *ends(1)]
    with ThreadPoolExecutor() as pool:
        for waiting in [pool.submit(carrier.recv, timeout=0.0) for carrier in made]:
            assert isinstance(waiting.exception(10.0), DeadlineError)
    assert inside == [0, 1]


def test_what_mpi_may_still_read_outlives_the_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "monotonic", count().__next__)
    carrier, _ = ends(2)
    frame = weakref.ref(carrier.isend(1, 0, [bytes(8192)]))
    carrier.close()
    del carrier, _
    gc.collect()
    handle = frame()
    assert handle is not None and len(handle.frame) == 8192


def test_after_finalize_no_thread_calls_mpi(module: Mpi) -> None:
    a, b = ends(2)
    handle = a.isend(1, 0, [bytes(8192)])
    assert len(flushers()) == 1
    without_flusher(module)
    assert not handle.is_done
    b.recv(0, timeout=1.0)
    a.close()


def test_a_carrier_that_is_closed_leaves_mpi_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (end,) = ends(1)
    looked: list[Any] = []
    monkeypatch.setattr(Comm, "Improbe", lambda *args: looked.append(args))
    end.close()
    with pytest.raises(ClosedError):
        end.recv(timeout=0.0)
    assert looked == []


def test_a_missing_mpi_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mpi4py", Package("mpi4py"))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(MissingExtraError, match=r'cannot load.*pip install "recollect\[mpi\]".*"local"'):
        carrier_of("mpi")

"""Ring between processes: handles, roles, waits, deaths, and the end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest
from tests.asleep import asleep_at
from tests.meanwhile import at_every_moment, at_moment
from tests.process.actor import Actor
from tests.process.killing import in_child
from tests.timing import Stopwatch

import recollect as rc
from recollect.memory import ring as rings
from recollect.memory import segment as segments
from recollect.memory.ring import Ring
from recollect.memory.segment import registry

pytestmark = pytest.mark.process
SLOT = {"obs": ((4,), "float32"), "n": ((), "int64")}


def put(ring: Ring, number: int) -> None:
    views = ring.claim(5.0)
    views["obs"][:], views["n"][...] = number, number
    ring.commit(number)


def get(ring: Ring, timeout: float = 5.0) -> int:
    taken = ring.take(timeout)
    number = int(taken.values["n"])
    assert taken.values["obs"].tolist() == [number] * 4
    ring.release()
    return number


def writer_of(ring: Ring) -> Actor:
    return Actor(put=lambda n: put(ring, n), claim=lambda: ring.claim(0.0) and None)


def write_one(ring: Ring) -> None:
    with ring:
        put(ring, 7)


class TestBeforeSleeping:
    """What comes after the last look at the slots and before the sleep is seen at once, not at the next wake-up."""

    def test_a_reader_looks_again(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            with at_every_moment(lambda: len(passed) == 2 and put(ring, 7)) as passed:
                assert get(ring) == 7
            assert len(passed) == 4, "it looks, is about to sleep, looks again, is about to take"

    def test_a_writer_looks_again(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            put(ring, 1)
            put(ring, 2)
            with at_every_moment(lambda: get(ring)) as passed:
                put(ring, 3)
            assert len(passed) == 1
            assert [get(ring), get(ring)] == [2, 3]


class TestTheOldest:
    """Whatever the other side does while it is looked for, and between finding and taking it."""

    def test_is_found_though_younger_ones_come_where_is_still_to_be_looked(self) -> None:
        with Ring.create(SLOT, 3) as ring:
            with at_moment(0, lambda: (put(ring, 1), put(ring, 2))) as meanwhile:
                assert get(ring) == 1
            assert meanwhile.happened and get(ring) == 2

    def test_is_that_of_all_lanes(self) -> None:
        with Ring.create(SLOT, 3, 2) as ring, ring.on_lane(0) as first, ring.on_lane(1) as second:
            for n, lane in enumerate((second, second, first, second, first)):
                put(lane, n)
            taken = []
            for _ in range(5):
                it = ring.take(0.0)
                taken.append((it.sequence, int(it.values["n"])))
                ring.release()
            assert [n for _, n in taken] == [0, 1, 2, 3, 4]
            assert all(before < after for (before, _), (after, _) in pairwise(taken))

    def test_is_dropped_before_it_is_taken(self) -> None:
        for n in range(100):
            with Ring.create(SLOT, 2, policy="drop_oldest") as ring:
                put(ring, 1)
                put(ring, 2)
                with at_moment(n, lambda: put(ring, 3)) as meanwhile:
                    found = [get(ring), get(ring)]
                assert found == ([2, 3] if n < 2 else [1, 2]), "in order"
                s = ring.stats()
                assert s.written == s.delivered + s.dropped + s.available
            if not meanwhile.happened:
                break
        assert n == 4

    @pytest.mark.parametrize("n", [0, 1], ids=["while it is looked for", "when it was found"])
    def test_is_taken_before_it_is_dropped(self, n: int) -> None:
        with Ring.create(SLOT, 2, policy="drop_oldest") as ring:
            put(ring, 1)
            put(ring, 2)
            with at_moment(n, lambda: ring.take(5.0)) as meanwhile:
                put(ring, 3)
            assert meanwhile.happened and [get(ring), get(ring)] == [1, 3]
            s = ring.stats()
            assert (s.written, s.delivered, s.dropped, s.available) == (3, 2, 1, 0)


class TestHandles:
    @pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
    def test_attach_from(self, method: str) -> None:
        with Ring.create(SLOT, 2, 2) as ring:
            context: Any = multiprocessing.get_context(method)
            child = context.Process(target=write_one, args=(ring.on_lane(1),), daemon=True)
            child.start()
            taken = ring.take(40.0)
            assert (taken.lane, taken.info[0], int(taken.values["n"])) == (1, 7, 7)
            child.join(40)
            assert child.exitcode == 0
            child.close()

    def test_attach_from_an_unrelated_process_by_name(self) -> None:
        script = (
            "import sys; from recollect.memory.ring import Ring; r = Ring.attach(sys.argv[1]);"
            "r.claim()['n'][...] = 5; r.commit(5); r.close()"
        )
        with Ring.create(SLOT, 2) as ring:
            subprocess.run([sys.executable, "-c", script, ring.name], timeout=200, check=True)
            assert int(ring.take(0.0).values["n"]) == 5

    def test_small_whatever_the_schema(self) -> None:
        slot = {f"leaf{i}": ((2,), "float32") for i in range(200)}
        with Ring.create(slot, 2) as ring, ring.on_lane(0) as lane:
            assert len(pickle.dumps(ring)) < 300
            assert len(pickle.dumps(lane)) < 300

    def test_a_stale_one_is_refused(self) -> None:
        ring = Ring.create(SLOT, 2)
        handle = pickle.dumps(ring)
        name = ring.name
        ring.cleanup()
        with pytest.raises(rc.AttachError, match="gone|closed"):
            pickle.loads(handle)
        with Ring.create(SLOT, 2), pytest.raises(rc.AttachError, match="gone"):  # the number was reused
            Ring.attach(name)
        with pytest.raises(rc.AttachError, match="name"):
            Ring.attach("nonsense")

    def test_the_first_difference_is_named(self) -> None:
        def attach_wrong(name: segments.Name) -> None:
            registry.clear()
            for wrong, said in (
                (replace(name, schema_hash="0" * 32), "layout hash must be 0000"),
                (replace(name, kind="latest"), "kind must be ring, found latest"),
                (replace(name, nonce=b"f" * 16), "gone"),
            ):
                with pytest.raises(rc.AttachError, match=said):
                    Ring.attach(str(wrong))

        with Ring.create(SLOT, 2) as ring:
            in_child(lambda: attach_wrong(segments.Name.parse(ring.name, "ring")))

    def test_sealed(self) -> None:
        with Ring.create(SLOT, 2) as ring, pytest.raises(PermissionError):
            os.ftruncate(ring.segment().fd, 0)

    def test_at_home_it_is_the_same_ring(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            again = pickle.loads(pickle.dumps(ring))
            put(again, 3)
            again.close()
            assert get(ring) == 3


class TestRoles:
    def test_one_writer_a_lane_and_one_reader(self) -> None:
        with Ring.create(SLOT, 2, 2) as ring:
            child = Actor(put=lambda n: put(ring, n), get=lambda: get(ring), give=ring.release_lane)
            child.do("put", 1)
            child.do("get")
            with pytest.raises(rc.LaneBusyError, match=str(child.pid)):
                put(ring.on_lane(0), 2)
            with pytest.raises(rc.LaneBusyError, match=str(child.pid)):
                ring.take(0.0)
            put(ring, 2)  # lane=None: the first free one
            assert ring.stats().lanes[1].written == 1
            child.do("give")
            with ring.on_lane(0) as lane:
                put(lane, 3)
            child.kill()
            assert (get(ring), get(ring)) == (2, 3)

    def test_every_lane_taken(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            child = writer_of(ring)
            child.do("put", 1)
            with pytest.raises(rc.LaneBusyError, match=f"{child.pid}.*more lanes"):
                ring.claim(0.0)
            child.kill()
            put(ring, 2)

    def test_closing_gives_them_up(self) -> None:
        with Ring.create(SLOT, 2) as ring, ring.on_lane(0) as lane:
            child = Actor(
                put=lambda n: put(ring, n), take=lambda: int(ring.take().values["n"]), end=ring.close
            )
            child.do("put", 1)
            assert child.do("take") == 1
            child.do("end")  # the process lives on
            assert ring.wait(0.0)
            put(lane, 2)
            assert [get(ring), get(ring)] == [1, 2]  # also what it took and did not release
            child.kill()

    def test_a_child_has_turns_of_its_own(self) -> None:
        """Though a thread of its parent, which it has not inherited, was waiting in its turn to read."""
        got: list[int] = []
        with Ring.create(SLOT, 2) as ring:
            waiter = threading.Thread(target=lambda: got.append(get(ring, 60.0)))
            waiter.start()
            while not ring.native.reader():
                os.sched_yield()

            def work() -> None:
                with pytest.raises(rc.LaneBusyError, match=str(os.getppid())):
                    ring.take(1.0)
                put(ring, 1)

            try:
                in_child(work)
            finally:
                if not ring.stats().written:
                    put(ring, 0)
                waiter.join()
        assert got == [1]

    def test_a_child_has_no_slot_of_its_parents(self) -> None:
        with Ring.create(SLOT, 3) as ring:
            put(ring, 1)
            views, taken = ring.claim(5.0), ring.take(5.0)
            child = Actor(put=lambda n: put(ring, n), get=lambda: get(ring))
            views["obs"][:], views["n"][...] = 2, 2
            assert int(taken.values["n"]) == 1
            ring.commit(2)
            ring.release()
            ring.release_lane()
            ring.native.release_reader()
            child.do("put", 3)
            assert (child.do("get"), child.do("get")) == (2, 3)
            child.kill()

    def test_a_zombie_is_dead(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            child = writer_of(ring)
            child.do("claim")
            os.kill(child.pid, signal.SIGKILL)
            os.waitid(
                os.P_PID, child.pid, os.WEXITED | os.WNOWAIT
            )  # dead, and nobody has asked for its status
            put(ring, 1)
            assert ring.stats().abandoned == 1
            os.waitpid(child.pid, 0)
            child.pipe.close()

    def test_threads_take_turns(self) -> None:
        with Ring.create(SLOT, 4) as ring:

            def write() -> None:
                for _ in range(500):
                    with lock:
                        put(ring, 1)

            lock = threading.Lock()  # claim to commit is one thread's business; the ring orders the calls
            threads = [threading.Thread(target=write) for _ in range(3)]
            for t in threads:
                t.start()
            assert sum(get(ring) for _ in range(1500)) == 1500
            for t in threads:
                t.join()


class TestWaits:
    @pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
    def test_timeouts_must_be_finite(self, bad: float) -> None:
        with Ring.create(SLOT, 2) as ring:
            for call in (ring.claim, ring.take, ring.wait):
                with pytest.raises(ValueError, match="timeout"):
                    call(bad)

    def test_dead_writer(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            child = writer_of(ring)
            child.do("put", 1)
            child.do("claim")
            child.kill()
            assert get(ring) == 1  # what is there is read first
            start = Stopwatch()
            with pytest.raises(rc.PeerDiedError):
                ring.take(30.0)
            assert start.s < 1.0

    def test_writer_that_dies_while_waited_for(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            child = writer_of(ring)
            child.do("put", 1)
            get(ring)
            start = Stopwatch()
            killer = threading.Timer(0.3, lambda: os.kill(child.pid, signal.SIGKILL))
            killer.start()
            with pytest.raises(rc.PeerDiedError):
                ring.take(30.0)
            assert start.wall_s >= 0.25 and start.s < 1.3
            killer.join()
            child.kill()

    @pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
    def test_dead_reader(self, policy: str) -> None:
        """`block` says so; the others go on without it, and its value is delivered again."""
        with Ring.create(SLOT, 2, policy=policy) as ring:
            for n in (1, 2):
                put(ring, n)
            reader = Actor(take=lambda: int(ring.take(1.0).values["n"]))
            first = reader.do("take")
            reader.kill()
            if policy == "block":
                start = Stopwatch()
                with pytest.raises(rc.PeerDiedError):
                    ring.claim(30.0)
                assert start.s < 1.0
            else:
                put(ring, 3)
                put(ring, 4)
            assert get(ring) == first == 1

    def test_wakes_a_sleeper(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            child, took = Actor(get=lambda: get(ring, 30.0)), list[float]()
            for n in range(5):
                child.tell("get")
                while not ring.native.reader():  # it is there
                    os.sched_yield()
                threading.Event().wait(0.02)  # well asleep
                start = Stopwatch()
                put(ring, n)
                assert child.answer() == n
                took.append(start.s)
            assert median(took) < 0.06  # not at the next look, 100 ms later
            child.kill()

    @pytest.mark.parametrize("by", ["work", "cleanup", "close"])
    @pytest.mark.parametrize("who", ["reader", "reader of that lane", "writer"])
    def test_wakes_who_says_that_it_waits(self, who: str, by: str) -> None:
        """The sleeper here has nothing but the wake-up: it does not look again every 100 ms as a wait does."""
        ring = Ring.create(SLOT, 2)
        with ring.on_lane(0) as lane:
            put(lane, 1)
            ring.take()
            mapping, at = ring.segment().mapping, segments.WORDS_AT + (200 if who == "writer" else 64)
            word = mapping.load(at) & 0xFFFFFFFF  # above it in ring.hpp: who waits
            mapping.store(at, word | (2 if who == "reader of that lane" else 1) << 32)
            sleeper = asleep_at(mapping, at)
            if by == "cleanup":
                ring.cleanup()
            elif by == "close":
                lane.close()  # then nobody in this process uses the ring
                ring.close()
            elif who == "writer":
                ring.release()
            else:
                put(lane, 2)
            sleeper.join(5)
            assert not sleeper.is_alive()
            del mapping, sleeper
        ring.cleanup()

    def test_signals_are_seen(self) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGALRM, stop)
        try:
            with Ring.create(SLOT, 2) as ring:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                start = Stopwatch()
                with pytest.raises(KeyboardInterrupt):
                    ring.take(30.0)
                assert start.s < 1.0
        finally:
            signal.signal(signal.SIGALRM, old)

    def test_the_gil_is_free(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            waiter = threading.Thread(target=lambda: ring.wait(0.3))
            waiter.start()
            n = 0
            while waiter.is_alive():
                n += 1
            waiter.join()
            assert n > 1000


class ClosedMeanwhile:
    """The native ring of an object that another thread closes as soon as a call of it has returned."""

    def __init__(self, ring: Ring) -> None:
        self.native, self.close_ring, self.first = ring.native, ring.close, ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.native, name)
        if name not in ("claim", "take", self.first):
            return real

        def call(*args: Any) -> Any:
            outcome = real(*args)
            self.close_ring()
            return outcome

        return call


class TestTheEnd:
    def test_closing_wakes_everybody(self) -> None:
        assert (
            median(self.seconds_until_closed() for _ in range(5)) < 0.06
        )  # not at the next look, 100 ms later

    def seconds_until_closed(self) -> float:
        """Until a writer that waits for a place hears that there will be none."""
        ring = Ring.create(SLOT, 2)
        other = ring.on_lane(0)

        def fill() -> None:
            for n in range(3):
                other.claim(30.0)
                other.commit(n)

        writer = Actor(fill=fill)
        writer.tell("fill")
        while ring.available() < 2:
            os.sched_yield()
        threading.Event().wait(0.02)
        start = Stopwatch()
        ring.cleanup()
        with pytest.raises(rc.ClosedError):
            writer.answer()
        took_s = start.s
        other.close()
        writer.kill()
        return took_s

    def test_in_another_process_cleanup_is_close(self) -> None:
        with Ring.create(SLOT, 2) as ring:
            in_child(ring.cleanup)
            put(ring, 1)
            assert get(ring) == 1

    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "one of two objects"])
    @pytest.mark.parametrize("call", ["take", "wait", "claim"])
    def test_waiter_in_another_thread(self, call: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not shared:
            monkeypatch.setattr(rings, "LOOK_S", 20.0)  # it is woken, and does not find out at its next look
        ring = Ring.create(SLOT, 2)
        other = ring.on_lane(0) if shared else None
        put(ring, 1)
        get(ring)
        for n in (1, 2) if call == "claim" else ():
            put(ring, n)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                getattr(ring, call)(30.0)
            except rc.ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        threading.Event().wait(0.03)  # well asleep
        start = Stopwatch()
        ring.close()
        thread.join(15)
        assert len(errors) == 1
        assert start.s < 1.0
        if other is not None:
            put(other, 3) if call != "claim" else other.skip()  # the other one goes on
            assert other.available() == 1
            other.cleanup()

    @pytest.mark.parametrize("call", ["claim", "take", "try_take_slot"])
    def test_what_is_got_while_it_is_closed_is_given_up_again(self, call: str) -> None:
        """Else the lane, or the reading, would be this process's as long as it lives."""
        ring = Ring.create(SLOT, 2)
        put(ring, 1)
        ring.release_lane()
        late = Ring.attach(ring.name)
        late.native = ClosedMeanwhile(late)  # type: ignore[assignment]
        with pytest.raises(rc.ClosedError):
            getattr(late, call)()
        assert (ring.native.writer(0), ring.native.reader()) == (0, 0)
        assert get(ring) == 1
        ring.cleanup()

    @pytest.mark.parametrize("call", ["commit", "release"])
    def test_who_ends_what_somebody_closes_hears_that_it_is_closed(self, call: str) -> None:
        ring = Ring.create(SLOT, 2)
        put(ring, 1)
        ring.claim()
        ring.take()
        ring.native = ClosedMeanwhile(ring)  # type: ignore[assignment]
        ring.native.first = "is_closed"
        with pytest.raises(rc.ClosedError):
            getattr(ring, call)()

    def test_views_outlive_it(self) -> None:
        ring = Ring.create(SLOT, 2)
        views = ring.claim()
        views["obs"][:] = 1
        ring.commit()
        with pytest.raises(ValueError, match="read-only"):
            views["obs"][:] = 2
        mine, seen = ring.claim(), ring.take().values
        with pytest.raises(ValueError, match="read-only"):
            seen["obs"][:] = 2
        with pytest.raises(ValueError):
            seen["obs"].flags.writeable = True
        ring.cleanup()
        assert seen["obs"].tolist() == [1, 1, 1, 1]
        with pytest.raises(ValueError, match="read-only"):
            mine["obs"][:] = 2
        ring.cleanup()  # twice
        ring.close()
        for call in (ring.claim, ring.commit, ring.take, ring.release, ring.skip, ring.wait, ring.available,
                     ring.stats, ring.release_lane, lambda: ring.name, lambda: pickle.dumps(ring)):  # fmt: skip
            with pytest.raises(rc.ClosedError):
                call()

    def test_dropped_without_close_leaves_nothing(self) -> None:
        put(Ring.create(SLOT, 2), 1)


def test_the_order_of_calls() -> None:
    with Ring.create(SLOT, 3) as ring:
        for call in (ring.commit, ring.release, ring.skip):
            with pytest.raises(rc.EmptyError):
                call()
        put(ring, 1)
        put(ring, 2)
        assert ring.take().sequence == ring.take().sequence == 1
        ring.release()
        ring.skip()
        s = ring.stats()
        assert (s.written, s.delivered, s.skipped, s.available) == (2, 1, 1, 0)
        assert ring.claim()["obs"] is not ring.claim()["obs"]
        with pytest.raises(rc.DeadlineError, match="value"):
            ring.take(0.0)


def test_a_commit_says_whether_its_value_was_dropped() -> None:
    with Ring.create(SLOT, 2, policy="drop_newest") as ring:
        for kept in (True, False, False):
            ring.claim()
            assert ring.commit() is kept
        assert (ring.stats().written, ring.stats().dropped) == (3, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_slots": 1},
        {"num_slots": 2.0},
        {"num_lanes": 0},
        {"policy": "drop"},
        {"deadline": -1},
        {"slot": {"s": object()}},
    ],
)
def test_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(wrong))}|s:"):
        Ring.create(**{"slot": SLOT, **wrong})


def soak(n: int, policy: str) -> None:
    """Two writers at full speed, killed now and then; every value whole, each lane in order, counts right."""
    with Ring.create({"words": ((32,), "int64")}, 4, 2, policy=policy) as ring:

        def write(lane: int, first: int) -> None:
            with ring.on_lane(lane) as mine:
                number = first
                while True:
                    mine.claim(30.0)["words"][:] = number
                    mine.commit(number)
                    number += 1

        def start(lane: int, first: int) -> Actor:
            actor = Actor(write=write)
            actor.tell("write", lane, first)
            return actor

        rng = np.random.default_rng(0)
        last, starts = [-1, -1], [0, 0]
        writers = [start(0, 0), start(1, 0)]
        for i in range(n):
            taken = ring.take(30.0)
            words = taken.values["words"]
            number = int(words[0])
            assert (words == number).all() and taken.info[0] == number
            assert number > last[taken.lane]
            if policy == "block":
                assert number == last[taken.lane] + 1 or number % 1_000_000 == 0
            last[taken.lane] = number
            ring.release()
            if rng.random() < 30 / n:
                lane = int(rng.integers(2))
                writers[lane].kill()
                starts[lane] += (
                    1  # not told from what was taken: the one just killed may still be in the ring
                )
                writers[lane] = start(lane, starts[lane] * 1_000_000)
            del i
        for writer in writers:
            writer.kill()
        s = ring.stats()
        assert s.written == s.delivered + s.dropped + s.available


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
def test_writers_at_full_speed(policy: str) -> None:
    soak(8_000, policy)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
def test_writers_at_full_speed_for_long(policy: str) -> None:
    soak(2_000_000, policy)

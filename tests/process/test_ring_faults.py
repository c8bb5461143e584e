"""A writer or a reader of a Ring killed at every step: the next one goes on, nothing is torn, every count adds up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.process.killing import EVERY, killed_at, steps

import recollect as rc
from recollect.memory.ring import Ring, Taken

pytestmark = pytest.mark.process
POLICIES = ["block", "drop_oldest", "drop_newest"]


def make(policy: str, filled: int, slots: int = 3) -> Ring:
    ring = Ring.create({"words": ((8,), "int64")}, slots, policy=policy)
    put(ring, range(filled))
    return ring


def put(ring: Ring, numbers: range) -> None:
    for number in numbers:
        ring.claim(0.0)["words"][:] = number
        ring.commit(number)
    ring.release_lane()


def number_of(taken: Taken) -> int:
    (number,) = set(taken.values["words"].tolist())
    assert taken.info[0] == number, "torn"
    return int(number)


def drain(ring: Ring) -> list[int]:
    found = []
    with suppress(rc.DeadlineError, rc.PeerDiedError):
        while True:
            found.append(number_of(ring.take(0.0)))
            ring.release()
    return found


def check_counts(ring: Ring) -> None:
    s = ring.stats()
    assert s.written == s.delivered + s.dropped + s.skipped + s.available


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("filled", [1, 3])
def test_writer_killed_anywhere(policy: str, filled: int) -> None:
    if policy == "block" and filled == 3:
        pytest.skip("a full ring blocks")
    n_steps = 0
    for step in steps():
        with make(policy, filled, 4 if policy == "block" else 3) as ring:
            before = ring.stats().abandoned
            killed = killed_at(step, lambda: put(ring, range(10, 12)))
            n_steps += killed
            check_counts(ring)  # before anybody made good what it left
            put(ring, range(20, 21))  # whoever comes next claims at once
            check_counts(ring)
            assert ring.stats().abandoned - before <= killed
            found = drain(ring)
            check_counts(ring)
            assert ring.stats().available == 0
            assert found == sorted(found)
            assert set(found) <= {*range(filled), 10, 11, 20}
            assert ring.stats().written - (ring.stats().dropped) == len(found)
            if policy == "block":  # nothing is lost but what was not committed
                old = [*range(filled), *[x for x in (10, 11) if x in found], 20]
                assert found == old and (11 not in found or 10 in found)
            if policy != "drop_newest":
                assert found[-1] == 20
        if not killed:
            break
    assert n_steps >= (13 if policy == "block" else 9)


def read(ring: Ring, n: int) -> None:
    for _ in range(n):
        number_of(ring.take(0.0))
        ring.release()


@pytest.mark.parametrize("skips", [False, True])
def test_reader_killed_anywhere(skips: bool) -> None:
    def work(ring: Ring) -> None:
        ring.skip() if skips else read(ring, 1)
        read(ring, 1)

    n_steps = 0
    for step in steps():
        with make("block", 3) as ring:
            killed = killed_at(step, lambda: work(ring))
            n_steps += killed
            check_counts(ring)  # before anybody made good what it left
            gone = ring.stats().delivered + ring.stats().skipped
            found = drain(ring)
            # Delivered again rather than lost: what is left is a tail of what was written.
            assert found == list(range(3))[3 - len(found) :]
            assert len(found) >= 1 + (step == 0) * 2
            assert 0 <= len(found) - (3 - gone - 1) <= 1 or not killed
            check_counts(ring)
            assert ring.stats().written == ring.stats().delivered + ring.stats().skipped == 3
            put(ring, range(5, 8))  # all slots are free again
            assert drain(ring) == [5, 6, 7]
        if not killed:
            break
    assert n_steps >= 12


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
def test_killed_while_taking_over(policy: str, every: int) -> None:
    """The successor of a dead writer or reader dies too, at every step of making good what the first one left."""

    def both(first: Callable[[Ring], object], second: Callable[[Ring], object]) -> int:
        n = 0
        for step in steps(every=every):
            for again in steps(every=every):
                with make(policy, 2, 5 if policy == "block" else 4) as ring:
                    killed = killed_at(step, lambda: first(ring))
                    died = killed and killed_at(again, lambda: second(ring))
                    n += died
                    check_counts(ring)
                    put(ring, range(20, 21))
                    check_counts(ring)
                    assert ring.stats().abandoned <= killed + died
                    found = drain(ring)
                    check_counts(ring)
                    assert found == sorted(set(found)) and ring.stats().available == 0
                if not died:
                    break
            if not killed:
                return n
        return n

    def one_put(ring: Ring) -> None:
        put(ring, range(10, 11))

    def come_and_go(ring: Ring) -> None:
        ring.claim(0.0)
        ring.release_lane()

    def another_put(ring: Ring) -> None:
        put(ring, range(11, 12))

    assert both(one_put, come_and_go) > 10 // every**2
    assert both(one_put, another_put) > 10 // every**2
    assert both(lambda ring: read(ring, 1), lambda ring: read(ring, 1)) > 10 // every**2

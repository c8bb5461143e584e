"""Deadlines behind one timer."""

from __future__ import annotations

from recollect.rollout.event_loop import Deadlines
from recollect.testing import FakeClock


def test_deadlines_come_in_their_order_and_those_taken_back_wake_nothing() -> None:
    clock, seen = FakeClock(), []
    deadlines = Deadlines(clock)
    later = deadlines.put(30.0, seen.append, "thirty")
    for when in (20.0, 10.0):
        deadlines.put(when, seen.append, when)
    clock.advance(10.0)
    assert seen == [10.0]
    clock.advance(10.0)
    assert seen == [10.0, 20.0]
    deadlines.take_back(later)
    deadlines.take_back(later)
    clock.advance(100.0)
    assert seen == [10.0, 20.0] and clock.n_timers == 0
    entries = [deadlines.put(500.0, seen.append, "no") for _ in range(65)]
    assert clock.n_timers == 1
    for entry in entries:
        deadlines.take_back(entry)
    assert clock.n_timers == 0  # none is needed for what was taken back
    deadlines.put(600.0, seen.append, "after")
    clock.advance(1000.0)
    assert seen[2:] == ["after"]

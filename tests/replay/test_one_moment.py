"""A call sees all lanes at one moment, though it looks at them one after the other and writers come in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.meanwhile import at_every_moment, at_moment
from tests.replay.make import block, create, sample

from recollect.errors import ContentionError
from recollect.replay import ReplayBuffer
from recollect.sampling import StepSampler

LANES = 4


def per_lane(values: Any) -> list[int]:
    return np.bincount(np.asarray(values, np.int64) // 1000, minlength=LANES).tolist()


def by_segments(buffer: ReplayBuffer) -> list[int]:
    return [sum(b - a for a, b in buffer.get_segments() or [])]


LOOKS: dict[str, Callable[[ReplayBuffer], list[int]]] = {
    "a read of all": lambda buffer: per_lane(buffer[...]["x"]),
    "places": lambda buffer: per_lane(buffer.locate(...).row * 1000 // 50),
    "a length": lambda buffer: [len(buffer)],
    "segments": by_segments,
    "counts": lambda buffer: [buffer.stats().live],
}


class World:
    """A buffer of lanes that all hold as many samples; `add` gives each of them one more, the last lane first."""

    def __init__(self, run: int = 50) -> None:
        self.buffer = create(
            "memory", directory="", capacity=LANES * run, num_lanes=LANES, maintain_segment_metadata=True
        )
        self.lanes = [self.buffer.on_lane(k) for k in range(LANES)]
        self.add()

    def add(self) -> None:
        for k in reversed(range(LANES)):
            self.lanes[k].extend(block([1000 * k]))


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_write_to_all_lanes_is_seen_in_all_or_in_none(look: Callable[[ReplayBuffer], list[int]]) -> None:
    for n in range(100):
        world = World()
        before = look(world.buffer)
        with at_moment(n, world.add) as meanwhile:
            seen = look(world.buffer)
        assert seen in (before, look(world.buffer))
        if not meanwhile.happened:
            break
    assert n >= LANES - 1


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_look_is_repeated_until_no_writer_came_in_between(
    look: Callable[[ReplayBuffer], list[int]],
) -> None:
    world, times = World(), 0

    def add() -> None:
        nonlocal times
        times += 1
        if times <= 40:
            world.add()

    with at_every_moment(add):
        seen = look(world.buffer)
    assert seen == look(world.buffer) and times > 40


def test_what_left_a_lane_already_seen_is_not_counted_with_what_came_to_a_later_one() -> None:
    """One is removed, and then one added: there never is one more."""
    for n in range(100):
        world = World()
        world.add()  # so that the oldest is not the newest: the lane's cursor stays
        before = len(world.buffer)

        def remove_and_add(world: World = world) -> None:
            world.buffer.remove_at(0)
            world.lanes[-1].extend(block([3000]))

        with at_moment(n, remove_and_add) as meanwhile:
            assert len(world.buffer) in (before, before - 1)
        if not meanwhile.happened:
            break
    assert n >= LANES - 1


def test_writers_that_never_pause_do_not_keep_draws_out() -> None:
    """Then each lane is seen at a moment of its own within the call; samples are whole all the same."""
    world = World(run=5000)
    sampler = StepSampler(world.buffer, 8, seed=0)
    with at_every_moment(world.add) as passed:
        drawn = sampler.sample()
        assert len(passed) > 256
        assert 0 < len(world.buffer) <= LANES * len(passed)
    np.testing.assert_array_equal(drawn["y"][:, 0], drawn["x"])


def test_a_read_that_never_agrees_with_the_count_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clock = World(), iter(np.arange(0.0, 100.0, 0.3))
    monkeypatch.setattr("recollect.replay.buffer.time.monotonic", lambda: next(clock))
    tries: list[None] = []

    def lapped(*args: Any, **kwargs: Any) -> None:
        tries.append(None)
        raise IndexError("counted otherwise")

    monkeypatch.setattr(world.buffer.engine, "read", lapped)
    with pytest.raises(ContentionError, match="1 s"):
        world.buffer[-1]
    assert len(tries) == 4, "for 1 s, of a clock that goes on 0.3 s at every look"


@pytest.mark.parametrize("appends", ["....|", "...|..|..", "|...", "|."])
def test_an_open_segment_is_one_that_was_open(appends: str) -> None:
    """Whatever ends, begins and is overwritten while it is looked for."""

    def begin() -> ReplayBuffer:
        buffer = create("memory", directory="", capacity=8, maintain_segment_metadata=True)
        for i in range(6):
            buffer.append(sample(i))
        return buffer

    def go_on(buffer: ReplayBuffer) -> list[Any]:
        states = [buffer.open_segment]
        for i, what in enumerate(appends):
            buffer.append(sample(10 + i)) if what == "." else buffer.mark_segment_end()
            states.append(buffer.open_segment)
        return states

    possible = go_on(begin())
    for n in range(100):
        buffer = begin()
        with at_moment(n, lambda: go_on(buffer)) as meanwhile:  # noqa: B023
            seen = buffer.open_segment
        assert seen in possible, n
        if not meanwhile.happened:
            break
    assert n >= 3

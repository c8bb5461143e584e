"""Reads, draws and epochs while a writer comes in between any two of their steps: whole, and of one moment.

Each piece of work is done once for each moment of it, and at that moment the buffer is changed. What comes out must
be what the buffer held before, or what it holds after; what is there throughout may not be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.meanwhile import at_moment

import recollect as rc

RUN = 12
SPACE = {
    "x": ((), "int64"),
    "again": ((5,), "int64"),
    "reward": ((), "float64"),
    "next_obs": ((), "int64"),
    "terminated": ((), "bool"),
}
OFFSETS = (-2, 1)
Window = tuple[int, ...]


def rows(first: int, n: int) -> dict[str, Any]:
    x = np.arange(first, first + n)
    again = np.repeat(x[:, None], 5, 1)
    return {"x": x, "again": again, "reward": x * 1.0, "next_obs": x, "terminated": np.zeros(n, bool)}


def xs(batch: Any) -> Any:
    """The numbers of a batch of any shape, each sample of it whole."""
    assert (batch["again"] == batch["x"][..., None]).all(), "torn"
    return batch["x"]


class World:
    """A buffer whose lanes are full rings of short episodes, the last one open, and what may happen to it."""

    def __init__(self, lanes: int, run: int = RUN, lengths: tuple[int, ...] = (4, 5, 1, 2, 3)) -> None:
        self.lanes, self.run = lanes, run
        self.buffer = rc.ReplayBuffer.create(
            "memory", SPACE, capacity=lanes * run, num_lanes=lanes, maintain_segment_metadata=True
        )
        self.out = [self.buffer.on_lane(k) for k in range(lanes)]
        self.next, self.lengths = 1, lengths

    def fresh(self) -> World:
        """As it was made; to make another takes ten times as long."""
        self.buffer.clear()
        self.each(*self.lengths[:-1])
        for lane in self.out:
            self.add(lane, self.lengths[-1])
        return self

    def add(self, lane: Any, n: int) -> None:
        """Some samples one by one, of the episode that is open."""
        new = rows(self.next, n)
        for i in range(n):
            lane.append({k: v[i] for k, v in new.items()})
        self.next += n

    def each(self, *lengths: int) -> None:
        """Whole episodes in every lane."""
        n, ends = sum(lengths), np.cumsum(lengths) - 1
        for lane in self.out:
            lane.mark_segment_end()
            lane.extend(rows(self.next, n), ends=np.isin(np.arange(n), ends))
            self.next += n

    def go_on(self) -> None:
        for lane in self.out:
            self.add(lane, 5)

    def singles(self) -> None:
        self.each(*[1] * (self.run + 2))

    def lap(self) -> None:
        self.each(*[3] * (self.run // 3 + 1))

    def move_the_rare_one(self) -> None:
        self.each(*[1] * 30, 3, *[1] * 15)
        self.each(*[1] * 48)

    def take_one_of_two(self) -> None:
        self.each(*[1] * 48)

    def lap_one_lane(self) -> None:
        self.add(self.out[-1], self.run + 3)

    def overwrite(self) -> None:
        index = [0, 3, -1]
        self.buffer[index] = rows(self.next, len(index))
        self.next += len(index)

    def remove(self) -> None:
        self.out[0].mark_segment_end()
        self.buffer.remove_at([1, 4])

    def clear(self) -> None:
        self.buffer.clear()

    def clear_and_refill(self) -> None:
        self.buffer.clear()
        self.each(3, 1, 4, 2)


HAPPENINGS = [World.go_on, World.singles, World.lap, World.lap_one_lane, World.overwrite, World.remove, World.clear,
              World.clear_and_refill]  # fmt: skip


@dataclass(frozen=True)
class Held:
    """What a buffer holds: numbers, and where each is."""

    x: list[int]
    place: list[tuple[int, int]]
    segment: list[int]
    step: list[int]

    @classmethod
    def of(cls, buffer: rc.ReplayBuffer) -> Held:
        where = buffer.locate(...)
        places = list(zip(where.row.tolist(), where.generation.tolist(), strict=True))
        return cls(xs(buffer[...]).tolist(), places, where.segment.tolist(), where.step.tolist())

    def run_of(self, i: int) -> range:
        return range(self.segment.index(self.segment[i]), i + self.segment[i:].count(self.segment[i]))

    def windows(self, length: int, pad: bool, burn_in: int = 0) -> dict[int, Window]:
        """By its first number, what each window shows (0 where nothing is), then segment and step."""
        found = {}
        for i in range(len(self.x)):
            run = self.run_of(i)
            if run.stop - i >= length or (pad and i == run.start):
                shown = [self.x[j] if j in run else 0 for j in range(i - burn_in, i + length)]
                found[self.x[i]] = (*shown, self.segment[i], self.step[i])
        return found

    def stack(self, i: int) -> Window:
        """The frames from OFFSETS[0] to OFFSETS[1] round a sample, edges repeated, then which are valid."""
        run, frames = self.run_of(i), range(i + OFFSETS[0], i + OFFSETS[1] + 1)
        shown = [self.x[min(max(j, run.start), run.stop - 1)] for j in frames]
        return (*shown, *(int(j in run) for j in frames))

    def stacks(self) -> dict[int, Window]:
        return {x: self.stack(i) for i, x in enumerate(self.x)}

    def returns(self) -> dict[int, Window]:
        """Of two steps, fewer at a segment's end: the sum of rewards, and the next observation of the last."""
        shown = {}
        for i, x in enumerate(self.x):
            steps = [self.x[j] for j in range(i, min(i + 2, self.run_of(i).stop))]
            shown[x] = (x, sum(steps), steps[-1])
        return shown

    def places(self) -> dict[int, Window]:
        return {x: (x, *self.place[i]) for i, x in enumerate(self.x)}

    def alone(self) -> dict[int, Window]:
        return {x: (x,) for x in self.x}


def columns(*parts: Any) -> list[Window]:
    """Arrays of B side by side, as B tuples of int."""
    if not len(parts[0]):
        return []
    stacked = np.concatenate([np.asarray(p, np.int64).reshape(len(p), -1) for p in parts], axis=1)
    return [tuple(row) for row in stacked.tolist()]


# -- the work: what it gives for each sample or window, and what that should be, by its first number


@dataclass(frozen=True)
class Work:
    """`do(buffer)` gives what it saw; `shown(held)` all that there is to see, by first number."""

    do: Callable[[rc.ReplayBuffer], list[Window]]
    shown: Callable[[Held], dict[int, Window]]
    is_epoch: bool = False
    index: tuple[int, ...] | None = None  # it reads these, and no others
    is_all: bool = False


def sequences(
    length: int,
    burn_in: int = 0,
    pad: bool = False,
    epoch: bool = False,
    n: int = 3,
    prioritized: bool = False,
) -> Work:
    def frames(found: Any) -> list[Window]:
        batch, meta = found
        assert (meta["valid_mask"] == (batch["x"] > 0)).all()
        return columns(xs(batch), meta["segment"], meta["step"])

    def do(buffer: rc.ReplayBuffer) -> list[Window]:
        sampler: rc.BatchSampler = rc.SequenceSampler(buffer, n, length, burn_in, pad, seed=3)
        if prioritized:
            sampler = rc.PrioritizedSampler(sampler, n, seed=3)
        if not epoch:
            return frames(sampler.sample_with_metadata())
        return [w for found in sampler.epoch_iter_with_metadata() for w in frames(found)]

    return Work(do, lambda held: held.windows(length, pad, burn_in), epoch)


def stacked(buffer: rc.ReplayBuffer) -> rc.FrameStackedBatch:
    return rc.FrameStackedBatch(buffer, -OFFSETS[0], OFFSETS[1])


def frames_of(found: Any) -> list[Window]:
    return columns(xs(found[0]), found[1]["slice_valid_mask"])


def drawn_stacks(buffer: rc.ReplayBuffer) -> list[Window]:
    return frames_of(rc.StepSampler(stacked(buffer), 5, seed=1).sample_with_metadata())


def epoch_of_stacks(buffer: rc.ReplayBuffer) -> list[Window]:
    sampler = rc.StepSampler(stacked(buffer), 5, seed=1)
    return [w for found in sampler.epoch_iter_with_metadata() for w in frames_of(found)]


def drawn(buffer: rc.ReplayBuffer) -> list[Window]:
    return columns(xs(rc.StepSampler(buffer, 5, seed=1).sample()))


def epoch(buffer: rc.ReplayBuffer) -> list[Window]:
    return [w for batch in rc.StepSampler(buffer, 5, seed=1).epoch_iter() for w in columns(xs(batch))]


def all_of(view: Callable[[rc.ReplayBuffer], Any]) -> Work:
    return Work(lambda buffer: columns(xs(view(buffer)[...])), Held.alone, is_all=True)


def returns(buffer: rc.ReplayBuffer) -> list[Window]:
    batch = rc.NStepBatch(buffer, 2, 1.0)[...]
    return columns(xs(batch), batch["reward"], batch["next_obs"])


def one_by_one(buffer: rc.ReplayBuffer) -> list[Window]:
    return [(int(xs(sample)),) for sample in buffer]


def labelled(buffer: rc.ReplayBuffer) -> list[Window]:
    batch, meta = rc.PrioritizedSampler(buffer, 6, seed=1).get_at_with_metadata(...)
    assert meta is not None
    return columns(xs(batch), meta["row"], meta["generation"])


def prioritized(buffer: rc.ReplayBuffer) -> list[Window]:
    batch, meta = rc.PrioritizedSampler(buffer, 6, seed=1).sample_with_metadata()
    assert meta is not None
    return columns(xs(batch), meta["row"], meta["generation"])


SOME = (0, 3, 7, -1)
WORKS = {
    "a draw": Work(drawn, Held.alone),
    "an epoch": Work(epoch, Held.alone, True),
    "a read": Work(lambda b: columns(xs(b[list(SOME)])), Held.alone, index=SOME),
    "a prioritized draw": Work(prioritized, Held.places),
    "sequences": sequences(2),
    "padded sequences": sequences(3, 2, True),
    "an epoch of sequences": sequences(2, epoch=True),
    "an epoch of padded sequences": sequences(3, 2, True, True),
    "prioritized sequences": sequences(2, n=6, prioritized=True),
    "padded prioritized sequences": sequences(3, 2, True, n=6, prioritized=True),
    "an epoch of prioritized sequences": sequences(3, 2, True, True, prioritized=True),
    "stacks": Work(drawn_stacks, Held.stacks),
    "an epoch of stacks": Work(epoch_of_stacks, Held.stacks, True),
    "a read of stacks": Work(
        lambda b: frames_of(stacked(b).get_at_with_metadata(list(SOME))), Held.stacks, index=SOME
    ),
}
VIEWS = {
    "all stacks": Work(lambda b: frames_of(stacked(b).get_at_with_metadata(...)), Held.stacks, is_all=True),
    "all": all_of(lambda b: b),
    "all with labels": Work(labelled, Held.places, is_all=True),
    "all of a slice": all_of(lambda b: b.get_slice(...)),
    "all of a combination": all_of(lambda b: rc.CombinedBatch([b])),
    "all of a transformation": all_of(lambda b: rc.TransformedBatch(b, lambda batch: batch)),
    "all returns": Work(returns, Held.returns, is_all=True),
    "one by one": Work(one_by_one, Held.alone, True),
}


def check(work: Work, before: Held, after: Held, seen: list[Window] | type[Exception]) -> None:
    """What was seen is of the one moment or of the other; an epoch misses nothing that is there throughout."""
    shown = [work.shown(held) for held in (before, after)]
    if seen is rc.EmptyError:
        assert not all(shown)
        return
    if seen is IndexError:
        assert work.index and len(after.x) <= max(work.index)
        return
    assert isinstance(seen, list)
    if work.is_epoch:
        known = set(shown[0].values()) | set(shown[1].values())
        assert set(seen) <= known and len(set(seen)) == len(seen)
        stay = set(before.places().values()) & set(after.places().values())
        throughout = {w for x, w in shown[0].items() if shown[1].get(x) == w and after.places()[x] in stay}
        assert throughout <= set(seen), "missed"
        starts = {x for x, window in [*shown[0].items(), *shown[1].items()] if window in seen}
        new = shown[1].keys() - set(before.x)
        assert not starts & new or starts >= new, "some of those that came later"
    else:
        assert any(set(seen) <= set(s.values()) for s in shown), f"{seen} is of neither of {shown}"
    if work.is_all:
        assert seen in [list(s.values()) for s in shown]
    if work.index:
        expected = [[s[held.x[i]] for i in work.index] for s, held in zip(shown, (before, after), strict=True)
                    if len(held.x) > max(work.index)]  # fmt: skip
        assert seen in expected


def run_through(
    work: Work, world: World, happens: Callable[[World], None], least: int, times: int = 1
) -> None:
    """Do the work once for each moment of it; with `times` it happens as often, one moment after the other."""
    for n in range(1000):
        before = Held.of(world.fresh().buffer)
        with at_moment(n, lambda: happens(world), times) as meanwhile:
            try:
                seen: Any = work.do(world.buffer)
            except (rc.EmptyError, IndexError) as error:
                seen = type(error) if type(error) is rc.EmptyError else IndexError
        check(work, before, Held.of(world.buffer), seen)
        if not meanwhile.happened:
            break
    assert n >= least, f"only {n} moments: are they still there?"


LANES = [(happens, 1) for happens in HAPPENINGS] + [(World.go_on, 2), (World.lap_one_lane, 2)]


@pytest.mark.parametrize(("happens", "lanes"), LANES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("name", WORKS)
def test_a_writer_at_every_moment(name: str, happens: Callable[[World], None], lanes: int) -> None:
    run_through(WORKS[name], World(lanes), happens, 1)


@pytest.mark.parametrize("name", ["a draw", "a prioritized draw", "sequences", "stacks"])
def test_a_writer_again_while_what_it_took_is_drawn_again(name: str) -> None:
    run_through(WORKS[name], World(1), World.go_on, 1, times=2)


@pytest.mark.parametrize("happens", [World.lap, World.remove, World.clear], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_at_one_moment(name: str, happens: Callable[[World], None]) -> None:
    run_through(VIEWS[name], World(1), happens, 1)


TWO_RARE = (*[1] * 20, 3, *[1] * 40, 3, *[1] * 31)
RARE = (*[1] * 60, 3, *[1] * 34)


@pytest.mark.parametrize("happens", [World.singles, World.move_the_rare_one], ids=lambda f: f.__name__)
def test_a_writer_while_rare_windows_are_listed(happens: Callable[[World], None]) -> None:
    """One of a hundred starts has a window, so that a draw lists them all."""
    run_through(sequences(3, n=8), World(1, 96, RARE), happens, 90)


def test_a_writer_takes_one_of_two_rare_windows() -> None:
    run_through(sequences(3, n=8), World(1, 96, TWO_RARE), World.take_one_of_two, 90)


@pytest.mark.parametrize(("happens", "lanes"), LANES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("at", [(0, 3, 7, 11), (10, 11, 9)])
def test_runs_at_every_moment(at: tuple[int, ...], happens: Callable[[World], None], lanes: int) -> None:
    """Where runs begin and end, by steps: what relabelling asks for.

    While the open episode overwrites the oldest samples it is at both ends of the ring: only steps tell them apart.
    """

    def shown(held: Held) -> list[Window]:
        spans = [held.run_of(i) for i in at if i < len(held.x)]
        return [(held.segment[s.start], held.step[s.start], held.step[s.stop - 1] + 1) for s in spans]

    world = World(lanes, lengths=(3, 2, 2, 5))
    for n in range(100):
        before = Held.of(world.fresh().buffer)
        with at_moment(n, lambda: happens(world)) as meanwhile:
            try:
                runs = world.buffer._boundaries().runs(np.array(at))
            except IndexError:
                assert len(Held.of(world.buffer).x) <= max(at)
                continue
        found = columns(runs.place.segment, runs.first, runs.end)
        after = Held.of(world.buffer)
        heads = [(s, max(f, cut(after, s)), e) for s, f, e in shown(before)]
        assert found in (shown(before), shown(after), heads)
        if not meanwhile.happened:
            break
    assert n >= len(at)


def cut(held: Held, segment: int) -> int:
    """The first step that is left of a segment; 0 if there is none."""
    return held.step[held.segment.index(segment)] if segment in held.segment else 0


Places = dict[int, Window]


def restored(sampler: rc.PrioritizedSampler, buffer: rc.ReplayBuffer, known: Places) -> rc.PrioritizedSampler:
    other = rc.PrioritizedSampler(buffer, 6, alpha=1.0, eps=0.0)
    other.load_state_dict(sampler.state_dict())
    return other


def draw_once(
    sampler: rc.PrioritizedSampler, buffer: rc.ReplayBuffer, known: Places
) -> rc.PrioritizedSampler:
    """Whatever was there when it was drawn has its own probability: one that came meanwhile, the largest."""
    top = sampler.stats().top
    with suppress(rc.EmptyError):
        data, meta = sampler.sample_with_metadata()
        assert meta is not None
        places = columns(xs(data), meta["row"], meta["generation"])
        ratio = meta["probability"] / [x if known.get(x) == (x, *at) else top for x, *at in places]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
        assert ratio[0] > 0
    return sampler


def look_at_all(
    sampler: rc.PrioritizedSampler, buffer: rc.ReplayBuffer, known: Places
) -> rc.PrioritizedSampler:
    sampler.get_at_with_metadata(...)
    return sampler


@pytest.mark.parametrize(("happens", "lanes"), LANES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("use", [restored, draw_once, look_at_all])
def test_priorities_stay_with_their_samples(
    use: Callable[..., rc.PrioritizedSampler], happens: Callable[[World], None], lanes: int
) -> None:
    """Each sample has its number as priority; those that come, the largest."""
    world = World(lanes)
    for n in range(100):
        world.fresh()
        sampler = rc.PrioritizedSampler(world.buffer, 6, alpha=1.0, eps=0.0, seed=1)
        data, meta = sampler.get_at_with_metadata(...)
        sampler.update_priorities(meta, xs(data))
        before, top = Held.of(world.buffer).places(), max(xs(data))
        with at_moment(n, lambda: happens(world)) as meanwhile:
            used = use(sampler, world.buffer, before)
        after = Held.of(world.buffer).places()
        expected = np.array([x if before.get(x) == place else top for x, place in after.items()], float)
        _, meta = used.get_at_with_metadata(...)
        assert meta is not None
        np.testing.assert_allclose(meta["probability"], expected / max(expected.sum(), 1.0), rtol=1e-6)
        if not meanwhile.happened:
            break
    assert n > 0

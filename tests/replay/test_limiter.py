"""RateLimiter: the band, both sides' waits, refusals, and its counts across dumps, lanes and pickles."""

from __future__ import annotations

import json
import pickle
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.replay.make import KINDS, SPACE, block, create, sample

import recollect as rc


def limited(
    directory: Path, kind: str = "memory", capacity: int | None = 64, **kwargs: Any
) -> rc.ReplayBuffer:
    arguments = {"samples_per_insert": 2, "min_size": 3, "band": 8, "deadline": 0.01, **kwargs}
    return create(kind, directory=directory, capacity=capacity, limiter=rc.RateLimiter(**arguments))


def add(buffer: rc.ReplayBuffer, n: int) -> None:
    buffer.extend(block(list(range(n))))


@pytest.mark.parametrize("kind", KINDS)
def test_each_side_waits_at_its_edge_of_the_band(kind: str, tmp_path: Path) -> None:
    buffer = limited(tmp_path, kind)
    limiter, sampler = buffer.limiter, rc.StepSampler(buffer, 4, seed=0)
    assert limiter is not None
    assert not limiter.can_sample()
    with pytest.raises(rc.DeadlineError, match="draws wait for 3 more samples: there are 0 of min_size 3"):
        sampler.sample()
    add(buffer, 4)  # 4 × 2 = 8: the upper edge, which is within
    assert not limiter.can_insert(1)
    message = r"to insert 1 must be possible within 0.01 s; inserts wait for 2 more samples to be drawn"
    with pytest.raises(rc.DeadlineError, match=message):
        buffer.append(sample(9))
    assert len(buffer) == 4
    for _ in range(4):
        sampler.sample()  # down to −8: the lower edge
    assert (limiter.inserts, limiter.samples, limiter.can_sample(1), limiter.can_insert(8)) == (
        4,
        16,
        False,
        True,
    )
    message = (
        r"to draw 4 must be possible .* draws wait for 2 more samples to be inserted: 4 inserts × 2 − 16"
    )
    with pytest.raises(rc.DeadlineError, match=message):
        sampler.sample()
    assert limiter.why_blocked() is not None
    add(buffer, 8)
    assert limiter.stats() == type(limiter.stats())(12, 16, 8.0, 8.0, 0, limiter.why_blocked())
    sampler.sample()
    assert limiter.why_blocked() is None
    buffer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_or_raises_does_not_count(kind: str, tmp_path: Path) -> None:
    buffer = limited(tmp_path, kind, band=100)
    limiter = buffer.limiter
    assert limiter is not None
    for bad in ({"x": 1}, {"x": 0.5, "y": np.zeros(2, np.float32)}):
        with pytest.raises(rc.SchemaError):
            buffer.append(bad)
        with pytest.raises(rc.SchemaError):
            buffer.extend(bad)
    assert (limiter.inserts, limiter.samples) == (0, 0)
    assert limiter.can_insert(50)  # all of the band
    assert not limiter.can_insert(51)
    add(buffer, 5)
    buffer.append(sample(1))
    buffer.mark_segment_end()
    buffer.extend_from(create("memory", directory=tmp_path))  # nothing
    assert limiter.inserts == 6

    class Broken(rc.BatchSampler):
        def __init__(self) -> None:
            super().__init__(buffer.single_space, None, 4)
            self.data = buffer

        def _draw_index(self) -> Any:
            raise ZeroDivisionError

    for draw in (Broken().sample, Broken().sample_index, Broken().sample_flat):
        with pytest.raises(ZeroDivisionError):
            draw()
    assert limiter.samples == 0
    buffer.close()


@pytest.mark.parametrize("kind", ["memory", "test-list"])
def test_every_row_that_a_sampler_hands_out_counts_once(kind: str, tmp_path: Path) -> None:
    buffer = limited(tmp_path, kind, band=1000)
    limiter = buffer.limiter
    assert limiter is not None
    add(buffer, 10)
    step = rc.StepSampler(rc.FrameStackedBatch(buffer, 2), 4, seed=0)
    prioritized = rc.PrioritizedSampler(rc.TransformedBatch(buffer, lambda b: b["x"]), 4, seed=0)
    expected = 0
    for s in (step, prioritized, rc.StepSampler(buffer, 4, seed=0), rc.PrioritizedSampler(buffer, 4, seed=0)):
        for draw in (s.sample, s.sample_with_metadata, s.sample_flat, s.sample_index):
            draw()
            expected += 4
            assert limiter.samples == expected
        assert [len(np.asarray(b["x"] if isinstance(b, dict) else b)) for b in s.epoch_iter()] == [4, 4, 2]
        expected += 10
        assert limiter.samples == expected
        list(s.epoch_iter(drop_last=True))
        expected += 8
        assert limiter.samples == expected
    buffer[0], buffer[:], step[0]  # reading is not drawing
    assert limiter.samples == expected
    assert limiter.inserts == 10


def test_rows_count_on_every_lane_and_through_every_door(tmp_path: Path) -> None:
    limiter = rc.RateLimiter(1, 2, 1000)
    buffer = create("memory", directory=tmp_path, capacity=8, num_lanes=2, limiter=limiter)
    with buffer.on_lane(0) as a, buffer.on_lane(1) as b:
        a.append(sample(0))
        b.extend(block([1, 2]))
        b.extend(block(list(range(50))))  # all but four are gone at once
    assert (limiter.inserts, len(buffer)) == (53, 5)
    buffer.remove_at([0, 1])
    buffer.clear()
    assert limiter.inserts == 53
    limiter = rc.RateLimiter(1, 1, 9)
    best = create("memory", directory=tmp_path, capacity=2, evict="lowest", evict_key="x", limiter=limiter)
    best.extend(block([5, 6]))
    best.append(sample(1))  # turned away: it is not an insert
    best.extend(block([2, 9]))
    assert limiter.inserts == 3
    for _ in range(20):
        best.append(sample(1))
    assert limiter.can_insert(6)  # all of the band that is left


def test_below_min_size_rows_are_always_let_in(tmp_path: Path) -> None:
    """After a clear nobody can draw; if nobody could write either, both would wait for ever."""
    buffer = limited(tmp_path, samples_per_insert=1, min_size=4, band=4)
    add(buffer, 4)
    assert not buffer.limiter.can_insert(1)  # type: ignore[union-attr]
    buffer.clear()
    add(buffer, 4)
    with pytest.raises(rc.DeadlineError):
        add(buffer, 1)
    rc.StepSampler(buffer, 4).sample()


@given(st.fractions(Fraction(1, 50), 20, max_denominator=50), st.integers(1, 20))
def test_the_smallest_band_is_said_and_works(ratio: Fraction, min_size: int) -> None:
    spi = float(ratio)
    exact = Fraction(str(spi))
    least = max(min_size * exact, (1 + exact) / 2)
    says = "band: must be at least .*below that neither side could ever move"
    with pytest.raises(ValueError, match=says) as refused:
        rc.RateLimiter(spi, min_size, float(least) * 0.99)
    said = float(str(refused.value).split()[5])
    assert said == pytest.approx(float(least), rel=1e-15)
    limiter = rc.RateLimiter(spi, min_size, said)
    inserts = samples = 0
    limiter._counts = lambda: (inserts, inserts)
    for _ in range(200):  # one row at a time something can always move
        if limiter.can_sample(1):
            samples += 1
            limiter._add(0, 1)
        else:
            assert limiter.can_insert(1)
            inserts += 1
        assert abs(inserts * exact - samples) <= Fraction(str(limiter.band))
    assert inserts
    assert samples


def test_bands_are_exact(tmp_path: Path) -> None:
    """0.1 × 3 is 0.3, not 0.30000000000000004, and at 10**15 rows one is still one."""
    buffer = limited(tmp_path, samples_per_insert=0.1, min_size=1, band=0.7)
    assert buffer.limiter is not None
    add(buffer, 7)
    assert not buffer.limiter.can_insert(1)
    state = buffer.limiter.state_dict() | {"inserts": 10**15, "samples": 10**14}
    buffer.limiter.load_state_dict(state)
    assert buffer.limiter.can_insert(7)
    assert not buffer.limiter.can_insert(8)


def test_too_large_for_the_band_is_said_at_once(tmp_path: Path) -> None:
    buffer = limited(tmp_path, samples_per_insert=1, min_size=1, band=8, deadline=60)
    add(buffer, 8)
    with pytest.raises(
        ValueError, match=r"band must be at least 9 to draw 17 samples at once, got 8; draw fewer"
    ):
        rc.StepSampler(buffer, 17).sample()
    with pytest.raises(ValueError, match=r"band must be at least 10.5 to insert 20 rows at once, got 8"):
        add(buffer, 20)
    assert len(buffer) == 8


def test_wrong_arguments(tmp_path: Path) -> None:
    for name in ("samples_per_insert", "band", "deadline"):
        good: dict[str, Any] = {"samples_per_insert": 1, "min_size": 1, "band": 10, "deadline": 1}
        for bad in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name}: must be a finite number above 0"):
                rc.RateLimiter(**{**good, name: bad})
        with pytest.raises(TypeError, match=f"{name}: must be a finite number"):
            rc.RateLimiter(**{**good, name: None})
    for bad_size in (0, 1.5, True):
        with pytest.raises(ValueError, match="min_size: must be an int of at least 1"):
            rc.RateLimiter(1, bad_size, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limiter: min_size must be at most the capacity 64, got 65"):
        limited(tmp_path, min_size=65, band=1000)
    used = rc.RateLimiter(1, 1, 4)
    create("memory", directory=tmp_path, limiter=used)
    with pytest.raises(ValueError, match="limiter: must limit one buffer, got one in use"):
        create("memory", directory=tmp_path, limiter=used)
    with pytest.raises(TypeError, match="belongs to its buffer, got pickled; send the buffer"):
        pickle.dumps(used)
    with pytest.raises(ValueError, match="CombinedBatch cannot say beforehand"):
        rc.StepSampler(rc.CombinedBatch([limited(tmp_path), limited(tmp_path)]), 4)
    assert repr(used) == "RateLimiter(samples_per_insert=1.0, min_size=1, band=4.0, deadline=60.0)"


def test_waiting_ends_when_the_other_side_moves(tmp_path: Path) -> None:
    buffer = limited(tmp_path, deadline=30)
    limiter, sampler = buffer.limiter, rc.StepSampler(buffer, 4, seed=0)
    assert limiter is not None
    drawn: list[Any] = []
    reader = threading.Thread(target=lambda: drawn.extend(sampler.sample() for _ in range(3)))
    reader.start()
    while not limiter.stats().waiting:
        pass
    for _ in range(6):
        add(buffer, 1)  # waits now and then for the reader, as the reader does for it
    reader.join(30)
    assert (len(drawn), limiter.inserts, limiter.samples, limiter.stats().waiting) == (3, 6, 12, 0)


def test_who_watches_is_asked_in_waits(tmp_path: Path) -> None:
    buffer = limited(tmp_path, deadline=30)
    assert buffer.limiter is not None
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            add(buffer, 4)
        elif len(looks) > 3:
            raise LookupError

    buffer.limiter.watch(look)
    rc.StepSampler(buffer, 4).sample()
    assert len(looks) == 3
    with pytest.raises(LookupError):
        rc.StepSampler(buffer, 13).sample()  # 4 × 2 + 8 is the most: one too many
    assert len(looks) == 4


def test_close_wakes_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.replay.limiter._QUIET_S", 30.0)  # nobody looks by himself
    buffer = limited(tmp_path, deadline=30)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            rc.StepSampler(buffer, 4).sample()
        except BaseException as error:
            caught.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    assert buffer.limiter is not None
    while not buffer.limiter.stats().waiting:
        pass
    buffer.close()
    reader.join(5)
    assert not reader.is_alive()
    assert isinstance(caught[0], rc.ClosedError)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_never_stopped(kind: str, tmp_path: Path) -> None:
    """Neither empty counters nor an exploding replay ratio after a restart (sheeprl#280, AReaL#1388)."""
    buffer = limited(tmp_path, kind, capacity=16)
    sampler = rc.StepSampler(buffer, 4, seed=3)
    for i in range(30):  # more than fit
        add(buffer, 1)
        if i >= 3 and i % 2:
            sampler.sample()
    before = buffer.limiter.stats()  # type: ignore[union-attr]
    state = json.loads(json.dumps(sampler.state_dict(), default=lambda a: a.tolist() if a.ndim else a.item()))
    buffer.dumps(tmp_path / "dump")
    manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    assert (manifest["limiter"]["inserts"], manifest["limiter"]["samples"]) == (
        before.inserts,
        before.samples,
    )

    loaded = rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False)
    resumed = rc.StepSampler(loaded, 4)
    resumed.load_state_dict({**state, "rng": sampler.state_dict()["rng"]})
    for one in (buffer, loaded):
        assert one.limiter is not None
        assert one.limiter.stats() == before
        assert one.limiter.deadline == 0.01
    for _ in range(40):
        moves = []
        for one, s in ((buffer, sampler), (loaded, resumed)):
            try:
                moves.append(s.sample()["x"].tolist())
            except rc.DeadlineError as error:
                moves.append(str(error))
                add(one, 1)
        assert moves[0] == moves[1]
    assert loaded.limiter.stats() == buffer.limiter.stats()  # type: ignore[union-attr]
    reader = rc.ReplayBuffer.load_from(tmp_path / "dump")
    assert reader.limiter is None  # nobody can write to it: draws would wait in vain
    rc.StepSampler(reader, 100).sample()
    for one in (buffer, loaded, reader):
        one.close()


def test_a_live_file_keeps_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "live"
    limiter = rc.RateLimiter(2, 3, 8, deadline=0.01)
    buffer = rc.ReplayBuffer.create("memmap", SPACE, capacity=16, cache_path=path, limiter=limiter)
    add(buffer, 4)
    rc.StepSampler(buffer, 4).sample()
    before = limiter.stats()
    buffer.close()  # no dumps
    again = rc.ReplayBuffer.load_from(path, read_only=False)
    assert again.limiter is not None
    assert again.limiter.stats() == before
    again.dumps(path)
    again.dumps(tmp_path / "copy")
    again.close()
    for place in (path, tmp_path / "copy", path, tmp_path / "copy"):  # the copy becomes a live file itself
        last = rc.ReplayBuffer.load_from(place, read_only=False, storage="memmap")
        assert last.limiter is not None
        assert last.limiter.stats() == before
        last.close()


def test_state_of_another_configuration_is_refused() -> None:
    state = rc.RateLimiter(1, 2, 10).state_dict()
    for other in (rc.RateLimiter(2, 2, 10), rc.RateLimiter(1, 3, 10), rc.RateLimiter(1, 2, 11)):
        with pytest.raises(ValueError, match="must be .* to load this state"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="counts must not be negative"):
        rc.RateLimiter(1, 2, 10).load_state_dict({**state, "samples": -1})
    rc.RateLimiter(1, 2, 10, deadline=1).load_state_dict(state)


def test_a_damaged_limiter_in_a_manifest_is_said(tmp_path: Path) -> None:
    from recollect.replay import snapshot

    with pytest.raises(rc.FormatError, match="limiter: cannot be read"):
        snapshot._stored_limiter(tmp_path, {"limiter": {"band": 3}}, False)


class Machine(RuleBasedStateMachine):
    """Two numbers and a list length, beside a limited ring in which nobody waits: what must wait is refused."""

    @initialize(ratio=st.sampled_from([0.25, 0.3, 1, 2.5, 7]), min_size=st.integers(1, 4), extra=st.integers(0, 20),
                capacity=st.integers(4, 9))  # fmt: skip
    def begin(self, ratio: float, min_size: int, extra: int, capacity: int) -> None:
        self.ratio, self.min_size = Fraction(str(ratio)), min_size
        band = float(max(min_size * self.ratio, (1 + self.ratio) / 2)) + extra
        self.band = Fraction(str(band))
        self.limiter = rc.RateLimiter(ratio, min_size, band, deadline=1e-6)
        self.buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=capacity, limiter=self.limiter)
        self.inserts = self.samples = self.length = 0

    @rule(n=st.integers(1, 6))
    def insert(self, n: int) -> None:
        allowed = (
            self.inserts + n
        ) * self.ratio - self.samples <= self.band or self.length + n <= self.min_size
        assert self.limiter.can_insert(n) == allowed
        if allowed:
            self.buffer.extend(np.arange(n))
            self.inserts += n
            self.length = min(self.length + n, self.buffer.capacity or 0)
            return
        with pytest.raises((rc.DeadlineError, ValueError)):
            self.buffer.extend(np.arange(n))

    @rule(n=st.integers(1, 6), prioritized=st.booleans())
    def draw(self, n: int, prioritized: bool) -> None:
        allowed = self.length >= self.min_size and self.inserts * self.ratio - self.samples - n >= -self.band
        assert self.limiter.can_sample(n) == allowed
        sampler: Any = rc.PrioritizedSampler if prioritized else rc.StepSampler
        if allowed:
            sampler(self.buffer, n).sample()
            self.samples += n
            return
        with pytest.raises((rc.DeadlineError, ValueError)):
            sampler(self.buffer, n).sample()

    @rule(n=st.integers(1, 3))
    def remove(self, n: int) -> None:
        n = min(n, self.length)
        self.buffer.remove_at(slice(0, n))
        self.length -= n

    @rule()
    def save_and_load(self) -> None:
        state = self.limiter.state_dict()
        self.limiter.load_state_dict(state)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "buffer"):
            stats = self.limiter.stats()
            assert (stats.inserts, stats.samples, len(self.buffer)) == (
                self.inserts,
                self.samples,
                self.length,
            )
            blocked = not (self.limiter.can_insert(1) and self.limiter.can_sample(1))
            assert (self.limiter.why_blocked() is not None) == blocked
            assert self.limiter.can_insert(1) or self.limiter.can_sample(1)  # somebody can always move


TestMachine = Machine.TestCase


def test_counts_that_nobody_can_have_counted_are_an_attach_error(tmp_path: Path) -> None:
    limiter = rc.RateLimiter(1, 1, 9)
    with create("shared", directory=tmp_path, capacity=8, limiter=limiter):
        limiter._words.store(limiter._at, 2**64 - 1)
        with pytest.raises(rc.errors.AttachError):
            limiter.can_sample()

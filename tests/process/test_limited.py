"""A limiter between processes: wake-ups, parties that are killed or stopped, and counts that hold all the same."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.actor import Actor
from tests.process.killing import killed_at, steps
from tests.process.test_lanes import child, until
from tests.timing import Stopwatch

import recollect as rc

pytestmark = pytest.mark.process


def limited(lanes: int = 1, **kwargs: Any) -> rc.ReplayBuffer:
    limiter = rc.RateLimiter(**{"samples_per_insert": 2, "min_size": 4, "band": 16, "deadline": 20, **kwargs})
    return rc.ReplayBuffer.create("shared", ((), "int64"), capacity=64 * lanes, num_lanes=lanes, multiprocessing=True,
                                  limiter=limiter)  # fmt: skip


def limiter_of(buffer: rc.ReplayBuffer) -> rc.RateLimiter:
    assert buffer.limiter is not None
    return buffer.limiter


def forever(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        while True:
            work()

    return run


def check_band(limiter: rc.RateLimiter) -> None:
    """At every moment, with everybody at work: the count that rises is read first where it must not be too high."""
    samples = limiter.samples
    inserts = limiter.inserts
    assert inserts * limiter.samples_per_insert - samples >= -limiter.band
    inserts = limiter.inserts
    samples = limiter.samples
    assert inserts * limiter.samples_per_insert - samples <= limiter.band


def test_writers_and_readers_of_several_processes_keep_the_band() -> None:
    with limited(lanes=2) as buffer:
        limiter = limiter_of(buffer)
        sampler = rc.StepSampler(buffer, 4, seed=0)
        write = forever(lambda: buffer.append(1))
        read = forever(sampler.sample)
        with child(write), child(write), child(read), child(read):
            seen = 0
            end = time.monotonic() + 60
            while limiter.samples < 2000 or seen < 100:
                check_band(limiter)
                seen += 1
                assert time.monotonic() < end, limiter.stats()
        check_band(limiter)


def test_a_waiter_is_woken_within_milliseconds() -> None:
    with limited() as buffer:
        limiter = limiter_of(buffer)
        ready, told = os.pipe()

        def work() -> None:
            rc.StepSampler(buffer, 4).sample()
            os.write(told, b"x")
            signal.pause()

        with child(work):
            until(lambda: limiter.stats().waiting)
            start = Stopwatch()
            buffer.extend(np.arange(4))
            os.read(ready, 1)
            assert start.s < 0.5  # far below the second after which a waiter looks by itself
        os.close(ready)
        os.close(told)


def test_a_killed_waiter_holds_up_nobody() -> None:
    with limited() as buffer:
        limiter = limiter_of(buffer)
        with child(lambda: rc.StepSampler(buffer, 4).sample()):
            until(lambda: limiter.stats().waiting)
        assert limiter.stats().waiting == 1  # it could not say good-bye
        buffer.extend(np.arange(8))
        rc.StepSampler(buffer, 4).sample()
        assert (limiter.inserts, limiter.samples) == (8, 4)


def test_a_stopped_writer_holds_up_nobody() -> None:
    with limited(lanes=2) as buffer:
        limiter = limiter_of(buffer)
        sampler = rc.StepSampler(buffer, 4, seed=0)
        with buffer.on_lane(1) as mine, child(forever(lambda: buffer.append(1))) as pid:
            for _ in range(20):
                until(lambda: limiter.can_sample(4))
                os.kill(pid, signal.SIGSTOP)
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
                start = time.monotonic()
                sampler.sample()  # there is room for two rows, of which the stopped one may have taken one
                mine.append(1)
                assert time.monotonic() - start < 5
                os.kill(pid, signal.SIGCONT)
                os.waitid(os.P_PID, pid, os.WCONTINUED)


def test_rows_that_a_killed_writer_was_let_in_for_are_taken_back() -> None:
    """Killed at each step of a write: the counts are those of the rows there are, and the next writer gets in."""
    for step in steps():
        with limited(samples_per_insert=1, min_size=1, band=4) as buffer:
            limiter = limiter_of(buffer)
            killed = killed_at(step, lambda: buffer.extend(np.arange(4)))
            assert limiter.inserts == len(buffer)
            buffer.extend(np.arange(4 - len(buffer)))  # waits at most until it is clear that nothing moves
            assert (limiter.inserts, len(buffer)) == (4, 4)
            assert not limiter.can_insert(1)
            rc.StepSampler(buffer, 4).sample()
            if not killed:
                break


def test_nothing_waits_for_ever() -> None:
    with limited(deadline=0.2) as buffer:
        start = time.monotonic()
        with pytest.raises(
            rc.DeadlineError, match=r"to draw 4 must be possible within 0.2 s; draws wait for 4 more"
        ):
            rc.StepSampler(buffer, 4).sample()
        assert 0.15 < time.monotonic() - start < 5
        assert limiter_of(buffer).stats().waiting == 0


@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.parametrize("verb", ["append", "draw"])
def test_cleanup_ends_a_buffer_for_every_process(
    kind: str, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recollect.replay.limiter._QUIET_S", 600.0)  # nobody looks by himself
    limiter = rc.RateLimiter(2, 4, 16, deadline=600)
    path = tmp_path / "file" if kind == "memmap" else None
    buffer = rc.ReplayBuffer.create(kind, ((), "int64"), capacity=64, num_lanes=2, cache_path=path,
                                    multiprocessing=True, limiter=limiter)  # fmt: skip
    buffer.on_lane(0)  # so that the collector gets the other lane
    if verb == "append":
        buffer.extend(np.arange(8))  # the upper edge of the band
    theirs = pickle.loads(pickle.dumps(buffer))
    collector = Actor(
        append=lambda: theirs.append(1), draw=lambda: rc.StepSampler(theirs, 4).sample(), length=theirs.__len__,
        on_lane=lambda: theirs.on_lane(1), cleanup=buffer.cleanup, close=theirs.close,
    )  # fmt: skip
    collector.do("cleanup")  # it did not make the buffer: this closes its own object and no more
    collector.tell(verb)
    until(lambda: limiter.stats().waiting)
    buffer.cleanup()
    with pytest.raises(rc.ClosedError, match="closed by its owner"):
        collector.answer()
    for later in ("append", "draw", "length", "on_lane"):
        with pytest.raises(rc.ClosedError, match="closed by its owner"):
            collector.do(later)
    collector.do("close")
    collector.kill()
    theirs.close()
    if path is not None:  # a file is there for the next run
        with closing(rc.ReplayBuffer.load_from(path, read_only=False)) as again:
            again.append(1) if verb == "draw" else rc.StepSampler(again, 4).sample()


def test_cleanup_ends_a_buffer_without_a_limiter_too() -> None:
    buffer = rc.ReplayBuffer.create(
        "shared", ((), "int64"), capacity=64, multiprocessing=True, maintain_segment_metadata=True
    )
    collector = Actor(
        append=lambda: buffer.append(1), length=buffer.__len__, attach=lambda x: len(pickle.loads(x))
    )
    collector.do("append")
    handle = pickle.dumps(buffer)
    assert len(buffer) == 1
    buffer.cleanup()
    buffer.cleanup()
    for call in (("append",), ("length",)):
        with pytest.raises(rc.ClosedError, match="closed by its owner"):
            collector.do(*call)
    with pytest.raises((rc.ClosedError, rc.AttachError)):
        collector.do("attach", handle)
    collector.kill()


def test_cleanup_of_transitions_wakes_who_waits_for_their_limiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.replay.limiter._QUIET_S", 600.0)
    replay = rc.ipc.ReplayBuffer(64, 1, 1, "numpy")
    limiter = rc.RateLimiter(2, 4, 16, deadline=600)
    replay.attach_limiter(limiter)
    collector = Actor(wait=lambda: limiter.drawing(4).__enter__())
    collector.tell("wait")
    until(lambda: limiter.stats().waiting)
    replay.cleanup()
    with pytest.raises(rc.ClosedError):
        collector.answer()
    collector.kill()


def write_pairs(buffer: rc.ReplayBuffer) -> None:
    """Rows whose parts must agree, for ever."""
    n = 0
    while True:
        a = np.arange(n, n + 5)
        buffer.extend({"a": a, "b": np.repeat(a[:, None], 8, 1)})
        buffer.append({"a": n + 5, "b": np.full(8, n + 5)})
        n += 6


def draw_beside(buffer: rc.ReplayBuffer, sampler: rc.PrioritizedSampler, n_evicted: int) -> None:
    """Every batch is whole and of rows that exist; updates go to those that still do, and none is lost."""
    rng = np.random.default_rng(0)
    with child(lambda: write_pairs(buffer)), child(lambda: write_pairs(buffer)):
        until(lambda: buffer.stats().evicted >= n_evicted)
        applied = 0
        for _ in range(300):
            data, meta = sampler.sample_with_metadata()
            assert meta is not None
            assert (data["b"] == data["a"][..., None]).all()
            assert (meta["probability"] > 0).all()
            assert ((meta["weight"] > 0) & (meta["weight"] <= 1)).all()
            applied += sampler.update_priorities(meta, rng.random(sampler.batch_size))
        stats = sampler.stats()
    assert (stats.applied, stats.applied + stats.late) == (applied, 300 * sampler.batch_size)
    buffer.remove_at(slice(0, 5))  # and a look at rest: masses are exactly those of the rows there are
    state, place = sampler.state_dict()["priorities"], buffer.locate(...)
    assert np.array_equal(state["row"], place.row)
    assert np.array_equal(state["generation"], place.generation)
    assert np.isclose(sampler._ledger.total(), state["mass"].sum())


PAIRS = {"a": ((), "int64"), "b": ((8,), "int64")}


@pytest.mark.parametrize("capacity", [16, 256, 1 << 14])
def test_priorities_beside_writers_of_other_processes(capacity: int) -> None:
    """In the smallest ring all rows are often gone before they are copied."""
    with rc.ReplayBuffer.create(
        "shared", PAIRS, capacity=capacity, num_lanes=2, multiprocessing=True
    ) as buffer:
        draw_beside(buffer, rc.PrioritizedSampler(buffer, 64, seed=0), 1000)


def test_priorities_of_stacks_beside_writers_that_keep_pace() -> None:
    limiter = rc.RateLimiter(2, 64, 256)
    with rc.ReplayBuffer.create("shared", PAIRS, capacity=512, num_lanes=2, multiprocessing=True,
                                limiter=limiter) as buffer:  # fmt: skip
        sampler = rc.PrioritizedSampler(rc.FrameStackedBatch(buffer, 1), 16, seed=0)
        draw_beside(buffer, sampler, 0)
        assert limiter.samples == 300 * 16

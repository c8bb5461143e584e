"""Every sampler drawn through worker processes: counted by the limiter, relabelled, with the labels of now."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import recollect as rc

pytestmark = pytest.mark.process
GOAL = {"achieved_goal": ((1,), "float32"), "desired_goal": ((1,), "float32")}
SPACE = {"obs": GOAL, "next_obs": GOAL, "reward": ((), "float32"), "id": ((), "int32")}
N = 40


def create(n: int = N, capacity: int = N, **kwargs: Any) -> rc.ReplayBuffer:
    """Episodes of ten steps; the goal achieved by step i is i + 1."""
    buffer = rc.ReplayBuffer.create(
        "shared", SPACE, capacity=capacity, multiprocessing=True, maintain_segment_metadata=True, **kwargs
    )
    add(buffer, n)
    return buffer


def add(buffer: rc.ReplayBuffer, n: int) -> None:
    t = np.arange(n, dtype=np.float32)
    none = np.full((n, 1), -1, np.float32)
    value = {
        "obs": {"achieved_goal": t[:, None], "desired_goal": none},
        "next_obs": {"achieved_goal": t[:, None] + 1, "desired_goal": none},
        "reward": np.full(n, -5, np.float32),
        "id": np.arange(n, dtype=np.int32),
    }
    buffer.extend(value, ends=np.arange(n) % 10 == 9)


def reached(achieved: Any, desired: Any, info: Any) -> Any:
    return (achieved == desired).all(-1).astype(np.float32)


MAKERS: dict[str, Callable[[Any], rc.BatchSampler]] = {
    "step": lambda data: rc.StepSampler(data, 8, seed=0),
    "without replacement": lambda data: rc.StepSampler(data, 8, seed=0, replace=False),
    "prioritized": lambda data: rc.PrioritizedSampler(data, 8, seed=0),
    "sequence": lambda data: rc.SequenceSampler(data, 8, 4, seed=0),
    "prioritized sequence": lambda data: rc.PrioritizedSampler(rc.SequenceSampler(data, 1, 4), 8, seed=0),
    "hindsight": lambda data: rc.HindsightSampler(data, 8, reached, seed=0),
}


def through(sampler: rc.BatchSampler, **kwargs: Any) -> rc.MultiprocessingSampler:
    return rc.MultiprocessingSampler(sampler, n_workers=2, **{"n_buffers": 4, **kwargs})


class TestLimited:
    @pytest.mark.parametrize("kind", MAKERS)
    def test_what_is_handed_out_counts_once_and_what_lies_ready_not_at_all(self, kind: str) -> None:
        limiter = rc.RateLimiter(2, min_size=1, band=10_000)
        with create(limiter=limiter) as buffer, through(MAKERS[kind](buffer)) as sampler:
            out = sampler.sample()
            calls = (sampler.sample, lambda: sampler.sample(out=out), sampler.sample_with_metadata,
                     sampler.sample_flat, sampler.sample_index, sampler.sample)  # fmt: skip
            for k, call in enumerate(calls):
                call()
                assert limiter.samples == 8 * (k + 2)
            before = limiter.samples
            n = sum(len(b["id"]) for b in sampler.epoch_iter())
            assert limiter.samples == before + n > before
            before = limiter.samples
            n = sum(len(b["id"]) for b in sampler.epoch_iter(drop_last=True))
            assert limiter.samples == before + n

    @pytest.mark.parametrize("kind", MAKERS)
    def test_draws_wait_and_the_sampler_lives_on(self, kind: str) -> None:
        limiter = rc.RateLimiter(1, min_size=20, band=20, deadline=0.05)
        with create(0, limiter=limiter) as buffer, through(MAKERS[kind](buffer)) as sampler:
            add(buffer, 19)
            with pytest.raises(rc.DeadlineError, match="draws wait for 1 more samples"):
                sampler.sample()
            with pytest.raises(rc.DeadlineError, match="draws wait for 1 more samples"):
                next(sampler.epoch_iter())
            add(buffer, 1)
            for _ in range(5):  # 20 × 1 + 20: five batches of eight, and not one that lies ready beside them
                sampler.sample()
            with pytest.raises(rc.DeadlineError, match="draws wait for 8 more samples"):
                sampler.sample()
            assert limiter.samples == 40
            add(buffer, 10)
            sampler.sample()

    def test_in_a_spawned_worker(self) -> None:
        limiter = rc.RateLimiter(2, min_size=1, band=10_000)
        with create(limiter=limiter) as buffer, through(MAKERS["step"](buffer), ctx="spawn") as sampler:
            sampler.sample()
            assert limiter.samples == 8

    @pytest.mark.parametrize("workers", [False, True])
    def test_samples_gone_before_their_turn_in_an_epoch_do_not_count(self, workers: bool) -> None:
        limiter = rc.RateLimiter(2, min_size=1, band=10_000)
        with create(limiter=limiter) as buffer:
            inner = MAKERS["step"](buffer)
            sampler = through(inner) if workers else inner
            epoch = sampler.epoch_iter()
            n = len(next(epoch)["id"])
            buffer.remove_at(slice(3, None))
            n += sum(len(b["id"]) for b in epoch)
            assert limiter.samples == n < N
            if isinstance(sampler, rc.MultiprocessingSampler):
                sampler.close()

    @pytest.mark.parametrize("kind", MAKERS)
    def test_a_pickled_sampler_is_limited_too(self, kind: str) -> None:
        limiter = rc.RateLimiter(2, min_size=1, band=10_000)
        with create(limiter=limiter) as buffer:
            pickle.loads(pickle.dumps(MAKERS[kind](buffer))).sample()
            assert limiter.samples == 8


class TestEpochs:
    def test_goals_are_changed(self) -> None:
        with create() as buffer:
            plain = rc.HindsightSampler(buffer, 8, reached, "final", ratio=1.0, seed=0)
            with through(plain) as sampler:
                for data, meta in sampler.epoch_iter_with_metadata():
                    assert meta is not None
                    assert meta["relabelled"].all()
                    last = (data["id"] // 10 * 10 + 10).astype(np.float32)
                    assert np.array_equal(data["obs"]["desired_goal"][:, 0], last)
                    assert np.array_equal(data["reward"], data["id"] % 10 == 9)

    @pytest.mark.parametrize("kind", MAKERS)
    def test_the_rest_is_bit_for_bit_the_same(self, kind: str) -> None:
        with (
            create() as buffer,
            through(MAKERS[kind](buffer)) as sampler,
            through(MAKERS[kind](buffer)) as other,
        ):
            sampler.sample()
            epoch = sampler.epoch_iter_with_metadata()
            next(epoch)
            other.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
            left = [pickle.dumps(b) for b in epoch]
            assert left == [pickle.dumps(b) for b in other.epoch_iter_with_metadata()] != []

    def test_labels_are_those_of_now(self) -> None:
        with create() as buffer:
            inner = rc.PrioritizedSampler(buffer, 8, alpha=1.0, eps=0.0, seed=0)
            with through(inner) as sampler:
                sampler.sample()  # workers have begun
                place = buffer.locate(...)
                values = np.arange(1.0, N + 1)
                inner.update_priorities({"row": place.row, "generation": place.generation}, values)
                for data, meta in sampler.epoch_iter_with_metadata():
                    assert meta is not None
                    np.testing.assert_allclose(
                        meta["probability"], values[data["id"]] / values.sum(), rtol=1e-6
                    )


class TestLabels:
    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_as_in_this_process(self, backend: str) -> None:
        pytest.importorskip(backend)
        with create() as buffer:
            view = rc.ToBackendOrDeviceBatch(buffer, backend, "cpu")
            here = rc.PrioritizedSampler(view, 8, seed=0)
            inner = rc.PrioritizedSampler(view, 8, seed=0)
            with through(inner, ctx="forkserver" if backend == "jax" else None) as sampler:
                for _ in range(2):
                    expected, found = here.sample_with_metadata()[1], sampler.sample_with_metadata()[1]
                    assert expected is not None and found is not None
                    for name, value in expected.items():
                        assert type(found[name]) is type(value)
                        assert np.array_equal(np.asarray(found[name]), np.asarray(value))
                    assert inner.update_priorities(found, np.ones(8)) == 8
                    here.update_priorities(expected, np.ones(8))
                    sampler.manual_seed(0)
                    here.manual_seed(0)

    def test_beside_the_sources_own(self) -> None:
        with create() as buffer:
            here = rc.PrioritizedSampler(rc.FrameStackedBatch(buffer, 2), 8, seed=0)
            inner = rc.PrioritizedSampler(rc.FrameStackedBatch(buffer, 2), 8, seed=0)
            with through(inner) as sampler:
                for _ in range(3):
                    expected, found = here.sample_with_metadata()[1], sampler.sample_with_metadata()[1]
                    assert expected is not None and found is not None
                    assert expected.keys() == found.keys() >= {"slice_valid_mask", "row", "weight"}
                    for name, value in expected.items():
                        assert np.array_equal(found[name], value), name

"""Scoring functions: what they are given, what they may return, and what happens when they fail."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, grid, paths, samples

from recollect.errors import (
    ScoringError,
)
from recollect.remote import (
    ReplayBufferManager,
)

INF = float("inf")


def manager(env: Any = SAMPLE, n: int | None = 1, **kw: Any) -> ReplayBufferManager:
    return ReplayBufferManager(env, 1, n, **kw)


def test_a_scoring_function_sees_the_container_and_what_was_kept() -> None:
    seen: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        seen.append((obj, sender_rank))
        return {"score": float(obj.kept.mean()), "baseline_log_reward": 99.0}

    m = manager(grid(), scoring_function=score, capacity=2, max_length=MAX_LENGTH)
    scores = m.add(paths([1, 2, 3], [0.0, 1.0, 2.0], lengths=[1, 2, 3]), sender_rank=5)
    obj, rank = seen[0]
    assert rank == 5
    assert obj.kept.tolist() == [False, True, True] and obj.row[0] == -1
    assert m.buffer.storage.get(obj.row[1:].tolist())["id"].tolist() == [2, 3]
    assert obj.lengths.tolist() == [1, 2, 3] and len(obj.steps["state"]) == 6
    assert obj.fields["final_state"].tolist() == [[1, 1.5], [2, 2.5], [3, 3.5]]
    assert obj.log_rewards.tolist() == [0.0, 1.0, 2.0]
    assert scores == {"score": pytest.approx(2 / 3), "baseline_log_reward": 1.0}
    kept = obj.fields["final_state"]
    kept[:] = -7  # its own memory
    assert (m.buffer[:]["final_state"] >= 0).all()


def test_a_scoring_function_may_be_any_object_that_can_be_called() -> None:
    class Modes(list[Any]):
        """False while it is empty."""

        def __call__(self, obj: Any, sender_rank: int) -> dict[str, float]:
            return {"n_modes": float(len(self))}

    assert manager(PLAIN, scoring_function=Modes()).add(samples([1])) == {"n_modes": 0.0}
    with pytest.raises(TypeError, match="^scoring_function: must be callable, got str"):
        manager(PLAIN, scoring_function="score")


@pytest.mark.parametrize("env", [PLAIN, SAMPLE])
def test_what_a_later_item_of_a_ring_displaced_was_not_kept(env: Any) -> None:
    seen: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        seen.append((obj.kept.tolist(), obj.row.tolist()))
        return {}

    m = manager(env, scoring_function=score, capacity=3, evict="oldest")
    m.add(samples(range(5), range(5) if env is SAMPLE else None))
    assert seen == [([False] * 2 + [True] * 3, [-1, -1, 2, 0, 1])]
    assert m.buffer[:]["id"].tolist() == [2, 3, 4] and m.stats().evicted == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda obj, sender_rank: 1 / 0,
        lambda obj, sender_rank: 3,
        lambda obj, sender_rank: {"score": "high"},
        lambda obj, sender_rank: {1: 2.0},
        lambda obj, sender_rank: {"score": np.zeros(2)},
        lambda obj, sender_rank: {"score": None},
        lambda obj, sender_rank: {"score": True},
        lambda obj, sender_rank: {"x" * 256: 1.0},
        lambda obj, sender_rank: {"score": 10**400},
    ],
)
def test_a_broken_scoring_function_is_that_containers_error(function: Callable[..., Any]) -> None:
    m = manager(scoring_function=function)
    with pytest.raises(ScoringError) as caught:
        m.add(samples([1, 2], [0.0, 1.0]))
    assert caught.value.kept == 2
    assert m.stats().scoring_errors == 1 and m.stats().live == 2


def test_nan_and_infinite_scores_pass() -> None:
    m = manager(
        PLAIN, scoring_function=lambda obj, sender_rank: {"a": float("nan"), "b": -INF, "c": np.float32(2)}
    )
    scores = m.add(samples([1]))
    assert np.isnan(scores["a"]) and scores["b"] == -INF and scores["c"] == 2.0


def test_the_dict_that_was_returned_is_not_changed() -> None:
    mine = {"score": 1.0}
    m = manager(scoring_function=lambda obj, sender_rank: mine)
    assert m.add(samples([1], [2.0])) == {"score": 1.0, "baseline_log_reward": 2.0}
    assert mine == {"score": 1.0}


def test_a_baseline_of_the_function_is_never_taken_for_one() -> None:
    m = manager(PLAIN, scoring_function=lambda obj, sender_rank: {"baseline_log_reward": 99.0})
    assert m.add(samples([1])) == {}


def test_a_baseline_is_written_into_the_dict_that_is_given() -> None:
    m = manager(capacity=2)
    scores: dict[str, float] = {}
    m._inject_baseline_log_reward(scores, SimpleNamespace(log_rewards=np.array([4.0, -INF])))
    assert scores == {"baseline_log_reward": 4.0} and m._baseline_ema == 4.0


def test_leaves_of_a_container_are_found_by_path() -> None:
    seen: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        seen.extend([obj["obs/image"], obj["pair/1"], len(obj), obj.log_rewards])
        for name in ("steps", "lengths", "fields"):
            with pytest.raises(TypeError, match="samples"):
                getattr(obj, name)
        return {}

    env = {"obs": {"image": ((2,), "uint8")}, "pair": (((), "int64"), ((), "float32"))}
    m = manager(env, scoring_function=score)
    m.add({"obs": {"image": np.ones((3, 2), "uint8")}, "pair": (np.arange(3), np.arange(3, dtype="float32"))})
    assert seen[0].shape == (3, 2) and seen[1].tolist() == [0.0, 1.0, 2.0] and seen[2:] == [3, None]


def test_what_a_function_is_given_is_its_own() -> None:
    given_: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        obj.log_rewards[:] = -99.0
        with pytest.raises(TypeError, match="trajectories"):
            obj["id"]
        given_.append(obj)
        return {}

    m = manager(grid(), scoring_function=score, max_length=MAX_LENGTH, capacity=2)
    assert m.add(paths([1, 2], [3.0, 4.0])) == {"baseline_log_reward": 3.0}
    m.add(paths([5, 6], [7.0, 8.0]))
    assert m._baseline_ema == pytest.approx(0.1 * 7.0 + 0.9 * 3.0)
    assert given_[0].fields["id"].tolist() == [1, 2] and given_[0].row.tolist() == [0, 1]


def test_an_interrupt_is_no_scoring_error() -> None:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager(scoring_function=score).add(samples([1], [0.0]))

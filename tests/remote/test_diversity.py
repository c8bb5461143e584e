"""Diversity: what is too close stays out, or makes room."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, assert_doors, grid, paths, samples

from recollect.remote import (
    Diversity,
    ReplayBufferManager,
)
from recollect.remote.manager.diversity import crowding, near

INF = float("inf")


def manager(env: Any = SAMPLE, n: int | None = 1, **kw: Any) -> ReplayBufferManager:
    return ReplayBufferManager(env, 1, n, **kw)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-3, 3)), max_size=6), max_size=5),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([1.0, 2.0, INF]),
    st.integers(1, 8),
)  # fmt: skip
def test_no_two_kept_items_are_close(containers: Any, cutoff: float, p: float, capacity: int) -> None:
    m = manager(grid(), capacity=capacity, max_length=MAX_LENGTH, diverse_replay_buffer=True,
                diversity=Diversity(cutoff=cutoff, p=p))  # fmt: skip
    n = 0
    for rows in containers:
        finals = np.array([[x, y] for x, y, _ in rows], float).reshape(-1, 2)
        m.add(paths(range(n, n + len(rows)), [float(r) for *_, r in rows], finals=finals))
        n += len(rows)
        kept = m.buffer[:]["final_state"]
        for i in range(len(kept)):
            for j in range(i):
                assert np.linalg.norm(kept[i] - kept[j], ord=p) > cutoff
        assert_doors(m.stats())
    assert m.stats().offered == n


def test_a_better_item_makes_its_worse_neighbours_leave() -> None:
    m = manager(grid(), max_length=MAX_LENGTH, diverse_replay_buffer=True, diversity=Diversity(cutoff=1.0))
    m.add(paths([1, 2], [0.0, 0.0], finals=[[0, 0], [5, 5]]))
    m.add(paths([3], [1.0], finals=[[0, 1]]))
    m.add(paths([4], [0.5], finals=[[0, 1]]))
    assert sorted(m.buffer[:]["id"].tolist()) == [2, 3]
    stats = m.stats()
    assert (stats.removed, stats.rejected["too_close"]) == (1, 1)


@pytest.mark.parametrize(
    ("p", "cutoff", "is_close"),
    [
        (1, 7.0, True),
        (1, 6.99, False),
        (2, 5.0, True),
        (2, 4.99, False),
        (INF, 4.0, True),
        (INF, 3.99, False),
    ],
)
def test_distance_is_the_p_norm_and_a_cutoff_is_within(p: float, cutoff: float, is_close: bool) -> None:
    m = manager(
        grid(), max_length=MAX_LENGTH, diverse_replay_buffer=True, diversity=Diversity(cutoff=cutoff, p=p)
    )
    m.add(paths([1, 2], [1.0, 0.0], finals=[[3, 0], [0, 4]]))
    assert m.stats().rejected == ({"too_close": 1} if is_close else {})


def test_of_a_container_the_best_is_tried_first_and_of_equals_the_first() -> None:
    m = manager(grid(), max_length=MAX_LENGTH, diverse_replay_buffer=True, diversity=Diversity(cutoff=1.0))
    m.add(paths([1, 2, 3], [0.0, 1.0, 1.0], finals=[[0, 0], [0, 1], [1, 0]]))
    assert m.buffer[:]["id"].tolist() == [2, 3]  # 1 is close to both, they are not to each other
    m.add(paths([4, 5, 6], [2.0, 2.0, 1.5], finals=[[9, 9], [9, 9], [9, 9]]))
    assert m.buffer[:]["id"].tolist() == [2, 3, 4]


def test_trajectories_without_fields_cannot_be_diverse() -> None:
    bare = spaces.Dict({"steps": spaces.Sequence(spaces.Dict({"state": spaces.Discrete(3)}), stack=True)})
    with pytest.raises(ValueError, match="key must be a leaf of the items"):
        manager(bare, max_length=4, diverse_replay_buffer=True, diversity=Diversity("state"))


def test_text_has_no_distance() -> None:
    with pytest.raises(ValueError, match=r"one of \['id', 'log_reward'\], got 'name'"):
        flat(Diversity("name"), name=spaces.Text(5))


def test_an_item_that_was_just_removed_keeps_no_other_out() -> None:
    m = manager(grid(), max_length=MAX_LENGTH, diverse_replay_buffer=True, diversity=Diversity(cutoff=1.0))
    m.add(paths([1], [1.0], finals=[[0, 0]]))
    m.add(paths([2, 3], [0.5, 5.0], finals=[[0, -1], [0, 1]]))  # the better is tried first, and 1 leaves
    assert sorted(m.buffer[:]["id"].tolist()) == [2, 3] and m.stats().removed == 1


def flat(key: Any, **leaves: Any) -> ReplayBufferManager:
    return manager({**SAMPLE, **leaves}, diverse_replay_buffer=True, diversity=key, capacity=3)


def test_samples_may_be_diverse_by_any_leaf_flattened() -> None:
    m = flat(Diversity("at/xy", cutoff=1.0, p=3.0), at={"xy": ((2, 2), "float32")})

    def put(number: int, reward: float, *corner: float) -> None:
        xy = np.zeros((1, 2, 2), "float32")
        xy[0, 1] = corner
        m.add({**samples([number], [reward]), "at": {"xy": xy}})

    put(1, 0.0, 0.0, 0.0)
    put(2, 0.0, 0.8, -0.8)  # 1.008 away
    put(3, 0.0, 0.75, 0.75)  # 0.945 from the first; by p=2 it would be 1.06
    put(4, 0.0, np.nan, 0.0)
    put(5, 0.0, np.inf, 0.0)
    assert m.buffer[:]["id"].tolist() == [1, 2]
    assert dict(m.stats().rejected) == {"too_close": 1, "bad_value": 2}
    put(6, 2.0, 9.0, 9.0)
    put(7, 1.0, 5.0, 5.0)  # full: the lowest and older one leaves
    put(8, -1.0, 20.0, 20.0)
    assert sorted(m.buffer[:]["id"].tolist()) == [2, 6, 7] and m.stats().rejected["too_low"] == 1
    assert_doors(m.stats())


def test_a_negative_cutoff_tests_nothing_and_zero_admits_no_duplicate() -> None:
    for cutoff, kept in ((-1.0, [1, 2]), (0.0, [1])):
        m = flat(Diversity("id", cutoff=cutoff))
        m.add(samples([1], [0.0]))
        m.add({"id": np.array([1]), "log_reward": np.array([0.0])})
        assert len(m.buffer) == len(kept)


def test_with_a_negative_cutoff_items_keep_their_order() -> None:
    m = flat(Diversity("id", cutoff=-1.0))
    m.add(samples([1, 2, 3], [0.0, 2.0, 1.0]))
    assert m.buffer[:]["id"].tolist() == [1, 2, 3]


def test_items_without_a_reward_may_be_diverse() -> None:
    m = manager(PLAIN, diverse_replay_buffer=True, diversity=Diversity("id", cutoff=1.0), capacity=9)
    m.add(samples([1, 5, 2, 9]))
    m.add(samples([6, 12]))
    assert sorted(m.buffer[:]["id"].tolist()) == [1, 5, 9, 12]


def test_the_baseline_follows_what_was_removed() -> None:
    m = manager(
        grid(), max_length=MAX_LENGTH, capacity=2, diverse_replay_buffer=True, diversity=Diversity(cutoff=1.0)
    )
    m.add(paths([1, 2], [0.0, 5.0], finals=[[0, 0], [9, 9]]))
    m.add(paths([3], [1.0], finals=[[0, 1]]))
    assert m.add(paths([4], [3.0], finals=[[4, 4]]))["baseline_log_reward"] == 3.0


def test_the_baseline_follows_what_was_removed_from_between() -> None:
    m = flat(Diversity("id", cutoff=1.0))
    m.add(samples([10], [5.0]))
    m.add(samples([20], [0.0]))
    m.add(samples([30], [7.0]))
    assert m.add(samples([21], [1.0]))["baseline_log_reward"] == 1.0
    assert sorted(m.buffer[:]["log_reward"].tolist()) == [1.0, 5.0, 7.0]
    assert m.add(samples([40], [6.0]))["baseline_log_reward"] == 5.0


def peak_nbytes(work: Any) -> tuple[Any, int]:
    """What a piece of work returns, and the most memory that it had."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_distances_are_computed_in_blocks_of_bounded_memory() -> None:
    rng = np.random.default_rng(0)
    points, others = rng.normal(size=(300, 5)), rng.normal(size=(4000, 5))  # 48 MB of gaps
    found, peak = peak_nbytes(lambda: near(points, others, Diversity(cutoff=2.0, p=2)))
    whole = [np.linalg.norm(point - others, axis=1) <= 2.0 for point in points]
    np.testing.assert_equal(found, whole)
    assert peak < 90 << 20 and found.any() and not found.all()


def test_a_large_container_is_compared_in_blocks_too() -> None:
    n = 800
    rng = np.random.default_rng(0)
    points, rewards = rng.uniform(0, 9, size=(n, 12)), np.sort(rng.integers(0, 9, n))[::-1].astype(float)
    kept, kept_rewards = rng.uniform(0, 9, size=(n, 12)), rng.integers(0, 9, n).astype(float)  # 61 MB
    rule = Diversity(cutoff=6.0, p=2)
    (winners, gone), peak = peak_nbytes(lambda: crowding(points, rewards, kept, kept_rewards, rule))
    assert peak < 110 << 20 and winners.any() and len(gone)
    left = np.concatenate([points[winners], np.delete(kept, gone, axis=0)[:0]])
    gaps = np.linalg.norm(left[:, None] - left[None], axis=2) + 99.0 * np.eye(len(left))
    assert gaps.min() > 6.0

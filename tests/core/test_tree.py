"""Sum and min trees against a list: what is stored, found and lowest after any updates."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.make import index_of

from recollect._core import MinTree, SumTree

ARITY = 16
CAPACITIES = [1, 2, 15, 16, 17, 255, 256, 257, 4097]
BIG = 2**63 - 1
weights = st.sampled_from([0.0, 1.0, 0.1, 1e-300, 5e-324, 1e300, 3.0]) | st.floats(0, 1e9)


def updates(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[tuple[int, float]]]]:
    """Calls of set, each a list of (row, value); rows repeat often."""
    row = st.integers(0, 40) | st.integers(0, 5000)
    return st.lists(st.lists(st.tuples(row, values), max_size=20), max_size=6)


def node_sums(leaves: list[float]) -> float:
    """The total as the tree adds it, sixteen at a time.

    Leaves: every fourth together, then those four in pairs. Sums of these: running, within each four and of the fours.
    """
    level, of_leaves = leaves, True
    while True:
        level = level + [0.0] * (-len(level) % ARITY)
        groups = [level[at : at + ARITY] for at in range(0, len(level), ARITY)]
        level = [leaf_sum(group) if of_leaves else running_sums(group)[-1] for group in groups]
        if len(level) == 1:
            return level[0]
        of_leaves = False


def leaf_sum(group: list[float]) -> float:
    a, b, c, d = (sum(group[k + 4 :: 4], start=group[k]) for k in range(4))
    return (a + b) + (c + d)


def running_sums(group: list[float]) -> list[float]:
    found, before = [], 0.0
    for at in range(0, ARITY, 4):
        within = list(accumulate(group[at : at + 4]))
        found += [before + x for x in within]
        before += within[-1]
    return found


def floats(values: list[float]) -> np.ndarray:
    return np.array(values, np.float64)


@given(st.sampled_from(CAPACITIES), updates(weights), st.lists(st.floats(0, 1), max_size=20))
@example(17, [[(0, 1.0), (16, 2.0), (0, 3.0)]], [0.0, 0.99, 1.0])
@example(257, [[(256, 2.0)], [(256, 0.0), (3, 1.0)]], [0.0, 0.5, 1.0])
def test_a_sum_tree_is_a_list_of_weights(
    capacity: int, calls: list[list[tuple[int, float]]], points: list[float]
) -> None:
    tree, model = SumTree(capacity), [0.0] * capacity
    for call in calls:
        pairs = [(row % capacity, value) for row, value in call]
        tree.set(index_of(*(row for row, _ in pairs)), floats([value for _, value in pairs]))
        for row, value in pairs:
            model[row] = value
        assert tree.total == node_sums(model)
    assert np.array_equal(tree.get(np.arange(capacity)), model)
    if tree.total == 0:
        with pytest.raises(ValueError, match="find: the tree is empty"):
            tree.find(floats([0.0]))
        return
    found = tree.find(floats([p * tree.total for p in points] + [0.0, tree.total, math.inf, math.nan, -1.0]))
    positive = [row for row, value in enumerate(model) if value > 0]
    assert set(found.tolist()) <= set(positive)
    assert found[-1] == found[-5] == positive[0]


@given(st.sampled_from(CAPACITIES), st.data())
def test_find_is_the_row_where_the_running_sum_passes_the_mass(capacity: int, data: st.DataObject) -> None:
    """Whole numbers, so that sums are exact and each mass has one right answer."""
    rows = np.array(data.draw(st.lists(st.integers(0, capacity - 1), min_size=1, max_size=60)), np.int64)
    model = np.zeros(capacity)
    for row in rows:
        model[row] = data.draw(st.integers(0, 4))
    model[rows[0]] = 2.0
    tree = SumTree(capacity)
    tree.set(np.arange(capacity), model)
    assert tree.total == model.sum()
    masses = np.arange(0, tree.total, 0.5)
    assert np.array_equal(tree.find(masses), np.searchsorted(np.cumsum(model), masses, side="right"))
    assert tree.find(floats([tree.total, math.inf])).tolist() == [np.flatnonzero(model)[-1]] * 2


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_everything_set_to_zero_adds_up_to_exactly_zero(capacity: int) -> None:
    tree, rng = SumTree(capacity), np.random.default_rng(0)
    for _ in range(3):
        tree.set(np.arange(capacity), rng.random(capacity) * 1e9)
        assert tree.total > 0
    tree.set(np.arange(capacity), np.zeros(capacity))
    assert tree.total == 0


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_rounding_at_the_end_finds_the_last_row_that_has_mass(capacity: int) -> None:
    last = capacity // 2
    tree = SumTree(capacity)
    tree.set(np.arange(last + 1), np.full(last + 1, 0.1))
    masses = tree.total * np.array([1.0, 1.0 + 1e-15, 1.0 - 1e-16, 2.0])
    assert tree.find(masses)[[0, 1, 3]].tolist() == [last] * 3
    assert tree.find(masses).max() == last


ranks = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf]) | st.floats(allow_nan=False)


@given(st.sampled_from(CAPACITIES), updates(ranks), st.integers(1, 5))
def test_a_min_tree_knows_the_lowest_and_of_equals_the_older(
    capacity: int, calls: list[list[tuple[int, float]]], n_orders: int
) -> None:
    tree = MinTree(capacity)
    model = [(math.inf, BIG)] * capacity
    assert tree.lowest() == (math.inf, BIG, 0)
    order = 0
    for call in calls:
        pairs = [(row % capacity, value) for row, value in call]
        orders = [(order := order + 1) % n_orders for _ in pairs]
        tree.set(index_of(*(r for r, _ in pairs)), floats([v for _, v in pairs]), index_of(*orders))
        for (row, value), age in zip(pairs, orders, strict=True):
            model[row] = (value, age)
        assert tree.lowest() == (*min(model), model.index(min(model)))


def test_of_equal_values_the_smaller_order_is_lowest_wherever_it_is() -> None:
    tree = MinTree(257)
    tree.set(np.arange(257), np.full(257, 0.5), np.arange(257)[::-1].copy())
    assert tree.lowest() == (0.5, 0, 256)
    tree.set(index_of(256), floats([math.inf]), index_of(0))
    assert tree.lowest() == (0.5, 1, 255)


@pytest.mark.parametrize("row", [-1, 17, 2**62, -(2**63)])
def test_a_row_outside_is_an_index_error_and_nothing_changes(row: int) -> None:
    total, lowest = SumTree(17), MinTree(17)
    with pytest.raises(IndexError, match=f"row {row} is out of range for 17"):
        total.set(index_of(0, row), floats([1.0, 1.0]))
    with pytest.raises(IndexError, match=f"row {row} is out of range for 17"):
        total.get(index_of(0, row))
    with pytest.raises(IndexError, match=f"row {row} is out of range for 17"):
        lowest.set(index_of(0, row), floats([1.0, 1.0]), index_of(0, 1))
    assert total.total == 0 and lowest.lowest() == (math.inf, BIG, 0)


@pytest.mark.parametrize("value", [-1.0, -5e-324, math.nan, math.inf, -math.inf])
def test_a_weight_is_finite_and_not_negative(value: float) -> None:
    tree = SumTree(4)
    with pytest.raises(ValueError, match="values: must be finite and not negative"):
        tree.set(index_of(0, 1), floats([1.0, value]))
    assert tree.total == 0


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="values: must not be NaN"):
        MinTree(4).set(index_of(0), floats([math.nan]), index_of(0))
    with pytest.raises(ValueError, match="equal lengths"):
        SumTree(4).set(index_of(0, 1), floats([1.0]))
    with pytest.raises(ValueError, match="equal lengths"):
        MinTree(4).set(index_of(0), floats([1.0]), index_of(0, 1))
    with pytest.raises(TypeError, match="values: must be a contiguous 1-D array of float64"):
        SumTree(4).set(index_of(0), np.ones(1, np.float32))
    with pytest.raises(TypeError, match="rows: must be a contiguous 1-D array of int64"):
        SumTree(4).get(np.zeros(1, np.int32))
    for tree in (SumTree, MinTree):
        with pytest.raises(ValueError, match="capacity: must be at least 1, got 0"):
            tree(0)

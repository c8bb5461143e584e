"""IndexStream: the native draw equals a plain reference, and streams restart, save and resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect.sampling import IndexStream

WORD = 2**64


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % WORD
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def reference(key: int, counter: int, bound: int, n: int) -> list[int]:
    """The indices, in integers of any size."""
    found = []
    for c in range(counter, counter + n):
        x = mix((key + (c + 1) * 0x9E3779B97F4A7C15) % WORD)
        while (x * bound) % WORD < WORD % bound:
            x = mix(x ^ 0xD1B54A32D192ED03)
        found.append(x * bound // WORD)
    return found


def words(key: int, counter: int, n: int) -> list[int]:
    return [mix((key + (c + 1) * 0x9E3779B97F4A7C15) % WORD) for c in range(counter, counter + n)]


@given(
    st.integers(0, WORD - 1),
    st.integers(0, 2**40),
    st.integers(1, 2**62) | st.integers(1, 100),
    st.integers(0, 20),
)
def test_indices_are_those_of_the_reference(seed: int, counter: int, bound: int, n: int) -> None:
    stream = IndexStream(seed)
    stream.counter = counter
    got = stream.indices(bound, n)
    assert got.dtype == np.int64
    assert got.tolist() == reference(mix(seed), counter, bound, n)
    assert stream.counter == counter + n


def test_indices_are_uniform() -> None:
    counts = np.bincount(IndexStream(0).indices(10, 100_000), minlength=10)
    assert abs(counts - 10_000).max() < 500


@given(st.integers(0, WORD - 1), st.integers(0, 2**40), st.integers(0, 40))
def test_a_permutation_orders_the_words_of_the_stream(seed: int, counter: int, n: int) -> None:
    stream = IndexStream(seed)
    stream.counter = counter
    drawn = words(mix(seed), counter, n)
    assert stream.permutation(n).tolist() == sorted(range(n), key=drawn.__getitem__)
    assert stream.counter == counter + n


def test_permutations_are_uniform() -> None:
    stream = IndexStream(1)
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(6_000):
        p = tuple(stream.permutation(3).tolist())
        seen[p] = seen.get(p, 0) + 1
    assert len(seen) == 6
    assert all(abs(count - 1_000) < 150 for count in seen.values())


@given(st.integers(0, 30), st.data())
def test_a_choice_has_no_duplicates(bound: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, bound))
    found = IndexStream(data.draw(st.integers(0, 99))).choice(bound, n) if bound else np.empty(0)
    assert len(set(found.tolist())) == len(found) == n
    assert all(0 <= i < bound for i in found)


@pytest.mark.parametrize(("bound", "n"), [(5, 2), (5, 4)])
def test_choices_are_uniform(bound: int, n: int) -> None:
    stream = IndexStream(2)
    first = np.bincount([stream.choice(bound, n)[0] for _ in range(5_000)], minlength=bound)
    last = np.bincount([stream.choice(bound, n)[-1] for _ in range(5_000)], minlength=bound)
    assert abs(first - 5_000 / bound).max() < 150
    assert abs(last - 5_000 / bound).max() < 150


def test_equal_seeds_are_equal_and_none_is_fresh() -> None:
    assert IndexStream(7).indices(10**9, 5).tolist() == IndexStream(7).indices(10**9, 5).tolist()
    assert IndexStream(7).indices(10**9, 5).tolist() != IndexStream(8).indices(10**9, 5).tolist()
    assert IndexStream().indices(10**9, 5).tolist() != IndexStream().indices(10**9, 5).tolist()
    assert IndexStream(np.int64(7)).seed == 7


def test_a_fresh_stream_can_be_repeated_by_its_seed() -> None:
    stream = IndexStream(None)
    assert IndexStream(stream.seed).indices(99, 9).tolist() == stream.indices(99, 9).tolist()


def test_the_state_is_plain_numbers() -> None:
    stream = IndexStream(3)
    stream.indices(10, 4)
    state = stream.state_dict()
    assert all(type(value) is int for value in state.values())
    rest = stream.indices(1000, 6).tolist()
    other = IndexStream(9)
    other.load_state_dict(state)
    assert other.indices(1000, 6).tolist() == rest
    assert other.seed == 3


@pytest.mark.parametrize(
    ("seed", "error"),
    [(-1, ValueError), (WORD, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)],
)
def test_bad_seeds(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed"):
        IndexStream(seed)

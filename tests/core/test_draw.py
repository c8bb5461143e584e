"""Drawn indices against the definition of the stream in whole-number Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recollect._core import draw_indices

WORD = 2**64
words = st.integers(0, WORD - 1)
# Of a bound b, draws are repeated with probability (2**64 mod b) / 2**64: one in four at 2**62 + 1 and 3 * 2**61.
bounds = (
    st.integers(1, 1000) | st.sampled_from([2**62 + 1, 3 * 2**61, 2**63 - 1, 2**63]) | st.integers(1, 2**63)
)


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def draw(key: int, counter: int, bound: int) -> tuple[int, int]:
    """One index, and how often it was drawn again."""
    x, again = mix((key + (counter + 1) * 0x9E3779B97F4A7C15) % WORD), 0
    while x * bound % WORD < WORD % bound:
        x, again = mix(x ^ 0xD1B54A32D192ED03), again + 1
    return x * bound // WORD, again


@given(words, words, bounds, st.integers(0, 20))
@example(0, WORD - 3, 10, 6)  # the counter goes round
@example(WORD - 1, 0, 1, 3)
def test_draws_follow_the_definition(key: int, counter: int, bound: int, n: int) -> None:
    expected = [draw(key, (counter + i) % WORD, bound)[0] for i in range(n)]
    got = draw_indices(key, counter, bound, n)
    assert got.dtype == np.int64 and got.tolist() == expected


@pytest.mark.parametrize("bound", [2**62 + 1, 3 * 2**61, 2**63 - 2**61 + 1])
def test_draws_that_would_be_biased_are_drawn_again(bound: int) -> None:
    pairs = [draw(7, i, bound) for i in range(400)]
    assert sum(again == 0 for _, again in pairs) > 200
    assert sum(again == 1 for _, again in pairs) > 15
    assert any(again > 1 for _, again in pairs)
    assert draw_indices(7, 0, bound, 400).tolist() == [index for index, _ in pairs]


def test_a_stream_goes_on_where_it_was_left() -> None:
    whole = draw_indices(3, 0, 1000, 100)
    assert np.array_equal(
        whole, np.concatenate([draw_indices(3, 0, 1000, 37), draw_indices(3, 37, 1000, 63)])
    )


def test_draws_are_uniform() -> None:
    counts = np.bincount(draw_indices(1, 0, 10, 100_000), minlength=10)
    assert abs(counts - 10_000).max() < 500  # five standard deviations


@pytest.mark.parametrize("bound", [0, 2**63 + 1])
def test_a_bound_is_at_least_one_and_its_indices_are_int64(bound: int) -> None:
    with pytest.raises(ValueError, match="bound: must be at"):
        draw_indices(0, 0, bound, 1)

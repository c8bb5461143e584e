"""Powers as the priorities take them: numpy's to the last digits, and libm's where numbers are not ordinary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect import _core


@given(st.lists(st.floats(1e-30, 1e30), max_size=200), st.floats(-3, 3))
def test_ordinary_numbers(x: list[float], a: float) -> None:
    np.testing.assert_allclose(_core.powers(np.array(x), a), np.array(x) ** a, rtol=1e-13)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=200), st.floats(0, 1))
def test_a_number_has_one_power_wherever_it_stands(x: list[float], a: float) -> None:
    alone = [float(_core.powers(np.array([v]), a)[0]) for v in x]
    assert _core.powers(np.array(x), a).tolist() == alone


def test_powers_of_two_are_exact() -> None:
    x = 2.0 ** np.arange(-900, 900)
    for a, expected in (
        (1.0, x),
        (0.0, np.ones_like(x)),
        (-1.0, 1 / x),
        (0.5, 2.0 ** (np.arange(-900, 900) / 2)),
    ):
        np.testing.assert_allclose(_core.powers(x, a), expected, rtol=0 if a != 0.5 else 1e-12)


@pytest.mark.parametrize("a", [0.0, 0.4, 0.6, 1.0, 2.0, 3.7, -0.4, -2.0, math.inf, -math.inf, math.nan])
def test_what_is_not_ordinary_is_as_numpy_says(a: float) -> None:
    x = np.array(
        [
            0.0,
            -0.0,
            -1.0,
            5e-324,
            1e-310,
            2.3e-308,
            1e-300,
            1e300,
            1.7e308,
            np.inf,
            -np.inf,
            np.nan,
            1.0,
            0.5,
            3.0,
        ]
    )
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(_core.powers(x, a), x**a, rtol=1e-12)


def test_the_first_power_is_the_number_itself() -> None:
    x = np.random.default_rng(0).random(1000)
    np.testing.assert_array_equal(_core.powers(x, 1.0), x)


def test_order_is_kept() -> None:
    x = np.sort(np.random.default_rng(0).random(100_000))
    assert (np.diff(_core.powers(x, 0.6)) >= 0).all()

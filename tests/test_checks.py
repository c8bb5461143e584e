"""The checks of arguments: what passes, what is refused, and that each message has the one form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from recollect import checks

GOOD: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = [
    (checks.count, (1,), {}, 1),
    (checks.count, (np.int64(3), 0), {"most": 3}, 3),
    (checks.seed, (2**64 - 1,), {}, 2**64 - 1),
    (checks.seed, (np.uint32(7),), {"below": 2**32}, 7),
    (checks.number, (0,), {}, 0.0),
    (checks.number, (np.float32(0.5),), {"above": True}, 0.5),
    (checks.seconds, (Fraction(1, 4),), {}, 0.25),
    (checks.seconds, (1e9,), {"most": checks.MOST_S}, 1e9),
    (checks.fraction, (1,), {"above": True}, 1.0),
    (checks.fraction, (0,), {}, 0.0),
    (checks.choice, ("b", ("a", "b")), {}, "b"),
    (checks.choice, (None, (None, "a")), {}, None),
    (checks.flag, (True,), {}, True),
]
OF_ANOTHER_KIND: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (checks.count, (2.0,), {}),
    (checks.count, (True,), {}),
    (checks.count, (np.array([1, 2]),), {}),
    (checks.seed, ("7",), {}),
    (checks.seed, (False,), {}),
    (checks.number, ("1",), {}),
    (checks.number, (None,), {}),
    (checks.seconds, (True,), {}),
    (checks.fraction, (1j,), {}),
    (checks.flag, (1,), {}),
]
OUT_OF_BOUNDS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (checks.count, (0,), {}),
    (checks.count, (4, 0), {"most": 3}),
    (checks.seed, (-1,), {}),
    (checks.seed, (2**32,), {"below": 2**32}),
    (checks.number, (-0.1,), {}),
    (checks.number, (0.0,), {"above": True}),
    (checks.number, (math.nan,), {}),
    (checks.number, (10**400,), {}),
    (checks.seconds, (math.inf,), {}),
    (checks.seconds, (2e9,), {"most": checks.MOST_S}),
    (checks.fraction, (1.5,), {}),
    (checks.fraction, (0,), {"above": True}),
    (checks.choice, ("c", ("a", "b")), {}),
    (checks.choice, (1, (True, "a")), {}),
]


@pytest.mark.parametrize(("check", "given", "options", "wanted"), GOOD)
def test_a_good_value_comes_back_as_a_plain_one(
    check: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any], wanted: Any
) -> None:
    found = check("x", *given, **options)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(("check", "given", "options"), OF_ANOTHER_KIND)
@pytest.mark.parametrize("caught", [TypeError, ValueError])
def test_another_kind_is_a_type_error_and_a_value_error(
    caught: type[Exception], check: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(caught, match=f"^x: must be .*, got {re.escape(repr(given[0]))}"):
        check("x", *given, **options)


@pytest.mark.parametrize(("check", "given", "options"), OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_a_value_error_of_one_form(
    check: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"^x: must be [^;]*, got [^;]+(; .+)?$") as caught:
        check("x", *given, **options)
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize("check", [checks.count, checks.number, checks.seconds, checks.fraction])
def test_advice_ends_the_message(check: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="; do this instead$"):
        check("x", -1, advice="do this instead")


def test_no_timeout_is_the_default() -> None:
    assert checks.timeout(None, 2.5) == 2.5 and checks.timeout(1, 2.5) == 1.0
    with pytest.raises(ValueError, match="timeout: must be a finite number of seconds"):
        checks.timeout(-1.0, 2.5)

"""Spaces as JSON: the form itself, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from recollect.errors import FormatError
from recollect.spaces import as_space, canonical, space_from_json, space_to_json


def test_the_form_is_standard_json_with_infinities_as_strings_and_equal_bounds_once() -> None:
    space = as_space({"b": spaces.Box(-np.inf, np.inf, (3,)), "a": spaces.Box(0, 255, (2, 2), np.uint8)})
    assert space_to_json(space) == {
        "type": "dict",
        "items": [
            ["b", {"type": "box", "shape": [3], "dtype": "float32", "low": "-inf", "high": "inf"}],
            ["a", {"type": "box", "shape": [2, 2], "dtype": "uint8", "low": 0, "high": 255}],
        ],
    }


def test_unequal_bounds_are_a_flat_list() -> None:
    obj = space_to_json(spaces.Box(np.array([[0, -np.inf], [1, 2]]), np.full((2, 2), 9.0), dtype=np.float64))
    assert obj["low"] == [0.0, "-inf", 1.0, 2.0]
    assert obj["high"] == 9.0


def test_64_bit_bounds_are_exact() -> None:
    low, high = np.array([-(2**63), 5]), np.array([2**63 - 1, 2**53 + 1])
    space = spaces.Box(low, high, dtype=np.int64)
    back = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert isinstance(back, spaces.Box)
    assert back.low.tolist() == low.tolist()
    assert back.high.tolist() == high.tolist()


def test_float_bounds_are_exact_to_the_bit_and_keep_negative_zero() -> None:
    low = np.array([-0.0, 0.0, 0.1, 1e-45], np.float32)
    back = space_from_json(json.loads(json.dumps(space_to_json(spaces.Box(low, np.full(4, 1, np.float32))))))
    assert isinstance(back, spaces.Box)
    assert back.low.tobytes() == low.tobytes()


def test_integer_boxes_stay_unbounded() -> None:
    for space in (
        spaces.Box(-np.inf, np.inf, (2,), np.int32),
        spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.int16),
    ):
        back = space_from_json(space_to_json(space))
        assert isinstance(back, spaces.Box)
        assert back.bounded_below.tolist() == space.bounded_below.tolist()
        assert back.bounded_above.tolist() == space.bounded_above.tolist()


def test_a_charset_is_ranges_of_code_points_in_any_hash_order() -> None:
    obj = space_to_json(spaces.Text(3, charset=frozenset("cba9é")))
    assert obj["charset"] == [[57, 57], [97, 99], [233, 233]]
    assert space_to_json(spaces.Text(3, charset="éa9cb")) == obj
    assert space_to_json(spaces.Text(0, min_length=0, charset=""))["charset"] == []
    every = {chr(code) for code in range(0x110000)}
    for missing, ranges in (
        ("", [[0, 0x10FFFF]]),
        ("\0\ud800\U0010ffff", [[1, 0xD7FF], [0xD801, 0x10FFFE]]),
    ):
        assert space_to_json(spaces.Text(3, charset=frozenset(every - {*missing})))["charset"] == ranges


def test_canonical_text_is_sorted_and_tight() -> None:
    assert canonical({"b": [1, 2.5], "a": "é"}) == '{"a":"\\u00e9","b":[1,2.5]}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical(float("nan"))


GOOD = space_to_json(as_space({"x": ((2,), "f4")}))


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [],
        "box",
        {},
        {"type": "graph"},
        {"type": ["box"]},
        {"type": "box"},
        {"type": "box", "shape": [2], "dtype": "float32", "low": [1], "high": 2},
        {"type": "box", "shape": [2], "dtype": "float99", "low": 0, "high": 2},
        {"type": "box", "shape": [2], "dtype": "float32", "low": 3, "high": 2},
        {"type": "discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"type": "dict", "items": [["x"]]},
        {"type": "dict", "items": [["x", {"type": "os.system"}]]},
        {"type": "text", "min_length": 0, "max_length": 3, "charset": [[0, 2**40]]},
        {**GOOD, "type": "tuple"},
    ],
)
def test_what_is_no_space_is_a_format_error(obj: Any) -> None:
    with pytest.raises(FormatError, match="^space: "):
        space_from_json(obj)

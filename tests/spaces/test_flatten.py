"""The flattened form: dtype, order, and exactness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from recollect.errors import DtypeError, SchemaError
from recollect.spaces import compile_layout
from recollect.spaces.dtypes import promote

MIXED = compile_layout({"f": ((), "float32"), "i": ((2,), "int64"), "d": spaces.Discrete(3)})


def test_leaves_are_raveled_in_order_one_column_per_discrete() -> None:
    layout = compile_layout({"m": ((2, 2), "f4"), "d": spaces.Discrete(3, dtype=np.int8), "b": ((), "bool")})
    assert layout.flat_dtype == np.float32
    assert layout.flatten_one({"m": [[1.0, 2.0], [3.0, 4.0]], "d": 2, "b": True}).tolist() == [
        1,
        2,
        3,
        4,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("dtypes", "flat"),
    [
        (["float32"], "float32"),
        (["float32", "int64"], "float64"),
        (["float32", "int16"], "float32"),
        (["float32", "int32"], "float64"),
        (["uint8", "int8"], "int16"),
        (["uint64", "int64"], "float64"),
        (["bool"], "bool"),
        (["bool", "float16"], "float16"),
        (["bfloat16"], "bfloat16"),
        (["bfloat16", "int64"], "float64"),
        (["bfloat16", "float16"], "float32"),
        (["bfloat16", "uint8"], "float32"),
        (["int4", "uint8"], "int16"),
        (["float8_e4m3fn", "int8"], "float32"),
    ],
)
def test_the_dtype_is_numpys_promotion(dtypes: list[str], flat: str) -> None:
    for order in (dtypes, dtypes[::-1]):
        assert compile_layout({d: ((), d) for d in order}).flat_dtype.name == flat


def test_promotion_does_not_depend_on_the_order() -> None:
    dtypes = [np.dtype(d) for d in ("bool", "uint8", "int8", "float16")]
    assert promote(dtypes) == promote(dtypes[::-1]) == np.float16


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63) + 1, 2**62 + 1])
def test_an_integer_the_dtype_would_change_names_its_leaf(value: int) -> None:
    sample = {"f": 1.0, "i": [0, value], "d": 1}
    with pytest.raises(SchemaError, match=f"^i: integers must be exact .*float64, got {value}"):
        MIXED.flatten_one(sample)
    with pytest.raises(SchemaError, match="^i: "):
        MIXED.flatten_batch({"f": [1.0], "i": [[0, value]], "d": [1]})


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_flatten_exactly_or_not_at_all(value: int) -> None:
    sample = {"f": 1.0, "i": [0, value], "d": 1}
    if int(float(value)) == value:
        assert int(MIXED.unflatten_one(MIXED.flatten_one(sample))["i"][1]) == value
    else:
        with pytest.raises(SchemaError, match="^i: "):
            MIXED.flatten_one(sample)


@given(st.integers(0, 2**64 - 1))
def test_unsigned_integers_too(value: int) -> None:
    layout = compile_layout({"u": ((), "uint64"), "i": ((), "int8")})
    if int(float(value)) == value:
        assert int(layout.unflatten_one(layout.flatten_one({"u": value, "i": -1}))["u"]) == value
    else:
        with pytest.raises(SchemaError, match="^u: "):
            layout.flatten_one({"u": value, "i": -1})


def test_64_bit_integers_alone_stay_exact() -> None:
    layout = compile_layout({"i": ((2,), "int64")})
    assert layout.flatten_one({"i": [2**63 - 1, -(2**63)]}).tolist() == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    ("vector", "match"),
    [
        ([1.0, 0.5, 0.0, 0.0], "^i: value must .* int64, got 0.5"),
        ([1.0, np.nan, 0.0, 0.0], "^i: "),
        ([1.0, 2.0**63, 0.0, 0.0], "^i: "),
        ([1.0, 0.0, 0.0, np.inf], "^d: "),
        ([1e300, 0.0, 0.0, 0.0], "^f: value must fit float32, got 1e"),
        ([1.0, 0.0, 0.0], r"^flattened: shape must be \(4,\), got \(3,\)"),
        ([1.0, 0.0, 0.0, 0.0, 0.0], r"^flattened: shape must be \(4,\)"),
        (np.zeros((1, 4)), r"^flattened: shape must be \(4,\)"),
        ("abcd", "^flattened: "),
    ],
)
def test_a_vector_that_is_no_sample_is_refused(vector: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        MIXED.unflatten_one(np.asarray(vector) if isinstance(vector, list) else vector)


def test_a_matrix_of_another_width_or_dtype_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^flattened: shape must be \(2, 4\), got \(2, 3\)"):
        MIXED.unflatten_batch(np.zeros((2, 3)))
    with pytest.raises(DtypeError, match="^flattened: dtype must be float64, got float32"):
        MIXED.unflatten_batch(np.zeros((2, 4), "f4"))
    assert MIXED.unflatten_batch(np.zeros((2, 4), "f4"), cast=True)["i"].tolist() == [[0, 0], [0, 0]]


def test_bools_come_back_from_zero_and_one_only() -> None:
    layout = compile_layout({"b": ((), "bool"), "f": ((), "f4")})
    assert layout.unflatten_one(np.array([1, 0], "f4"))["b"].dtype == bool
    with pytest.raises(SchemaError, match="^b: value must .*bool, got 2"):
        layout.unflatten_one(np.array([2, 0], "f4"))


def test_floats_are_rounded_to_the_leaf() -> None:
    assert MIXED.unflatten_one(np.array([0.1, 0, 0, 0]))["f"] == np.float32(0.1)


def test_nan_and_infinity_pass() -> None:
    layout = compile_layout({"f": ((3,), "f4"), "g": ((), "f8")})
    values = [np.nan, np.inf, -np.inf]
    back = layout.unflatten_one(layout.flatten_one({"f": np.array(values, "f4"), "g": 0.0}))
    assert np.array_equal(back["f"], np.array(values, "f4"), equal_nan=True)

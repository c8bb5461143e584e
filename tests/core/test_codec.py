"""What a codec takes as it is, and what it declines for the Python side to convert or refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.make import byte_codec, codec_of, index_of, make_rows

from recollect import _core

INTS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
OTHERS = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
FLOAT32_MAX = float(np.finfo(np.float32).max)
F64 = np.dtype(np.float64)
PLAN = (
    "dict",
    (
        ("x", ("leaf", 1)),
        ("pair", ("tuple", (("leaf", 0), ("dict", (("deep", ("leaf", 2)),))))),
        (7, ("leaf", 3)),
    ),
)
SHAPES = [(), (3,), (2, 2), (0,)]
NESTED = _core.Codec([(8 * k * 4, F64, shape, False) for k, shape in enumerate(SHAPES)], PLAN, 128)


def taken(codec: _core.Codec, sample: Any) -> Any:
    """What reads back after an append of `sample`, None if it was declined (and then nothing was written)."""
    rows = make_rows(codec.row_nbytes, 2)
    if rows.append(codec, sample):
        assert rows.count() == 1
        return rows.read(codec, index_of(0), single=True)
    assert rows.count() == 0 and rows.counters()["offered"] == 0
    return None


def nested(a: Any, b: Any, c: Any, d: Any) -> Any:
    return {"pair": (a, {"deep": c}), "x": b, 7: d}  # another order of keys than the plan's


def sample() -> list[Any]:
    return [np.float64(1), np.arange(3.0), np.arange(4.0).reshape(2, 2), np.zeros(0)]


def test_a_nested_sample_reads_back_in_the_order_of_the_plan() -> None:
    got = taken(NESTED, nested(*sample()))
    assert list(got) == ["x", "pair", 7]
    assert type(got["pair"]) is tuple and got["pair"][0] == 1 and got["x"].tolist() == [0, 1, 2]
    assert got["pair"][1]["deep"].tolist() == [[0, 1], [2, 3]] and got[7].shape == (0,)


def test_a_nested_batch_reads_back() -> None:
    blocks = [np.random.default_rng(0).random((5, *shape)) for shape in SHAPES]
    rows = make_rows(NESTED.row_nbytes, 8)
    assert rows.extend(NESTED, nested(*blocks)) == 5
    got = rows.read(NESTED, np.arange(5))
    leaves = [got["pair"][0], got["x"], got["pair"][1]["deep"], got[7]]
    assert all(np.array_equal(leaf, block) for leaf, block in zip(leaves, blocks, strict=True))


def wrong_samples() -> dict[str, Any]:
    a, b, c, d = sample()
    good = nested(a, b, c, d)
    return {
        "missing key": {k: v for k, v in good.items() if k != "x"},
        "another key": {("y" if k == "x" else k): v for k, v in good.items()},
        "one key more": good | {"y": a},
        "not a dict": list(good.values()),
        "a dict's subclass": type("Other", (dict,), {})(good),
        "list for tuple": good | {"pair": list(good["pair"])},
        "tuple too short": good | {"pair": good["pair"][:1]},
        "dtype": nested(a, b.astype(np.float32), c, d),
        "byte order": nested(a, b.astype(">f8"), c, d),
        "shape": nested(a, np.arange(4.0), c, d),
        "number of axes": nested(a, b[None], c, d),
        "not contiguous": nested(a, np.arange(6.0)[::2], c, d),
        "transposed": nested(a, b, c.T, d),
        "list for array": nested(a, [0.0, 1.0, 2.0], c, d),
        "number for array": nested(a, 1.0, c, d),
        "array's subclass": nested(a, np.ma.array(b), c, d),
        "none": nested(None, b, c, d),
        "text": nested("1", b, c, d),
        "nothing": None,
    }


@pytest.mark.parametrize("name", wrong_samples())
def test_a_sample_of_another_form_is_declined(name: str) -> None:
    assert taken(NESTED, wrong_samples()[name]) is None


def wrong_batches() -> dict[str, Any]:
    good = [np.zeros((5, *shape)) for shape in SHAPES]
    return {
        "a leaf too long": [good[0], np.zeros((6, 3)), *good[2:]],
        "no leading axis": [np.float64(1), *good[1:]],
        "dtype": [good[0].astype(np.float32), *good[1:]],
        "not contiguous": [np.zeros(10)[::2], *good[1:]],
        "list": [[0.0] * 5, *good[1:]],
        "0-d": [np.array(1.0), *good[1:]],
    }


@pytest.mark.parametrize("name", wrong_batches())
def test_a_batch_of_another_form_is_declined(name: str) -> None:
    rows = make_rows(NESTED.row_nbytes, 8)
    assert rows.extend(NESTED, nested(*wrong_batches()[name])) == -1
    assert rows.count() == 0


def test_a_codec_without_a_plan_declines_samples_and_takes_fields() -> None:
    codec = _core.Codec([(0, F64, (2,), False), (16, F64, (), False)], None, 24)
    rows = make_rows(24, 4)
    assert (
        not rows.append(codec, (np.zeros(2), 1.0))
        and rows.extend(codec, (np.zeros((1, 2)), np.zeros(1))) == -1
    )
    rows.write(codec, [np.ones((3, 2)), np.arange(3.0)], 3)
    got = rows.read(codec, index_of(2))
    assert type(got) is list and got[0].tolist() == [[1, 1]] and got[1].tolist() == [2]


# -- numbers


@given(st.sampled_from(INTS), st.integers(-(2**65), 2**65))
@example("uint64", 1)
def test_a_python_int_is_taken_where_it_fits(name: str, value: int) -> None:
    info = np.iinfo(name)
    fits = info.min <= value <= info.max and name != "uint64"  # which always goes the slow way
    got = taken(codec_of(name), value)
    assert (got is not None) == fits
    if fits:
        assert got == value and got.dtype == name


@pytest.mark.parametrize("name", INTS[:-1])
def test_the_edges_of_each_integer_type(name: str) -> None:
    codec, info = codec_of(name), np.iinfo(name)
    low, high = int(info.min), int(info.max)
    assert taken(codec, low) == low and taken(codec, high) == high
    assert taken(codec, low - 1) is None and taken(codec, high + 1) is None


@given(st.floats(allow_nan=True))
@example(FLOAT32_MAX)
@example(-FLOAT32_MAX * (1 + 2**-23))
@example(math.inf)
@example(5e-324)
def test_a_python_float_is_rounded_and_never_becomes_infinite(value: float) -> None:
    assert np.array_equal(taken(codec_of(np.float64), value), value, equal_nan=True)
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    got = taken(codec_of(np.float32), value)
    if np.isinf(rounded) and math.isfinite(value):
        assert got is None
    else:
        assert np.array_equal(got, rounded, equal_nan=True)


@pytest.mark.parametrize("name", INTS + OTHERS)
def test_numpy_scalars_and_0d_arrays_are_taken_by_their_own_type_alone(name: str) -> None:
    codec = codec_of(name)
    for other in INTS + OTHERS:
        value = np.dtype(other).type(1)
        for given_as in (value, np.array(value)):
            got = taken(codec, given_as)
            assert (got is not None) == (other == name), (name, other)
            assert got is None or (got == value and got.dtype == name)


@pytest.mark.parametrize("name", INTS + OTHERS)
def test_python_numbers_are_taken_by_types_of_their_kind_alone(name: str) -> None:
    codec = codec_of(name)
    assert (taken(codec, True) is not None) == (name == "bool")
    assert (taken(codec, 1) is not None) == (name in INTS[:-1])
    assert (taken(codec, 1.0) is not None) == (name in ("float32", "float64"))
    assert taken(codec, 1j) is None and taken(codec, "1") is None


def test_true_and_false() -> None:
    codec = codec_of(np.bool_)
    for value in (True, False):
        for given_as in (value, np.bool_(value), np.array(value)):
            assert taken(codec, given_as) == value


def test_numbers_of_a_type_that_numpy_does_not_know() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    codec = codec_of(bfloat16)
    assert taken(codec, np.array(1.5, bfloat16)) == bfloat16(1.5)
    for number in (bfloat16(1.5), 1.5, np.float16(1.5)):  # Python takes them out of their boxes
        assert taken(codec, number) is None
    assert taken(codec_of(bfloat16, (2,)), np.array([1, 2], bfloat16)).tolist() == [1, 2]


def test_more_leaves_than_fit_on_the_stack() -> None:
    n = 100
    plan = ("tuple", tuple(("leaf", k) for k in range(n)))
    codec = _core.Codec([(8 * k, F64, (), False) for k in range(n)], plan, 8 * n)
    assert [float(x) for x in taken(codec, tuple(float(k) for k in range(n)))] == list(range(n))


def test_a_longer_tuple_is_declined() -> None:
    codec, a = byte_codec([4, 4]), np.zeros(4, np.uint8)
    rows = make_rows(codec.row_nbytes, 4)
    assert not rows.append(codec, (a, a, a)) and not rows.append(codec, (a,)) and rows.count() == 0
    assert rows.extend(codec, (a[None],) * 3) == -1 and rows.count() == 0
    assert rows.append(codec, (a, a))

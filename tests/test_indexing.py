"""One meaning of an index: the table of the contract, and numpy as the reference."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect.indexing import normalize, positions


def backends() -> list[Any]:
    """A function per backend that makes its array of a numpy array."""
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    return [np.asarray, torch.from_numpy, jnp.asarray]


class Number(IntEnum):
    TWO = 2


class Indexable:
    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "index", [3, -2, np.int64(3), np.uint8(3), np.int8(-2), np.array(3), np.array(-2, np.int16), Indexable()]
)
def test_an_integer_is_one_sample(index: Any) -> None:
    assert normalize(index, 5) == 3
    assert type(normalize(index, 5)) is int
    assert positions(index, 5).tolist() == [3]


def test_an_int_enum_is_an_integer() -> None:
    assert normalize(Number.TWO, 5) == 2


def test_0d_arrays_of_any_backend_are_integers() -> None:
    for make in backends():
        assert normalize(make(np.array(-1, np.int32)), 5) == 4
        with pytest.raises(TypeError, match="^index: must be"):
            normalize(make(np.array(True)), 5)
        with pytest.raises(TypeError, match="^index: must be"):
            normalize(make(np.array(1.0, np.float32)), 5)


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(1, 3),
        slice(-100, 100),
        slice(None, None, -1),
        slice(4, 0, -2),
        slice(3, 1),
        slice(np.int64(1), np.int64(4)),
    ],
)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_slices_are_clipped_as_python_clips_them(index: slice, n: int) -> None:
    found = normalize(index, n)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.int64
    assert found.tolist() == list(range(n))[index]


def test_an_ellipsis_is_everything() -> None:
    assert positions(..., 4).tolist() == [0, 1, 2, 3]
    assert positions(..., 0).shape == (0,)


@pytest.mark.parametrize(
    "index",
    [
        [0, 4, -1, 0],
        (0, 4, -1, 0),
        [np.int8(0), 4, np.array(-1), 0],
        np.array([0, 4, -1, 0]),
        np.array([0, 4, -1, 0], np.int8),
        np.array([0, 4, -1, 0], ">i4"),
        np.array([0, 0, 4, 0, -1, 0, 0])[[0, 2, 4, 6]],
    ],
)
def test_lists_and_arrays_keep_order_and_duplicates(index: Any) -> None:
    found = normalize(index, 5)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.int64
    assert found.tolist() == [0, 4, 4, 0]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (range(1, 4), [1, 2, 3]),
        (range(4, -1, -2), [4, 2, 0]),
        (range(-2, 2), [3, 4, 0, 1]),
        (range(3, 3), []),
        (range(10**30, 10**30), []),
    ],
)
def test_ranges(index: range, expected: list[int]) -> None:
    assert positions(index, 5).tolist() == expected


def test_arrays_of_any_backend() -> None:
    for make in backends():
        assert positions(make(np.array([0, -1], np.int32)), 5).tolist() == [0, 4]
        assert positions(make(np.array([True, False, True])), 3).tolist() == [0, 2]
        assert positions(make(np.array([], np.float32)), 3).tolist() == []
        assert positions([make(np.array(1, np.int32)), 2], 3).tolist() == [1, 2]
        with pytest.raises(TypeError):
            normalize(make(np.zeros((1, 1), np.int32)), 5)
        with pytest.raises(TypeError):
            normalize(make(np.zeros(1, np.float32)), 5)
        with pytest.raises(IndexError, match="got 5"):
            normalize(make(np.array([0, 5], np.int32)), 5)


@pytest.mark.parametrize(
    "index", [[], (), np.array([]), np.array([], np.int64), np.array([], np.uint8), range(0), slice(0, 0)]
)
@pytest.mark.parametrize("n", [0, 3])
def test_nothing_is_an_empty_batch(index: Any, n: int) -> None:
    found = normalize(index, n)
    assert isinstance(found, np.ndarray)
    assert (found.shape, found.dtype) == ((0,), np.int64)


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_masks(make: Any) -> None:
    assert positions(make([True, False, True]), 3).tolist() == [0, 2]
    assert positions(make([False, False]), 2).tolist() == []
    assert positions([np.True_, False], 2).tolist() == [0]
    for mask in ([True, False], [True] * 4):
        with pytest.raises(IndexError, match=f"length 3 of the batch, got length {len(mask)}"):
            normalize(make(mask), 3)


def test_an_empty_mask_needs_an_empty_batch() -> None:
    assert positions(np.array([], bool), 0).tolist() == []
    with pytest.raises(IndexError, match="got length 0"):
        normalize(np.array([], bool), 3)


@pytest.mark.parametrize(
    ("index", "got"),
    [
        (5, "5"),
        (-6, "-6"),
        (2**70, str(2**70)),
        pytest.param(10**5000, "an int of 16610 bits", id="too long to print"),
        (np.uint64(2**63), str(2**63)),
        (np.array(5), "5"),
        ([0, 5], "5"),
        ([0, -6], "-6"),
        ([0, 2**70], str(2**70)),
        ([np.int64(1), 2**70], str(2**70)),
        (np.array([0, 7, 8]), "7"),
        (np.array([0, -7]), "-7"),
        (np.array([0, 2**64 - 1], np.uint64), str(2**64 - 1)),
        (range(3, 7), "6"),
        (range(-6, 0), "-6"),
        (range(10**30), str(10**30 - 1)),
    ],
)
def test_out_of_range_names_the_index_and_the_length(index: Any, got: str) -> None:
    with pytest.raises(IndexError) as caught:
        normalize(index, 5)
    assert str(caught.value) == f"index: must be in [-5, 5) for length 5, got {got}"


@pytest.mark.parametrize("index", [0, -1, [0], np.array([0]), range(1), np.array([-1])])
def test_nothing_is_in_range_of_nothing(index: Any) -> None:
    with pytest.raises(IndexError, match="length 0"):
        normalize(index, 0)


@pytest.mark.parametrize(
    "index",
    [
        True,
        np.bool_(False),
        np.array(True),
        1.0,
        np.float64(1),
        np.array(1.0),
        np.array([1.0, 2.0]),
        [1.0],
        [1, 2.0],
        [True, 1],
        [1, None],
        [[0, 1]],
        [(0,)],
        ["0"],
        [slice(None)],
        [np.array([0])],
        "0",
        "",
        b"0",
        None,
        {},
        {0},
        object(),
        np.array([[0, 1]]),
        np.empty((0, 3)),
        np.zeros((2, 2), bool),
        np.array(["a"]),
        np.array([None]),
        np.array([0], object),
        np.timedelta64(1),
        np.array([1], "m8[s]"),
        np.array([1j]),
        1j,
        iter([1]),
        slice(1.0, None),
        slice("a"),
    ],
)
def test_everything_else_is_a_type_error(index: Any) -> None:
    with pytest.raises(TypeError):
        normalize(index, 5)
    with pytest.raises(TypeError):
        positions(index, 5)


def test_a_step_of_zero_is_a_value_error_as_in_python() -> None:
    with pytest.raises(ValueError, match="step cannot be zero"):
        normalize(slice(None, None, 0), 5)


def test_a_good_int64_array_is_passed_on_and_never_changed() -> None:
    index = np.array([0, 3])
    assert normalize(index, 5) is index
    negative = np.array([-1, 3])
    assert positions(negative, 5).tolist() == [4, 3]
    assert negative.tolist() == [-1, 3]
    frozen = np.array([-1, 3])
    frozen.flags.writeable = False
    assert positions(frozen, 5).tolist() == [4, 3]


@given(n=st.integers(0, 8), index=st.lists(st.integers(-10, 10), max_size=6))
def test_integers_agree_with_numpy(n: int, index: list[int]) -> None:
    data = np.arange(n)
    try:
        expected = data[np.array(index, np.int64)].tolist()
    except IndexError:
        for given_as in (index, tuple(index), np.array(index)):
            with pytest.raises(IndexError):
                normalize(given_as, n)
        return
    for given_as in (index, tuple(index), np.array(index, np.int64), np.array(index, np.int8)):
        assert positions(given_as, n).tolist() == expected


@given(n=st.integers(0, 8), index=st.slices(20))
def test_slices_agree_with_python(n: int, index: slice) -> None:
    assert positions(index, n).tolist() == list(range(n))[index]

"""Blocks written past the caches: the same bytes as in place, wherever a block begins and ends, patched or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.make import BYTE, byte_codec, make_rows, random_blocks

from recollect import _core


@pytest.fixture(autouse=True)
def everything_is_streamed() -> Iterator[None]:
    _core.stream_from(0, 0)
    yield
    _core.stream_from(None, None)


def in_place(codec: _core.Codec, capacity: int, writes: list[tuple[Any, Any]]) -> Any:
    _core.stream_from(None, 1 << 62)
    try:
        return packed(codec, capacity, writes)
    finally:
        _core.stream_from(0, 0)


def packed(codec: _core.Codec, capacity: int, writes: list[tuple[Any, Any]]) -> Any:
    """The bytes of all rows, padding too, after these writes of (blocks, patches)."""
    rows = make_rows(codec.row_nbytes, capacity)
    for blocks, patches in writes:
        rows.write(codec, blocks, len(blocks[0]), 0, None, False, patches)
    whole = _core.Codec([(0, BYTE, (codec.row_nbytes,), False)], ("leaf", 0), codec.row_nbytes)
    return rows.read(whole, np.arange(rows.count()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([1, 4, 8, 24, 68, 192]), min_size=1, max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.integers(0, 100),
)
def test_the_same_bytes_as_in_place(sizes: list[int], gap: int, lengths: list[int], percent: int) -> None:
    codec, rng = byte_codec(sizes, gap), np.random.default_rng(percent)
    writes = []
    for seed, n in enumerate(lengths):
        samples = np.flatnonzero(rng.random(n) * 100 < percent)
        others = random_blocks(sizes, n, seed + 100)
        writes.append((random_blocks(sizes, n, seed), (samples, [(0, others[0])])))
    expected = in_place(codec, 100, writes)
    np.testing.assert_array_equal(packed(codec, 100, writes), expected)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 47, 48, 49, 100, 4096])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_every_length_from_every_place_in_a_line(n: int, first: int) -> None:
    codec = byte_codec([68, 24, 4, 68, 4])
    writes = [(random_blocks([68, 24, 4, 68, 4], k, k), None) for k in (first, n) if k]
    expected = in_place(codec, 5000, writes)
    np.testing.assert_array_equal(packed(codec, 5000, writes), expected)


@pytest.mark.parametrize("size", [1016, 1024, 1032, 5000])
def test_rows_of_which_few_or_none_fit_where_they_are_put_together(size: int) -> None:
    codec = byte_codec([size])
    writes = [(random_blocks([size], 20, 0), None)]
    np.testing.assert_array_equal(packed(codec, 30, writes), in_place(codec, 30, writes))


def test_large_blocks_on_several_threads() -> None:
    codec = byte_codec([192, 256])
    n = 3 * (1 << 20) // codec.row_nbytes
    blocks, others = random_blocks([192, 256], n, 0), random_blocks([192, 256], n, 1)
    writes = [(blocks, (np.arange(0, n, 7), [(1, others[1])]))]
    np.testing.assert_array_equal(packed(codec, n, writes), in_place(codec, n, writes))
    np.testing.assert_array_equal(packed(codec, n, writes)[::7, 192:448], others[1][::7])

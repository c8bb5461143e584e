"""Gather and scatter: what goes into rows leaf by leaf comes out of them, whatever the sizes and the way taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.make import BYTE, Blocks, byte_codec, codec_of, index_of, make_rows, random_blocks, stream_at

from recollect import _core

EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 68, 100, 192, 1000]
LARGE = [1024, 1025, 5000]
STAGED = st.lists(st.sampled_from(EDGES) | st.integers(0, 130), min_size=1, max_size=6)
DIRECT = st.lists(st.sampled_from(EDGES + LARGE), min_size=1, max_size=4)
MIB = 1 << 20


def filled(sizes: list[int], n: int, gap: int = 0, seed: int = 0) -> tuple[_core.Rows, _core.Codec, Blocks]:
    """Rows with n random samples, each lane position in its own row."""
    codec = byte_codec(sizes, gap)
    rows = make_rows(codec.row_nbytes, max(n, 1))
    blocks = random_blocks(sizes, n, seed)
    assert rows.extend(codec, tuple(blocks)) == n
    return rows, codec, blocks


def same(got: Any, blocks: Blocks, index: Any = slice(None)) -> bool:
    return len(got) == len(blocks) and all(
        g.dtype == b.dtype and np.array_equal(g, b[index]) for g, b in zip(got, blocks, strict=True)
    )


def some_index(n: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n, k)


@given(STAGED | DIRECT, st.integers(1, 70), st.integers(0, 5), st.lists(st.integers(0, 10**6), max_size=60))
@example([0], 3, 0, [0, 2, 1])
@example([0, 0, 0], 3, 0, [0, 2, 1])
@example([0, 1, 3, 17, 68, 192], 70, 0, [69, 0, 69])
@example([0, 1, 3, 17, 68, 192, 1000, 5000], 70, 3, [69, 0, 69])
@example([1016, 8], 64, 0, list(range(60)))
@example([1017, 8], 64, 0, list(range(60)))
def test_gather_reads_what_scatter_wrote(sizes: list[int], n: int, gap: int, picks: list[int]) -> None:
    rows, codec, blocks = filled(sizes, n, gap)
    index = np.array([p % n for p in picks], np.int64)
    assert same(rows.read(codec, index), blocks, index)
    assert same(rows.read_rows(codec, index), blocks, index)
    for i in index[:3]:
        one = rows.read(codec, index_of(i), single=True)
        assert all(np.array_equal(leaf, block[i]) for leaf, block in zip(one, blocks, strict=True))


@pytest.mark.parametrize("size", EDGES + LARGE)
@pytest.mark.parametrize("path", ["alone", "staged", "direct"])
def test_every_size_on_every_path(size: int, path: str) -> None:
    sizes = {"alone": [size], "staged": [3, min(size, 1000), 5], "direct": [3, size, 1100]}[path]
    rows, codec, blocks = filled(sizes, 40)
    assert same(rows.read(codec, some_index(40, 100)), blocks, some_index(40, 100))


@given(STAGED, st.integers(1, 20), st.integers(0, 9))
def test_a_packed_row_is_its_leaves_and_zeros_between(sizes: list[int], n: int, gap: int) -> None:
    rows, codec, blocks = filled(sizes, n, gap)
    expected = np.zeros((n, codec.row_nbytes), np.uint8)
    at = 0
    for block in blocks:
        expected[:, at : at + block.shape[1]] = block
        at += block.shape[1] + gap
    packed = _core.Codec([(0, BYTE, (codec.row_nbytes,), False)], ("leaf", 0), codec.row_nbytes)
    got = rows.read(packed, np.arange(n))
    if codec.row_nbytes <= 1024:
        assert np.array_equal(got, expected)
    other = make_rows(codec.row_nbytes, n)
    assert other.extend(packed, got) == n
    assert same(other.read(codec, np.arange(n)), blocks)


@given(st.lists(st.integers(1, 400), min_size=3, max_size=6), st.data())
def test_a_codec_of_some_leaves_reads_those_alone(sizes: list[int], data: st.DataObject) -> None:
    rows, codec, blocks = filled(sizes, 50)
    chosen = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1), min_size=1)))
    fields = [(sum(sizes[:k]), BYTE, (sizes[k],), False) for k in chosen]
    part = _core.Codec(fields, None, codec.row_nbytes)
    index = some_index(50, 100)
    assert same(rows.read(part, index), [blocks[k] for k in chosen], index)


@given(DIRECT, st.integers(1, 9))
def test_one_append_writes_what_an_extend_would(sizes: list[int], n: int) -> None:
    codec = byte_codec(sizes)
    blocks = random_blocks(sizes, n, 0)
    rows = make_rows(codec.row_nbytes, n)
    for i in range(n):
        assert rows.append(codec, tuple(block[i] for block in blocks))
    assert same(rows.read(codec, np.arange(n)), blocks)


@given(STAGED | DIRECT, st.integers(2, 30), st.data())
def test_overwrite_changes_the_named_rows_and_the_last_of_duplicates_wins(
    sizes: list[int], n: int, data: st.DataObject
) -> None:
    rows, codec, blocks = filled(sizes, n)
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=12)), np.int64)
    new = random_blocks(sizes, len(index), 7)
    rows.overwrite(codec, index, new)
    for i, at in enumerate(index):
        for block, fresh in zip(blocks, new, strict=True):
            block[at] = fresh[i]
    assert same(rows.read(codec, np.arange(n)), blocks)


@pytest.mark.parametrize("sizes", [[17], [3, 68, 0, 1, 192], [5000], [1000, 3000, 1]])
def test_large_copies_are_shared_out_between_threads_and_no_sample_is_left_out(sizes: list[int]) -> None:
    row_nbytes = byte_codec(sizes).row_nbytes
    n = 5 * MIB // row_nbytes + 3  # not a multiple of anything
    rows, codec, blocks = filled(sizes, n)
    assert same(rows.read(codec, np.arange(n)), blocks)
    index = some_index(n, n)
    assert same(rows.read(codec, index), blocks, index)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Threads that are started here begin when the one that starts them has to pause."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    yield
    os.sched_setaffinity(0, usable)


@pytest.mark.process
def test_who_begins_late_is_not_needed_and_changes_nothing(one_core: None) -> None:
    sizes, n = [300], 5 * MIB // 300
    rows, codec, blocks = filled(sizes, n)
    for seed in range(40):
        index = some_index(n, n, seed)
        assert same(rows.read(codec, index), blocks, index)
        assert len(os.listdir("/proc/self/task")) < 40  # nor do they pile up
    child = os.fork()  # in which nobody is late
    if not child:
        os._exit(not same(rows.read(codec, index), blocks, index))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("row_nbytes", [8, 264, 1032])
def test_rows_of_an_unbounded_lane_are_found_across_its_chunks(row_nbytes: int) -> None:
    sizes = [row_nbytes - 3, 3]
    codec = byte_codec(sizes)
    rows = make_rows(codec.row_nbytes, None)
    n = 4 * _core.FIRST_CHUNK + 5
    blocks = random_blocks(sizes, n, 0)
    for begin, end in ((0, 1), (1, 1000), (1000, 1024), (1024, 2050), (2050, n)):
        rows.extend(codec, tuple(block[begin:end] for block in blocks))
    assert same(rows.read(codec, np.arange(n)), blocks)


@given(st.integers(1, 40), st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_a_ring_keeps_the_newest(capacity: int, pieces: list[int]) -> None:
    sizes = [3, 17]
    codec = byte_codec(sizes)
    rows = make_rows(codec.row_nbytes, capacity)
    blocks = random_blocks(sizes, sum(pieces), 0)
    at = 0
    for n in pieces:
        rows.extend(codec, tuple(block[at : at + n] for block in blocks))
        at += n
    kept = slice(max(0, at - capacity), at)
    assert rows.count() == kept.stop - kept.start
    assert same(rows.read(codec, np.arange(rows.count())), blocks, kept)


@pytest.mark.parametrize("n", [1, 7, 300, 20_000])
def test_a_draw_reads_the_indices_that_draw_indices_names(n: int) -> None:
    rows, codec, blocks = filled([3, 17, 200], 97)
    stream = stream_at(11, 5)
    assert same(rows.draw(codec, stream, n), blocks, _core.draw_indices(11, 5, 97, n))
    assert stream.counter == 5 + n
    assert make_rows(codec.row_nbytes, 4).draw(codec, stream, n) is None
    assert stream.counter == 5 + n  # nothing was drawn


# -- where the batch goes


@given(STAGED | DIRECT, st.integers(0, 30))
def test_out_is_filled_and_returned(sizes: list[int], k: int) -> None:
    rows, codec, blocks = filled(sizes, 20)
    out = tuple(np.full((k, size), 0xAA, np.uint8) for size in sizes)
    index = some_index(20, k)
    assert rows.read(codec, index, out=out) is out
    assert same(out, blocks, index)
    assert rows.draw(codec, stream_at(3), k, out=out) is out
    assert same(out, blocks, _core.draw_indices(3, 0, 20, k))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out",
    [
        (np.zeros((3, 4), np.uint8),),
        (np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8)),
        [np.zeros((3, 4), np.uint8), np.zeros((3, 5), np.uint8)],
        (np.zeros((2, 4), np.uint8), np.zeros((2, 5), np.uint8)),
        (np.zeros((3, 4), np.int8), np.zeros((3, 5), np.uint8)),
        (np.zeros((3, 8), np.uint8)[:, ::2], np.zeros((3, 5), np.uint8)),
        (read_only(np.zeros((3, 4), np.uint8)), np.zeros((3, 5), np.uint8)),
    ],
    ids=["a leaf short", "shape", "structure", "length", "dtype", "not contiguous", "read only"],
)
def test_an_out_that_does_not_fit_is_refused(out: Any) -> None:
    rows, codec, _ = filled([4, 5], 8)
    with pytest.raises(ValueError, match="out: must have the batch's structure"):
        rows.read(codec, index_of(1, 2, 3), out=out)
    with pytest.raises(ValueError, match="out: must have the batch's structure"):
        rows.draw(codec, stream_at(0), 3, out=out)


def span(array: np.ndarray) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


@pytest.mark.parametrize("n", [10, 300, 5000])
def test_live_batches_never_share_memory(n: int) -> None:
    rows, codec, blocks = filled([68, 192, 3], 500)
    batches = [rows.read(codec, some_index(500, n, seed)) for seed in range(6)]
    arrays = [array for batch in batches for array in batch]
    assert not any(overlap(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    for array in batches[0]:
        array[:] = 0
    for seed, batch in enumerate(batches[1:], 1):
        assert same(batch, blocks, some_index(500, n, seed))


def test_a_block_is_used_again_only_after_all_its_arrays_are_gone() -> None:
    rows, codec, blocks = filled([192, 68], 500)
    index = some_index(500, 3777)  # a size no other test asks for
    first, second = rows.read(codec, index)
    block = span(first)
    del first
    assert second.base is not None
    other = rows.read(codec, index)  # the second leaf still lives in the block
    assert span(other[0])[0] != block[0]
    assert np.array_equal(second, blocks[1][index])
    view = second[5:6, ::2]
    del second
    third = rows.read(codec, index)  # and now a view of it
    assert span(third[0])[0] not in (block[0], span(other[0])[0])
    assert np.array_equal(view, blocks[1][index][5:6, ::2])
    del view
    assert span(rows.read(codec, index)[0])[0] == block[0]


def test_arrays_of_a_pooled_batch_are_aligned_and_writable() -> None:
    rows, codec, _ = filled([3, 17, 1], 50)
    for array in rows.read(codec, some_index(50, 20_001)):
        assert array.ctypes.data % 64 == 0 and array.flags.writeable and array.flags.c_contiguous


# -- bounds


@pytest.mark.parametrize("bad", [-1, 8, 2**40, -(2**63), 2**63 - 1])
def test_an_index_outside_is_an_index_error_and_nothing_changes(bad: int) -> None:
    rows, codec, blocks = filled([4, 5], 8)
    for call in (
        lambda i: rows.read(codec, i),
        lambda i: rows.read(codec, i, out=tuple(random_blocks([4, 5], 2, 0))),
        lambda i: rows.read_rows(codec, i),
        lambda i: rows.overwrite(codec, i, random_blocks([4, 5], 2, 1)),
        lambda i: rows.overwrite_rows(codec, i, random_blocks([4, 5], 2, 1)),
        lambda i: rows.set_generations(bad, index_of(1)),
        lambda i: rows.generations(bad, 1),
        rows.locate,
        rows.remove,
    ):
        with pytest.raises((IndexError, TypeError) if bad < 0 else IndexError):
            call(index_of(0, bad))
    assert same(rows.read(codec, np.arange(8)), blocks)


@pytest.mark.parametrize(
    "index",
    [[0, 1], np.arange(2, dtype=np.int32), np.arange(4)[::2], np.zeros((1, 1), np.int64), np.zeros(2), None],
    ids=["list", "int32", "strided", "2-D", "float", "None"],
)
def test_an_index_of_another_form_is_a_type_error(index: Any) -> None:
    rows, codec, _ = filled([4], 8)
    with pytest.raises(TypeError):
        rows.read(codec, index)


def test_one_sample_is_read_by_one_index() -> None:
    rows, codec, _ = filled([4, 5000], 8)
    for index in (index_of(), index_of(1, 2)):
        with pytest.raises(ValueError, match="index: must be one"):
            rows.read(codec, index, single=True)
        with pytest.raises(ValueError, match="rows: must be one"):
            rows.read_rows(codec, index, single=True)


def test_a_codec_of_other_rows_is_refused() -> None:
    rows, codec, blocks = filled([4, 5], 8)
    other, more = byte_codec([4000]), random_blocks([4000], 1, 0)
    for call in (
        lambda: rows.read(other, index_of(0)),
        lambda: rows.read_rows(other, index_of(0)),
        lambda: rows.draw(other, stream_at(0), 1),
        lambda: rows.append(other, (more[0][0],)),
        lambda: rows.extend(other, tuple(more)),
        lambda: rows.write(other, more, 1),
        lambda: rows.overwrite(other, index_of(0), more),
        lambda: rows.overwrite_rows(other, index_of(0), more),
        lambda: rows.extend_lowest(other, more, _core.MinTree(8), np.zeros(1), 0),
    ):
        with pytest.raises(ValueError, match="codec: must be made for rows of 16 bytes, got 4000"):
            call()
    assert same(rows.read(codec, np.arange(8)), blocks)


@pytest.mark.parametrize("arrays", [[], [np.zeros((2, 4), np.uint8)], [np.zeros((1, 5), np.uint8)], [None]])
def test_arrays_that_do_not_fit_their_fields_are_refused(arrays: list[Any]) -> None:
    rows, codec, blocks = filled([4], 8)
    for call in (
        lambda: rows.write(codec, arrays, 1),
        lambda: rows.overwrite(codec, index_of(0), arrays),
    ):
        with pytest.raises(ValueError, match="arrays: one"):
            call()
    assert same(rows.read(codec, np.arange(8)), blocks)


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        ([(0, BYTE, (9,), False)], None),
        ([(1, BYTE, (8,), False)], None),
        ([(2**64 - 1, BYTE, (2,), False)], None),
        ([(0, BYTE, (2**32, 2**32), False)], None),
        ([(0, BYTE, (-1,), False)], None),
        ([(0, BYTE, (1,) * 70, False)], None),
        ([(0, np.dtype(object), (), False)], None),
        ([(0, BYTE, (1,), False)], ("leaf", 1)),
        ([(0, BYTE, (1,), False)], ("tuple", ())),
        ([(0, BYTE, (1,), False)], ("tuple", (("leaf", 0), ("leaf", 0)))),
    ],
)
def test_a_codec_that_would_leave_its_row_is_refused(fields: list[Any], plan: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="fields: |plan: |dtype: "):
        _core.Codec(fields, plan, 8)


def test_rows_need_the_memory_they_speak_of() -> None:
    header, small = _core.Mapping(-1, 0, 4096, True), _core.Mapping(-1, 0, 4096, True)
    whole = ((small, 0), None, None, (small, 2048))

    def rows(capacity: int, n_lanes: int, row_nbytes: int, tagged: bool, sections: Any) -> _core.Rows:
        return _core.Rows(header, capacity, n_lanes, row_nbytes, tagged, True, True, -1, sections)

    assert rows(8, 1, 256, False, whole).count() == 0
    for wrong in (
        (8, 1, 257, False, whole),
        (8, 1, 2**61, False, whole),
        (2**61, 1, 8, False, whole),
        (8, 0, 8, False, whole),
        (64, 64, 8, False, whole),
        (8, 1, 8, True, whole),
        (8, 1, 8, False, (None, None, None, (small, 0))),
        (8, 1, 8, False, ((small, 4), None, None, (small, 2048))),
        (8, 1, 8, False, ((small, 0), None, None, (small, 2**64 - 8))),
    ):
        with pytest.raises(ValueError, match="sections: |n_lanes: |capacity: "):
            rows(*wrong)


def test_a_scalar_leaf_reads_as_a_numpy_scalar_alone_and_as_an_array_in_a_batch() -> None:
    for as_scalar, kind in ((True, np.int64), (False, np.ndarray)):
        codec = codec_of(np.int64, (), as_scalar)
        rows = make_rows(8, 4)
        rows.extend(codec, np.arange(4) * 7)
        one = rows.read(codec, index_of(2), single=True)
        assert type(one) is kind and one == 14 and one.shape == ()
        assert rows.read(codec, index_of(2, 3)).tolist() == [14, 21]


def test_arrays_are_copied_whole() -> None:
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 255, n, np.uint8) for n in (0, 1, 100, (1 << 18) + 1, 5 << 20)]
    targets = [np.zeros_like(x) for x in sources]
    _core.copy_arrays(targets, sources)
    assert all((a == b).all() for a, b in zip(targets, sources))
    frozen = np.zeros(1, np.uint8)
    frozen.flags.writeable = False
    for wrong in (np.zeros(2, np.uint8), frozen, np.zeros((2, 2), np.uint8)[:, 0]):
        with pytest.raises((ValueError, BufferError)):
            _core.copy_arrays([wrong], [np.zeros(1, np.uint8)])
    with pytest.raises(ValueError, match="as many"):
        _core.copy_arrays([], sources)


@given(st.integers(1, 12), st.integers(0, 30), st.data())
def test_patched_samples_have_the_other_values_and_no_others_do(
    capacity: int, n: int, data: st.DataObject
) -> None:
    sizes = [3, 40, 5]
    codec, rows = byte_codec(sizes, plan=False), make_rows(48, capacity)
    block, other = random_blocks(sizes, n, 0), random_blocks(sizes, n, 1)
    chosen = sorted(data.draw(st.sets(st.integers(0, n - 1))) if n else ())
    rows.write(codec, block, n, patches=(index_of(*chosen), [(2, other[2]), (1, other[1])]))
    expected = [array.copy() for array in block]
    for k in (1, 2):
        expected[k][chosen] = other[k][chosen]
    kept = min(n, capacity)
    found = rows.read(codec, np.arange(kept))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want[n - kept :])


PATCHES = {
    "no pair": (index_of(0),),
    "out of range": (index_of(4), []),
    "below zero": (index_of(-1), []),
    "not ascending": (index_of(1, 0), []),
    "twice the same": (index_of(1, 1), []),
    "another dtype": (np.zeros(1, np.int32), []),
    "no such field": (index_of(0), [(2, np.zeros((4, 3), np.uint8))]),
    "too few values": (index_of(0), [(0, np.zeros((3, 3), np.uint8))]),
}


@pytest.mark.parametrize("patches", PATCHES.values(), ids=list(PATCHES))
def test_patches_that_do_not_fit_are_refused_and_nothing_is_written(patches: Any) -> None:
    codec, rows = byte_codec([3, 5], plan=False), make_rows(8, 10)
    with pytest.raises((TypeError, ValueError, IndexError)):
        rows.write(codec, random_blocks([3, 5], 4, 0), 4, patches=patches)
    assert rows.count() == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_value_that_is_not_right_is_found(dtype: str) -> None:
    values = np.array([0.0, -0.0, 1e30, -1.0, np.inf, np.nan], dtype)
    assert [_core.first_not_finite(values[:n]) for n in (0, 4, 5)] == [-1, -1, 4]
    assert _core.first_not_finite(values[5:]) == 0
    assert [_core.first_below_zero(values[:n]) for n in (0, 3, 6)] == [-1, -1, 3]
    flags = np.array([0.0, -0.0, 1.0, 0.5, np.nan], dtype)
    assert [_core.first_not_flag(flags[:n]) for n in (0, 3, 5)] == [-1, -1, 3]
    assert _core.first_not_flag(flags[4:]) == 0
    assert [_core.first_above(values[:n], values[:n]) for n in (0, 6)] == [-1, -1]
    assert _core.first_above(values, np.zeros(6, dtype)) == 2
    with pytest.raises(ValueError, match="equal lengths"):
        _core.first_above(values, values[:5])
    for wrong in (values[::2], values.reshape(2, 3), np.zeros(2, "float16"), [0.0]):
        with pytest.raises(TypeError, match="contiguous 1-D"):
            _core.first_not_finite(wrong)


def test_orders_of_arrival_that_a_tree_has_from_elsewhere_are_no_places() -> None:
    codec, rows, tree = byte_codec([8], plan=False), make_rows(8, 2, tagged=True), _core.MinTree(2)
    rows.extend_lowest(codec, [np.zeros((2, 8), np.uint8)], tree, np.zeros(2), 1 << 40)
    kept, rejected = rows.extend_lowest(codec, [np.ones((2, 8), np.uint8)], tree, np.ones(2), 0)
    assert (kept, rejected) == (2, 0)
    np.testing.assert_array_equal(rows.read(codec, np.arange(2))[0], np.ones((2, 8), np.uint8))


def test_a_write_by_lane_number_claims_that_lane() -> None:
    rows, codec = make_rows(8, 8, n_lanes=2), codec_of("int64")
    assert rows.owner(1) == 0
    assert rows.extend(codec, np.arange(3), 1) == 3
    assert (rows.owner(0), rows.owner(1)) == (0, _core.own_word())


def test_the_open_segment_of_a_lane_that_is_given_up_has_ended() -> None:
    rows, codec = make_rows(8, 8, n_lanes=2, tagged=True), codec_of("int64")
    assert rows.append(codec, 5, 1) and rows.has_open(1)
    rows.release(1)
    assert not rows.has_open(1) and len(rows.segments()[0]) == 1


def test_rows_for_reading_count_no_refusals() -> None:
    rows = make_rows(8, 8)
    rows.reject(2)
    rows.freeze()
    rows.reject(3)
    assert rows.counters()["rejected"] == 2


def test_a_block_that_ends_closes_the_segment_that_an_earlier_one_left_open() -> None:
    rows, codec = make_rows(8, 8, tagged=True), codec_of("int64")
    rows.extend(codec, np.arange(2), keep_open=True)
    assert rows.has_open(0) and rows.open_segment(0) == (0, 2, 1)
    rows.extend(codec, np.arange(2))
    assert not rows.has_open(0) and rows.segments()[3].tolist() == [4]


@pytest.mark.parametrize("n_lanes", [1, 2, 10])
def test_a_row_that_is_not_there_holds_no_sample(n_lanes: int) -> None:
    rows, codec = make_rows(8, 20, n_lanes), codec_of("int64")
    for lane in range(n_lanes):
        rows.extend(codec, np.arange(2), lane)
    assert rows.index_of(index_of(-1, 20, 21, 10**6, 2**62), index_of(1, 0, 1, 0, 0)).tolist() == [-1] * 5


def test_a_window_that_does_not_fit_its_lane_is_refused() -> None:
    rows = make_rows(8, 8, n_lanes=2)
    for low, cursor in ((3, 2), (0, 5), (10, 15)):
        with pytest.raises(ValueError, match="must fit its lane"):
            rows.set_window(1, low, cursor)
    rows.set_window(1, 10, 14)
    assert rows.count() == 4


def test_a_key_that_is_not_a_number_is_refused_and_nothing_is_written() -> None:
    rows, codec = make_rows(8, 8, tagged=True), codec_of("int64")
    with pytest.raises(ValueError, match="NaN"):
        rows.extend_lowest(codec, [np.arange(2)], _core.MinTree(8), np.array([1.0, np.nan]), 0)
    assert rows.count() == 0


def test_one_sample_is_not_read_into_a_batch() -> None:
    rows, codec = make_rows(8, 8), codec_of("int64")
    rows.extend(codec, np.arange(3))
    with pytest.raises(ValueError, match="out: must have"):
        rows.read(codec, index_of(1), True, np.zeros(1, np.int64))

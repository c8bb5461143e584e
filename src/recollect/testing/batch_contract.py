"""BatchContract: what every batch promises, as a suite that any implementation inherits.

    class TestMyBatch(BatchContract):
        @pytest.fixture
        def make_batch(self):
            return lambda n: MyBatch(n)     # a batch of n samples, no two of them equal

The class attributes say which writers work; by default all or none, as `is_mutable` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recollect.backends import get_backend, map_arrays
from recollect.batch import BatchBase
from recollect.batch.structure import empty_batch, flat_layout, leaf_paths, unbatch
from recollect.errors import EmptyError, ReadOnlyError, SchemaError
from recollect.sampling import IndexStream
from recollect.spaces import as_numpy

Make = Callable[[int], BatchBase]
N = 7


def equal(a: Any, b: Any) -> bool:
    """Tell whether two nested values are equal in structure, dtypes and bits (NaN equals itself)."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, str) or a is None:
        return bool(a == b)
    x, y = as_numpy(a), as_numpy(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def samples_of(batch: BatchBase) -> list[Any]:
    """Return every sample, read one by one."""
    return [batch.get_at(i) for i in range(len(batch))]


def split(batch: BatchBase, data: Any, n: int) -> list[Any]:
    """Return the samples of a read with batch axis, as single reads give them."""
    return [unbatch(batch.single_space, data, i) for i in range(n)]


class BatchContract:
    """What indices, reads, writes and views of every batch promise; inherit it and give `make_batch`."""

    can_set: bool | None = None
    can_append: bool | None = None
    can_remove: bool | None = None

    @pytest.fixture
    def make_batch(self) -> Make:
        """Return a function that makes a batch of n samples, no two of them equal."""
        raise NotImplementedError(
            f"{type(self).__name__}: must give the fixture make_batch, got none; add it"
        )

    @pytest.fixture
    def batch(self, make_batch: Make) -> BatchBase:
        """A batch of seven samples."""
        return make_batch(N)

    # Indices

    INDICES: tuple[Any, ...] = (
        slice(None),
        slice(1, 5, 2),
        slice(None, None, -1),
        slice(-3, 100),
        slice(5, 2),
        ...,
        [],
        [0],
        [3, 1, 3, -1],
        (2, -7),
        range(1, 6, 2),
        range(0),
        np.array([6, 0, 0]),
        np.array([1, 2], np.uint8),
        np.array([], np.int64),
        np.arange(N) % 2 == 0,
        [True, False] * 3 + [True],
        [False] * N,
    )

    @pytest.mark.parametrize("index", [0, 3, -1, -N, np.int32(2), np.uint8(2), np.array(5), np.array(-2)])
    def test_an_integer_gives_one_sample(self, batch: BatchBase, index: Any) -> None:
        want = batch.get_at(range(N))
        assert equal(batch[index], split(batch, want, N)[int(index)])

    @pytest.mark.parametrize("index", INDICES, ids=repr)
    def test_a_batch_index_gives_a_batch_axis(self, batch: BatchBase, index: Any) -> None:
        at = _expected(index)
        want = [batch.get_at(int(i)) for i in at]
        got = split(batch, batch.get_at(index), len(at))
        assert equal(got, want)

    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_indices_of_any_backend(self, batch: BatchBase, backend: str) -> None:
        pytest.importorskip(backend)
        made = get_backend(backend).from_numpy
        assert equal(batch[made(np.array([4, -1, 4], np.int32))], batch[[4, N - 1, 4]])
        assert equal(batch[made(np.array(3, np.int32))], batch[3])
        assert equal(batch[made(np.arange(N) > 2)], batch[3:])

    @pytest.mark.parametrize("index", [N, -N - 1, [0, N], range(N + 1), np.array([-N - 1]), 10**30], ids=repr)
    def test_out_of_range_names_index_and_length(self, batch: BatchBase, index: Any) -> None:
        with pytest.raises(IndexError, match=rf"(?s)(?=.*\b{N}\b)(?=.*-?\d+)"):
            batch[index]

    @pytest.mark.parametrize("n", [N - 1, N + 1])
    def test_a_mask_of_another_length_is_an_index_error(self, batch: BatchBase, n: int) -> None:
        with pytest.raises(IndexError):
            batch[np.ones(n, np.bool_)]

    @pytest.mark.parametrize(
        "index",
        [True, np.True_, 1.0, np.float32(1), "0", None, np.zeros((1, 1), int), [[0]], [0.5]],
        ids=repr,
    )
    def test_other_types_are_a_type_error(self, batch: BatchBase, index: Any) -> None:
        with pytest.raises(TypeError):
            batch[index]

    def test_an_empty_batch(self, make_batch: Make) -> None:
        empty = make_batch(0)
        assert len(empty) == 0
        assert list(empty) == []
        assert equal(split(empty, empty[:], 0), [])
        with pytest.raises(IndexError):
            empty[0]

    def test_iteration_gives_the_samples_in_order(self, batch: BatchBase) -> None:
        assert equal(list(batch), samples_of(batch))

    # Forms of reading

    def test_flattened_reads_are_the_same_samples(self, batch: BatchBase) -> None:
        try:
            layout = flat_layout(batch.single_space)
        except TypeError:
            with pytest.raises(TypeError):
                batch.get_flattened_at(0)
            return
        for index in (0, -1):
            one = np.asarray(as_numpy(batch.get_flattened_at(index)))
            assert equal(one.ravel(), layout.flatten_one(batch.get_at(index)))
        for many in ([2, 0, 2], [], slice(None)):
            flat = np.asarray(as_numpy(batch.get_flattened_at(many)))
            want = layout.flatten_batch(batch.get_at(many))
            assert equal(flat.reshape(want.shape), want)

    def test_metadata_forms_are_the_same_samples(self, batch: BatchBase) -> None:
        for index in (1, [3, 1], []):
            data, metadata = batch.get_at_with_metadata(index)
            assert equal(data, batch.get_at(index))
            self._check_metadata(batch, metadata)
        data, metadata = batch.get_at_with_metadata(slice(None))
        singles = [batch.get_at_with_metadata(i)[1] for i in range(N)]
        if metadata is not None and batch.single_metadata_space is not None:
            assert equal([unbatch(batch.single_metadata_space, metadata, i) for i in range(N)], singles)

    def test_flattened_metadata_form(self, batch: BatchBase) -> None:
        try:
            flat_layout(batch.single_space)
        except TypeError:
            return
        for index in (1, [3, 1], []):
            data, metadata = batch.get_flattened_at_with_metadata(index)
            assert equal(data, batch.get_flattened_at(index))
            assert equal(metadata, batch.get_at_with_metadata(index)[1])

    def _check_metadata(self, batch: BatchBase, metadata: Any) -> None:
        if batch.single_metadata_space is None:
            assert metadata is None
        else:
            assert list(metadata) == list(batch.single_metadata_space)

    def test_samples_are_in_the_space(self, batch: BatchBase) -> None:
        if batch.backend.name == "numpy":
            assert all(batch.single_space.contains(sample) for sample in batch)

    # Ownership

    def test_what_a_read_returns_is_the_callers(self, batch: BatchBase) -> None:
        if batch.backend.name != "numpy":
            pytest.skip("only numpy arrays are overwritten here")
        before = samples_of(batch)
        for read in (batch[:], batch[0], batch[[1, 1]]):
            map_arrays(_scribble, read)
        assert equal(samples_of(batch), before)

    def test_what_a_write_takes_is_copied(self, make_batch: Make) -> None:
        batch, other = make_batch(N), make_batch(N)
        if not self._can("append", batch):
            pytest.skip("not appendable")
        value = other[:]
        batch.extend(value)
        map_arrays(_scribble, value)
        assert equal(samples_of(batch)[N:], samples_of(other))

    # Writes

    def _can(self, verb: str, batch: BatchBase) -> bool:
        said: bool | None = getattr(self, f"can_{verb}")
        return batch.is_mutable if said is None else said

    def test_append_and_extend(self, make_batch: Make) -> None:
        batch = make_batch(3)
        if not self._can("append", batch):
            for write in (batch.append, batch.append_flattened):
                with pytest.raises(ReadOnlyError):
                    write(batch[0])
            for write in (batch.extend, batch.extend_flattened):
                with pytest.raises(ReadOnlyError):
                    write(batch[:])
            return
        want = samples_of(batch)
        batch.append(batch[1])
        want.append(want[1])
        self._close(batch)
        batch.extend(batch[[2, 0]])
        want += [want[2], want[0]]
        batch.extend(empty_batch(batch.single_space))
        assert equal(samples_of(batch), want)

    def test_set_at(self, make_batch: Make) -> None:
        batch, other = make_batch(N), make_batch(N)
        if not self._can("set", batch):
            with pytest.raises(ReadOnlyError):
                batch[0] = other[0]
            return
        want = samples_of(batch)
        batch[-1] = other[0]
        want[-1] = other[0]
        batch[[0, 2, 0]] = other[[4, 5, 6]]  # the last of duplicates wins
        want[0], want[2] = other[6], other[5]
        batch[np.arange(N) == 3] = other[[1]]
        want[3] = other[1]
        batch[[]] = empty_batch(batch.single_space)
        assert equal(samples_of(batch), want)
        with pytest.raises(IndexError):
            batch[N] = other[0]

    def test_remove_at(self, make_batch: Make) -> None:
        batch = make_batch(N)
        if not self._can("remove", batch):
            with pytest.raises(ReadOnlyError):
                del batch[0]
            return
        want = samples_of(batch)
        del batch[-1]
        del want[-1]
        batch.remove_at([0, 3, 3])
        del want[3], want[0]
        batch.remove_at([])
        assert equal(samples_of(batch), want)
        with pytest.raises(IndexError):
            batch.remove_at(len(want))

    def test_flattened_writes(self, make_batch: Make) -> None:
        batch, other = make_batch(3), make_batch(3)
        try:
            flat_layout(batch.single_space)
        except TypeError:
            return
        want = samples_of(batch)
        if self._can("set", batch):
            batch.set_flattened_at(0, other.get_flattened_at(2))
            batch.set_flattened_at([1, 2], other.get_flattened_at([0, 1]))
            want = [other[2], other[0], other[1]]
        if self._can("append", batch):
            batch.append_flattened(other.get_flattened_at(1))
            self._close(batch)
            batch.extend_flattened(other.get_flattened_at([2, 0]))
            want += [other[1], other[2], other[0]]
        assert equal(samples_of(batch), want)

    def test_a_refused_write_changes_nothing(self, make_batch: Make) -> None:
        batch = make_batch(N)
        before = samples_of(batch)
        bad = {"no such leaf": np.zeros(3)}
        if self._can("append", batch):
            for write in (batch.append, batch.extend):
                with pytest.raises(SchemaError):
                    write(bad)
        if self._can("set", batch):
            with pytest.raises(SchemaError):
                batch[[0, 1, 2]] = bad
            with pytest.raises(SchemaError):
                batch[[0, 1]] = batch[[0, 1, 2]]
        assert equal(samples_of(batch), before)

    def test_extend_from_copies_all(self, make_batch: Make) -> None:
        batch, other = make_batch(2), make_batch(N)
        if not self._can("append", batch):
            with pytest.raises(ReadOnlyError):
                batch.extend_from(other)
            return
        want = samples_of(batch) + samples_of(other)
        batch.extend_from(other, chunk_size=3)
        assert equal(samples_of(batch), want)
        with pytest.raises(ValueError, match="itself"):
            batch.extend_from(batch.get_slice([0]))

    def _close(self, batch: BatchBase) -> None:
        """End the segment that an append opened, where there are segments."""
        source: Any = batch
        while source._sources():
            source = source._sources()[-1]
        getattr(source, "mark_segment_end", lambda: None)()

    # Views, segments, places

    def test_get_slice_and_get_column_are_lazy_views(self, batch: BatchBase) -> None:
        part = batch.get_slice([5, 1])
        assert len(part) == 2
        assert equal(samples_of(part), [batch[5], batch[1]])
        for path, _ in leaf_paths(batch.single_space):
            field = batch.get_column(path)
            assert equal(field[[2, 0]], _at(batch[[2, 0]], path))
            assert equal(batch.get_column_at(path, [2, 0]), _at(batch[[2, 0]], path))
            drawn = batch.draw_column_at(path, IndexStream(1), 9)
            assert equal(drawn, _at(batch[IndexStream(1).indices(N, 9)], path))

    def test_draws_are_those_of_the_stream(self, batch: BatchBase) -> None:
        stream = IndexStream(3)
        assert equal(batch.draw_at(stream, 9), batch[IndexStream(3).indices(N, 9)])
        assert stream.counter == 9

    def test_nothing_can_be_drawn_from_an_empty_batch(self, make_batch: Make) -> None:
        with pytest.raises(EmptyError):
            make_batch(0).draw_at(IndexStream(0), 1)

    def test_segments_are_sorted_and_disjoint(self, batch: BatchBase) -> None:
        segments = batch.get_segments()
        flat = [edge for pair in segments or () for edge in pair]
        assert flat == sorted(flat)
        assert all(a < b for a, b in segments or ())
        assert not flat or (flat[0] >= 0 and flat[-1] <= N)

    def test_located_samples_can_be_read_again(self, batch: BatchBase) -> None:
        place = batch.locate([4, 0, 4])
        assert batch.is_current(place).all()
        assert batch.relocate(place).tolist() == [4, 0, 4]
        found = batch.get_located(place)
        assert found is not None
        assert equal(found[0], batch[[4, 0, 4]])
        assert int(batch.locate(3).row) == int(batch.locate([3]).row[0])

    def test_segments_and_places_agree(self, batch: BatchBase) -> None:
        segments = batch.get_segments()
        ids = batch.locate(slice(None)).segment
        if segments is None:
            assert (ids == -1).all()
        for start, end in segments or ():
            assert len(set(ids[start:end].tolist())) == 1
            assert ids[start] not in np.delete(ids, slice(start, end))

    def test_stats_is_a_frozen_record(self, batch: BatchBase) -> None:
        stats = batch.stats()
        field = stats.__struct_fields__[0] if hasattr(stats, "__struct_fields__") else None
        field = field or dataclasses.fields(stats)[0].name
        with pytest.raises((AttributeError, TypeError)):
            setattr(stats, field, None)


def _scribble(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        x[...] = np.ones((), x.dtype)
    return x


def _expected(index: Any) -> list[int]:
    if index is ... or isinstance(index, slice):
        return list(range(N))[slice(None) if index is ... else index]
    items = list(index)
    if items and isinstance(items[0], bool | np.bool_):
        return [i for i in range(N) if items[i]]
    return [int(i) % N for i in items]


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data

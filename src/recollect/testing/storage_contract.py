"""StorageContract: what every storage promises, as a suite that any implementation inherits.

    class TestMyStorage(StorageContract):
        cls = MyStorage

Give `create_arguments` where `create` needs more (a path, an inner storage), and set the flags below for what this
kind of storage cannot do. A storage of another space gives `space`, `block` and `numbers_in` too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from recollect.backends import map_arrays
from recollect.errors import ClosedError, ReadOnlyError, RecollectError, SchemaError, SegmentOpenError
from recollect.spaces import as_numpy, compile_layout
from recollect.storage import SpaceStorage

SPACE = spaces.Dict(
    {
        "obs": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "action": spaces.Discrete(100_000),
        "done": spaces.MultiBinary(2),
    }
)
CAPACITY = 9
Make = Callable[..., SpaceStorage]


def block(*numbers: int) -> dict[str, Any]:
    """Rows of SPACE, no two numbers alike."""
    n = np.array(numbers, np.int64)
    return {
        "obs": (n[:, None] + np.array([0.0, 0.25, 0.5])).astype(np.float32),
        "action": n.copy(),
        "done": np.stack([n % 2, n // 2 % 2], 1).astype(np.int8) if len(n) else np.zeros((0, 2), np.int8),
    }


def row(number: int) -> dict[str, Any]:
    """One row of SPACE."""
    return {key: value[0] for key, value in block(number).items()}


def to_numpy(data: Any) -> Any:
    """The same nested data with numpy leaves."""
    return map_arrays(as_numpy, data)


class StorageContract:
    """What rows, ends, segments and files of every storage promise; inherit it and give `cls`."""

    cls: type[SpaceStorage]
    space: Any = SPACE
    allows_fixed = True
    allows_unbounded = True
    only_grows = False  # rows that are there are never changed
    ends_segments = False  # rows are there to be read once their segment has ended
    can_append = True  # has a cursor of its own
    keeps_segments = True  # says where they are
    refuses_after_close = True
    crosses_processes = False  # a new one can be sent to another process

    # -- how to make one

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        """More keywords for `create`."""
        return {}

    def load_arguments(self) -> dict[str, Any]:
        """More keywords for `load_from`."""
        return {}

    def block(self, *numbers: int) -> Any:
        """Rows of the space, no two numbers alike (below 128)."""
        return block(*numbers)

    def row(self, number: int) -> Any:
        """One row of the space."""
        layout = compile_layout(self.space)
        return layout.decode_one([a[0] for a in layout.encode_batch(self.block(number))[1]])

    def numbers_in(self, data: Any) -> Any:
        """The number of each row, or of one, that `block` made."""
        return data["action"]

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        """A function that makes a storage; all are closed afterwards."""
        made: list[SpaceStorage] = []

        def make(capacity: int | None = self._capacity(), **kwargs: Any) -> SpaceStorage:
            arguments = {**self.create_arguments(tmp_path / f"storage-{len(made)}"), **kwargs}
            made.append(self.cls.create(self.space, capacity=capacity, **arguments))
            return made[-1]

        yield make
        for storage in made:
            storage.close()

    @pytest.fixture
    def storage(self, make: Make) -> SpaceStorage:
        """Nine rows, numbered from 0."""
        storage = make()
        self.fill(storage)
        return storage

    @classmethod
    def _capacity(cls) -> int | None:
        return CAPACITY if cls.allows_fixed else None

    def fill(self, storage: SpaceStorage) -> None:
        """Write rows 0 to 8."""
        self.add(storage, range(CAPACITY))

    def add(self, storage: SpaceStorage, numbers: Sequence[int]) -> None:
        """Write rows at the end of an unbounded storage, or all rows of a fixed one."""
        n = len(storage)
        if storage.capacity is None:
            storage.extend_length(len(numbers))
        storage.set(slice(n if storage.capacity is None else 0, None), self.block(*numbers))
        if self.ends_segments:
            storage.mark_segment_end()

    def numbers(self, data: Any) -> Any:
        """The numbers of the rows in a read, each row whole."""
        found = to_numpy(data)
        numbers = as_numpy(self.numbers_in(found)).tolist()
        layout = compile_layout(self.space)
        if isinstance(numbers, int):
            pairs = zip(layout.encode_one(found), layout.encode_one(self.row(numbers)), strict=True)
        else:
            pairs = zip(
                layout.encode_batch(found)[1], layout.encode_batch(self.block(*numbers))[1], strict=True
            )
        for field, (got, expected) in zip(layout.fields, pairs, strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape, field.name
            assert np.array_equal(got, expected), field.name
        return numbers

    def load(self, path: Path, **kwargs: Any) -> SpaceStorage:
        return self.cls.load_from(path, self.space, **{**self.load_arguments(), **kwargs})

    # -- what it is

    def test_says_what_it_is(self, storage: SpaceStorage, tmp_path: Path) -> None:
        assert storage.short_name
        assert storage.single_file_ext is None or storage.single_file_ext.startswith(".")
        place = self.create_arguments(tmp_path / "storage-0").get("cache_path")
        assert storage.cache_filename == (None if place is None else str(place))
        assert storage.is_multiprocessing_safe is self.crosses_processes
        assert storage.is_mutable is True
        assert storage.single_instance_space == self.space
        assert len(storage) == CAPACITY

    # -- rows by number

    @pytest.mark.parametrize(
        "index",
        [slice(None), ..., slice(1, 8, 3), slice(None, None, -2), slice(20, 30), [3], [], [8, 0, 0, -1], (1, 2),
         range(4), np.array([2, 5], np.uint8), np.arange(9) % 2 == 0, [True] * 9],
        ids=repr,
    )  # fmt: skip
    def test_rows_as_numpy_indexes_them(self, storage: SpaceStorage, index: Any) -> None:
        at = list(index) if isinstance(index, tuple | range) else index
        expected = np.arange(CAPACITY)[
            np.array(at, np.int64) if isinstance(at, list) and not at else at
        ].tolist()
        assert self.numbers(storage.get(index)) == expected

    @pytest.mark.parametrize("index", [0, 8, -1, np.int32(4), np.array(2)], ids=repr)
    def test_one_row_has_no_batch_axis(self, storage: SpaceStorage, index: Any) -> None:
        assert self.numbers(storage.get(index)) == int(index) % CAPACITY

    @pytest.mark.parametrize("index", [9, -10, [0, 9], [-10], np.ones(8, bool)], ids=repr)
    def test_out_of_range_is_an_index_error(self, storage: SpaceStorage, index: Any) -> None:
        with pytest.raises(IndexError):
            storage.get(index)
        n = 1 if np.ndim(index) == 0 else len(index)
        with pytest.raises(IndexError):
            storage.set(index, self.row(50) if np.ndim(index) == 0 else self.block(*range(50, 50 + n)))
        assert self.numbers(storage.get(...)) == list(range(CAPACITY))

    @pytest.mark.parametrize("index", [True, 1.0, "a", None, np.zeros((2, 2), int), [0.5]], ids=repr)
    def test_no_index_is_a_type_error(self, storage: SpaceStorage, index: Any) -> None:
        with pytest.raises(TypeError):
            storage.get(index)

    def test_set_overwrites_and_of_duplicates_the_last_wins(self, storage: SpaceStorage) -> None:
        if self.only_grows:
            for index, value in ((-1, self.row(20)), ([0, 3], self.block(21, 22))):
                with pytest.raises(ReadOnlyError, match="extend_from"):
                    storage.set(index, value)
            assert self.numbers(storage.get(...)) == list(range(CAPACITY))
            return
        storage.set(-1, self.row(20))
        storage.set([0, 3, 0], self.block(21, 22, 23))
        storage.set(np.arange(9) == 5, self.block(24))
        storage.set([], self.block())
        assert self.numbers(storage.get(...)) == [23, 1, 2, 22, 4, 24, 6, 7, 20]

    def test_a_write_is_checked_whole_before_anything_changes(self, storage: SpaceStorage) -> None:
        at = [0, 1]
        if self.only_grows:
            storage.extend_length(2)
            at = [CAPACITY, CAPACITY + 1]
        for value in self.wrong_blocks():
            with pytest.raises(SchemaError):
                storage.set(at, value)
        if self.only_grows:
            storage.shrink_length(2)
        assert self.numbers(storage.get(...)) == list(range(CAPACITY))

    def wrong_blocks(self) -> list[Any]:
        """Values that do not fit two rows of the space."""
        good = self.block(30, 31)
        if not isinstance(good, dict):
            return [good.astype(np.float64), good[:, :2], self.block(30, 31, 32), None]
        return [
            {**good, "obs": good["obs"].astype(np.float64)},
            {**good, "obs": good["obs"][:, :2]},
            {**good, "action": good["action"][:1]},
            {key: value for key, value in good.items() if key != "done"},
            {**good, "more": good["action"]},
            self.block(30, 31, 32),
        ]

    def test_reads_and_writes_copy(self, storage: SpaceStorage) -> None:
        value, at = self.block(40, 41), [0, 1]
        if self.only_grows:
            storage.extend_length(2)
            at = [CAPACITY, CAPACITY + 1]
        storage.set(at, value)
        for array in value.values() if isinstance(value, dict) else [value]:
            array[...] = 0
        if self.ends_segments:
            storage.mark_segment_end()
        assert self.numbers(storage.get(at)) == [40, 41]
        got = to_numpy(storage.get([2, 3]))
        map_arrays(lambda array: array.fill(0), to_numpy(storage.get([2, 3])))
        assert self.numbers(storage.get([2, 3])) == [2, 3]
        if not self.only_grows:
            storage.set([2, 3], self.block(42, 43))
        assert self.numbers(got) == [2, 3]

    def test_flattened(self, storage: SpaceStorage) -> None:
        flat = as_numpy(storage.get_flattened([1, 2]))
        assert flat.shape == (2, storage.layout.flat_dim)
        assert np.array_equal(flat, storage.layout.flatten_batch(self.block(1, 2)))
        assert np.array_equal(as_numpy(storage.get_flattened(1)), flat[0])
        if self.only_grows:
            storage.extend_length(2)
            storage.set_flattened([CAPACITY, CAPACITY + 1], flat)
            if self.ends_segments:
                storage.mark_segment_end()
            assert self.numbers(storage.get([CAPACITY, CAPACITY + 1])) == [1, 2]
            return
        storage.set_flattened([7, 8], flat)
        storage.set_flattened(0, flat[1])
        assert self.numbers(storage.get([7, 8, 0])) == [1, 2, 2]

    def test_column(self, storage: SpaceStorage) -> None:
        if self.space != SPACE:
            assert np.array_equal(as_numpy(storage.get_column((), [4, 2])), self.block(4, 2))
            return
        assert as_numpy(storage.get_column("action", [4, 2])).tolist() == [4, 2]
        assert as_numpy(storage.get_column(("obs",), 4)).tolist() == [4.0, 4.25, 4.5]
        with pytest.raises(KeyError):
            storage.get_column("reward", 0)
        with pytest.raises(IndexError):
            storage.get_column("action", 9)

    # -- the end

    def test_length_of_an_unbounded_storage_moves(self, make: Make) -> None:
        if not self.allows_unbounded:
            pytest.skip("this kind always has a capacity")
        storage = make(None)
        assert storage.capacity is None and len(storage) == 0
        self.add(storage, [0, 1, 2])
        self.add(storage, [3, 4])
        assert len(storage) == 5 and self.numbers(storage.get(...)) == [0, 1, 2, 3, 4]
        storage.shrink_length(2)
        assert self.numbers(storage.get(...)) == [0, 1, 2]
        with pytest.raises(IndexError):
            storage.get(3)
        for call in (storage.extend_length, storage.shrink_length):
            with pytest.raises(ValueError, match="length"):
                call(-1)
        with pytest.raises(ValueError, match="length"):
            storage.shrink_length(4)
        storage.extend_length(0)
        storage.shrink_length(0)
        assert self.numbers(storage.get(...)) == [0, 1, 2]
        storage.clear()
        assert len(storage) == 0

    def test_length_of_a_fixed_storage_stays(self, make: Make) -> None:
        if not self.allows_fixed:
            pytest.skip("this kind has no capacity")
        storage = make(4)
        storage.set(slice(None), self.block(0, 1, 2, 3))
        storage.extend_length(3)
        storage.shrink_length(2)
        assert len(storage) == storage.capacity == 4
        assert self.numbers(storage.get(...)) == [0, 1, 2, 3]
        storage.clear()
        assert len(storage) == 4

    # -- its own cursor, and segments

    def test_append_goes_to_the_cursor(self, make: Make) -> None:
        storage = make()
        if not self.can_append:
            with pytest.raises(ReadOnlyError):
                storage.append(self.row(1))
            return
        for n in range(3):
            storage.append(self.row(n))
        if self.ends_segments:
            with pytest.raises(SegmentOpenError, match="mark_segment_end"):
                storage.get(0)
            assert storage.pending_segment_length == 3
            storage.mark_segment_end()
        assert self.numbers(storage.get([0, 1, 2])) == [0, 1, 2]
        with pytest.raises(SchemaError):
            storage.append({"obs": 1})
        assert storage.pending_segment_length == 0
        if storage.capacity is None:
            assert len(storage) == 3
            return
        for n in range(3, CAPACITY + 2):  # and round the end
            storage.append(self.row(n))
        assert self.numbers(storage.get(...)) == [CAPACITY, CAPACITY + 1, *range(2, CAPACITY)]

    def test_segments(self, make: Make) -> None:
        storage = make()
        if not (self.can_append and self.keeps_segments):
            assert storage.get_segments() is None and not storage.has_open_segment
            storage.mark_segment_end()
            storage.abort_segment()
            assert storage.pending_segment_length == 0
            return
        assert storage.get_segments() == [] and not storage.has_open_segment
        storage.append(self.row(0))
        storage.append(self.row(1))
        assert storage.has_open_segment and storage.get_segments() == []
        storage.mark_segment_end()
        storage.mark_segment_end()  # none is open: nothing happens
        assert not storage.has_open_segment and storage.get_segments() == [(0, 2)]
        with pytest.raises(ValueError, match="row 2"):
            storage.mark_segment_start(0)
        storage.mark_segment_start(2)
        storage.append(self.row(2))
        storage.mark_segment_start(3)  # ends the open one
        assert not storage.has_open_segment and storage.get_segments() == [(0, 2), (2, 3)]

    def test_a_segment_is_aborted_and_cleared(self, make: Make) -> None:
        if not (self.can_append and self.keeps_segments):
            pytest.skip("this kind keeps no segments")
        storage = make()
        storage.append(self.row(0))
        storage.mark_segment_end()
        storage.append(self.row(1))
        storage.abort_segment()
        assert not storage.has_open_segment and storage.pending_segment_length == 0
        # Rows that could be seen stay, and so does the segment that they are.
        assert storage.get_segments() == ([(0, 1)] if self.ends_segments else [(0, 1), (1, 2)])
        storage.append(self.row(2))
        storage.clear()
        assert storage.get_segments() == [] and not storage.has_open_segment
        assert storage.pending_segment_length == 0 and len(storage) == (storage.capacity or 0)
        storage.append(self.row(3))
        storage.mark_segment_end()
        assert self.numbers(storage.get(0)) == 3 and storage.get_segments() == [(0, 1)]

    def test_what_was_cleared_does_not_come_back(self, storage: SpaceStorage) -> None:
        storage.flush()
        storage.clear()
        if storage.capacity is None:
            assert len(storage) == 0
        self.add(storage, range(20, 20 + CAPACITY))
        storage.flush()
        assert self.numbers(storage.get(...)) == [*range(20, 20 + CAPACITY)]

    # -- disk

    @pytest.mark.parametrize("capacity", [CAPACITY, None])
    def test_dump_loads_as_it_was(self, make: Make, tmp_path: Path, capacity: int | None) -> None:
        if not (self.allows_fixed if capacity else self.allows_unbounded):
            pytest.skip("not this kind")
        storage = make(capacity)
        self.fill(storage)
        storage.dumps(tmp_path / "dump")
        if self.only_grows:
            self.add(storage, [77])
        else:
            storage.set(0, self.row(77))  # no longer in the dump
        with self.load(tmp_path / "dump") as loaded:
            assert len(loaded) == CAPACITY and loaded.capacity == capacity
            assert self.numbers(loaded.get(...)) == list(range(CAPACITY))
            assert not loaded.is_mutable
            with pytest.raises(ReadOnlyError):
                loaded.set(0, self.row(5))
            for write in (loaded.clear, lambda: loaded.append(self.row(1))):
                with pytest.raises(ReadOnlyError):
                    write()
            assert self.numbers(loaded.get(...)) == list(range(CAPACITY))
        with self.load(tmp_path / "dump", read_only=False) as loaded:
            if self.only_grows:
                self.add(loaded, [60])
                assert self.numbers(loaded.get([0, -1])) == [0, 60]
            else:
                loaded.set(1, self.row(60))
                assert self.numbers(loaded.get([0, 1])) == [0, 60]
        assert self.numbers(storage.get([-1 if self.only_grows else 0, 1])) == [77, 1]

    def test_dump_over_a_dump(self, storage: SpaceStorage, tmp_path: Path) -> None:
        storage.dumps(tmp_path / "dump")
        if self.only_grows:
            self.add(storage, [90, 91])
        else:
            storage.set([0, 1], self.block(90, 91))
        storage.dumps(tmp_path / "dump")
        at = [-2, -1, 2] if self.only_grows else [0, 1, 2]
        with self.load(tmp_path / "dump") as loaded:
            assert self.numbers(loaded.get(at)) == [90, 91, 2]

    def test_loading_something_else_is_refused(self, storage: SpaceStorage, tmp_path: Path) -> None:
        storage.dumps(tmp_path / "dump")
        other, name = spaces.Dict({**SPACE.spaces, "action": spaces.Discrete(7)}), "action"
        if self.space != SPACE:
            other, name = spaces.Discrete(7), "value"  # type: ignore[assignment]
        with pytest.raises(ValueError, match=name):
            self.cls.load_from(tmp_path / "dump", other, **self.load_arguments())
        with pytest.raises(ValueError, match="capacity"):
            self.load(tmp_path / "dump", capacity=CAPACITY + 1)
        with pytest.raises(TypeError):
            self.load(tmp_path / "dump", no_such_keyword=1)
        with pytest.raises((RecollectError, OSError)):
            self.load(tmp_path / "nowhere")

    def test_unknown_keywords_are_refused(self, make: Make) -> None:
        with pytest.raises(TypeError):
            make(no_such_keyword=1)

    # -- other processes, and the end

    def test_pickle(self, storage: SpaceStorage) -> None:
        if not storage.is_multiprocessing_safe:
            with pytest.raises(TypeError):
                pickle.dumps(storage)
            return
        handle = pickle.dumps(storage)
        assert len(handle) < 8192
        with pickle.loads(handle) as other:
            storage.set(0, self.row(70))
            assert self.numbers(other.get([0, 1])) == [70, 1]  # the same rows

    def test_a_loaded_storage_pickles_to_a_small_handle_or_not_at_all(
        self, storage: SpaceStorage, tmp_path: Path
    ) -> None:
        storage.dumps(tmp_path / "dump")
        with self.load(tmp_path / "dump") as loaded:
            if not loaded.is_multiprocessing_safe:
                with pytest.raises(TypeError):
                    pickle.dumps(loaded)
                return
            handle = pickle.dumps(loaded)
            assert len(handle) < 8192
            with pickle.loads(handle) as other:
                assert self.numbers(other.get([0, -1])) == [0, CAPACITY - 1]
                assert not other.is_mutable

    def test_close_may_be_called_twice(self, make: Make) -> None:
        storage = make()
        with storage as same:
            assert same is storage
        if self.refuses_after_close:
            with pytest.raises(ClosedError):
                storage.get(0)
        storage.close()
        if self.refuses_after_close:
            with pytest.raises(ClosedError):
                storage.get(0)

"""Row dumps load as every kind of row storage; what does not fit is refused in words."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.storage.rows import KINDS, SPACE, block, contents, files_under, ids, make, manifest_of, sample

import recollect as rc
from recollect.errors import BudgetError, FormatError, SegmentOpenError
from recollect.storage import find_storage
from recollect.testing import CATALOGUE, assert_same, max_lengths_of, samples


@pytest.mark.parametrize("target", KINDS)
def test_lanes_and_the_lowest_come_back(target: str, tmp_path: Path) -> None:
    with rc.ReplayBuffer.create(
        "memory", SPACE, capacity=12, num_lanes=2, maintain_segment_metadata=True
    ) as buffer:
        with buffer.on_lane(1) as one, buffer.on_lane(0) as zero:
            one.extend(block(100, 8))
            zero.extend(block(0, 4))
        buffer.dumps(tmp_path / "lanes")
        was = contents(buffer)
    with rc.ReplayBuffer.load_from(tmp_path / "lanes", storage=target, read_only=False) as loaded:
        assert contents(loaded) == was
        with loaded.on_lane(1) as one:
            one.append(sample(108))
        assert ids(loaded[...]) == [0, 1, 2, 3, *range(103, 109)]
    with rc.ReplayBuffer.create("memory", SPACE, capacity=4, evict="lowest", evict_key="id") as buffer:
        for n in (5, 3, 9, 3, 1, 7):
            buffer.append(sample(n))
        buffer.dumps(tmp_path / "lowest")
    with rc.ReplayBuffer.load_from(tmp_path / "lowest", storage=target, read_only=False) as loaded:
        assert sorted(ids(loaded[...])) == [3, 5, 7, 9]
        loaded.append(sample(4))
        assert sorted(ids(loaded[...])) == [4, 5, 7, 9]


def test_what_a_row_storage_does_not_take() -> None:
    with pytest.raises(TypeError, match="positional"):
        rc.MemoryStorage.create(SPACE, 3, capacity=4)
    with pytest.raises(ValueError, match="SharedMemoryStorage"):
        rc.MemoryStorage.create(SPACE, capacity=4, multiprocessing=True)


@pytest.mark.parametrize("kind", ["memory", "memmap"])
def test_added_rows_are_seen_once_written(kind: str, tmp_path: Path) -> None:
    where = {"cache_path": tmp_path / "live"} if kind == "memmap" else {}
    with find_storage(kind).create(SPACE, capacity=None, **where) as storage:
        storage.append(sample(0))
        storage.extend_length(2)
        storage.dumps(tmp_path / "dump")
        assert len(storage) == 3 and len(rc.MemoryStorage.load_from(tmp_path / "dump", SPACE)) == 1
        storage.set(1, sample(1))
        storage.dumps(tmp_path / "dump")
        assert len(rc.MemoryStorage.load_from(tmp_path / "dump", SPACE)) == 2
        storage.append(sample(2))  # takes the row that is left
        assert len(storage) == 3 and ids(storage.get(...)) == [0, 1, 2]
        storage.extend_length(3)
        with pytest.raises(SegmentOpenError):
            storage.shrink_length(4)
        assert len(storage) == 6
        storage.mark_segment_end()
        storage.shrink_length(4)  # the added ones go first
        assert len(storage) == 2 and ids(storage.get(...)) == [0, 1]
        storage.extend_length(2)
        storage.clear()
        assert len(storage) == 0


def test_multiprocessing_makes_shared_of_memory(tmp_path: Path) -> None:
    with make("memory", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
        was = contents(buffer)
        with pytest.raises(ValueError, match="SharedMemoryStorage"):
            rc.MemoryStorage.load_from(tmp_path / "dump", SPACE, multiprocessing=True)
    with rc.ReplayBuffer.load_from(tmp_path / "dump", multiprocessing=True) as loaded:
        assert isinstance(loaded.storage, rc.SharedMemoryStorage)
        with pickle.loads(pickle.dumps(loaded)) as other:
            assert contents(other) == was


def _read_in_child(buffer: rc.ReplayBuffer, out: Any) -> None:
    with buffer:
        out.send(contents(buffer))


@pytest.mark.process
@pytest.mark.parametrize("storage", [None, "memmap", "shared"])
def test_a_dump_of_a_memmap_is_read_by_other_processes(storage: str | None, tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
        was = contents(buffer)
    with rc.ReplayBuffer.load_from(tmp_path / "dump", multiprocessing=True, storage=storage) as loaded:
        assert len(pickle.dumps(loaded)) < 8192
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_read_in_child, args=(pickle.loads(pickle.dumps(loaded)), theirs))
        child.start()
        assert ours.recv() == was
        child.join()
        child.close()
        ours.close()
        theirs.close()


def test_a_pickled_dump_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
        with rc.ReplayBuffer.load_from(tmp_path / "dump", multiprocessing=True) as loaded:
            handle = pickle.dumps(loaded)
            buffer.dumps(tmp_path / "dump")
            assert len(loaded[...]["id"]) == 12  # it has the old file open
            with pytest.raises(FormatError, match="load again"):
                pickle.loads(handle)


def test_a_given_space_must_equal_the_stored_one(tmp_path: Path) -> None:
    with make("memory", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
    other = {"id": ((), "int64"), "words": ((3,), "float32")}
    with pytest.raises(ValueError, match="words.*float32.*float64|words.*float64.*float32"):
        rc.ReplayBuffer.load_from(tmp_path / "dump", single_instance_space=other)
    with pytest.raises(ValueError, match="words"):
        rc.MemoryStorage.load_from(tmp_path / "dump", other)
    space = rc.as_space(SPACE)
    with rc.ReplayBuffer.load_from(tmp_path / "dump", single_instance_space=space) as loaded:
        assert loaded.single_space is space


def test_a_dump_of_any_space_is_read_back(tmp_path: Path) -> None:
    for number, (name, space) in enumerate(CATALOGUE.items()):
        path, kind = tmp_path / name, KINDS[number % 3]
        with rc.ReplayBuffer.create("memory", space, capacity=3, max_lengths=max_lengths_of(name)) as buffer:
            given = samples(space, 2)
            for one in given:
                buffer.append(one)
            buffer.dumps(path)
        assert rc.ReplayBuffer.get_space_from_path(path) == space, name
        with rc.ReplayBuffer.load_from(path, single_instance_space=space, storage=kind) as loaded:
            for i, one in enumerate(given if name != "box-big-endian" else ()):  # reads back in native order
                assert_same(loaded[i], one, name)


# -- arguments


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("capacity", "num_lanes"), [(12, 24), (12, 2.0), (12, True), (None, 2)])
def test_bad_lanes(kind: str, capacity: int | None, num_lanes: Any, tmp_path: Path) -> None:
    match = "capacity" if kind == "shared" and capacity is None else "num_lanes"
    with pytest.raises(ValueError, match=match):
        make(kind, tmp_path, capacity=capacity, num_lanes=num_lanes)
    assert not files_under(tmp_path)


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_a_dump_that_does_not_fit_in_memory(kind: str, tmp_path: Path, leaves_nothing: None) -> None:
    with rc.ReplayBuffer.create(
        "memmap", SPACE, capacity=1 << 36, cache_path=tmp_path / "live", sparse=True
    ) as buffer:
        buffer.extend(block(0, 3))
    with pytest.raises(BudgetError, match="capacity"):
        rc.ReplayBuffer.load_from(tmp_path / "live", storage=kind)
    with rc.ReplayBuffer.load_from(tmp_path / "live") as loaded:
        assert ids(loaded[...]) == [0, 1, 2]


# -- open segments


def test_an_open_segment_longer_than_the_ring(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=5, maintain_segment_metadata=True) as buffer:
        for n in range(13):
            buffer.append(sample(n))
        buffer.dumps(tmp_path / "dump", cut_open=True)
        assert manifest_of(tmp_path / "dump")["segments"] == [[1, 0, 3, 5, 8]]
    with rc.ReplayBuffer.load_from(tmp_path / "dump") as loaded:
        assert ids(loaded[...]) == [8, 9, 10, 11, 12] and loaded.locate(...).step.tolist() == [
            8,
            9,
            10,
            11,
            12,
        ]
        assert loaded.get_segments() == [(0, 5)]


# -- asking a path


def test_what_the_path_of_a_live_memmap_tells(tmp_path: Path) -> None:
    with make("memmap", tmp_path, capacity=20) as buffer:
        assert manifest_of(tmp_path / "live")["count"] == 0, "the manifest is of create"
        assert rc.ReplayBuffer.get_length_from_path(tmp_path / "live") == 15
        buffer.append(sample(15))
        assert rc.ReplayBuffer.get_length_from_path(tmp_path / "live") == 16
        assert rc.ReplayBuffer.get_capacity_from_path(tmp_path / "live") == 20
        assert rc.ReplayBuffer.get_space_from_path(tmp_path / "live") == buffer.single_space
        assert rc.ReplayBuffer.is_loadable_from(tmp_path / "live")


@pytest.mark.parametrize("capacity", [12, None])
def test_a_live_memmap_goes_on_where_it_was(capacity: int | None, tmp_path: Path) -> None:
    with make("memmap", tmp_path, capacity=capacity) as buffer:
        was = contents(buffer)
        with rc.ReplayBuffer.load_from(tmp_path / "live") as reader:  # beside the writer, at its last commit
            assert contents(reader) == was and not reader.is_mutable
            buffer.extend(block(15, 1))
            assert ids(reader[-1:]) == [15]
    with rc.ReplayBuffer.load_from(tmp_path / "live", read_only=False) as again:
        again.extend(block(16, 2))
        assert ids(again[...])[-5:] == [13, 14, 15, 16, 17]
        assert len(set(again.locate([-1, -3, -4]).segment.tolist())) == 3
    for kind in ("memory", "memmap"):
        with rc.ReplayBuffer.load_from(tmp_path / "live", storage=kind) as loaded:
            assert ids(loaded[-3:]) == [15, 16, 17]


def test_a_row_dump_that_is_loaded_as_a_memmap_to_write_goes_on_there(tmp_path: Path) -> None:
    with make("memory", tmp_path) as buffer:
        buffer.dumps(tmp_path)
    with rc.ReplayBuffer.load_from(tmp_path, storage="memmap", read_only=False) as live:
        live.extend(block(15, 2))
        was = contents(live)
    assert manifest_of(tmp_path)["live"] is True
    assert files_under(tmp_path) == {"manifest.json", "storage", "storage/live-1.bin"}
    for kind in (None, "memory"):
        with rc.ReplayBuffer.load_from(tmp_path, storage=kind) as loaded:
            assert contents(loaded) == was and ids(loaded[-2:]) == [15, 16]


def test_dumps_of_the_storage_of_a_live_buffer_leaves_it_a_buffer(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        was = contents(buffer)
        buffer.storage.dumps(tmp_path / "live")
    with rc.ReplayBuffer.load_from(tmp_path / "live") as loaded:
        assert contents(loaded) == was


def test_flattened_reads_of_sequences_are_a_type_error_through_a_backend() -> None:
    space = spaces.Dict({"t": spaces.Sequence(spaces.Discrete(3))})
    storage = rc.storage.ToBackendOrDeviceStorage.create(space, capacity=2, max_lengths={"t": 2})
    for call in (lambda: storage.get_flattened(0), lambda: storage.set_flattened(0, np.zeros(2))):
        with pytest.raises(TypeError, match="t: "):
            call()

"""What the storages that keep files promise: commits, one writer, exactness, and errors that name what is wrong."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.storage.disk import file_size

import recollect as rc
from recollect.batch import CastTransformation
from recollect.testing.spaces import CATALOGUE, assert_same, max_lengths_of, samples, stack

ROWS: dict[str, Any] = {"id": ((), "int64"), "words": ((3,), "float64")}
WEIGHTS = np.array([1.0, -2.0, 0.5])
FRAME: Any = ((4, 6, 3), "uint8")
KINDS = ["parquet", "hdf5", "image", "video"]


def rows(first: int, n: int) -> Any:
    ids = np.arange(first, first + n)
    return {"id": ids, "words": ids[:, None] * WEIGHTS}


def frames(first: int, n: int) -> Any:
    ids = np.arange(first, first + n).reshape(-1, 1, 1, 1)
    return np.broadcast_to(ids, (n, 4, 6, 3)).astype(np.uint8)


def make(kind: str, path: Path, **options: Any) -> rc.ReplayBuffer:
    space = FRAME if kind in ("image", "video") else ROWS
    return rc.ReplayBuffer.create(kind, space, cache_path=path, **options)


def block(kind: str, first: int, n: int) -> Any:
    return frames(first, n) if kind in ("image", "video") else rows(first, n)


def sample(kind: str, i: int) -> Any:
    found = block(kind, i, 1)
    return {k: v[0] for k, v in found.items()} if isinstance(found, dict) else found[0]


def ids(data: Any) -> list[int]:
    return np.asarray(data["id"] if isinstance(data, dict) else data[..., 0, 0, 0]).tolist()


def committed(path: Path) -> list[int]:
    """What a new reader finds."""
    with rc.ReplayBuffer.load_from(path) as buffer:
        return ids(buffer[...])


def data_file(path: Path, kind: str) -> Path:
    """One of the files that hold rows."""
    ending = {"parquet": "part-*.parquet", "hdf5": "*.hdf5", "image": "row-*.png", "video": "*.mkv"}[kind]
    return sorted(path.rglob(ending))[0]


# -- commits


def test_parquet_commits_full_pieces_segment_ends_and_flushes(tmp_path: Path) -> None:
    with make("parquet", tmp_path, piece_size=4, maintain_segment_metadata=True) as buffer:
        assert committed(tmp_path) == []
        for i in range(6):
            buffer.append(sample("parquet", i))
        assert committed(tmp_path) == [0, 1, 2, 3] and ids(buffer[...]) == [*range(6)]
        with rc.ReplayBuffer.load_from(tmp_path) as reader:
            assert reader.get_segments() == [(0, 4)], "the open segment, as far as it is committed"
        buffer.mark_segment_end()
        assert committed(tmp_path) == [*range(6)]
        buffer.append(sample("parquet", 6))
        assert committed(tmp_path) == [*range(6)]
        buffer.storage.flush()
        assert committed(tmp_path) == [*range(7)]
    assert committed(tmp_path) == [*range(7)]
    names = sorted(f.name for f in (tmp_path / "storage").iterdir())
    assert len(names) == 2, f"a piece that was not full is written again with the next: {names}"


def test_a_parquet_file_has_1024_rows_unless_another_number_is_named(tmp_path: Path) -> None:
    with make("parquet", tmp_path) as buffer:
        buffer.extend(rows(0, 1500))
        assert committed(tmp_path) == [*range(1024)]


def test_hdf5_commits_at_dumps_and_close_and_writes_on_in_a_copy(tmp_path: Path) -> None:
    with make("hdf5", tmp_path, capacity=6, maintain_segment_metadata=True) as buffer:
        buffer.extend(rows(0, 4))  # the end of a segment is no commit here
        assert committed(tmp_path) == []
        buffer.dumps(tmp_path)
        first = data_file(tmp_path, "hdf5").read_bytes()
        with rc.ReplayBuffer.load_from(tmp_path) as reader:
            buffer.extend(rows(4, 4))
            assert ids(reader[...]) == [0, 1, 2, 3]
            assert first in [f.read_bytes() for f in tmp_path.rglob("*.hdf5")], (
                "a committed file never changes"
            )
    assert committed(tmp_path) == [2, 3, 4, 5, 6, 7]
    with rc.ReplayBuffer.load_from(tmp_path, read_only=False) as buffer:
        buffer.set_at(0, sample("hdf5", 50))
    assert committed(tmp_path) == [50, 3, 4, 5, 6, 7]
    assert len(list(tmp_path.rglob("*.hdf5"))) == 1, "the file that was copied goes with the commit"


def test_images_are_a_file_per_row_and_generation(tmp_path: Path) -> None:
    with make("image", tmp_path, capacity=4, piece_size=3) as buffer:
        buffer.extend(frames(0, 2))
        assert committed(tmp_path) == []
        buffer.append(frames(2, 1)[0])
        assert committed(tmp_path) == [0, 1, 2]
        buffer.set_at(1, frames(9, 1)[0])
        assert committed(tmp_path) == [0, 1, 2] and ids(buffer[...]) == [0, 9, 2]
        buffer.storage.flush()
        assert committed(tmp_path) == [0, 9, 2]
        assert len(list(tmp_path.rglob("row-1-*.png"))) == 1, "the older generation is gone with the commit"


def test_video_shows_a_segment_when_it_has_ended(tmp_path: Path) -> None:
    with make("video", tmp_path) as buffer:  # untracked: the storage itself knows the segments
        buffer.extend(frames(0, 3))
        for i in (3, 4):
            buffer.append(frames(i, 1)[0])
        assert len(buffer) == 3 and buffer.get_segments() == [(0, 3)] == rc_segments(tmp_path)
        assert buffer.stats().live == 5 == buffer.stats().offered
        with pytest.raises(rc.SegmentOpenError, match="mark_segment_end"):
            buffer.storage.get(4)
        with pytest.raises(rc.SegmentOpenError, match="mark_segment_end"):
            buffer.extend(frames(5, 1))
        with pytest.raises(rc.SegmentOpenError, match="cut_open=True"):
            buffer.dumps(tmp_path / "dump")
        buffer.dumps(tmp_path / "dump", cut_open=True)
        assert committed(tmp_path / "dump") == [*range(5)] and len(buffer) == 3
        buffer.mark_segment_end()
        assert ids(buffer[...]) == committed(tmp_path) == [*range(5)]
        assert buffer.get_segments() == [(0, 3), (3, 5)]
        buffer.append(frames(5, 1)[0])
        buffer.storage.abort_segment()
        assert buffer.storage.pending_segment_length == 0 and committed(tmp_path) == [*range(5)]


def test_a_block_of_several_segments_is_as_many_videos(tmp_path: Path) -> None:
    with make("video", tmp_path, maintain_segment_metadata=True) as buffer:
        buffer.extend(frames(0, 6), ends=np.isin(np.arange(6), [2, 5]))
        assert len(list(tmp_path.rglob("*.mkv"))) == 2
        assert buffer.get_segments() == buffer.storage.get_segments() == [(0, 3), (3, 6)]


def rc_segments(path: Path) -> Any:
    with rc.ReplayBuffer.load_from(path) as buffer:
        return buffer.get_segments()


@pytest.mark.parametrize("kind", KINDS)
def test_one_writer_and_a_path_that_is_taken(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(block(kind, 0, 3))
        buffer.storage.flush()
        with pytest.raises(rc.LaneBusyError, match=rf"one writer.*process {os.getpid()};"):
            rc.ReplayBuffer.load_from(tmp_path, read_only=False)
        with pytest.raises(rc.LaneBusyError, match="one writer"):
            make(kind, tmp_path, overwrite=True)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            make(kind, tmp_path)
        assert committed(tmp_path) == [0, 1, 2]
    with rc.ReplayBuffer.load_from(tmp_path, read_only=False) as buffer:
        buffer.extend(block(kind, 3, 1))
    assert committed(tmp_path) == [0, 1, 2, 3]
    with make(kind, tmp_path, overwrite=True) as buffer:
        assert len(buffer) == 0
    assert committed(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_files_need_a_place_and_no_more_arguments(kind: str, tmp_path: Path) -> None:
    cls = type(make(kind, tmp_path / "a").storage)
    with pytest.raises(ValueError, match="cache_path"):
        cls.create(FRAME if kind in ("image", "video") else ROWS)
    with pytest.raises(TypeError, match="positional"):
        cls.create(FRAME if kind in ("image", "video") else ROWS, 3, cache_path=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_added_rows_count_for_a_commit_once_written(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path / "data") as buffer:
        cls, space = type(buffer.storage), buffer.storage.single_instance_space
    with cls.load_from(tmp_path / "data", space, read_only=False) as storage:
        for n in (0, 1, 2):
            storage.append(sample(kind, n))
        storage.mark_segment_end()
        storage.extend_length(2)
        assert len(storage) == 5
        storage.flush()
        with cls.load_from(tmp_path / "data", space) as reader:
            assert ids(reader.get(...)) == [0, 1, 2]
        with pytest.raises((rc.FormatError, IndexError)):
            storage.get(3)
        storage.set(3, sample(kind, 3))
        storage.append(sample(kind, 4))  # takes the row that is left
        assert len(storage) + storage.pending_segment_length == 5
        storage.mark_segment_end()
        storage.flush()
        with cls.load_from(tmp_path / "data", space) as reader:
            assert ids(reader.get(...)) == [0, 1, 2, 3, 4]
        storage.extend_length(3)
        storage.shrink_length(4)  # the added ones go first
        storage.flush()
        assert len(storage) == 4
        with cls.load_from(tmp_path / "data", space) as reader:
            assert ids(reader.get(...)) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["image", "parquet"])
def test_a_failed_append_leaves_no_row(kind: str, tmp_path: Path) -> None:
    made: Any
    if kind == "image":
        made = rc.ImageStorage.create(FRAME, cache_path=tmp_path)
    else:
        made = rc.ParquetStorage.create(ROWS, cache_path=tmp_path, piece_size=1)
    with made as storage:
        storage.append(sample(kind, 0))
        for added in (0, 1):
            storage.extend_length(added)
            with file_size(0), pytest.raises(OSError, match="File too large"):
                storage.append(sample(kind, 1))
            assert len(storage) == 1 + added and storage.stored_length() <= 1
        storage.append(sample(kind, 1))
        assert ids(storage.get(...)) == [0, 1]


def test_new_rows_of_a_storage_that_only_grows_come_in_order(tmp_path: Path) -> None:
    with make("parquet", tmp_path) as buffer:
        storage = buffer.storage
        storage.extend_length(2)
        for index, value in (([1, 0], rows(0, 2)), ([1], rows(1, 1)), (1, sample("parquet", 1))):
            with pytest.raises(rc.ReadOnlyError, match="in order"):
                storage.set(index, value)
        storage.set([0, 1], rows(0, 2))
        assert ids(storage.get(...)) == [0, 1]


def test_a_buffer_that_is_forgotten_is_not_closed(tmp_path: Path) -> None:
    buffer = make("hdf5", tmp_path)
    buffer.extend(rows(0, 2))
    del buffer
    gc.collect()
    assert committed(tmp_path) == []


def test_threads_read_one_storage(tmp_path: Path) -> None:
    """Two chunks fit into the cache, so that each thread throws out what the others read."""
    with make("parquet", tmp_path, piece_size=4) as buffer:
        buffer.extend(rows(0, 64))
    with rc.ReplayBuffer.load_from(tmp_path, cache_nbytes=300) as reader, ThreadPoolExecutor(4) as pool:

        def read(seed: int) -> bool:
            draw = np.random.default_rng(seed)
            for _ in range(20):
                at = draw.integers(0, 64, 3)
                found = reader.storage.get(at)  # not by way of the buffer, whose own lock would do
                if ids(found) != at.tolist() or not np.array_equal(
                    found["words"], found["id"][:, None] * WEIGHTS
                ):
                    return False
            return True

        assert all(pool.map(read, range(4)))


@pytest.mark.parametrize("kind", ["parquet", "video"])
def test_append_only_storages_say_how_to_change(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only grows"):
        make(kind, tmp_path / "fixed", capacity=5)
    assert not (tmp_path / "fixed").exists()
    with make(kind, tmp_path / "all") as buffer:
        buffer.extend(block(kind, 0, 5))
        changes = (lambda: buffer.set_at(0, sample(kind, 9)), lambda: buffer.remove_at([1]),
                   lambda: buffer.remove_at(-1))  # fmt: skip
        for change in changes:
            with pytest.raises(rc.ReadOnlyError, match=r"extend_from\(buf.get_slice\(keep\)\)"):
                change()
        assert len(buffer) == 5
        with make(kind, tmp_path / "kept") as kept:
            kept.extend_from(buffer.get_slice([0, 2, 4]), tqdm=True)
            assert ids(kept[...]) == [0, 2, 4]
        buffer.clear()
        assert len(buffer) == 0
        buffer.extend(block(kind, 7, 2))
    assert committed(tmp_path / "all") == [7, 8] and committed(tmp_path / "kept") == [0, 2, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_dumps_elsewhere_reuse_unchanged_files(kind: str, tmp_path: Path) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        found = [f for f in (tmp_path / "dump" / "storage").rglob("*") if f.is_file()]
        return {f: (f.stat().st_ino, f.stat().st_mtime_ns) for f in found}

    options = {"piece_size": 2} if kind == "parquet" else {}
    with make(kind, tmp_path / "live", maintain_segment_metadata=True, **options) as buffer:
        buffer.extend(block(kind, 0, 4))
        buffer.dumps(tmp_path / "dump")
        before = files()
        buffer.extend(block(kind, 4, 3))
        buffer.dumps(tmp_path / "dump")
        assert committed(tmp_path / "dump") == [*range(7)] == committed(tmp_path / "live")
        # The first segment's file, its rows' files, its pieces; hdf5 has one file, which changed.
        n_reused = {"video": 1, "image": 4, "parquet": 2, "hdf5": 0}[kind]
        assert len(before.items() & files().items()) == n_reused
    with rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as again:
        again.extend(block(kind, 7, 1))
        assert again.get_segments() == [(0, 4), (4, 7), (7, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dump_over_anothers_leaves_its_files_as_they_are_until_the_commit(
    kind: str, tmp_path: Path
) -> None:
    for number in range(2):  # the names are the same, what they hold is not
        with make(kind, tmp_path / f"live-{number}", maintain_segment_metadata=True) as buffer:
            buffer.extend(block(kind, 10 * number, 2 + 2 * number))
            buffer.extend(block(kind, 10 * number + 2, 2 - 2 * number))  # none: one commit less
            buffer.dumps(tmp_path / "dump")
        assert committed(tmp_path / "dump") == [*range(10 * number, 10 * number + 4)]
        file = data_file(tmp_path / "dump", kind)
        if number == 0:
            os.link(file, tmp_path / "link")
            content = file.read_bytes()
    assert (tmp_path / "link").read_bytes() == content != file.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_buffer_is_sent_to_other_processes_as_a_handle(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path, maintain_segment_metadata=True) as buffer:
        buffer.extend(block(kind, 0, 6), ends=np.isin(np.arange(6), [2, 5]))
        with pytest.raises(TypeError, match="another process"):
            pickle.dumps(buffer)
    with rc.ReplayBuffer.load_from(tmp_path, multiprocessing=True) as reader:
        handle = pickle.dumps(reader)
        assert len(handle) < 8192
        with pickle.loads(handle) as other:
            assert ids(other[...]) == [*range(6)] and other.get_segments() == [(0, 3), (3, 6)]
    with make(kind, tmp_path, overwrite=True), pytest.raises(rc.FormatError, match="load again"):
        pickle.loads(handle)


def test_extend_from_keeps_segments_across_storages(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", ROWS, capacity=50, maintain_segment_metadata=True) as source:
        source.extend(rows(0, 30), ends=np.isin(np.arange(30), [4, 11, 29]))
        with make("parquet", tmp_path / "p", piece_size=7, maintain_segment_metadata=True) as buffer:
            buffer.extend_from(source, chunk_size=4)
            assert buffer.get_segments() == source.get_segments() == [(0, 5), (5, 12), (12, 30)]
            with make("hdf5", tmp_path / "h", maintain_segment_metadata=True) as other:
                other.extend_from(buffer, chunk_size=11)
                assert ids(other[...]) == [*range(30)] and other.get_segments() == buffer.get_segments()


# -- exactness


@pytest.mark.parametrize("kind", ["parquet", "hdf5"])
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "box-big-endian"])  # read as native
def test_every_space_comes_back_exactly(kind: str, name: str, tmp_path: Path) -> None:
    space = CATALOGUE[name]
    given = samples(space, 7)
    # Parquet needs no greatest length of a Sequence.
    most = {"max_lengths": max_lengths_of(name)} if kind == "hdf5" and max_lengths_of(name) else {}
    with rc.ReplayBuffer.create(kind, space, cache_path=tmp_path, **most) as buffer:
        buffer.extend(stack(space, given[:3]))
        buffer.append(given[3])
        buffer.storage.flush()
        buffer.extend(stack(space, given[4:]))
        for i in (0, 3, 6):
            assert_same(buffer[i], given[i])
        assert_same(buffer[[5, 0, 3]], stack(space, [given[5], given[0], given[3]]))
    with rc.ReplayBuffer.load_from(tmp_path, verify=True) as loaded:
        for i, value in enumerate(given):
            assert_same(loaded[i], value)


def test_parquet_is_read_by_others_and_only_the_columns_asked_for(tmp_path: Path) -> None:
    import pyarrow.parquet

    with make("parquet", tmp_path) as buffer:
        buffer.extend(rows(0, 5))
    table = pyarrow.parquet.read_table(data_file(tmp_path, "parquet"))
    assert table.column("id").to_pylist() == [*range(5)]
    assert table.column("words").to_pylist()[2] == [2.0, -4.0, 1.0]
    with rc.ReplayBuffer.load_from(tmp_path) as loaded:
        assert loaded.get_column("words")[2].tolist() == [2.0, -4.0, 1.0]
        storage: Any = loaded.storage
        assert list(storage._caches) == [("words",)]


def test_hdf5_reads_only_the_columns_asked_for(tmp_path: Path) -> None:
    with make("hdf5", tmp_path) as buffer:
        buffer.extend(rows(0, 5))
    with rc.ReplayBuffer.load_from(tmp_path) as loaded:
        assert loaded.get_column("words")[2].tolist() == [2.0, -4.0, 1.0]
        storage: Any = loaded.storage
        assert list(storage._caches) == [("words",)]


def test_hdf5_single_file(tmp_path: Path) -> None:
    import h5py

    with make("hdf5", tmp_path / "live") as buffer:
        buffer.extend(rows(0, 5))
        buffer.storage.dumps(tmp_path / "one.hdf5")
    with h5py.File(tmp_path / "one.hdf5") as f:
        assert f["id"][:].tolist() == [*range(5)]
    with rc.HDF5Storage.load_from(tmp_path / "one.hdf5", ROWS) as storage:
        assert ids(storage.get(...)) == [*range(5)]
        with pytest.raises(rc.ReadOnlyError):
            storage.set(0, sample("hdf5", 1))
    with pytest.raises(rc.FormatError, match="words"):
        rc.HDF5Storage.load_from(tmp_path / "one.hdf5", {**ROWS, "words": ((4,), "float64")})


@pytest.mark.parametrize(("shape", "dtype"), [((5, 7), "uint8"), ((5, 7, 1), "uint8"), ((5, 7, 3), "uint8"),
                                              ((5, 7), "uint16")])  # fmt: skip
@pytest.mark.parametrize("kind", ["image", "video"])
def test_frames_are_exact_by_default(kind: str, shape: Any, dtype: str, tmp_path: Path) -> None:
    top = np.iinfo(dtype).max
    given = np.random.default_rng(0).integers(0, top, (9, *shape), endpoint=True).astype(dtype)
    with rc.ReplayBuffer.create(kind, (shape, dtype), cache_path=tmp_path) as buffer:
        buffer.extend(given)
        at = [8, 0, 3]
        assert np.array_equal(buffer[at], given[at]) and buffer[2].dtype == dtype


def test_lossy_formats_must_be_named_and_spaces_must_be_frames(tmp_path: Path) -> None:
    smooth = np.broadcast_to(np.linspace(0, 200, 40).astype(np.uint8)[:, None, None, None], (40, 16, 16, 3))
    for kind, lossy in (("image", {"format": "jpeg"}), ("video", {"codec": "h264"})):
        with rc.ReplayBuffer.create(
            kind, ((16, 16, 3), "uint8"), cache_path=tmp_path / kind, **lossy
        ) as buffer:
            buffer.extend(smooth)
        with rc.ReplayBuffer.load_from(tmp_path / kind) as loaded:
            assert np.abs(loaded[...].astype(int) - smooth).max() < 8
        for wrong in (
            ROWS,
            ((4, 4), "float32"),
            ((4, 4, 2), "uint8"),
            ((4, 4, 3), "uint16"),
            ((4,), "uint8"),
        ):
            with pytest.raises(ValueError, match="space"):
                rc.ReplayBuffer.create(kind, wrong, cache_path=tmp_path / "wrong")
    for kind, options in (("image", {"format": "nothing"}), ("video", {"codec": "nothing"}),
                          ("parquet", {"piece_size": 0}), ("parquet", {"compression": "nothing"}),
                          ("hdf5", {"compression": "nothing"})):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            make(kind, tmp_path / "wrong", **options)
    for kind, options in (("image", {"format": "jpeg"}), ("video", {"codec": "h264"})):
        with pytest.raises(ValueError, match="uint16"):
            rc.ReplayBuffer.create(kind, ((4, 4), "uint16"), cache_path=tmp_path / "wrong", **options)
    assert not (tmp_path / "wrong").exists()


def test_cast_and_max_lengths_reach_the_storage(tmp_path: Path) -> None:
    with make("parquet", tmp_path / "a", cast=True) as buffer:
        buffer.extend({"id": np.arange(2, dtype=np.int32), "words": np.zeros((2, 3), np.float32)})
    with make("parquet", tmp_path / "b") as buffer, pytest.raises(rc.DtypeError):
        buffer.extend({"id": np.arange(2, dtype=np.int32), "words": np.zeros((2, 3))})
    tokens = {"tokens": spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True)}
    with rc.ReplayBuffer.create(
        "parquet", spaces.Dict(tokens), cache_path=tmp_path / "c", max_lengths={"tokens": 4}
    ) as buffer:
        buffer.append({"tokens": np.arange(4)})
        with pytest.raises(rc.SchemaError, match="at most 4"):
            buffer.append({"tokens": np.arange(9)})


# -- damage


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def foreign(file: Path) -> None:
    file.write_bytes(os.urandom(file.stat().st_size))


DAMAGE = {"truncated": truncate, "flipped": flip, "foreign": foreign, "gone": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_a_format_error_never_zeros(kind: str, damage: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(block(kind, 1, 6))
    DAMAGE[damage](data_file(tmp_path, kind))
    with pytest.raises(rc.FormatError):
        rc.ReplayBuffer.load_from(tmp_path, verify=True)
    with pytest.raises(rc.FormatError), rc.ReplayBuffer.load_from(tmp_path) as loaded:
        loaded[...]


def test_a_row_that_was_never_written_is_no_image(tmp_path: Path) -> None:
    with rc.ImageStorage.create(FRAME, capacity=4, cache_path=tmp_path) as storage:
        storage.set(0, frames(1, 1)[0])
        with pytest.raises(rc.FormatError, match="row 2"):
            storage.get([0, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_garbled_manifests_are_format_errors(kind: str, tmp_path: Path) -> None:
    from recollect.storage.manifest import write_manifest

    with make(kind, tmp_path) as buffer:
        buffer.extend(block(kind, 0, 3))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest.pop("crc32c")
    good = manifest["storage"]["options"]
    for options in ({}, {**good, "contents": 3}, {**good, "contents": [["../x", 1]]}, {**good, "more": 1}):
        write_manifest(tmp_path, {**manifest, "storage": {**manifest["storage"], "options": options}})
        with pytest.raises(rc.FormatError), rc.ReplayBuffer.load_from(tmp_path) as loaded:
            loaded[...]
    write_manifest(tmp_path, {**manifest, "storage": {**manifest["storage"], "options": good}})
    assert committed(tmp_path) == [0, 1, 2]


def test_a_reader_whose_files_were_replaced_is_told_to_load_again(tmp_path: Path) -> None:
    with make("parquet", tmp_path) as buffer:
        buffer.extend(rows(0, 3))
    with rc.ReplayBuffer.load_from(tmp_path) as reader:
        with rc.ReplayBuffer.load_from(tmp_path, read_only=False) as writer:
            writer.clear()
            writer.extend(rows(5, 1))
        with pytest.raises(rc.FormatError, match="load again"):
            reader[0]


# -- what the machine cannot give


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_loses_nothing_that_was_committed(kind: str, small_disk: Path) -> None:
    noise = np.random.default_rng(0)
    space, n = ((128, 128, 3), "uint8"), 60
    if kind in ("parquet", "hdf5"):
        space, n = ((2048,), "float64"), 60
    options = {"piece_size": 4} if kind == "parquet" else {}
    buffer = rc.ReplayBuffer.create(kind, space, cache_path=small_disk / "data", **options)

    def some() -> Any:
        if kind in ("parquet", "hdf5"):
            return noise.standard_normal((4, *space[0]))
        return noise.integers(0, 255, (4, *space[0]), endpoint=True).astype(np.uint8)

    kept: list[Any] = []
    try:
        with pytest.raises(OSError):
            for _ in range(n):
                given = some()
                before = len(buffer)
                buffer.extend(given)
                buffer.storage.flush()
                kept.append(given)
        assert kept, "it fits at first"
        assert before <= len(buffer) <= before + 4
        with rc.ReplayBuffer.load_from(small_disk / "data", verify=True) as loaded:
            assert np.array_equal(loaded[...], np.concatenate(kept))
    finally:
        with contextlib.suppress(OSError):
            buffer.close()
    with rc.ReplayBuffer.load_from(small_disk / "data", verify=True) as loaded:
        assert np.array_equal(loaded[: 4 * len(kept)], np.concatenate(kept))


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("not a directory")
        with pytest.raises(OSError):
            make(kind, tmp_path / "file")
        return  # the permissions of a directory do not bind root
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            make(kind, tmp_path / "data")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        ("parquet", "pyarrow", "parquet"),
        ("hdf5", "h5py", "hdf5"),
        ("image", "PIL", "images"),
        ("video", "av", "video"),
    ],
)
def test_a_missing_package_is_named_with_the_command(
    kind: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(kind, tmp_path / "data") as buffer:
        buffer.extend(block(kind, 0, 2))
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)  # what an import finds of a package that is not there
    with pytest.raises(rc.MissingExtraError, match=rf'pip install "recollect\[{extra}\]"'):
        rc.ReplayBuffer.load_from(tmp_path / "data")
    with pytest.raises(rc.MissingExtraError, match=rf'pip install "recollect\[{extra}\]"'):
        make(kind, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- wrappers


def test_flattened_refuses_what_it_would_change(tmp_path: Path) -> None:
    space = {"big": ((), "int64"), "x": ((2,), "float32")}
    with rc.ReplayBuffer.create("flattened", space, inner="parquet", cache_path=tmp_path) as buffer:
        exact = {"big": np.array([2**53, -(2**53), 7]), "x": np.zeros((3, 2), np.float32)}
        buffer.extend(exact)
        with pytest.raises(rc.SchemaError, match="big"):
            buffer.extend({"big": np.array([1, 2**53 + 1]), "x": np.zeros((2, 2), np.float32)})
        assert len(buffer) == 3 and buffer.stats().rejected == 2
        assert buffer[...]["big"].tolist() == [2**53, -(2**53), 7]
    with pytest.raises(TypeError, match="text"):
        rc.FlattenedStorage.create(spaces.Dict({"text": spaces.Text(4)}), capacity=4)


def test_transformed_is_saved_by_name_and_arguments(tmp_path: Path) -> None:
    space = {"x": ((2,), "float32")}
    half = CastTransformation({"x": "float16"})
    with rc.ReplayBuffer.create(
        "transformed", space, half, inner="hdf5", capacity=4, cache_path=tmp_path
    ) as buffer:
        given = np.ones((2, 2), np.float32)
        buffer.extend({"x": given})
        assert given.dtype == np.float32 and buffer.storage.inner.get(0)["x"].dtype == np.float16
    saved = json.loads((tmp_path / "manifest.json").read_text())["storage"]
    assert saved["options"] == {"transformation": {"name": "cast", "arguments": {"dtypes": {"x": "float16"}}}}
    assert saved["children"]["inner"]["name"] == "hdf5"
    with rc.ReplayBuffer.load_from(tmp_path) as loaded:
        assert loaded[0]["x"].dtype == np.float32 and type(loaded.storage).__name__ == "TransformedStorage"

    class OneWay(rc.DataTransformation):
        def get_target_space_from_source(self, space: Any) -> Any:
            return space

        def transform(self, space: Any, data: Any) -> Any:
            return data

    with pytest.raises(ValueError, match="inverse"):
        rc.TransformedStorage.create(space, OneWay(), capacity=4)
    with pytest.raises(TypeError, match="DataTransformation"):
        rc.TransformedStorage.create(space, capacity=4)


NESTED: Any = {"obs": {"image": FRAME, "state": ((3,), "float32"), "more": ((), "int8")}, "id": ((), "int64")}


def nested(first: int, n: int) -> Any:
    i = np.arange(first, first + n)
    obs = {
        "image": frames(first, n),
        "state": np.repeat(i[:, None], 3, 1).astype("f4"),
        "more": i.astype("i1"),
    }
    return {"obs": obs, "id": i}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"obs/image": "memory", "*": "memory"}, [["obs/image"], ["obs/state", "obs/more", "id"]]),
        (
            {"obs/*": "memory", "obs/image": "memory", "id": "memory"},
            [["obs/state", "obs/more"], ["obs/image"], ["id"]],
        ),
        ({"*": "memory", "obs": "memory"}, [["id"], ["obs/image", "obs/state", "obs/more"]]),
        ({"*": "memory"}, [["obs/image", "obs/state", "obs/more", "id"]]),
    ],
)
def test_dict_patterns(patterns: Any, expected: Any) -> None:
    with rc.DictStorage.create(NESTED, patterns, capacity=4) as storage:
        found = [["/".join(map(str, path)) for path in part.paths] for part in storage.parts]
        assert found == expected
        storage.set([0, 1], nested(5, 2))
        assert_same(storage.get([1, 0]), _reversed(nested(5, 2)))


def _reversed(data: Any) -> Any:
    return {k: _reversed(v) for k, v in data.items()} if isinstance(data, dict) else data[::-1]


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"obs/image": "memory"},
        {"*": "memory", "nothing": "memory"},
        {"*": "memory", "obs/x/*": "memory"},
        {"*": "memory", "obs": "memory", "id": "memory"},
    ],
)
def test_dict_refuses_keys_and_patterns_left_over(patterns: Any) -> None:
    with pytest.raises(ValueError, match="storages"):
        rc.DictStorage.create(NESTED, patterns, capacity=4)


def test_a_dict_has_one_capacity_and_allows_what_all_its_storages_allow() -> None:
    space: Any = {"a": ((), "int64"), "b": ((), "int64")}
    with pytest.raises(ValueError, match="capacity: must be equal in all"):
        rc.DictStorage.create(space, {"a": ("memory", {"capacity": 3}), "*": "memory"}, capacity=4)
    with rc.DictStorage.create(space, {"a": "shared", "*": "memory"}, capacity=4) as mixed:
        assert not mixed.is_multiprocessing_safe
        with pytest.raises(TypeError):
            pickle.dumps(mixed)


@pytest.mark.parametrize("grows", ["a", "b"])
def test_a_dict_of_one_storage_that_only_grows_only_grows(grows: str, tmp_path: Path) -> None:
    space: Any = {"a": ((), "int64"), "b": ((), "int64")}
    with rc.ReplayBuffer.create("dict", space, {grows: "parquet", "*": "hdf5"}, cache_path=tmp_path) as mixed:
        mixed.extend({"a": np.arange(3), "b": np.arange(3)})
        for write in (lambda: mixed.set_at(0, {"a": 1, "b": 1}), lambda: mixed.remove_at(0)):
            with pytest.raises(rc.ReadOnlyError, match="only grows"):
                write()
        assert [mixed[:][key].tolist() for key in "ab"] == [[0, 1, 2], [0, 1, 2]]


def test_dict_in_files_takes_only_storages_with_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MemoryStorage"):
        rc.DictStorage.create(
            NESTED, {"obs/image": "image", "*": "memory"}, capacity=4, cache_path=tmp_path / "x"
        )
    with pytest.raises(ValueError, match="only grows"):
        rc.DictStorage.create(
            NESTED, {"obs/image": "image", "*": "parquet"}, capacity=4, cache_path=tmp_path / "x"
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "most", [0, 500, 1000, 1500]
)  # the clip, the Parquet file or the manifest is refused
def test_if_a_child_fails_all_go_back(most: int, tmp_path: Path) -> None:
    both: Any = {"obs/image": "video", "*": "parquet"}
    with rc.ReplayBuffer.create(
        "dict", NESTED, both, cache_path=tmp_path, maintain_segment_metadata=True
    ) as buffer:
        buffer.extend(nested(0, 4))
        before = json.loads((tmp_path / "manifest.json").read_text())["commit"]
        with file_size(most), pytest.raises(OSError, match="File too large"):
            buffer.extend(nested(4, 3))
        assert len(buffer) == 4 and buffer.get_segments() == [(0, 4)] and buffer.open_segment is None
        assert [len(s) for s in buffer.storage.storages] == [4, 4]
        assert ids(buffer[...]) == [0, 1, 2, 3]
        assert json.loads((tmp_path / "manifest.json").read_text())["commit"] == before
        buffer.extend(nested(4, 3))
        assert ids(buffer[...]) == [*range(7)]
    with rc.ReplayBuffer.load_from(tmp_path, verify=True) as loaded:
        assert ids(loaded[...]) == [*range(7)] and loaded.get_segments() == [(0, 4), (4, 7)]
        assert loaded[6]["obs"]["image"].max() == 6


def test_rows_that_a_dict_overwrote_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with rc.DictStorage.create(NESTED, {"obs": "memory", "*": "memory"}, capacity=3) as storage:
        storage.set(slice(None), nested(0, 3))

        def fail(*args: Any) -> None:
            raise OSError(28, "full")

        with monkeypatch.context() as patch:
            patch.setattr(storage.storages[1], "set", fail)
            with pytest.raises(OSError, match="full"):
                storage.set([2, 0], nested(7, 2))
        assert_same(storage.get(...), nested(0, 3))


def large_frames(first: int, n: int) -> Any:
    """Frames of 64 KiB each."""
    return np.repeat(np.arange(first, first + n, dtype=np.uint16).astype(np.uint8), 1 << 16).reshape(
        n, 256, 256
    )


def test_an_open_video_segment_takes_bounded_memory(tmp_path: Path) -> None:
    n, space = 512, spaces.Box(0, 255, (256, 256), np.uint8)
    with rc.ReplayBuffer.create(
        "video", space, cache_path=tmp_path, maintain_segment_metadata=True
    ) as buffer:
        buffer.append(large_frames(0, 1)[0])
        tracemalloc.start()  # arrays count, what the encoder takes for a frame or two does not
        try:
            for k in range(1, n):
                buffer.append(large_frames(k, 1)[0])
            buffer.storage.flush()
            after_flush = committed_frames(tmp_path)
            buffer.mark_segment_end()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert after_flush == n and peak < 12 << 20, f"{n * 64 >> 10} MiB of frames took {peak >> 20} MiB"
        assert buffer.get_segments() == [(0, n)]
        for k in range(0, n, 64):
            assert np.array_equal(buffer[k : k + 64], large_frames(k, 64))
    assert not list(tmp_path.rglob("*.raw"))


def committed_frames(path: Path) -> int:
    with rc.ReplayBuffer.load_from(path) as found:
        return len(found)


def test_frames_that_the_disk_refuses_are_none_of_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, space = 200, spaces.Box(0, 255, (256, 256), np.uint8)
    with rc.VideoStorage.create(space, capacity=None, cache_path=tmp_path) as storage:

        def full(*args: Any) -> int:
            raise OSError(28, "full")

        def refused(block: Any) -> None:
            before = storage.pending_segment_length
            with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
                patch.setattr(os, "pwrite", full)
                storage.extend_length(len(block))
                storage.set(range(before, before + len(block)), block)
            storage.shrink_length(len(block))
            assert storage.pending_segment_length == before

        refused(large_frames(100, 70))
        for k in range(0, n, 50):
            for frame in large_frames(k, 50):
                storage.append(frame)
            refused(large_frames(7, 70))
        storage.mark_segment_end()
        assert np.array_equal(storage.get(slice(None)), large_frames(0, n))
        for frame in large_frames(0, 150):
            storage.append(frame)
        storage.shrink_length(100)  # into those that wait in the file
        for frame in large_frames(50, 100):
            storage.append(frame)
        storage.mark_segment_end()
        assert np.array_equal(storage.get(slice(n, None)), large_frames(0, 150))
    assert {f.suffix for f in (tmp_path / "storage").iterdir()} == {".mkv"}


def test_a_failed_segment_end_leaves_it_open(tmp_path: Path) -> None:
    with make("video", tmp_path, maintain_segment_metadata=True) as buffer:
        buffer.append(frames(0, 1)[0])
        with file_size(0), pytest.raises(OSError, match="File too large"):
            buffer.mark_segment_end()
        assert buffer.open_segment == (0, 1) and len(buffer) == 0
        buffer.mark_segment_end()
        assert len(buffer) == 1 and committed(tmp_path) == [0]

"""Storages over others: what they pass on, and what they see of the values on the way."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.storage.disk import file_size

import recollect as rc
from recollect.batch import CastTransformation
from recollect.spaces import as_space
from recollect.testing.spaces import assert_same, samples, stack

HALF = CastTransformation({"x": "float16"})
X: Any = {"x": ((2,), "float32")}
BOTH: Any = {"image": ((4, 6, 3), "uint8"), "id": ((), "int64")}
IN_FILES: Any = {"image": "video", "*": "parquet"}


def both(first: int, n: int) -> Any:
    i = np.arange(first, first + n)
    return {
        "image": np.broadcast_to(i.reshape(-1, 1, 1, 1), (n, 4, 6, 3)).astype(np.uint8),
        "id": i,
    }


def one(i: int) -> Any:
    return {k: v[0] for k, v in both(i, 1).items()}


def numbers(data: Any) -> list[int]:
    """The numbers of samples whose parts belong together."""
    assert np.array_equal(data["image"][:, 0, 0, 0], data["id"])
    return [int(i) for i in data["id"]]


# -- settings of `create`

OVER: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "memory": ((), {}),
    "flattened": ((), {}),
    "transformed": ((HALF,), {}),
    "dict": (({"*": "memory"},), {}),
    "backend": ((), {"backend": "numpy"}),
    "hdf5": ((), {"cache_path": "here"}),
}


def place(options: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**options, **({"cache_path": tmp_path / "live"} if "cache_path" in options else {})}


@pytest.mark.parametrize("kind", OVER)
def test_cast_reaches_every_write_and_is_remembered(kind: str, tmp_path: Path) -> None:
    arguments, options = OVER[kind]
    with rc.ReplayBuffer.create(
        kind, X, *arguments, capacity=4, cast=True, **place(options, tmp_path)
    ) as buffer:
        buffer.append({"x": np.zeros(2)})
        buffer.extend({"x": np.ones((2, 2))})
        buffer.set_at(0, {"x": np.full(2, 5.0)})
        buffer.set_at([1], {"x": np.full((1, 2), 6.0)})
        assert buffer[...]["x"][:, 0].tolist() == [5, 6, 1] and buffer[0]["x"].dtype == np.float32
        buffer.dumps(tmp_path / "dump")
    with rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as loaded:
        loaded.append({"x": np.full(2, 7.0)})
        assert loaded[-1]["x"].tolist() == [7, 7]
    with rc.ReplayBuffer.create(kind, X, *arguments, capacity=4, **place(options, tmp_path / "b")) as buffer:
        for write in (
            lambda: buffer.append({"x": np.zeros(2)}),
            lambda: buffer.extend({"x": np.ones((2, 2))}),
        ):
            with pytest.raises(rc.DtypeError, match="cast=True"):
                write()


WORDS = spaces.Dict(
    {
        "t": spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True),
        "x": spaces.Box(-1, 1, (2,), np.float32),
    }
)
OF_WORDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "transformed": ("transformed", HALF, {"capacity": 4}),
    "transformed hdf5": ("transformed", HALF, {"capacity": 4, "inner": "hdf5", "cache_path": "here"}),
    "transformed parquet": ("transformed", HALF, {"inner": "parquet", "cache_path": "here"}),
    "dict": ("dict", {"t": "memory", "*": "memory"}, {"capacity": 4}),
    "dict hdf5": ("dict", {"t": "hdf5", "*": "hdf5"}, {"capacity": 4, "cache_path": "here"}),
}


@pytest.mark.parametrize("case", OF_WORDS)
def test_greatest_lengths_reach_the_storage_of_a_sequence(case: str, tmp_path: Path) -> None:
    kind, argument, options = OF_WORDS[case]
    options = place(options, tmp_path)
    with rc.ReplayBuffer.create(kind, WORDS, argument, max_lengths={"t": 3}, **options) as buffer:
        buffer.append({"t": np.arange(3), "x": np.ones(2, np.float32)})
        buffer.extend({"t": (np.arange(1), np.arange(2)), "x": np.zeros((2, 2), np.float32)})
        with pytest.raises(rc.SchemaError, match="at most 3"):
            buffer.append({"t": np.arange(4), "x": np.ones(2, np.float32)})
        assert [len(t) for t in buffer[...]["t"]] == [3, 1, 2]
        buffer.dumps(tmp_path / "dump")
    with rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as loaded:
        loaded.append({"t": np.arange(2), "x": np.ones(2, np.float32)})
        assert loaded[0]["t"].tolist() == [0, 1, 2] and loaded[-1]["t"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="max_lengths"):
        rc.ReplayBuffer.create(
            kind, WORDS, argument, max_lengths={"t": 3, "u": 4}, **{**options, "overwrite": True}
        )


def test_a_path_reaches_the_storage_inside_or_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dumps"):
        rc.FlattenedStorage.create(X, capacity=4, cache_path=tmp_path / "a")
    with rc.FlattenedStorage.create(X, capacity=4, inner="memmap", cache_path=tmp_path / "b") as storage:
        assert storage.cache_filename == str(tmp_path / "b") and (tmp_path / "b" / "manifest.json").exists()
    with pytest.raises(ValueError, match="cache_path"):
        rc.FlattenedStorage.create(X, capacity=4, inner="hdf5")


# -- flattened


@pytest.mark.parametrize(
    "space",
    [
        {"a": ((2,), "int64"), "b": ((), "int8")},
        {"a": ((3,), "bool"), "b": ((), "bool")},
        {"a": ((2,), "bfloat16")},
        {"a": ((), "uint8"), "b": ((2,), "uint16")},
    ],
    ids=["int64", "bool", "bfloat16", "uint16"],
)
def test_flattened_keeps_what_is_no_float(space: Any) -> None:
    given = samples(as_space(space), 4)
    with rc.FlattenedStorage.create(space, capacity=4) as storage:
        storage.set(slice(None), stack(storage.single_instance_space, given))
        for i, value in enumerate(given):
            assert_same(storage.get(i), value)


def test_flattened_keeps_the_greatest_integers() -> None:
    limits = np.iinfo(np.int64)
    with rc.FlattenedStorage.create(((2,), "int64"), capacity=1) as storage:
        storage.set(0, np.array([limits.min, limits.max]))
        assert storage.get(0).tolist() == [limits.min, limits.max]


# -- transformed


class Doubled(rc.DataTransformation):
    """Works in place, and keeps the leaf under another name; remembers what it was given."""

    has_inverse = True

    def __init__(self, seen: list[Any], back: bool = False) -> None:
        self.seen, self.back = seen, back

    def get_target_space_from_source(self, space: Any) -> Any:
        return spaces.Dict({"y": space["x"]})

    def transform(self, space: Any, data: Any) -> Any:
        ((name, array),) = data.items()
        self.seen.append((list(space.spaces), name, array.shape))
        if self.back:
            array /= 2
            return {"x": array}
        array *= 2
        return {"y": array}

    def direction_inverse(self, space: Any) -> rc.DataTransformation:
        assert list(space.spaces) == ["x"], "the space that samples come from"
        return Doubled(self.seen, True)


def test_a_transformation_sees_blocks_and_the_space_of_one_sample() -> None:
    seen: list[Any] = []
    with rc.TransformedStorage.create(X, Doubled(seen), capacity=4) as storage:
        storage.set(0, {"x": np.ones(2, np.float32)})
        storage.append({"x": np.ones(2, np.float32)})
        storage.set([1, 2], {"x": np.ones((2, 2), np.float32)})
        assert seen == [(["x"], "x", (1, 2)), (["x"], "x", (1, 2)), (["x"], "x", (2, 2))]
        assert storage.inner.get(1)["y"].tolist() == [2, 2]
        seen.clear()
        assert storage.get(1)["x"].tolist() == [1, 1] and storage.get([0, 1, 2])["x"].shape == (3, 2)
        assert seen == [(["y"], "y", (1, 2)), (["y"], "y", (3, 2))]


def test_a_transformation_in_place_leaves_the_callers_arrays() -> None:
    several, single = np.ones((3, 2), np.float32), np.ones(2, np.float32)
    with rc.ReplayBuffer.create("transformed", X, Doubled([]), capacity=4) as buffer:
        buffer.append({"x": single})
        buffer.extend({"x": several})
        buffer.set_at([0, 1, 2], {"x": several})
        buffer.storage.set(0, {"x": single})
        buffer.storage.append({"x": single})
        assert (several == 1).all() and (single == 1).all()
        assert (buffer[...]["x"] == 1).all()


# -- segments below


@pytest.mark.parametrize("kind", ["transformed", "dict"])
def test_an_open_segment_of_a_video_below(kind: str, tmp_path: Path) -> None:
    space, argument, options = BOTH, IN_FILES, {"cache_path": tmp_path}
    if kind == "transformed":
        space, argument = BOTH["image"], CastTransformation({})
        options |= {"inner": "video"}

    def some(first: int, n: int) -> Any:
        return both(first, n) if kind == "dict" else both(first, n)["image"]

    def row(i: int) -> Any:
        return one(i) if kind == "dict" else one(i)["image"]

    def found() -> list[int]:
        return numbers(buffer[...]) if kind == "dict" else buffer[...][:, 0, 0, 0].tolist()

    with rc.ReplayBuffer.create(kind, space, argument, maintain_segment_metadata=True, **options) as buffer:
        buffer.extend(some(0, 2))
        buffer.append(row(2))
        buffer.append(row(3))
        assert buffer.storage.pending_segment_length == 2 and buffer.storage.has_open_segment
        assert len(buffer) == 2 and buffer.open_segment == (2, 4)
        with pytest.raises(rc.SegmentOpenError, match="mark_segment_end"):
            buffer.storage.get(2)
        buffer.storage.abort_segment()
        assert buffer.storage.pending_segment_length == 0 and not buffer.storage.has_open_segment
        assert len(buffer) == len(buffer.storage) == 2 and buffer.open_segment is None
        stats = buffer.stats()
        assert (stats.offered, stats.live, stats.removed) == (4, 2, 2)
        buffer.extend(some(4, 2))
        buffer.append(row(6))
        buffer.mark_segment_end()
        assert found() == [0, 1, 4, 5, 6] and buffer.get_segments() == [(0, 2), (2, 4), (4, 5)]
        ids = buffer.locate(...).segment.tolist()
    with rc.ReplayBuffer.load_from(tmp_path, verify=True) as buffer:
        assert found() == [0, 1, 4, 5, 6] and buffer.locate(...).segment.tolist() == ids


def test_a_segment_ends_in_all_videos_or_in_none(tmp_path: Path) -> None:
    space: Any = {"a": BOTH["image"], "b": ((64, 64, 3), "uint8")}
    large = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    sample = {"a": one(3)["image"], "b": large}
    with rc.DictStorage.create(space, {"a": "video", "b": "video"}, cache_path=tmp_path) as storage:
        storage.append(sample)
        with file_size(4096), pytest.raises(OSError, match="File too large"):  # enough for the first
            storage.mark_segment_end()
        assert not list(tmp_path.rglob("*.mkv")) and storage.has_open_segment and len(storage) == 0
        storage.append(sample)
        storage.mark_segment_end()
        assert [len(s) for s in storage.storages] == [2, 2] and storage.get_segments() == [(0, 2)]


# -- dict


def test_a_dict_has_a_directory_per_child(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("dict", BOTH, IN_FILES, cache_path=tmp_path) as buffer:
        buffer.extend(both(0, 2))
    found = {
        f.relative_to(tmp_path / "storage").parts[0]
        for f in (tmp_path / "storage").rglob("*.*")
        if f.is_file()
    }
    assert found == {"0-image", "1-rest"}


def test_a_dict_of_shared_rows_is_sent_to_other_processes() -> None:
    space: Any = {"a": ((), "int64"), "b": ((), "int64")}
    with rc.DictStorage.create(space, {"a": "shared", "*": "shared"}, capacity=4) as storage:
        handle = pickle.dumps(storage)
        assert storage.is_multiprocessing_safe and len(handle) < 8192
        with pickle.loads(handle) as other:
            storage.set([0, 1], {"a": [1, 2], "b": [3, 4]})
            assert_same(other.get([0, 1]), {"a": np.array([1, 2]), "b": np.array([3, 4])})


def test_no_child_commits_before_the_last_has_written(tmp_path: Path) -> None:
    space: Any = {"a": ((), "int64"), "b": ((4096,), "float64")}
    each = {"a": ("parquet", {"piece_size": 1}), "*": ("parquet", {"piece_size": 1})}
    sample = {"a": 1, "b": np.random.default_rng(0).standard_normal(4096)}
    with rc.DictStorage.create(space, each, cache_path=tmp_path) as storage:
        before = json.loads((tmp_path / "manifest.json").read_text())
        with file_size(1 << 14), pytest.raises(OSError, match="File too large"):  # enough for the first
            storage.append(sample)
        assert json.loads((tmp_path / "manifest.json").read_text()) == before
        storage.append(sample)
        assert len(storage) == 1

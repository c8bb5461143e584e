"""Dumps of UniEnv are read from their files: written here in its formats, and by UniEnv where it is installed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc

BOX = {"type": "BoxSpace", "shape": [2], "low": [-1.0, -1.0], "high": [float("inf")] * 2, "dtype": "float32"}
COUNT = {"type": "BoxSpace", "shape": [], "low": 0, "high": 1000, "dtype": "int64"}
FLAG = {"type": "BinarySpace", "shape": [], "dtype": None}
TEXT = {"type": "TextSpace", "min_length": 0, "max_length": 8, "charset": None}
IMAGE = {"type": "BoxSpace", "shape": [6, 8, 3], "low": 0, "high": 255, "dtype": "uint8"}
SPACE = {
    "type": "DictSpace",
    "spaces": {"a": {"type": "DictSpace", "spaces": {"x": BOX, "flag": FLAG}}, "n": COUNT},
}


def dump(path: Path, space: dict[str, Any], storage: str, file: str, *, count: int, **more: Any) -> Path:
    """The metadata of a dump, as UniEnv writes it."""
    path.mkdir(exist_ok=True)
    meta = {"type": "ReplayBuffer", "count": count, "offset": 0, "capacity": None, "physical_segments": None}
    meta |= {"storage_cls": f"unienv_data.storages.x.{storage}", "storage_path_relative": file}
    (path / "metadata.json").write_text(json.dumps(meta | {"single_instance_space": space} | more))
    return path


def columns(n: int) -> dict[str, Any]:
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    return {"a": {"x": x, "flag": np.arange(n) % 3 == 2}, "n": np.arange(n)}


def write_hdf5(file: Path, value: dict[str, Any]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(file, "w") as f:
        for key, child in value.items():
            for name, array in child.items() if isinstance(child, dict) else (("", child),):
                f[f"{key}/{name}".rstrip("/")] = array


def test_hdf5_ring_is_read_from_its_oldest_sample(tmp_path: Path) -> None:
    # 8 rows, of which the sample at row 5 is the oldest; the segment of rows 7 to 1 goes over the end.
    ring = {"count": 8, "offset": 5, "capacity": 8, "physical_segments": [[5, 6], [7, 1], [2, 4]]}
    write_hdf5(dump(tmp_path, SPACE, "HDF5Storage", "storage.hdf5", **ring) / "storage.hdf5", columns(8))
    with rc.datasets.open_dataset(tmp_path) as batch:
        assert batch.get_segments() == [(0, 2), (2, 5), (5, 8)]
        assert batch[:]["n"].tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
        assert batch[3]["a"]["x"].tolist() == [0, 1] and batch[0]["a"]["flag"].dtype == bool
        buf = rc.ReplayBuffer.create("memory", batch.single_space, capacity=8, maintain_segment_metadata=True)
        buf.extend_from(batch)
        assert buf.get_segments() == batch.get_segments() and buf[-1]["n"] == 4


def test_parquet_pieces_text_and_one_leaf(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    space = {"type": "DictSpace", "spaces": {"t": TEXT, "x": BOX}}
    (
        dump(tmp_path, space, "ParquetStorage", "storage", count=5, physical_segments=[[0, 2]]) / "storage"
    ).mkdir()
    (tmp_path / "storage" / "_metadata.json").write_text(json.dumps({"piece_size": 2, "num_rows": 5}))
    for piece, first in enumerate((0, 2, 4)):
        rows = range(first, min(first + 2, 5))
        x = pa.FixedSizeListArray.from_arrays(
            pa.array([float(i) for r in rows for i in (r, -r)], pa.float32()), 2
        )
        table = pa.table({"t": [f"s{r}" for r in rows], "x": x})
        parquet.write_table(table, tmp_path / "storage" / f"part-{piece:06d}.parquet")
    batch = rc.datasets.from_unienv(tmp_path)
    assert batch[1:5]["t"] == ("s1", "s2", "s3", "s4") and batch[[4, 0]]["x"].tolist() == [[4, -4], [0, 0]]
    assert batch.get_segments() == [(0, 3)]  # the last two rows are in none
    batch.close()


def test_flattened_rows_of_a_memmap_are_promoted_as_torch_does(tmp_path: Path) -> None:
    path = dump(tmp_path, SPACE, "FlattenedStorage", "storage", count=3, capacity=4)
    (path / "storage").mkdir()
    inner = {"inner_storage_type": "a.b.PytorchTensorStorage", "inner_storage_path": "inner.memmap"}
    (path / "storage" / "flattened_metadata.json").write_text(json.dumps(inner))
    rows = np.array([[0, 1, 1, 7], [2, 3, 0, 8], [4, 5, 1, 9], [0, 0, 0, 0]], np.float32)
    rows.tofile(path / "storage" / "inner.memmap")  # float32, though there is an int64 leaf
    with rc.datasets.from_unienv(path) as batch:
        assert batch.get_segments() is None and batch[:]["n"].tolist() == [7, 8, 9]
        assert batch[0]["a"]["flag"] and batch[0]["a"]["x"].tolist() == [0, 1]


def test_pictures_videos_and_a_storage_per_key(tmp_path: Path) -> None:
    av, image = pytest.importorskip("av"), pytest.importorskip("PIL.Image")
    space = {
        "type": "DictSpace",
        "spaces": {"cam": IMAGE, "film": IMAGE, "low": {"type": "DictSpace", "spaces": {"x": BOX}}},
    }
    path = dump(tmp_path, space, "DictStorage", "storage", count=5, capacity=5, offset=3) / "storage"
    children = {
        "cam": ("ImageStorage", "cam"),
        "film": ("VideoStorage", "film"),
        "*": ("HDF5Storage", "_default.hdf5"),
    }
    about = {k: {"type": f"unienv_data.storages.{t}", "path": p} for k, (t, p) in children.items()}
    (path / "cam").mkdir(parents=True)
    (path / "film").mkdir()
    (path / "dict_storage_metadata.json").write_text(
        json.dumps({"storage_map": about, "nested_separator": "/"})
    )
    (path / "cam" / "image_metadata.json").write_text(json.dumps({"format": "PNG"}))
    (path / "film" / "video_metadata.json").write_text(json.dumps({"fps": 15, "file_ext": "mkv"}))
    frames = np.random.default_rng(0).integers(0, 255, (5, 6, 8, 3), np.uint8)
    write_hdf5(path / "_default.hdf5", {"low": {"x": columns(5)["a"]["x"]}})
    for row in range(5):
        image.fromarray(frames[row]).save(path / "cam" / f"{row}.png")
    for name, rows in (("3_0", (3, 4, 0)), ("1_2", (1, 2))):  # the first goes over the end of the ring
        with av.open(str(path / "film" / f"{name}.mkv"), "w") as container:
            stream = container.add_stream("ffv1", rate=15)
            stream.width, stream.height, stream.pix_fmt = 8, 6, "bgr0"
            for row in rows:
                frame = av.VideoFrame.from_ndarray(frames[row], format="rgb24").reformat(format="bgr0")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    with rc.datasets.from_unienv(tmp_path) as batch:
        oldest_first = [3, 4, 0, 1, 2]
        assert np.array_equal(batch[:]["cam"], frames[oldest_first])
        assert np.array_equal(batch[:]["film"], frames[oldest_first])
        assert batch[:]["low"]["x"][:, 0].tolist() == [6, 8, 0, 2, 4]
        (path / "cam" / "4.png").unlink()
    with rc.datasets.from_unienv(tmp_path) as batch, pytest.raises((rc.FormatError, FileNotFoundError)):
        batch[1]["cam"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"storage_cls": "os.system"}, "got system; copy it into one of these with UniEnv"),
        ({"storage_path_relative": "../x"}, "outside itself"),
        ({"count": 9, "capacity": 8}, "9 samples from 0 of 8"),
        ({"physical_segments": [[0, 9]]}, "segment 0 to 9 of 8"),
        ({"single_instance_space": {"type": "GraphSpace"}}, "got GraphSpace; leave it out"),
    ],
)
def test_what_cannot_be_read_is_refused_before_a_row_is_read(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    dump(tmp_path, SPACE, "HDF5Storage", "storage.hdf5", **({"count": 8} | change))
    with pytest.raises(rc.FormatError, match=says):
        rc.datasets.from_unienv(tmp_path)


def test_no_dump_of_unienv_is_none(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"data_format": "hdf5"}')
    with pytest.raises(rc.FormatError, match="got none"):
        rc.datasets.from_unienv(tmp_path)


@pytest.mark.parametrize("capacity", [None, 7, 32])
def test_what_unienv_writes_is_read_as_unienv_reads_it(tmp_path: Path, capacity: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("unienv_data")
        from unienv_data.replay_buffer import ReplayBuffer
        from unienv_data.storages.flattened import FlattenedStorage
        from unienv_data.storages.hdf5 import HDF5Storage
        from unienv_data.storages.parquet import ParquetStorage
        from unienv_interface.backends.numpy import NumpyComputeBackend as Numpy
        from unienv_interface.space import BinarySpace, BoxSpace, DictSpace

        leaves = {
            "x": BoxSpace(Numpy, -9, 99, shape=(2,), dtype=np.float32),
            "f": BinarySpace(Numpy, shape=(), dtype=bool),
        }
        flat = DictSpace(Numpy, leaves)
        for number, (storage, space, extra) in enumerate([
            (HDF5Storage, DictSpace(Numpy, {"in": flat, "r": BoxSpace(Numpy, 0, 99, shape=(), dtype=np.int32)}), {}),
            (ParquetStorage, flat, {"piece_size": 4}),
            (FlattenedStorage, flat, {"inner_storage_cls": HDF5Storage}),
        ]):  # fmt: skip
            path = tmp_path / str(number)
            kwargs = {
                "cache_path": str(path),
                "capacity": capacity,
                "maintain_segment_metadata": True,
                **extra,
            }
            theirs = ReplayBuffer.create(storage, space, **kwargs)
            for i in range(20):
                value = {"x": np.array([i, -i], np.float32) / 9, "f": np.array(i % 3 == 0)}
                theirs.append({"in": value, "r": np.array(i, np.int32)} if number == 0 else value)
                if i % 4 == 3:
                    theirs.mark_segment_end()
            theirs.dumps(str(path))
            with rc.datasets.from_unienv(path) as ours:
                assert ours.get_segments() == theirs.get_segments() and len(ours) == len(theirs)
                for i in range(len(ours)):
                    np.testing.assert_equal(ours[i], theirs.get_at(i))

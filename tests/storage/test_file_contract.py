"""The storages that keep files, and the wrappers over any storage, keep the contract of SpaceStorage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import recollect as rc
from recollect.batch import CastTransformation
from recollect.testing import StorageContract
from recollect.testing.storage_contract import SPACE


class InFiles(StorageContract):
    keeps_segments = False

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"cache_path": tmp_path}


class TestHDF5(InFiles):
    cls = rc.HDF5Storage


class TestParquet(InFiles):
    cls = rc.ParquetStorage
    allows_fixed = False
    only_grows = True


class TestParquetInSmallPieces(TestParquet):
    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"cache_path": tmp_path, "piece_size": 4, "cache_nbytes": 200, "compression": "none"}


class Frames(InFiles):
    """Images in which every pixel tells the number of the row."""

    space = spaces.Box(0, 255, (4, 6, 3), np.uint8)

    def block(self, *numbers: int) -> Any:
        n = np.array(numbers, np.int64).reshape(-1, 1, 1, 1)
        pixel = np.arange(72).reshape(4, 6, 3)
        return np.where(pixel == 0, n, (n * 37 + pixel * 11) % 251).astype(np.uint8)

    def numbers_in(self, data: Any) -> Any:
        return np.asarray(data)[..., 0, 0, 0]


class TestImage(Frames):
    cls = rc.ImageStorage


class TestVideo(Frames):
    cls = rc.VideoStorage
    allows_fixed = False
    only_grows = True
    ends_segments = True
    keeps_segments = True


class TestVideoDecodedBitByBit(TestVideo):
    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recollect.storage.filed.video._CHUNK_NBYTES", 150)

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"cache_path": tmp_path, "cache_nbytes": 400}


class TestFlattened(StorageContract):
    cls = rc.FlattenedStorage


class TestFlattenedShared(StorageContract):
    cls = rc.FlattenedStorage
    allows_unbounded = False
    crosses_processes = True

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"inner": "shared"}


class TestFlattenedHDF5(InFiles):
    cls = rc.FlattenedStorage

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"inner": "hdf5", "cache_path": tmp_path}


class TestTransformed(StorageContract):
    cls = rc.TransformedStorage

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"transformation": CastTransformation({"obs": "float64"})}


class TestTransformedParquet(TestParquet):
    cls = rc.TransformedStorage

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "transformation": CastTransformation({"obs": "float64"}),
            "inner": "parquet",
            "cache_path": tmp_path,
        }


class TestDictInMemory(StorageContract):
    cls = rc.DictStorage
    keeps_segments = False

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"storages": {"obs": "memory", "*": rc.MemoryStorage}}


class TestDictInFiles(InFiles):
    cls = rc.DictStorage

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        both: Any = {"obs": "hdf5", "*": ("flattened", {"inner": "hdf5"})}
        return {"storages": both, "cache_path": tmp_path}


class TestDictOfParquet(TestParquet):
    cls = rc.DictStorage

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        both = {"obs": (rc.ParquetStorage, {"piece_size": 4}), "*": (rc.ParquetStorage, {"piece_size": 3})}
        return {"storages": both, "cache_path": tmp_path}


def test_the_suite_is_the_public_one() -> None:
    assert TestHDF5.space == SPACE

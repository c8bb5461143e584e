"""Where rows live: the contract SpaceStorage, its implementations, and their registry by short name."""

from __future__ import annotations

from recollect.storage.contract import SpaceStorage
from recollect.storage.filed.hdf5 import HDF5Storage
from recollect.storage.filed.image import ImageStorage
from recollect.storage.filed.parquet import ParquetStorage
from recollect.storage.filed.video import VideoStorage
from recollect.storage.over.backend import ToBackendOrDeviceStorage
from recollect.storage.over.dict import DictStorage
from recollect.storage.over.flattened import FlattenedStorage
from recollect.storage.over.transformed import TransformedStorage
from recollect.storage.registry import find_storage, register_storage
from recollect.storage.rows.base import RowStorage
from recollect.storage.rows.memmap import MemmapStorage
from recollect.storage.rows.memory import MemoryStorage
from recollect.storage.rows.shared import SharedMemoryStorage

__all__ = [
    "DictStorage",
    "FlattenedStorage",
    "HDF5Storage",
    "ImageStorage",
    "MemmapStorage",
    "MemoryStorage",
    "ParquetStorage",
    "RowStorage",
    "SharedMemoryStorage",
    "SpaceStorage",
    "ToBackendOrDeviceStorage",
    "TransformedStorage",
    "VideoStorage",
    "find_storage",
    "register_storage",
]

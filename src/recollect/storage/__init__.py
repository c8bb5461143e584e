"""Where rows live: the contract SpaceStorage, its implementations, and their registry by short name."""

from __future__ import annotations

from recollect.storage.backend import ToBackendOrDeviceStorage
from recollect.storage.base import SpaceStorage
from recollect.storage.dict import DictStorage
from recollect.storage.flattened import FlattenedStorage
from recollect.storage.hdf5 import HDF5Storage
from recollect.storage.image import ImageStorage
from recollect.storage.memmap import MemmapStorage
from recollect.storage.memory import MemoryStorage
from recollect.storage.parquet import ParquetStorage
from recollect.storage.registry import find_storage, register_storage
from recollect.storage.rows import RowStorage
from recollect.storage.shared import SharedMemoryStorage
from recollect.storage.transformed import TransformedStorage
from recollect.storage.video import VideoStorage

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

"""Where rows live: the contract SpaceStorage, its implementations, and their registry by short name."""

from __future__ import annotations

from recollect.storage.backend import ToBackendOrDeviceStorage
from recollect.storage.base import SpaceStorage
from recollect.storage.memmap import MemmapStorage
from recollect.storage.memory import MemoryStorage
from recollect.storage.registry import find_storage, register_storage
from recollect.storage.rows import RowStorage
from recollect.storage.shared import SharedMemoryStorage

__all__ = [
    "MemmapStorage",
    "MemoryStorage",
    "RowStorage",
    "SharedMemoryStorage",
    "SpaceStorage",
    "ToBackendOrDeviceStorage",
    "find_storage",
    "register_storage",
]

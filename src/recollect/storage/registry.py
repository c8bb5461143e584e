"""Storages by short name: files name a storage, never a class to import."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recollect import plugins
from recollect.errors import FormatError
from recollect.storage.contract import SpaceStorage

# Ours are loaded when first asked for, since some need an optional package.
_OWN = {
    "memory": "recollect.storage.rows.memory:MemoryStorage",
    "shared": "recollect.storage.rows.shared:SharedMemoryStorage",
    "memmap": "recollect.storage.rows.memmap:MemmapStorage",
    "hdf5": "recollect.storage.filed.hdf5:HDF5Storage",
    "parquet": "recollect.storage.filed.parquet:ParquetStorage",
    "image": "recollect.storage.filed.image:ImageStorage",
    "video": "recollect.storage.filed.video:VideoStorage",
    "dict": "recollect.storage.over.dict:DictStorage",
    "flattened": "recollect.storage.over.flattened:FlattenedStorage",
    "transformed": "recollect.storage.over.transformed:TransformedStorage",
    "backend": "recollect.storage.over.backend:ToBackendOrDeviceStorage",
}
_registered: dict[str, type[SpaceStorage]] = {}


def register_storage(name: str, cls: type[SpaceStorage]) -> None:
    """Make a storage of your own loadable by name; the name stands in the files it writes."""
    if not _is_storage(cls):
        raise TypeError(f"register_storage: must be a SpaceStorage class, got {cls!r}")
    if name in _OWN or _registered.get(name, cls) is not cls:
        raise ValueError(f"register_storage: the name {name!r} is taken; choose another")
    _registered[name] = cls
    cls.short_name = name


def find_storage(name: Any) -> type[SpaceStorage]:
    """Return the class of a short name, or the class itself."""
    found: type[SpaceStorage]
    if _is_storage(name):
        found = name
        return found  # noqa: RET504: typed
    if name in _registered:
        return _registered[name]
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        found = getattr(import_module(module), attribute)
        return found  # noqa: RET504: typed
    given = plugins.find(plugins.STORAGES, name) if isinstance(name, str) else None
    if given is not None:
        if not _is_storage(given):
            raise plugins.failure(plugins.STORAGES, name, f"{given!r}, which is no SpaceStorage class")
        register_storage(name, given)
        found = given
        return found  # noqa: RET504: typed
    known = sorted({*_OWN, *_registered, *plugins.names(plugins.STORAGES)})
    raise ValueError(f"storage: must be a SpaceStorage class or one of {known}, got {name!r}")


def find_stored(name: Any, where: str) -> type[SpaceStorage]:
    """Return the class that a file names; FormatError if it is not registered here."""
    try:
        return find_storage(name if isinstance(name, str) else repr(name))
    except ValueError as error:
        raise FormatError(
            f"{where}: its storage is not known here ({error}); install its package, or call register_storage first"
        ) from None


def _is_storage(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, SpaceStorage)

"""A replay buffer on disk: `dumps`, `load_from`, and what can be told from the path alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recollect.errors import ReadOnlyError, SegmentOpenError
from recollect.files import OwnedDirectory
from recollect.files.record import damage_in
from recollect.replay.limiter import RateLimiter
from recollect.spaces import as_space, first_difference
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.dump import DumpWriter
from recollect.storage.filed.base import DirectoryStorage
from recollect.storage.filed.commits import commits_of, is_same
from recollect.storage.manifest import check_files, read_manifest, stored_cast, stored_layout, stored_space
from recollect.storage.over.backend import ToBackendOrDeviceStorage
from recollect.storage.registry import find_storage, find_stored
from recollect.storage.rows.base import RowStorage, open_live
from recollect.storage.rows.memmap import MemmapStorage

if TYPE_CHECKING:
    from recollect.replay.buffer import ReplayBuffer

FORMAT = "recollect.replay"


def dump(
    buffer: ReplayBuffer,
    path: PathName,
    cut_open: bool,
    beside: Mapping[str, bytes] | None = None,
    *,
    log: str | None = None,
    owned: OwnedDirectory | None = None,
) -> int:
    """Do `buffer.dumps(path, cut_open=cut_open)`; return the number of the commit.

    `beside` are more files below `storage/`, by name without extension: they are part of the same commit. The file
    `<log>-<commit>.bin` belongs to it too, and is removed with it. `owned` is the directory if it is locked already.
    """
    if not cut_open and buffer.engine.has_open_segment():
        raise SegmentOpenError(
            "dumps: a segment is open; call mark_segment_end() first, or dumps(path, cut_open=True) "
            "to save it as ending at its last sample"
        )
    buffer.engine.count()  # raises when closed, before any file is made
    storage = buffer.inner_storage
    if isinstance(storage, MemmapStorage) and storage.is_live_at(path):
        storage.rows.sync()
        storage.live_as = (FORMAT, {"evict": buffer.evict_record(), **limiter_record(buffer.limiter)})
        storage.write_live()
        return 0
    commits = commits_of(storage)
    if commits is not None and is_same(commits.directory.path, path):
        if not commits.directory.is_writable:
            raise ReadOnlyError(
                f"{path}: was opened for reading, got dumps() to itself; load it with read_only=False"
            )
        commits.commit()
        return 0
    with DumpWriter(Path(path), owned) as writer:
        writer.log = log
        for name, data in (beside or {}).items():
            with writer.file(f"{name}-{writer.commit}.bin") as f:
                f.write(data)
        limits = limiter_record(buffer.limiter)
        writer.finish(
            {**buffer.engine.dump(writer), "evict": buffer.evict_record(), **limits, "format": FORMAT}
        )
        return writer.commit


def limiter_record(limiter: RateLimiter | None) -> dict[str, Any]:
    """What a manifest says of a limiter: nothing if there is none."""
    return {} if limiter is None else {"limiter": limiter.state_dict()}


def _stored_limiter(path: Path, manifest: dict[str, Any], read_only: bool) -> RateLimiter | None:
    """The limiter of a dump. What nobody can write to has none: draws would wait in vain."""
    saved = manifest.get("limiter")
    if saved is None or read_only:
        return None
    with damage_in(f"{path}: limiter"):
        arguments = ("samples_per_insert", "min_size", "band", "deadline")
        return RateLimiter(*(saved[name] for name in arguments))


def load_storage(path: Path, manifest: dict[str, Any], *, space: Any, read_only: bool, multiprocessing: bool,
                 storage: Any, **kwargs: Any) -> SpaceStorage:  # fmt: skip
    """Open the storage that a manifest names, or as the kind that the caller asks for."""
    cls = (
        find_storage(storage) if storage is not None else find_stored(manifest["storage"]["name"], str(path))
    )
    if multiprocessing and not cls.is_multiprocessing_safe and cls.short_name == "memory":
        cls = find_storage("shared")
    if multiprocessing and not (
        cls.is_multiprocessing_safe or (read_only and issubclass(cls, DirectoryStorage))
    ):
        raise ValueError(f"multiprocessing: {cls.__name__} belongs to one process; pass storage='shared'")
    if issubclass(cls, RowStorage):
        verify = bool(kwargs.pop("verify", False))
        if kwargs:
            raise TypeError(f"load_from: unknown arguments {sorted(kwargs)} for {cls.__name__}")
        cast = stored_cast(manifest)
        return cls.from_dump(path, manifest, space, read_only=read_only, verify=verify, cast=cast)
    verify = bool(kwargs.pop("verify", False))
    check_files(path, manifest, verify=verify)
    if issubclass(cls, DirectoryStorage):
        _check_same(path, manifest, cls)
        return cls.from_manifest(path, manifest, space, read_only=read_only, verify=verify, **kwargs)
    return cls.load_from(
        path / manifest["storage_path_relative"], space, capacity=manifest["capacity"], read_only=read_only,
        multiprocessing=multiprocessing, **kwargs,
    )  # fmt: skip


def _check_same(path: Path, manifest: dict[str, Any], cls: type[SpaceStorage]) -> None:
    """Only rows of one form load as one another."""
    if manifest["storage"]["name"] != cls.short_name:
        raise ValueError(
            f"storage: {path} must be loaded as {manifest['storage']['name']!r}, got {cls.short_name!r}; "
            "copy it into another storage with extend_from"
        )


def load(cls: type[ReplayBuffer], path: PathName, *, backend: Any, device: Any, read_only: bool,
         multiprocessing: bool, space: Any, storage: Any, **kwargs: Any) -> ReplayBuffer:  # fmt: skip
    """Do `ReplayBuffer.load_from(path, ...)`."""
    path = Path(path).absolute()  # what is read later, or in another process, is there too
    manifest = read_manifest(path, (FORMAT,))
    stored = stored_space(path, manifest)
    if space is not None:
        space = as_space(space)
        difference = first_difference(space, stored)
        if difference:
            raise ValueError(f"{path}: the space must equal the stored one, got a difference at {difference}")
        stored = space
    limiter = _stored_limiter(path, manifest, read_only)
    opened = load_storage(path, manifest, space=stored, read_only=read_only, multiprocessing=multiprocessing,
                          storage=storage, **kwargs)  # fmt: skip
    try:
        wrapped: SpaceStorage = opened
        if backend not in (None, "numpy") or device is not None:
            wrapped = ToBackendOrDeviceStorage(opened, backend, device)
        with damage_in(path):
            buffer = cls._over(
                wrapped, tracked=manifest["segments"] is not None, evict=manifest["evict"],
                multiprocessing=multiprocessing, cache_path=str(path), state=manifest, limiter=limiter,
            )  # fmt: skip
        if limiter is not None and not limiter.is_ready:
            with damage_in(f"{path}: limiter"):
                limiter.load_state_dict(manifest["limiter"])
        return buffer
    except BaseException:
        opened.close()
        raise


def peek(path: PathName) -> dict[str, Any] | None:
    """The manifest of a dump, None if there is none; a broken one raises."""
    path = Path(path)
    if not (path / "manifest.json").exists():
        return None
    manifest = read_manifest(path, (FORMAT,))
    if manifest.get("live"):
        rows = open_live(path, manifest, stored_layout(path, manifest), writable=False)
        try:
            manifest["count"] = rows.native.count()
        finally:
            rows.close()
    return manifest

"""FiledStorage: how storages that keep files in a directory are made, loaded, dumped and closed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from recollect import checks
from recollect.errors import ClosedError, FormatError, MissingExtraError, ReadOnlyError
from recollect.files import open_named
from recollect.files.record import ArgumentTypeError, damage_in
from recollect.spaces import as_space
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.dump import MANIFEST, check_files, read_manifest
from recollect.storage.filed.commits import FORMATS, SEGMENT, Live, dump_storage
from recollect.storage.filed.directory import Home
from recollect.storage.registry import find_stored
from recollect.storage.rows.base import checked_space, stored_layout

Ints = np.ndarray[Any, np.dtype[np.int64]]


class FiledStorage(SpaceStorage):
    """A storage whose rows are in the files of a `Home`, its own or that of the storage around it.

    A subclass gives `under` (a new one) and `reopen` (one that a manifest describes); making, loading, dumping and
    closing are the same for all. One that can do without files, over storages in memory, gives `is_filed`,
    `in_memory`, `is_in_parts` and `over_parts` too.

    Ownership: the outermost storage's `close()` commits and gives up the directory.
    Concurrency: threads take turns; one process writes, others read the last commit.
    """

    live: Live | None = None
    _closed = False
    positional: ClassVar[tuple[str, ...]] = ()  # keywords that may follow the space without their names
    load_options: ClassVar[tuple[str, ...]] = ()  # what `load_from` may change
    requires: ClassVar[tuple[str, str] | None] = None  # the package it needs, and the extra that brings it

    @classmethod
    def under(cls, live: Live, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        """Make a new storage whose files go below `prefix`; touches no file yet."""
        raise NotImplementedError

    @classmethod
    def reopen(cls, live: Live, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        """Make the storage that a manifest describes as `saved`, with `length` rows."""
        raise NotImplementedError

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        capacity: int | None = None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        overwrite: bool = False,
        owned: bool = False,
        **options: Any,
    ) -> Self:
        """Make a new storage in the directory `cache_path`.

        `owned` leaves the first commit to the buffer that makes the storage, so that one commit makes both.
        """
        if len(args) > len(cls.positional):
            taken = cls.positional or "no positional arguments"
            raise TypeError(f"{cls.__name__}.create: takes {taken} after the space, got {args!r}")
        options |= dict(zip(cls.positional, args))
        if not cls.is_filed(cache_path, options):
            more = {"overwrite": True} if overwrite else {}
            return cls.in_memory(as_space(single_instance_space), capacity, cache_path, multiprocessing,
                                 **more, **options)  # fmt: skip
        if multiprocessing:
            raise ValueError(f"multiprocessing: {cls.__name__} has one writer; use SharedMemoryStorage")
        if cache_path is None:
            raise ValueError(f"cache_path: {cls.__name__} needs the directory of its files, got None")
        made: Self = make_live(cls, single_instance_space, capacity, cache_path, overwrite, owned, **options)
        return made

    @classmethod
    def is_filed(cls, cache_path: PathName | None, options: dict[str, Any]) -> bool:
        """Whether a storage made with these arguments keeps files of its own."""
        return True

    @classmethod
    def in_memory(cls, space: Any, capacity: int | None, cache_path: PathName | None, multiprocessing: bool,
                  **options: Any) -> Self:  # fmt: skip
        """Make a new storage over others that keep no files below a common roof."""
        raise NotImplementedError

    @classmethod
    def is_in_parts(cls, path: Path, saved: dict[str, Any]) -> bool:
        """Whether a manifest describes storages that were dumped as directories of their own."""
        return False

    @classmethod
    def over_parts(cls, path: Path, manifest: dict[str, Any], space: Any, **options: Any) -> Self:
        """Open the storages that were dumped as directories of their own."""
        raise NotImplementedError

    @classmethod
    def load_from(
        cls,
        path: PathName,
        single_instance_space: Any,
        *,
        capacity: int | None = None,
        read_only: bool = True,
        multiprocessing: bool = False,
        verify: bool = False,
        **options: Any,
    ) -> Self:
        """Open a directory at its last commit; `read_only=False` makes this process its writer."""
        if multiprocessing and not read_only:
            raise ValueError(f"multiprocessing: {cls.__name__} has one writer; load it with read_only=True")
        path = Path(path).absolute()  # what is read later, or in another process, is there too
        manifest = read_manifest(path, FORMATS)
        check_files(path, manifest, verify=verify)
        if manifest["storage"]["name"] != cls.short_name:
            raise FormatError(
                f"{path}: must be a dump of {cls.__name__}, got {manifest['storage']['name']!r}; "
                "load it with that storage"
            )
        space = checked_space(path, manifest, single_instance_space, capacity)
        return cls.from_manifest(path, manifest, space, read_only=read_only, verify=verify, **options)

    @classmethod
    def from_manifest(
        cls,
        path: Path,
        manifest: dict[str, Any],
        space: Any,
        *,
        read_only: bool,
        verify: bool,
        **options: Any,
    ) -> Self:
        """Open the storage of a manifest whose files were checked."""
        with damage_in(path):
            is_in_parts = cls.is_in_parts(path, manifest["storage"])
        if is_in_parts:
            with damage_in(path):
                return cls.over_parts(path, manifest, space, read_only=read_only, verify=verify, **options)
        unknown = sorted(set(options) - set(cls.load_options))
        if unknown:
            raise ArgumentTypeError(f"{cls.__name__}.load_from: unknown arguments {unknown}")
        home = Home.open(path, manifest, not read_only)
        live = Live(home)
        try:
            length = int(manifest["count"])
            with damage_in(path):
                storage = cls.reopen(
                    live, "", manifest["storage"], space, manifest["capacity"], length, **options
                )
            live.root = storage
            if storage.stored_length() < length:
                raise FormatError(
                    f"{path}: must hold {length} rows, got files of {storage.stored_length()}; it is damaged"
                )
            if verify:
                storage.verify()
            if not read_only:
                home.sweep(storage.more_files())
        except BaseException:
            home.close()
            raise
        return storage

    def verify(self) -> None:
        """Raise FormatError if a file that the manifest does not name itself is damaged."""
        for _, problem in self.damages():
            raise FormatError(problem)

    def damages(self) -> Iterator[tuple[str, str]]:
        """Files that the manifest does not name itself and that are damaged, and what is wrong with each."""
        return iter(())

    # -- what it is

    def _bind(self, live: Live | None, capacity: int | None) -> None:
        self.live, self.capacity = live, capacity
        if live is not None:
            self.cache_filename = str(live.home.path)
            self.is_mutable = live.home.is_writable
            self.is_multiprocessing_safe = not self.is_mutable

    @classmethod
    def need(cls) -> Any:
        """Import the package that this storage is about."""
        if cls.requires is None:
            return None
        package, extra = cls.requires
        try:
            return import_module(package)
        except ImportError as error:
            raise MissingExtraError(
                f'{cls.__name__}: needs {package}; run pip install "recollect[{extra}]"'
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__}: must be open, got a use after close(); load it again")

    def _check_mutable(self, verb: str) -> None:
        self._check_open()
        if not self.is_mutable:
            raise ReadOnlyError(
                f"{type(self).__name__}: was opened for reading, got {verb}(); load it with read_only=False"
            )
        if self.live is not None and not self.live.home.is_writable:
            self.live.home.check()  # a forked child

    # -- commits and dumps

    def settle(self) -> None:
        if self.live is not None:
            self.live.settle()

    def flush(self) -> None:
        """Commit all that was written."""
        self._check_mutable("flush")
        if self.live is not None:
            self.live.commit()

    def mark_segment_end(self) -> None:
        """End the open segment, and commit."""
        self._check_mutable("mark_segment_end")
        if self.live is not None:
            self.live.due(SEGMENT)

    def dumps(self, path: PathName) -> None:
        self._check_open()
        dump_storage(self, path)

    def close(self) -> None:
        if self._closed:
            return
        if self.live is not None:
            self.live.check_free()
        try:
            if self.live is not None:
                self.live.close()
        finally:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Give up open files and memory."""

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe or self.live is None or self.live.root is not self:
            return super().__reduce__()
        return _reopen, (type(self), str(self.cache_filename), self.live.home.commit)


def make_live(cls: type[Any], space: Any, capacity: int | None, path: PathName, overwrite: bool, owned: bool,
              **options: Any) -> Any:  # fmt: skip
    """Make a directory, the storage in it, and its first commit; nothing is left if that fails."""
    check_capacity(cls, capacity)
    cls.need()
    home = Home.create(Path(path).absolute(), overwrite)
    live = Live(home)
    try:
        live.root = cls.under(live, "", as_space(space), capacity, **options)
        if not owned:
            live.commit()
    except BaseException:
        home.give_up()
        raise
    return live.root


def check_capacity(cls: type[SpaceStorage], capacity: Any) -> None:
    """Raise ValueError for a capacity that this storage cannot have."""
    if capacity is None:
        return
    checks.count("capacity", capacity)
    if not getattr(cls, "allows_fixed", True):
        raise ValueError(
            f"capacity: {cls.__name__} only grows and must have None, got {capacity}; use a storage that overwrites"
        )


def reopen_child(
    live: Live, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None, length: int
) -> Any:
    """Make an inner storage that a manifest describes."""
    cls = find_stored(saved.get("name"), str(live.home.path))
    if not issubclass(cls, FiledStorage):
        raise FormatError(
            f"{live.home.path}: {saved.get('name')!r} keeps no files below another; it is damaged"
        )
    return cls.reopen(live, prefix, saved, space, capacity, length)


def open_part(
    cls: type[SpaceStorage], path: Path, name: str, space: Any, *, read_only: bool, **options: Any
) -> SpaceStorage:
    """Open an inner storage that was dumped as the directory `name` of a dump; to write, it must be a copy in memory.

    The dump has the checksums of its parts, so a part that were written in place would damage it.
    """
    open_named(path, f"{name}/{MANIFEST}").close()  # no link leads out of the dump
    part = path / name
    is_filed = issubclass(cls, FiledStorage) and not cls.is_in_parts(
        part, read_manifest(part, FORMATS)["storage"]
    )
    if not read_only and (is_filed or getattr(cls, "needs_path", False)):
        raise ReadOnlyError(
            f"{part}: is a part of a dump that keeps files ({cls.__name__}), got read_only=False; load it with "
            "read_only=True, and copy it with extend_from to go on"
        )
    return cls.load_from(part, space, read_only=read_only, **options)


def _reopen(cls: type[FiledStorage], path: str, commit: int) -> FiledStorage:
    """Open in another process the same commit that was loaded for reading in this one."""
    manifest = read_manifest(Path(path), FORMATS)
    if manifest["commit"] != commit:
        raise FormatError(
            f"{path}: was commit {commit}, got {manifest['commit']}; it was replaced: load again"
        )
    space = stored_layout(Path(path), manifest).space
    return cls.from_manifest(Path(path), manifest, space, read_only=True, verify=False)

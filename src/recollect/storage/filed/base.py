"""DirectoryStorage: how storages that keep files in a directory are made, loaded, dumped and closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from recollect import checks, interrupts
from recollect.errors import ClosedError, FormatError, MissingExtraError, ReadOnlyError, SchemaError
from recollect.files import open_named
from recollect.files.record import ArgumentTypeError, damage_in
from recollect.indexing import normalize
from recollect.spaces import Layout, as_space, compile_layout, space_at
from recollect.spaces.tree import as_keys
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.filed.commits import PIECE, SEGMENT, Commits, StorageDirectory, dump_storage
from recollect.storage.manifest import (
    FORMATS,
    MANIFEST,
    check_files,
    checked_space,
    read_manifest,
    stored_layout,
)
from recollect.storage.registry import find_stored

Ints = np.ndarray[Any, np.dtype[np.int64]]


class DirectoryStorage(SpaceStorage):
    """A storage whose rows are in the files of a `StorageDirectory`, its own or that of the storage around it.

    A subclass gives `under` (a new one) and `reopen` (one that a manifest describes); making, loading, dumping and
    closing are the same for all. One that can do without files, over storages in memory, gives `is_filed`,
    `in_memory`, `is_in_parts` and `over_parts` too.

    Ownership: the outermost storage's `close()` commits and gives up the directory.
    Concurrency: threads take turns; one process writes, others read the last commit.
    """

    commits: Commits | None = None
    _closed = False
    positional: ClassVar[tuple[str, ...]] = ()  # keywords that may follow the space without their names
    load_options: ClassVar[tuple[str, ...]] = ()  # what `load_from` may change
    requires: ClassVar[tuple[str, str] | None] = None  # the package it needs, and the extra that brings it

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        """Make a new storage whose files go below `prefix`; touches no file yet."""
        raise NotImplementedError

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
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
        made: Self = make_storage(
            cls, single_instance_space, capacity, cache_path, overwrite, owned, **options
        )
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
        directory = StorageDirectory.open(path, manifest, not read_only)
        commits = Commits(directory)
        try:
            length = int(manifest["count"])
            with damage_in(path):
                storage = cls.reopen(
                    commits, "", manifest["storage"], space, manifest["capacity"], length, **options
                )
            commits.root = storage
            if storage.stored_length() < length:
                raise FormatError(
                    f"{path}: must hold {length} rows, got files of {storage.stored_length()}; it is damaged"
                )
            if verify:
                storage.verify()
            if not read_only:
                directory.sweep(storage.more_files())
        except BaseException:
            directory.close()
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

    def _bind(self, commits: Commits | None, capacity: int | None) -> None:
        self.commits, self.capacity = commits, capacity
        if commits is not None:
            self.cache_filename = str(commits.directory.path)
            self.is_mutable = commits.directory.is_writable
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
        if self.commits is not None and not self.commits.directory.is_writable:
            self.commits.directory.check()  # a forked child

    # -- commits and dumps

    def settle(self) -> None:
        if self.commits is not None:
            self.commits.settle()

    def flush(self) -> None:
        """Commit all that was written."""
        self._check_mutable("flush")
        if self.commits is not None:
            self.commits.commit()

    def mark_segment_end(self) -> None:
        """End the open segment, and commit."""
        self._check_mutable("mark_segment_end")
        if self.commits is not None:
            self.commits.due(SEGMENT)

    def dumps(self, path: PathName) -> None:
        self._check_open()
        dump_storage(self, path)

    def close(self) -> None:
        if self._closed:
            return
        if self.commits is not None:
            self.commits.check_free()
        try:
            if self.commits is not None:
                self.commits.close()
        finally:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Give up open files and memory."""

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe or self.commits is None or self.commits.root is not self:
            return super().__reduce__()
        return _reopen, (type(self), str(self.cache_filename), self.commits.directory.commit)


def make_storage(cls: type[Any], space: Any, capacity: int | None, path: PathName, overwrite: bool, owned: bool,
              **options: Any) -> Any:  # fmt: skip
    """Make a directory, the storage in it, and its first commit; nothing is left if that fails."""
    check_capacity(cls, capacity)
    cls.need()
    directory = StorageDirectory.create(Path(path).absolute(), overwrite)
    commits = Commits(directory)
    try:
        commits.root = cls.under(commits, "", as_space(space), capacity, **options)
        if not owned:
            commits.commit()
    except BaseException:
        directory.give_up()
        raise
    return commits.root


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
    commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None, length: int
) -> Any:
    """Make an inner storage that a manifest describes."""
    cls = find_stored(saved.get("name"), str(commits.directory.path))
    if not issubclass(cls, DirectoryStorage):
        raise FormatError(
            f"{commits.directory.path}: {saved.get('name')!r} keeps no files below another; it is damaged"
        )
    return cls.reopen(commits, prefix, saved, space, capacity, length)


def open_part(
    cls: type[SpaceStorage], path: Path, name: str, space: Any, *, read_only: bool, **options: Any
) -> SpaceStorage:
    """Open an inner storage that was dumped as the directory `name` of a dump; to write, it must be a copy in memory.

    The dump has the checksums of its parts, so a part that were written in place would damage it.
    """
    open_named(path, f"{name}/{MANIFEST}").close()  # no link leads out of the dump
    part = path / name
    is_filed = issubclass(cls, DirectoryStorage) and not cls.is_in_parts(
        part, read_manifest(part, FORMATS)["storage"]
    )
    if not read_only and (is_filed or getattr(cls, "needs_path", False)):
        raise ReadOnlyError(
            f"{part}: is a part of a dump that keeps files ({cls.__name__}), got read_only=False; load it with "
            "read_only=True, and copy it with extend_from to go on"
        )
    return cls.load_from(part, space, read_only=read_only, **options)


def _reopen(cls: type[DirectoryStorage], path: str, commit: int) -> DirectoryStorage:
    """Open in another process the same commit that was loaded for reading in this one."""
    manifest = read_manifest(Path(path), FORMATS)
    if manifest["commit"] != commit:
        raise FormatError(
            f"{path}: was commit {commit}, got {manifest['commit']}; it was replaced: load again"
        )
    space = stored_layout(Path(path), manifest).space
    return cls.from_manifest(Path(path), manifest, space, read_only=True, verify=False)


Array = np.ndarray[Any, Any]
Keys = tuple[str | int, ...]


class ColumnStorage(DirectoryStorage):
    """One storage of a layout's columns, with a cursor of its own; see `DirectoryStorage`."""

    allows_fixed: ClassVar[bool] = True

    def __init__(self, commits: Commits, prefix: str, space: Any, capacity: int | None, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        super().__init__(space)
        self.prefix, self.cast = prefix, cast
        self._layout = compile_layout(self.single_instance_space, max_lengths)
        self._cursor = 0
        self._unsaved = 0  # rows written since the last commit
        self._reserved = 0  # rows that `extend_length` added and `set` has not written yet
        self._bind(commits, capacity)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def directory(self) -> StorageDirectory:
        """The directory of the files."""
        return self._commits.directory

    @property
    def _commits(self) -> Commits:
        if self.commits is None:
            raise ClosedError(f"{type(self).__name__}: has no directory")
        return self.commits

    def options(self) -> dict[str, Any]:
        """Keywords of `create` that a manifest should remember."""
        return {"cast": True} if self.cast else {}

    def contents(self) -> Any:
        """Which files hold which rows, as JSON values."""
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.short_name,
            "options": {**self.options(), "contents": self.contents()},
            "children": {},
        }

    # -- rows

    def get(self, index: Any) -> Any:
        return self._decoded(index, ())

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        return self._decoded(index, as_keys(nested_keys))

    def _decoded(self, index: Any, keys: Keys) -> Any:
        with self._commits.lock:
            self._check_open()
            if keys:
                space_at(self.single_instance_space, keys)  # a KeyError names the keys there are
            found = self._visible(index)
            rows = np.array([found]) if isinstance(found, int) else np.asarray(found)
            layout, columns = self._read(rows, keys)
        if isinstance(found, int):
            return layout.decode_one([column[0] for column in columns])
        return layout.decode_batch(columns, len(rows))

    def _visible(self, index: Any) -> int | Ints:
        """The rows of an index that can be read."""
        found = normalize(index, len(self))
        if self._reserved and np.max(found, initial=-1) >= self._written():
            raise FormatError(
                f"{type(self).__name__}: rows from {self._written()} on were added and never written; set them first"
            )
        return found

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        """Gather rows of the part under `keys`, the caller's own copy, and their layout."""
        raise NotImplementedError

    def append(self, value: Any) -> None:
        with self._commits.lock:
            self._check_mutable("append")
            block = self.checked_one(value)
            row = self._cursor % self.capacity if self.capacity else self._written()
            grows = int(self.capacity is None and not self._reserved)
            self.extend_length(grows)
            try:
                self.set([row], block)
            except BaseException:
                with interrupts.deferred():
                    self.shrink_length(grows)
                raise
            self._cursor += 1

    # -- the end of an unbounded storage: rows are reserved, and count for a commit once written

    def _written(self) -> int:
        """How many rows there are, without those that are only reserved."""
        raise NotImplementedError

    def _truncate(self, length: int) -> None:
        """Keep the first rows only."""
        raise NotImplementedError

    def stored_length(self) -> int:
        return self._written()

    def extend_length(self, length: int) -> None:
        checks.count("extend_length", length, 0)
        if self.capacity is None:
            with self._commits.lock:
                self._check_mutable("extend_length")
                self._reserved += length

    def shrink_length(self, length: int) -> None:
        with self._commits.lock:
            n = self._written() + self._reserved
            checks.count("shrink_length", length, 0, most=n if self.capacity is None else None)
            if self.capacity is None:
                self._check_mutable("shrink_length")
                left = max(0, length - self._reserved)
                self._reserved = max(0, self._reserved - length)
                if left:
                    self._truncate(self._written() - left)

    def _wrote(self, n: int, piece_size: int) -> None:
        """Count rows towards a commit."""
        self._unsaved += n
        if self._unsaved >= piece_size:
            self._commits.due(PIECE)


def from_saved(where: Path, saved: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Read what `contents` wrote; FormatError if it is none."""
    with damage_in(f"{where}: storage"):
        return make(saved["options"])


class AppendStorage(ColumnStorage):
    """A storage without capacity whose end moves: `extend_length` reserves rows, `set` fills them, in order.

    A subclass gives `_written` (rows so far), `_add` (more of them), `_truncate` (fewer) and `_added` (what may bring
    a commit about). See `ColumnStorage`, one level above: it also serves storages that overwrite.
    """

    allows_fixed = False
    is_append_only = True

    def __init__(self, commits: Commits, prefix: str, space: Any, *, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        super().__init__(commits, prefix, space, None, cast, max_lengths)

    def _add(self, arrays: list[Array], n: int) -> None:
        raise NotImplementedError

    def _added(self) -> None:
        """Ask for a commit if one is due."""

    def _encoded(self, value: Any, single: bool) -> tuple[int, list[Array]]:
        if single:
            return 1, [a[None] for a in self.layout.encode_one(value, self.cast)]
        return self.layout.encode_batch(value, self.cast)

    def __len__(self) -> int:
        return self._written() + self._reserved - self.pending_segment_length

    def set(self, index: Any, value: Any) -> None:
        with self._commits.lock:
            self._check_mutable("set")
            start = self._written()
            found = normalize(index, start + self._reserved)
            rows = np.array([found]) if isinstance(found, int) else np.asarray(found)
            if len(rows) and int(rows.min()) < start:
                self._refuse("set")
            n, arrays = self._encoded(value, isinstance(found, int))
            if n != len(rows):
                raise SchemaError(
                    f"value: length must equal the index's {len(rows)}, got {n}; give one sample each"
                )
            if not np.array_equal(rows, np.arange(start, start + n)):
                raise ReadOnlyError(f"{type(self).__name__}: new rows must be set in order, from {start} on")
            self._put(start, arrays, n)

    def _put(self, start: int, arrays: list[Array], n: int) -> None:
        reserved = self._reserved
        try:
            if n:
                self._add(arrays, n)
                self._reserved -= n
                self._added()
        except BaseException:
            with interrupts.deferred():  # a second Ctrl-C would leave half of it
                self._truncate(start)
                self._reserved = reserved
            raise

    def _refuse(self, verb: str) -> NoReturn:
        raise ReadOnlyError(
            f"{type(self).__name__}: only grows, got {verb}() of rows that are there; "
            "copy what you keep into a new buffer with extend_from(buf.get_slice(keep))"
        )

    def clear(self) -> None:
        with self._commits.lock:
            self._check_mutable("clear")
            self._reserved = 0
            self._truncate(0)

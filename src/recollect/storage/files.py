"""FileStorage: what the storages that keep immutable files in a directory have in common."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from recollect.errors import ClosedError, FormatError, MissingExtraError, ReadOnlyError
from recollect.indexing import normalize
from recollect.spaces import Layout, as_space, compile_layout, first_difference, space_at
from recollect.spaces.tree import as_keys
from recollect.storage.base import PathName, SpaceStorage
from recollect.storage.dump import read_manifest
from recollect.storage.home import Home
from recollect.storage.live import FORMATS, PIECE, SEGMENT, Live, dump_storage, read_checked
from recollect.storage.registry import find_stored
from recollect.storage.rows import stored_layout

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Keys = tuple[str | int, ...]


class FiledStorage(SpaceStorage):
    """A storage whose rows are in the files of a `Home`, its own or that of the storage around it.

    A subclass gives `under` (a new one) and `reopen` (one that a manifest describes); making, loading, dumping and
    closing are the same for all.

    Ownership: the outermost storage's `close()` commits and gives up the directory.
    Concurrency: threads take turns; one process writes, others read the last commit.
    """

    live: Live | None = None
    _closed = False
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
        if args:
            raise TypeError(
                f"{cls.__name__}.create: takes no positional arguments after the space, got {args!r}"
            )
        if multiprocessing:
            raise ValueError(f"multiprocessing: {cls.__name__} has one writer; use SharedMemoryStorage")
        if cache_path is None:
            raise ValueError(f"cache_path: {cls.__name__} needs the directory of its files, got None")
        check_capacity(cls, capacity)
        made: Self = make_live(cls, single_instance_space, capacity, cache_path, overwrite, owned, **options)
        return made

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
        path = Path(path)
        manifest = read_checked(path, verify=verify)
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
        unknown = sorted(set(options) - set(cls.load_options))
        if unknown:
            raise TypeError(f"{cls.__name__}.load_from: unknown arguments {unknown}")
        home = Home.open(path, manifest, not read_only)
        live = Live(home)
        try:
            length = int(manifest["count"])
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
        """Check the checksums of files that the manifest does not name itself."""

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


class FileStorage(FiledStorage):
    """One storage of a layout's columns, with a cursor of its own; see `FiledStorage`."""

    allows_fixed: ClassVar[bool] = True

    def __init__(self, live: Live, prefix: str, space: Any, capacity: int | None, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        super().__init__(space)
        self.prefix, self.cast = prefix, cast
        self._layout = compile_layout(self.single_instance_space, max_lengths)
        self._cursor = 0
        self._unsaved = 0  # rows written since the last commit
        self._bind(live, capacity)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def home(self) -> Home:
        """The directory of the files."""
        return self._live.home

    @property
    def _live(self) -> Live:
        if self.live is None:
            raise ClosedError(f"{type(self).__name__}: has no directory")
        return self.live

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

    def checked_one(self, value: Any) -> Any:
        return self.layout.decode_batch([a[None] for a in self.layout.encode_one(value, self.cast)], 1)

    def checked_batch(self, value: Any) -> tuple[int, Any]:
        n, arrays = self.layout.encode_batch(value, self.cast)
        return n, self.layout.decode_batch(arrays, n)

    def get(self, index: Any) -> Any:
        return self._decoded(index, ())

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        return self._decoded(index, as_keys(nested_keys))

    def _decoded(self, index: Any, keys: Keys) -> Any:
        with self._live.lock:
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
        return normalize(index, len(self))

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        """Gather rows of the part under `keys`, the caller's own copy, and their layout."""
        raise NotImplementedError

    def append(self, value: Any) -> None:
        with self._live.lock:
            self._check_mutable("append")
            block = self.checked_one(value)
            row = self._cursor % self.capacity if self.capacity else len(self) + self.pending_segment_length
            if self.capacity is None:
                self.extend_length(1)
            try:
                self.set([row], block)
            except BaseException:
                if self.capacity is None:
                    self.shrink_length(1)
                raise
            self._cursor += 1

    def _wrote(self, n: int, piece_size: int) -> None:
        """Count rows towards a commit."""
        self._unsaved += n
        if self._unsaved >= piece_size:
            self._live.due(PIECE)


def make_live(cls: type[Any], space: Any, capacity: int | None, path: PathName, overwrite: bool, owned: bool,
              **options: Any) -> Any:  # fmt: skip
    """Make a directory, the storage in it, and its first commit; nothing is left if that fails."""
    cls.need()
    home = Home.create(Path(path), overwrite)
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
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity: must be an int of at least 1, or None, got {capacity!r}")
    if not getattr(cls, "allows_fixed", True):
        raise ValueError(
            f"capacity: {cls.__name__} only grows and must have None, got {capacity}; use a storage that overwrites"
        )


def checked_space(path: Path, manifest: dict[str, Any], space: Any, capacity: int | None) -> Any:
    """The caller's space, if it and the capacity are those stored."""
    space = as_space(space)
    difference = first_difference(space, stored_layout(path, manifest).space)
    if difference:
        raise ValueError(f"{path}: the space must equal the stored one, got a difference at {difference}")
    if capacity is not None and capacity != manifest["capacity"]:
        raise ValueError(f"{path}: capacity must be the stored {manifest['capacity']}, got {capacity}")
    return space


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


def from_saved(where: Path, saved: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Read what `contents` wrote; FormatError if it is none."""
    try:
        return make(saved["options"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"{where}: its storage is garbled ({error!r}); it is damaged") from None


def _reopen(cls: type[FiledStorage], path: str, commit: int) -> FiledStorage:
    """Open in another process the same commit that was loaded for reading in this one."""
    manifest = read_manifest(Path(path), FORMATS)
    if manifest["commit"] != commit:
        raise FormatError(
            f"{path}: was commit {commit}, got {manifest['commit']}; it was replaced: load again"
        )
    space = stored_layout(Path(path), manifest).space
    return cls.from_manifest(Path(path), manifest, space, read_only=True, verify=False)

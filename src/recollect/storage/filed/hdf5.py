"""HDF5Storage: rows in one HDF5 file, a dataset per leaf, to exchange with other programs."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote

import numpy as np

from recollect import _core, interrupts
from recollect.errors import FormatError
from recollect.files import make_directory, replace_file
from recollect.files.record import ArgumentTypeError
from recollect.indexing import normalize
from recollect.spaces import Field, Layout
from recollect.storage.contract import PathName
from recollect.storage.filed.arrow import raw_dtype
from recollect.storage.filed.base import Array, ColumnStorage, Ints, Keys, from_saved
from recollect.storage.filed.chunks import CACHE_NBYTES, ChunkCache, check_chunks
from recollect.storage.filed.columns import part_of
from recollect.storage.filed.commits import FLUSH, Commits, StorageDirectory
from recollect.storage.filed.hdf5_file import HDF5File, own_node
from recollect.storage.rows.base import encode_at

_CHUNK_NBYTES = 1 << 18
# Space that a chunk leaves when it is written anew (a compressed one changes its size) is used again, in copies too.
_REUSED = {"fs_strategy": "fsm", "fs_persist": True, "fs_threshold": 1}


class HDF5Storage(ColumnStorage):
    """Exchange: one `.hdf5` file with a dataset per leaf, named by its path (a Text has one more, of lengths).

    Rows are written to a new file as they come; `dumps()` and `close()` commit it. A committed file never changes:
    the next write goes on in a copy. `dumps("name.hdf5")` writes a single file instead of a directory.

    Ownership: the files stay; `close()` commits.
    Concurrency: one writer; readers, in any process, see the last commit when they load.

    >>> import recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/data"
    >>> with rc.ReplayBuffer.create("hdf5", {"x": ((2,), "float32")}, capacity=4, cache_path=path) as buf:
    ...     buf.extend({"x": [[1.0, 2.0], [3.0, 4.0]]})
    >>> rc.ReplayBuffer.load_from(path)[1]["x"].tolist()
    [3.0, 4.0]
    """

    load_options = ("cache_nbytes",)
    short_name = "hdf5"
    create_options = ("compression", "cache_nbytes")
    single_file_ext = ".hdf5"
    requires = ("h5py", "hdf5")
    commits_from = FLUSH

    def __init__(self, commits: Commits, prefix: str, space: Any, capacity: int | None, *,
                 compression: str | None = None, cache_nbytes: int = CACHE_NBYTES, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        self._h5 = self.need()
        super().__init__(commits, prefix, space, capacity, cast, max_lengths)
        if compression not in (None, "gzip", "lzf"):
            raise ValueError(f"compression: must be None, 'gzip' or 'lzf', got {compression!r}")
        self.compression, self.cache_nbytes = compression, cache_nbytes
        self._name: str | None = None  # the file that holds the rows
        self._file: Any = None  # as the library has it open
        self._disk: HDF5File | None = None  # below it, while rows are written
        self._old: str | None = None  # the committed file that the one being written replaces
        self._is_doubtful = False  # a sync failed: only a new file can be trusted
        self._length = capacity or 0
        self._chunk_rows = max(1, min(1024, _CHUNK_NBYTES // self.layout.row_nbytes, capacity or 1024))
        self._caches: dict[Keys, ChunkCache] = {}

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        return cls(commits, prefix, space, capacity, **options)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        def make(known: dict[str, Any]) -> Any:
            kept = {k: v for k, v in known.items() if k != "contents"}
            storage = cls(commits, prefix, space, capacity, **{**kept, **options})
            storage._name = known["contents"]["file"]
            storage._length = int(known["contents"]["length"])
            return storage

        storage: Self = from_saved(commits.directory.path, saved, make)
        if capacity is None:
            storage._length = min(storage._length, length)
        storage._check_length()
        if storage._name is not None:
            commits.directory.about(storage._name)
        storage._check_file()
        return storage

    @classmethod
    def load_from(
        cls, path: PathName, single_instance_space: Any, *, read_only: bool = True, **options: Any
    ) -> Self:
        """Open a directory at its last commit, or for reading a single HDF5 file with a dataset per leaf."""
        if not Path(path).is_file():
            return super().load_from(path, single_instance_space, read_only=read_only, **options)
        if not read_only:
            raise ValueError(
                f"read_only: {path} is a single file, which is only read; copy it with extend_from"
            )
        capacity, most = options.pop("capacity", None), options.pop("max_lengths", None)
        unknown = set(options) - {"multiprocessing", "verify"}
        if unknown:
            raise ArgumentTypeError(f"{cls.__name__}.load_from: unknown arguments {sorted(unknown)}")
        commits = Commits(StorageDirectory(Path(path).absolute().parent, {}, 0, ".", None))
        commits.root = storage = cls(commits, "", single_instance_space, None, max_lengths=most)
        storage._name, storage.is_multiprocessing_safe = Path(path).name, False
        storage._check_file()
        sizes = {len(storage._file[dataset_name(f)]) for f in storage.layout.fields if all(f.shape)}
        if len(sizes) > 1 or (capacity is not None and {capacity} != sizes):
            storage.close()
            raise ValueError(f"{path}: all leaves must have {capacity or 'one'} length, got {sorted(sizes)}")
        storage._length = max(sizes, default=0)
        try:
            storage._check_length()
        except BaseException:
            storage.close()
            raise
        return storage

    def _check_length(self) -> None:
        check_chunks(-(-self._length // self._chunk_rows), f"{self.directory.path}: {self._length} rows")

    def options(self) -> dict[str, Any]:
        most = dict(self.layout.max_lengths)
        return {
            **super().options(),
            "compression": self.compression,
            **({"max_lengths": most} if most else {}),
        }

    def contents(self) -> Any:
        return {"file": self._name, "length": self._length}

    def __len__(self) -> int:
        return self._length + self._reserved

    def _written(self) -> int:
        return self._length

    # -- the file

    def _writable_file(self) -> Any:
        """The file that may be changed: a new one, or a copy of the one that is committed."""
        disk = self._disk or self._begin_file()
        if self._file is None:
            self._file = self._h5.File(disk, "r+")
        return self._file

    def _begin_file(self) -> HDF5File:
        old = self._name
        self._close_file()
        name, disk = self._new_file()
        try:
            if old is None:
                with self._h5.File(disk, "w", libver="latest", **_REUSED) as f:
                    self._make_datasets(f)
                disk.settle()
            else:
                with self.directory.open_file(old) as source:
                    if (
                        disk.take_all(source) != self.directory.about(old)["crc32c"]
                    ):  # else the copy would vouch for it
                        raise FormatError(
                            f"{self.directory.path}: {old}: its checksum does not match; it is damaged"
                        )
            _core.fault_point()
        except BaseException:
            disk.close()
            self.directory.take_back(name)
            raise
        self._name, self._disk, self._old = name, disk, old
        return disk

    def _new_file(self) -> tuple[str, HDF5File]:
        name = self.directory.new_name(f"{self.prefix}rows-", ".hdf5")
        full = self.directory.place_new(name)
        try:
            _core.fault_point()
            return name, HDF5File(os.open(full, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except BaseException:
            self.directory.take_back(name)
            raise

    def _renew_file(self, old: HDF5File) -> None:
        """Go on in a copy of the file being written: after a sync that failed, another may claim what is not so."""
        doubtful = str(self._name)
        name, disk = self._new_file()
        try:
            disk.take_all(old)
        except BaseException:
            disk.close()
            self.directory.take_back(name)
            raise
        with interrupts.deferred():
            self._name, self._disk, self._is_doubtful = name, disk, False
            old.close()
            self.directory.take_back(doubtful)

    def _make_datasets(self, f: Any) -> None:
        for field in self.layout.fields:
            shape = (self._length, *field.shape)
            unlimited = (None if self.capacity is None else self.capacity, *field.shape)
            chunks = (self._chunk_rows, *field.shape) if all(field.shape) else None
            if chunks is None:
                continue  # a leaf of no numbers
            f.create_dataset(
                dataset_name(field), shape, raw_dtype(field.dtype), chunks=chunks, maxshape=unlimited,
                compression=self.compression, fletcher32=True,
            )  # fmt: skip

    def _close_file(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except (OSError, RuntimeError) as error:  # of the disk it hears nothing
                raise FormatError(
                    f"{self.directory.path}: {self._name}: cannot be written to its end ({error}); it is damaged"
                ) from None
            self._file = None

    def _readable_file(self) -> Any:
        if self._disk is not None:
            return self._writable_file()
        if self._file is None and self._name is not None:
            self.directory.check_place()
            try:
                self._file = self._h5.File(self.directory.path / self.directory.base / self._name, "r")
            except (OSError, RuntimeError, ValueError) as error:
                if not self.directory.has(self._name):  # the library does not always say so
                    raise FormatError(
                        f"{self.directory.path}: {self._name} is gone; it was replaced: load again"
                    ) from None
                raise FormatError(
                    f"{self.directory.path}: {self._name}: must be HDF5, got {error}; it is damaged"
                ) from None
        return self._file

    def _check_file(self) -> None:
        """FormatError unless every dataset is there, with its dtype and shape."""
        if self._name is None:
            return
        f = self._readable_file()
        for field in self.layout.fields:
            if all(field.shape):
                check_dataset(f, field, self._length, f"{self.directory.path}: {self._name}")

    def write_out(self, urgency: int) -> None:
        """Sync the file and name it. Where that fails, the rows stay as they are, and the next time goes on there."""
        if self._disk is None:
            return
        with interrupts.deferred(*interrupts.ASKING):
            self._close_file()
        self._disk.settle()
        if self._is_doubtful:
            self._renew_file(self._disk)
        self._is_doubtful = True
        self.directory.adopt(str(self._name))
        self._is_doubtful = False
        with interrupts.deferred():  # it is closed and gone at once: the next call would read a closed file
            self._disk.close()
            self._disk = None
            if self._old is not None:
                self.directory.drop(self._old)
                self._old = None

    # -- rows

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        return self._cache(keys).gather(self._ends(), rows)

    def _ends(self) -> Ints:
        return np.minimum(np.arange(0, self._length, self._chunk_rows) + self._chunk_rows, self._length)

    def _cache(self, keys: Keys) -> ChunkCache:
        found = self._caches.get(keys)
        if found is None:
            if len(self._caches) >= 4:
                self._caches.pop(next(iter(self._caches)))
            layout = part_of(self.layout, keys)
            # One thread: the HDF5 library takes one call at a time anyway.
            found = ChunkCache(
                layout, self._chunk_rows, self.cache_nbytes, lambda k: self._load(k, keys), workers=1
            )
            self._caches[keys] = found
        return found

    def _load(self, number: int, keys: Keys) -> tuple[Layout, list[Array]]:
        f, layout = self._readable_file(), part_of(self.layout, keys)
        first = number * self._chunk_rows
        end = min(first + self._chunk_rows, self._length)
        out = []
        for i in self.layout.field_indices(keys) if keys else range(len(self.layout.fields)):
            field = self.layout.fields[i]
            if f is None or not all(field.shape):
                out.append(np.zeros((end - first, *field.shape), field.dtype))
                continue
            try:
                with interrupts.deferred(*interrupts.ASKING):
                    found: Array = f[dataset_name(field)][first:end]
            except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
                raise FormatError(
                    f"{self.directory.path}: {self._name}: {field.name} cannot be read ({error}); it is damaged"
                ) from None
            out.append(found.view(field.dtype).reshape(end - first, *field.shape))
        return layout, out

    def set(self, index: Any, value: Any) -> None:
        with self._commits.lock:
            self._check_mutable("set")
            rows, arrays = encode_at(self.layout, normalize(index, len(self)), value, self.cast)
            if not len(rows):
                return
            rows, last = _last_of_each(rows)
            arrays = [a[last] for a in arrays]
            with interrupts.deferred(*interrupts.ASKING):
                self._write_all(rows, arrays)
            for keys, cache in self._caches.items():
                chosen = self.layout.field_indices(keys) if keys else range(len(arrays))
                cache.update(self._ends(), rows, [arrays[i] for i in chosen])

    def _write_all(self, rows: Ints, arrays: list[Array]) -> None:
        """Write rows; reserved ones among them are there from now on, unless it fails."""
        before, reserved = self._length, self._reserved
        new = max(0, int(rows[-1]) + 1 - before)
        try:
            self._reserved -= new
            self._writable_file()
            if self._disk is not None:
                self._disk.settle()  # raises while the disk is full: nothing is changed yet
            self._resize(before + new)
            self._write(self._writable_file(), rows, arrays)
        except BaseException:
            self._resize(before)
            self._reserved = reserved
            raise

    def _write(self, f: Any, rows: Ints, arrays: list[Array]) -> None:
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for part in np.split(np.arange(len(rows)), breaks):
            first, end = int(rows[part[0]]), int(rows[part[-1]]) + 1
            for field, array in zip(self.layout.fields, arrays):
                if all(field.shape):
                    f[dataset_name(field)][first:end] = array[part].view(raw_dtype(field.dtype))

    def _truncate(self, length: int) -> None:
        with interrupts.deferred(*interrupts.ASKING):
            self._resize(length)

    def _resize(self, length: int) -> None:
        if length == self._length:
            return
        f = self._writable_file()
        for field in self.layout.fields:
            if all(field.shape):
                f[dataset_name(field)].resize(length, axis=0)
        for cache in self._caches.values():
            cache.forget_from(min(length, self._length) // self._chunk_rows)
        self._length = length

    def clear(self) -> None:
        with self._commits.lock:
            self._check_mutable("clear")
            self._cursor = self._reserved = 0
            if self.capacity is None:
                self._truncate(0)

    def checks_reads(self) -> bool:
        """Every chunk has a checksum, and so have the tables that lead to it; files of others may have none."""
        f = self._readable_file()
        return f is None or all(
            f[dataset_name(field)].fletcher32 for field in self.layout.fields if all(field.shape)
        )

    def chunk_ends(self) -> Any:
        return self._ends()

    def chunk_window(self) -> int:
        return max(1, min(64, self._cache(()).n_slots // 2))

    # -- a single file

    def dumps(self, path: PathName) -> None:
        """Write a directory, or one file if the name ends in `.hdf5`; either way it is there whole or not at all."""
        if Path(path).suffix != self.single_file_ext:
            super().dumps(path)
            return
        self._check_open()
        self._commits.commit()
        make_directory(Path(path).parent)
        replace_file(Path(path), self._copy_to)

    def _copy_to(self, f: BinaryIO) -> None:
        """Write the committed file, or one of no rows."""
        if self._name is not None:
            with self.directory.open_file(self._name) as source:
                shutil.copyfileobj(source, f)
            return
        empty = io.BytesIO()
        with self._h5.File(empty, "w", libver="latest") as datasets:
            self._make_datasets(datasets)
        f.write(empty.getbuffer())

    def _release(self) -> None:
        with interrupts.deferred(*interrupts.ASKING):
            self._close_file()
            self._caches.clear()
            if self._disk is not None:  # never committed
                self._disk.close()
                self._disk = None
                self.directory.take_back(str(self._name))


def dataset_name(field: Field) -> str:
    """The name of a field's dataset: its path, with what HDF5 reads otherwise written as in a URL."""
    parts = [quote(part, safe="#[]() ") for part in field.name.split("/")]
    return "/".join(
        part if part.strip(".") else "".join(f"%{ord(c):02X}" for c in part) or "%" for part in parts
    )


def check_dataset(f: Any, field: Field, length: int, where: str) -> None:
    """Raise FormatError unless a dataset has the dtype and shape of its field, and at least `length` rows."""
    found = own_node(f, dataset_name(field), where)
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", None)
    if dtype != raw_dtype(field.dtype) or shape is None or shape[1:] != field.shape or shape[0] < length:
        raise FormatError(
            f"{where}: {field.name}: must be {raw_dtype(field.dtype)} of shape {(length, *field.shape)}, "
            f"got {dtype} of {shape}; it is damaged or foreign"
        )


def _last_of_each(rows: Ints) -> tuple[Ints, Ints]:
    """The rows in ascending order, and for each the position at which it was given last."""
    found, last = np.unique(rows[::-1], return_index=True)
    return found, len(rows) - 1 - last

"""RowStorage: packed rows; what MemoryStorage, SharedMemoryStorage and MemmapStorage have in common."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from recollect import checks
from recollect.errors import FormatError, ReadOnlyError, SchemaError
from recollect.files import check_name, open_named
from recollect.files.record import ArgumentTypeError, damage_in
from recollect.indexing import normalize
from recollect.memory.rows import Rows, codec_of
from recollect.spaces import (
    Layout,
    as_space,
    compile_layout,
    space_to_json,
)
from recollect.spaces.tree import as_keys
from recollect.storage.contract import PathName, Segments, SpaceStorage
from recollect.storage.dump import DumpWriter
from recollect.storage.manifest import (
    FORMATS,
    MANIFEST,
    checked_space,
    read_manifest,
    stored_cast,
    stored_layout,
)
from recollect.storage.rows.dump import Saved, copy_rows, open_rows, windows_of, write_rows


class RowStorage(SpaceStorage):
    """Rows of one packed layout over the `Rows` primitive; subclasses say where the memory is.

    Ownership: reads and writes copy; `close()` gives up this object's share of the memory.
    Concurrency: any number of readers, without locks; one writer process per lane.
    """

    allows_none: ClassVar[bool] = True  # capacity=None
    needs_path: ClassVar[bool] = False

    def __init__(
        self, rows: Rows, space: Any, *, capacity: int | None, cast: bool = False, is_mutable: bool = True
    ) -> None:
        super().__init__(space)
        self.rows, self.capacity, self.cast, self.is_mutable = rows, capacity, cast, is_mutable
        self.codec = codec_of(rows.layout)
        self._reserved = 0  # rows that `extend_length` added and `set` has not written yet
        self._columns: dict[Any, tuple[Layout, Any]] = {}

    # -- making

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        capacity: int | None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        num_lanes: int = 1,
        cast: bool = False,
        max_lengths: dict[str, int] | None = None,
        segments: bool = True,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Make new rows. `segments=False` saves 16 bytes a row where no boundaries are kept."""
        if args:
            raise TypeError(
                f"{cls.__name__}.create: takes no positional arguments after the space, got {args!r}"
            )
        if multiprocessing and not cls.is_multiprocessing_safe:
            raise ValueError(
                f"multiprocessing: {cls.__name__} belongs to one process; use SharedMemoryStorage"
            )
        check_capacity(capacity, num_lanes, cls)
        space = as_space(single_instance_space)
        layout = compile_layout(space, max_lengths)
        rows = cls._make_rows(layout, capacity, num_lanes, segments, cache_path, overwrite, **kwargs)
        storage = cls(rows, space, capacity=capacity, cast=cast)
        storage.cache_filename = None if cache_path is None else str(cache_path)
        return storage

    @classmethod
    def _make_rows(
        cls,
        layout: Layout,
        capacity: int | None,
        num_lanes: int,
        segments: bool,
        cache_path: PathName | None,
        overwrite: bool,
        **kwargs: Any,
    ) -> Rows:
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
        cast: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Open a row dump in this kind of memory; `cast` is as it was unless given."""
        if kwargs:
            raise ArgumentTypeError(f"{cls.__name__}.load_from: unknown arguments {sorted(kwargs)}")
        if multiprocessing and not cls.is_multiprocessing_safe:
            raise ValueError(
                f"multiprocessing: {cls.__name__} belongs to one process; use SharedMemoryStorage"
            )
        path = Path(path).absolute()  # what is read later, or in another process, is there too
        manifest = read_manifest(path, FORMATS)
        space = checked_space(path, manifest, single_instance_space, capacity)
        cast = stored_cast(manifest) if cast is None else cast
        return cls.from_dump(path, manifest, space, read_only=read_only, verify=verify, cast=cast)

    @classmethod
    def from_dump(
        cls,
        path: Path,
        manifest: dict[str, Any],
        space: Any,
        *,
        read_only: bool,
        verify: bool,
        cast: bool = False,
    ) -> Self:
        """Load the rows that a checked manifest names."""
        source = cls._open_source(path, manifest, verify=verify or not cls.needs_path)
        capacity = manifest["capacity"]
        try:
            rows = cls._make_rows(
                source.layout, capacity, source.geometry.n_lanes, source.geometry.tagged, None, False
            )
            copy_rows(source, rows)
        finally:
            source.close()
        if read_only:
            rows.native.freeze()
        return cls(rows, space, capacity=capacity, cast=cast, is_mutable=not read_only)

    @classmethod
    def _open_source(cls, path: Path, manifest: dict[str, Any], *, verify: bool) -> Rows:
        layout = stored_layout(path, manifest)
        if manifest.get("live"):
            return open_live(path, manifest, layout, writable=False)
        return open_rows(path, manifest, layout, verify=verify)

    # -- what it is

    @property
    def layout(self) -> Layout:
        return self.rows.layout

    def __len__(self) -> int:
        if self.capacity is not None:
            return self.capacity
        return int(self.rows.native.count()) + self._reserved

    @property
    def nbytes(self) -> int:
        """Bytes that it takes when full (now, if unbounded)."""
        return self.rows.nbytes if self.capacity is not None else len(self) * self.layout.row_nbytes

    # -- rows

    def get(self, index: Any) -> Any:
        return self._get(self.layout, self.codec, index)

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        return self._get(*self.column(as_keys(nested_keys)), index)

    def column(self, keys: tuple[str | int, ...]) -> tuple[Layout, Any]:
        """The layout and codec that read only one nested field; made once."""
        found = self._columns.get(keys)
        if found is None:
            layout = self.layout.project(keys)
            found = self._columns[keys] = (layout, codec_of(layout))
        return found

    def _get(self, layout: Layout, codec: Any, index: Any) -> Any:
        found = normalize(index, len(self))
        single = isinstance(found, int)
        rows = np.array([found]) if single else np.ascontiguousarray(found)
        data = self.rows.native.read_rows(codec, rows, single)
        if layout.is_fixed:
            return data
        return layout.decode_one(data) if single else layout.decode_batch(data, len(rows))

    def set(self, index: Any, value: Any) -> None:
        self._check_mutable("set")
        found = normalize(index, len(self))
        rows, arrays = encode_at(self.layout, found, value, self.cast)
        self.rows.native.overwrite_rows(self.codec, rows, arrays)
        if self._reserved and len(rows):
            self._show(int(rows.max()) + 1)

    def _show(self, end: int) -> None:
        """Move an unbounded storage's end past rows that were written now: readers see them from here on."""
        new = end - int(self.rows.native.count())
        if new > 0:
            self._reserved -= new
            self.rows.native.set_window(0, 0, end)

    def append(self, value: Any) -> None:
        self._check_mutable("append")
        if not self.rows.native.append(self.codec, value):
            arrays = [a[None] for a in self.layout.encode_one(value, self.cast)]
            self.rows.native.write(self.codec, arrays, 1, keep_open=True)
        self._reserved = max(0, self._reserved - 1)

    def extend_length(self, length: int) -> None:
        checks.count("extend_length", length, 0)
        if self.capacity is None:
            self._check_mutable("extend_length")
            self.rows.native.reserve_rows(len(self) + length)
            self._reserved += length

    def shrink_length(self, length: int) -> None:
        n = len(self)
        checks.count("shrink_length", length, 0, most=n if self.capacity is None else None)
        if self.capacity is None:
            self._check_mutable("shrink_length")
            written = n - self._reserved
            self.rows.native.remove(np.arange(min(written, n - length), written))
            self._reserved = max(0, self._reserved - length)

    def clear(self) -> None:
        self._check_mutable("clear")
        self._reserved = 0
        self.rows.native.clear()

    # -- segments

    def mark_segment_start(self, row: int) -> None:
        window = windows_of(self.rows)[0]
        end = window.offset + window.count
        cursor = end if window.capacity is None else end % window.capacity
        if row != cursor:
            raise ValueError(
                f"mark_segment_start: must be row {cursor}, where the next sample goes, got {row}"
            )
        self.rows.native.end_segment()

    def mark_segment_end(self) -> None:
        self.rows.native.end_segment()

    def abort_segment(self) -> None:
        self.rows.native.end_segment()  # its rows were visible at once

    @property
    def has_open_segment(self) -> bool:
        return any(self.rows.native.open_segment(k) for k in range(self.rows.geometry.n_lanes))

    def get_segments(self) -> Segments | None:
        if not self.rows.geometry.tagged:
            return None
        _, lanes, _, lengths, firsts, _ = (a.tolist() for a in self.rows.native.segments())
        windows = windows_of(self.rows)
        out = []
        for lane, first, length in zip(lanes, firsts, lengths):
            w = windows[lane]
            end = first + length if w.capacity is None else min(first + length, w.start + w.capacity)
            out.append((first, end))
            if end - first < length:
                out.append((w.start, w.start + length - (end - first)))
        return sorted(out)

    # -- disk

    def dumps(self, path: PathName) -> None:
        with DumpWriter(Path(path)) as writer:
            saved = write_rows(writer, self.rows)
            writer.finish({**self.record(saved), "format": "recollect.storage"})

    def record(self, saved: Saved) -> dict[str, Any]:
        """What a manifest says of these rows."""
        windows = saved.windows
        first = windows[0]
        return {
            "storage": {"name": self.short_name, "options": self.options(), "children": {}},
            "storage_path_relative": "storage",
            "space": space_to_json(self.single_instance_space),
            "max_lengths": dict(self.layout.max_lengths),
            "layout_hash": self.layout.hash,
            "count": sum(w.count for w in windows),
            "offset": first.offset,
            "capacity": self.capacity,
            "lanes": [
                {"start": w.start, "capacity": w.capacity, "count": w.count, "offset": w.offset}
                for w in windows
            ],
            "segments": saved.segments,
            "segment_counter": self.rows.native.segment_counter(),
            "live": False,
        }

    def options(self) -> dict[str, Any]:
        """Keywords of `create` that a file should remember."""
        return {"cast": True} if self.cast else {}

    # -- life

    def close(self) -> None:
        self.rows.close()

    def _check_mutable(self, verb: str) -> None:
        if not self.is_mutable:
            raise ReadOnlyError(
                f"{type(self).__name__}: was opened for reading, got {verb}(); load it with read_only=False"
            )

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe:
            return super().__reduce__()
        return _attach, (
            type(self),
            self.rows,
            self.capacity,
            self.cast,
            self.is_mutable,
            self.cache_filename,
        )


def _attach(
    cls: type[RowStorage],
    rows: Rows,
    capacity: int | None,
    cast: bool,
    is_mutable: bool,
    cache_filename: str | None,
) -> RowStorage:
    storage = cls(rows, rows.layout.space, capacity=capacity, cast=cast, is_mutable=is_mutable)
    storage.cache_filename = cache_filename
    return storage


def encode_at(layout: Layout, index: Any, value: Any, cast: bool) -> tuple[Any, list[Any]]:
    """Encode one value or a block for the rows at a normalised index; lengths must agree."""
    if isinstance(index, int):
        return np.array([index]), [a[None] for a in layout.encode_one(value, cast)]
    n, arrays = layout.encode_batch(value, cast)
    if n != len(index):
        raise SchemaError(f"value: length must equal the index's {len(index)}, got {n}; give one sample each")
    return np.ascontiguousarray(index), arrays


def refuse(cls: type[RowStorage], cache_path: PathName | None, kwargs: dict[str, Any]) -> None:
    """Raise for arguments that memory has no use for."""
    if kwargs:
        raise TypeError(f"{cls.__name__}.create: unknown arguments {sorted(kwargs)}")
    if cache_path is not None:
        raise ValueError(
            f"cache_path: {cls.__name__} lives in memory; write it with dumps(path), or use MemmapStorage"
        )


def check_capacity(capacity: Any, num_lanes: int, cls: type[RowStorage]) -> None:
    """Raise for capacities and lanes that cannot be."""
    if capacity is None:
        if not cls.allows_none:
            raise ValueError(f"capacity: {cls.__name__} needs a number of rows, got None")
        if num_lanes != 1:
            raise ValueError(f"num_lanes: an unbounded buffer has one lane, got {num_lanes}; give a capacity")
        return
    checks.count("capacity", capacity)
    if capacity % checks.count("num_lanes", num_lanes):
        raise ValueError(
            f"num_lanes: must divide the capacity {capacity}, got {num_lanes}; "
            f"take capacity={-(-capacity // num_lanes) * num_lanes}"
        )


def live_file(path: Path, manifest: dict[str, Any]) -> str:
    """The name of the file of a live memmap storage."""
    with damage_in(path / MANIFEST):
        return check_name(
            path, f"{manifest['storage_path_relative']}/{manifest['storage']['options']['file']}"
        )


def open_live(path: Path, manifest: dict[str, Any], layout: Layout, *, writable: bool) -> Rows:
    """Open the file of a live memmap storage; FormatError if it is not the one that the manifest speaks of."""
    name = live_file(path, manifest)
    file = path / name
    with suppress(PermissionError):  # what may not be written says so below, or is only read
        open_named(path, name, "rb+" if writable else "rb").close()
    try:
        rows = Rows.open_file(file, layout, writable=writable)
    except FileNotFoundError:
        raise FormatError(
            f"{file}: is gone; the dump was replaced or damaged meanwhile: load again"
        ) from None
    g = rows.geometry
    if (g.capacity, g.n_lanes) != (manifest["capacity"], len(manifest["lanes"])):
        rows.close()
        raise FormatError(
            f"{file}: capacity and lanes must be as in {path / MANIFEST}, got {g}; it is another's"
        )
    return rows

"""Rows: any whole value. Random access to packed rows, in RAM, between processes or in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from recollect import _core
from recollect.errors import AttachError, ClosedError, FormatError
from recollect.memory import segment as segments
from recollect.memory.closed import Closed
from recollect.memory.geometry import Geometry, check_same
from recollect.memory.segment import Handle, Segment
from recollect.spaces import Layout


class Rows:
    """Packed rows of one layout, with lanes, stamps and (if `tagged`) segment tags.

    `native` is the core's object; it has the protocol. This class makes, shares and closes it.

    Ownership: `close()` gives up this object's share; memory goes with the last user. Reads are copies.
    Concurrency: readers anywhere, without locks; one writer process per lane, its threads take turns.
    """

    def __init__(self, segment: Segment, layout: Layout) -> None:
        self.layout = layout
        self.geometry = segment.geometry
        self.native: Any = segment.rows
        self._segment: Segment | None = segment.hold()

    @classmethod
    def in_ram(cls, layout: Layout, capacity: int | None, n_lanes: int = 1, tagged: bool = False) -> Rows:
        return cls(segments.in_ram(_geometry(layout, capacity, n_lanes, tagged), "capacity"), layout)

    @classmethod
    def in_shared(cls, layout: Layout, capacity: int, n_lanes: int = 1, tagged: bool = False) -> Rows:
        return cls(segments.in_shared(_geometry(layout, capacity, n_lanes, tagged), "capacity"), layout)

    @classmethod
    def in_file(
        cls,
        path: Path,
        layout: Layout,
        capacity: int | None,
        n_lanes: int = 1,
        tagged: bool = False,
        sparse: bool = False,
    ) -> Rows:
        geometry = _geometry(layout, capacity, n_lanes, tagged)
        return cls(segments.in_file(path, geometry, "capacity", sparse=sparse), layout)

    @classmethod
    def open_file(cls, path: Path, layout: Layout, *, writable: bool) -> Rows:
        rows = cls(segments.open_file(path, writable=writable), layout)
        try:
            g = rows.geometry
            check_same(_geometry(layout, g.capacity, g.n_lanes, g.tagged), g, str(path))
        except AttachError as error:
            rows.close()
            raise FormatError(str(error)) from None
        return rows

    @classmethod
    def in_mapped_file(cls, path: Path, layout: Layout, capacity: int, n_lanes: int, tagged: bool) -> Rows:
        """Plain packed rows in a file, mapped for reading; header, stamps and tags are this process's own."""
        return cls(segments.over_file(path, _geometry(layout, capacity, n_lanes, tagged)), layout)

    @property
    def is_shared(self) -> bool:
        return self._open().is_shared

    @property
    def is_writable(self) -> bool:
        return self._open().writable

    @property
    def identity(self) -> bytes:
        """The same for all objects over the same rows."""
        return self._open().nonce

    @property
    def header(self) -> _core.Mapping:
        """The memory that begins with the header."""
        return self._open().mapping

    @property
    def path(self) -> str | None:
        """The file, if the rows lie in one that others can open."""
        return self._open().path

    def is_at(self, path: Path) -> bool:
        """Whether this is the file of these rows, and not another of the same name."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self._open().fd))
        except FileNotFoundError:
            return False

    @property
    def nbytes(self) -> int:
        """Bytes of address space; untouched pages cost nothing."""
        return self.geometry.nbytes

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        self._open()

    def sync(self) -> None:
        """Write a file's pages to disk."""
        self._open().mapping.sync()

    def close_for_all(self) -> None:
        """End the rows for every process, in the one that made them or opened their file."""
        self._open().close_for_all()

    def close(self) -> None:
        if self._segment is not None:
            segment, self._segment, self.native = self._segment, None, Closed()
            segment.release()

    def _open(self) -> Segment:
        if self._segment is None:
            raise ClosedError("this object was closed; open or create it again")
        return self._segment

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_rows, (self._open().handle(), self.layout.to_json())


def _attach_rows(handle: Handle, layout: dict[str, Any]) -> Rows:
    return Rows(segments.attach(handle), Layout.from_json(layout))


def _geometry(layout: Layout, capacity: int | None, n_lanes: int, tagged: bool) -> Geometry:
    return Geometry(capacity, n_lanes, layout.row_nbytes, tagged, layout.hash)


def codec_of(layout: Layout) -> _core.Codec:
    """The native way in and out of rows of this layout (flat lists of fields when sizes vary)."""
    scalars = {leaf.fields[0] for leaf in layout.leaves if leaf.kind == "discrete"}
    fields = [(f.offset, f.dtype, f.shape, i in scalars) for i, f in enumerate(layout.fields)]
    return _core.Codec(fields, layout.template if layout.is_fixed else None, layout.row_nbytes)


def packed_codec(row_nbytes: int) -> _core.Codec:
    """The native way to move whole rows as bytes `[n, row_nbytes]`."""
    return _core.Codec([(0, np.dtype(np.uint8), (row_nbytes,), False)], ("leaf", 0), row_nbytes)

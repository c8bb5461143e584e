"""FileStorage: rows of one layout in files of one kind, with a cursor of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from recollect import checks, interrupts
from recollect.errors import ClosedError, FormatError
from recollect.files.record import damage_in
from recollect.indexing import normalize
from recollect.spaces import Layout, compile_layout, space_at
from recollect.spaces.tree import as_keys
from recollect.storage.filed.base import FiledStorage, Ints
from recollect.storage.filed.commits import PIECE, Live
from recollect.storage.filed.directory import Home

Array = np.ndarray[Any, Any]
Keys = tuple[str | int, ...]


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
        self._reserved = 0  # rows that `extend_length` added and `set` has not written yet
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
        with self._live.lock:
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
            with self._live.lock:
                self._check_mutable("extend_length")
                self._reserved += length

    def shrink_length(self, length: int) -> None:
        with self._live.lock:
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
            self._live.due(PIECE)


def from_saved(where: Path, saved: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Read what `contents` wrote; FormatError if it is none."""
    with damage_in(f"{where}: storage"):
        return make(saved["options"])

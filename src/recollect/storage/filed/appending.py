"""AppendStorage: rows that are added at the end, and never changed; what Parquet and video have in common."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from recollect import interrupts
from recollect.errors import ReadOnlyError, SchemaError
from recollect.indexing import normalize
from recollect.storage.filed.columnar import Array, FileStorage
from recollect.storage.filed.commits import Live


class AppendStorage(FileStorage):
    """A storage without capacity whose end moves: `extend_length` reserves rows, `set` fills them, in order.

    A subclass gives `_written` (rows so far), `_add` (more of them), `_truncate` (fewer) and `_added` (what may bring
    a commit about). See `FileStorage`, one level above: it also serves storages that overwrite.
    """

    allows_fixed = False
    is_append_only = True

    def __init__(self, live: Live, prefix: str, space: Any, *, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        super().__init__(live, prefix, space, None, cast, max_lengths)

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
        with self._live.lock:
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
        with self._live.lock:
            self._check_mutable("clear")
            self._reserved = 0
            self._truncate(0)

"""`evict="lowest"`: a full buffer gives up its lowest sample by a key, not its oldest."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from recollect import _core
from recollect.errors import SchemaError
from recollect.replay.engines.base import Ints
from recollect.replay.engines.rows import RowsEngine
from recollect.spaces import Layout
from recollect.storage.dump import DumpWriter
from recollect.storage.rows.base import RowStorage, encode_at
from recollect.storage.rows.dump import write_orders

_EXACT = 1 << 53  # whole numbers below this compare exactly as float64


class LowestEngine(RowsEngine):
    """Samples stay in their rows; a new one takes the row of the lowest, or is rejected if it is lower itself.

    The order of arrival, which decides between equals, stands in the rows' step tags, so it survives with them. The
    tree over the keys is this object's own: it is built from the rows when it is first needed, and again when
    another object over the same rows has changed them.
    """

    has_lanes = False
    turns_away = True

    def __init__(self, storage: RowStorage, key: str) -> None:
        super().__init__(storage, tracked=False)
        self.has_runs = False  # neighbours in the ring are no neighbours in time
        self.key = key
        self.field = key_field(storage.layout, key)
        self._lock = threading.Lock()
        self._tree: _core.MinTree | None = None
        self._next = 0
        self._seen: Any = None  # the window and epoch that the tree was made for

    def append(self, value: Any) -> None:
        self._add([a[None] for a in self.layout.encode_one(value, self.storage.cast)])

    def extend(self, value: Any, ends: Any = None) -> None:
        _, arrays = self.layout.encode_batch(value, self.storage.cast)
        self._add(arrays)

    def extend_part(self, value: Any, closes: bool) -> None:
        self.extend(value)

    def overwrite(self, index: int | Ints, value: Any) -> None:
        at, arrays = encode_at(self.layout, index, value, self.storage.cast)
        keys = self._keys(arrays)
        with self._lock:
            tree = self._ready()
            self.native.overwrite(self.codec, at, arrays)
            rows, _, _, orders = self.native.locate(at)
            tree.set(rows, keys, orders)
            self._seen = self.native.windows()

    def check_overwrite(self, index: int | Ints, value: Any) -> None:
        super().check_overwrite(index, value)
        self._keys(encode_at(self.layout, index, value, self.storage.cast)[1])

    def remove(self, index: Ints) -> None:
        with self._lock:
            super().remove(index)

    def clear(self) -> None:
        with self._lock:
            super().clear()

    def extend_chosen(self, value: Any, rows: Ints) -> bool:
        return False

    def dump(self, writer: DumpWriter) -> dict[str, Any]:
        with self._lock:
            record = super().dump(writer)
            write_orders(writer, self.storage.rows, record["count"])
        return record

    def _add(self, arrays: list[Any]) -> None:
        keys = self._keys(arrays)
        with self._lock:
            tree = self._ready()
            stayed, _ = self.native.extend_lowest(self.codec, arrays, tree, keys, self._next)
            self._next += stayed
            self._seen = self.native.windows()

    def place(
        self, plan: _core.ItemPlan, steps: Any, lengths: Any, fields: Any, index: Ints, keys: Any
    ) -> tuple[Ints, int, int, int]:
        """Add packed items one after the other, in one native call.

        Returns the row that each took (-1: rejected, -2: a later one of them displaced it), and how many took fresh
        rows, took another's, and were rejected.
        """
        with self._lock:
            found = plan.place_lowest(
                self.native, self._ready(), steps, lengths, fields, index, keys, self._next
            )
            self._next += found[1] + found[2]
            self._seen = self.native.windows()
        return found

    def _ready(self) -> _core.MinTree:
        if self._tree is None or self._seen != self.native.windows():
            self._tree = _core.MinTree(self.storage.capacity or 1)
            index = np.arange(self.count())
            rows, _, _, orders = self.native.locate(index)
            self._next = int(orders.max(initial=-1)) + 1
            keys = np.asarray(self.read(index, tuple(self.key.split("/"))), np.float64)
            self._tree.set(rows, keys, orders)
        return self._tree

    def _keys(self, arrays: list[Any]) -> Any:
        keys = arrays[self.field]
        if np.isnan(keys.astype(np.float64)).any():
            raise SchemaError(
                f"{self.key}: must be a number to be ordered by, got NaN; score it before append"
            )
        if keys.dtype.kind in "iu" and keys.size and max(abs(int(keys.max())), abs(int(keys.min()))) > _EXACT:
            got = int(keys[np.argmax(np.abs(keys.astype(np.float64)))])
            raise SchemaError(f"{self.key}: must be within 2**53 to be ordered exactly, got {got}; scale it")
        return keys.astype(np.float64)


def key_field(layout: Layout, key: Any) -> int:
    """The number of the field to order by; it must be a scalar leaf."""
    scalars = {leaf.name: leaf.fields[0] for leaf in layout.leaves if len(leaf.fields) == 1}
    fields = [(name, layout.fields[number]) for name, number in scalars.items()]
    names = [name for name, field in fields if field.shape == () and field.dtype.kind in "fiub"]
    if key not in names:
        raise ValueError(f"evict_key: must be a scalar leaf, one of {names}, got {key!r}")
    return scalars[key]

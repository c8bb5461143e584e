"""SubItemBatch: one nested field of each sample of another batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Ask, Found
from recollect.batch.location import Location
from recollect.batch.structure import Key, Keys
from recollect.batch.view import Read, View, as_source
from recollect.spaces import space_at
from recollect.spaces.tree import as_keys


class SubItemBatch(View):
    """The field of `batch` under `sub_indexes`: a key per level, `str` in a Dict, `int` in a Tuple.

    A plain string is one key; an unknown one raises KeyError here. Sources that can read only that field.

    Ownership: owns nothing. Read-only; write to the batch it views.
    Concurrency: as the batch it views.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(
        ...     rc.MemoryStorage, {"obs": {"pos": ((2,), "float32")}, "reward": ((), "float32")}, capacity=4)
        >>> buf.append({"obs": {"pos": [1.0, 2.0]}, "reward": 0.5})
        >>> rc.SubItemBatch(buf, ("obs", "pos"))[0]
        array([1., 2.], dtype=float32)
    """

    def __init__(self, batch: BatchBase, sub_indexes: Key | Sequence[Key]) -> None:
        """View the field of `batch` under the keys `sub_indexes`."""
        self.sub_indexes: Keys = as_keys(sub_indexes)
        space = space_at(as_source(batch).single_space, self.sub_indexes)
        super().__init__(batch, space, batch.single_metadata_space)

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        return self.batch._read(idx, self.sub_indexes + keys, flat, metadata)

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        return self.batch.get_located(location, self.sub_indexes + keys, flat, metadata)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        return self.batch._read_frames(ask, self.sub_indexes + keys, flat)

    def _expect(self, idx: Any, keys: Keys = ()) -> None:
        self.batch._expect(idx, self.sub_indexes + keys)

    def _reads_ahead(self) -> int:
        return self.batch._reads_ahead()

    def draw_at(self, stream: Draws, n: int) -> Any:
        return self.batch.draw_column_at(self.sub_indexes, stream, n)

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        return self.batch.draw_column_at(self.sub_indexes + keys, stream, n)

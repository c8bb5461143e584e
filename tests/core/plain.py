"""Native rows over plain memory, with samples of named leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.core.make import make_rows

from recollect import _core


def rows_in_memory(capacity: int, row_nbytes: int, n_lanes: int = 1, tagged: bool = False) -> Any:
    """Rows over one private mapping; capacity 0 is unbounded."""
    return make_rows(row_nbytes, capacity or None, n_lanes, tagged)


def flat_codec(fields: list[tuple[str, tuple[int, ...]]]) -> tuple[Any, int]:
    """A codec of dict samples `f0, f1, …` and the row's size; leaves lie as numpy aligns them."""
    offset, placed = 0, []
    for dtype, shape in fields:
        size = np.dtype(dtype).itemsize
        offset = -(-offset // size) * size
        placed.append((offset, np.dtype(dtype), shape, False))
        offset += size * int(np.prod(shape, dtype=int))
    row_nbytes = max(8, -(-offset // 8) * 8)
    plan = ("dict", tuple((f"f{i}", ("leaf", i)) for i in range(len(fields))))
    return _core.Codec(placed, plan, row_nbytes), row_nbytes


def ints(values: Any) -> Any:
    return np.ascontiguousarray(np.asarray(values, np.int64))

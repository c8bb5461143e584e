"""Native rows and codecs of chosen sizes, without the Python classes above them."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect import _core
from recollect.memory.rows import Geometry

BYTE = np.dtype(np.uint8)
Blocks = list[np.ndarray]


def make_rows(row_nbytes: int, capacity: int | None, n_lanes: int = 1, tagged: bool = False) -> _core.Rows:
    """Rows in this process's own memory."""
    g = Geometry(capacity, n_lanes, row_nbytes, tagged, "")
    mapping = _core.Mapping(-1, 0, g.nbytes, True)
    return _core.Rows(
        mapping, capacity or 0, n_lanes, row_nbytes, tagged, True, True, -1, g.sections(mapping)
    )


def byte_codec(sizes: list[int], gap: int = 0, plan: bool = True) -> _core.Codec:
    """One leaf of uint8 per size, `gap` bytes apart, in a tuple; the row is padded to 8 bytes."""
    fields, at = [], 0
    for size in sizes:
        fields.append((at, BYTE, (size,), False))
        at += size + gap
    nodes = ("tuple", tuple(("leaf", k) for k in range(len(sizes))))
    return _core.Codec(fields, nodes if plan else None, max(8, -(-at // 8) * 8))


def codec_of(dtype: Any, shape: tuple[int, ...] = (), as_scalar: bool = False) -> _core.Codec:
    """A codec of one leaf, not nested."""
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize * int(np.prod(shape))
    return _core.Codec([(0, dtype, shape, as_scalar)], ("leaf", 0), max(8, -(-nbytes // 8) * 8))


def random_blocks(sizes: list[int], n: int, seed: int) -> Blocks:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (n, size), np.uint8) for size in sizes]


def index_of(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def stream_at(key: int, counter: int = 0) -> _core.Stream:
    stream = _core.Stream()
    stream.key, stream.counter = key, counter
    return stream

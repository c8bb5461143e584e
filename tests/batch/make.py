"""Batches for the tests of views and samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recollect.testing.batches import ListBatch

SPACE = {"obs": {"pos": ((2,), "float32"), "image": ((2, 2), "uint8")}, "id": ((), "int64")}


def sample(i: int) -> dict[str, Any]:
    """Sample number i, unlike every other."""
    return {
        "obs": {"pos": np.array([i, -i], np.float32), "image": np.full((2, 2), i % 251, np.uint8)},
        "id": i,
    }


def block(ids: Sequence[int]) -> dict[str, Any]:
    """Samples as one block."""
    rows = [sample(i) for i in ids]
    return {
        "obs": {
            "pos": np.array([r["obs"]["pos"] for r in rows], np.float32).reshape(-1, 2),
            "image": np.array([r["obs"]["image"] for r in rows], np.uint8).reshape(-1, 2, 2),
        },
        "id": np.array(ids, np.int64),
    }


def batch(n: int, start: int = 0, **kwargs: Any) -> ListBatch:
    """A batch of n samples, numbered from `start`."""
    return ListBatch(SPACE, [sample(i) for i in range(start, start + n)], **kwargs)


def numbers(n: int, start: int = 0, **kwargs: Any) -> ListBatch:
    """A batch of the int64 numbers from `start` on."""
    return ListBatch(((), "int64"), range(start, start + n), **kwargs)


class Counting(ListBatch):
    """Records what is read of it: the number of rows of each gather, and the columns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gathers: list[int] = []
        self.columns: list[tuple[Any, ...]] = []

    def get_at(self, idx: Any) -> Any:
        self.gathers.append(int(np.size(np.arange(len(self))[idx])))
        return super().get_at(idx)

    def get_column_at(self, keys: Any, idx: Any) -> Any:
        self.columns.append(tuple(keys))
        return super().get_column_at(keys, idx)

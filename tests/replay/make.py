"""Buffers to test: the row storages, and a storage of the user's own that has no packed rows."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any, Self

import numpy as np

from recollect.indexing import normalize
from recollect.replay import ReplayBuffer
from recollect.storage import SpaceStorage, register_storage
from recollect.storage.contract import PathName
from recollect.storage.rows.base import encode_at

SPACE = {"x": ((), "int64"), "y": ((2,), "float32")}
ROW_KINDS = ("memory", "shared", "memmap")
KINDS = (*ROW_KINDS, "test-list")
_number = itertools.count()


class ListStorage(SpaceStorage):
    """Rows as a list of encoded samples: the least a storage of the user's own can be."""

    def __init__(self, space: Any, capacity: int | None, rows: list[Any], is_mutable: bool = True) -> None:
        super().__init__(space)
        self.capacity, self.is_mutable, self.n_written = capacity, is_mutable, 0
        self._rows = rows

    @classmethod
    def create(cls, single_instance_space: Any, *args: Any, capacity: int | None,
               cache_path: PathName | None = None, multiprocessing: bool = False, **kw: Any) -> Self:  # fmt: skip
        return cls(single_instance_space, capacity, [None] * (capacity or 0))

    @classmethod
    def load_from(cls, path: PathName, single_instance_space: Any, *, capacity: int | None = None,
                  read_only: bool = True, multiprocessing: bool = False, **kw: Any) -> Self:  # fmt: skip
        rows = pickle.loads((Path(path) / "rows.pickle").read_bytes())
        return cls(single_instance_space, capacity, rows, not read_only)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, index: Any) -> Any:
        found = normalize(index, len(self))
        if isinstance(found, int):
            return self.layout.decode_one([a.copy() for a in self._rows[found]])
        rows = [self._rows[i] for i in found]
        fields = [np.empty((len(rows), *f.shape), f.dtype) for f in self.layout.fields]
        for k, field in enumerate(fields):
            for i, row in enumerate(rows):
                field[i] = row[k]
        return self.layout.decode_batch(fields, len(rows))

    def set(self, index: Any, value: Any) -> None:
        rows, arrays = encode_at(self.layout, normalize(index, len(self)), value, False)
        for i, row in enumerate(rows):
            self._rows[row] = [a[i].copy() for a in arrays]
            self.n_written += 1

    def extend_length(self, length: int) -> None:
        if self.capacity is None:
            self._rows += [None] * length

    def shrink_length(self, length: int) -> None:
        if self.capacity is None:
            del self._rows[len(self) - length :]

    def dumps(self, path: PathName) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "rows.pickle").write_bytes(pickle.dumps(self._rows))


register_storage("test-list", ListStorage)


def create(kind: str, space: Any = SPACE, *, directory: Path | str, **kwargs: Any) -> ReplayBuffer:
    """Make a buffer of any kind; a memmap gets a directory of its own below `directory`."""
    path = Path(directory) / f"live-{next(_number)}" if kind == "memmap" else None
    kwargs.setdefault("capacity", 8)
    return ReplayBuffer.create(kind, space, cache_path=path, **kwargs)


def sample(v: int) -> dict[str, Any]:
    """The sample that stands for a number."""
    return {"x": v, "y": np.array([v, -v], np.float32)}


def block(values: list[int]) -> dict[str, Any]:
    """The batch of these samples."""
    x = np.array(values, np.int64)
    return {"x": x, "y": np.stack([x, -x], 1).astype(np.float32)}


def numbers(buffer: Any) -> list[int]:
    """The numbers that a buffer holds, after a look at all of every sample."""
    data = buffer[:]
    np.testing.assert_array_equal(data["y"], np.stack([data["x"], -data["x"]], 1).astype(np.float32))
    return [int(x) for x in data["x"]]

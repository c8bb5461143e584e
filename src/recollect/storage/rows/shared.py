"""SharedMemoryStorage: rows that several processes read and write."""

from __future__ import annotations

from typing import Any

from recollect.memory.rows import Rows
from recollect.spaces import Layout
from recollect.storage.contract import PathName
from recollect.storage.rows.base import RowStorage, refuse


class SharedMemoryStorage(RowStorage):
    """Live replay between processes: pickle it to them, any number may read, one per lane may write.

    Ownership: the kernel frees the memory with its last user, even after SIGKILL; there is no name to leak.
    Concurrency: readers take no lock and block nobody; a dead writer's lane can be claimed again.

    >>> import recollect as rc
    >>> storage = rc.SharedMemoryStorage.create({"x": ((), "int64")}, capacity=4)
    >>> storage.set(slice(0, 2), {"x": [1, 2]})
    >>> storage.get([1, 0])["x"].tolist()
    [2, 1]
    """

    short_name = "shared"
    create_options = ()
    is_multiprocessing_safe = True
    allows_none = False

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
        refuse(cls, cache_path, kwargs)
        if capacity is None:
            raise ValueError(
                "capacity: SharedMemoryStorage needs a number of rows, got None; load it as memory or memmap"
            )
        return Rows.in_shared(layout, capacity, num_lanes, segments)

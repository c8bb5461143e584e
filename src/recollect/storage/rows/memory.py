"""MemoryStorage: rows in the memory of one process."""

from __future__ import annotations

from typing import Any

from recollect.memory.rows import Rows
from recollect.spaces import Layout
from recollect.storage.contract import PathName
from recollect.storage.rows.base import RowStorage, refuse


class MemoryStorage(RowStorage):
    """RAM of one process; the usual choice. `capacity=None` grows, and rows keep their numbers.

    Ownership: freed by `close()` or with the last reference.
    Concurrency: threads of this process. A forked child reads what it inherited; writing there raises.

    >>> import recollect as rc
    >>> storage = rc.MemoryStorage.create({"x": ((2,), "float32")}, capacity=4)
    >>> storage.set(0, {"x": [1.0, 2.0]})
    >>> storage.get(0)["x"].tolist()
    [1.0, 2.0]
    """

    short_name = "memory"
    create_options = ()

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
        return Rows.in_ram(layout, capacity, num_lanes, segments)

"""DatasetBatch: a data set on disk as a read-only batch; its episodes are segments.

Rows are read a chunk at a time, a chunk never crosses an episode, and each top-level key has a cache of its own: who
reads one column (`get_column`) never decodes the video beside it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from threading import RLock
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from recollect.batch import BatchBase
from recollect.batch.structure import Keys, fill, pick
from recollect.errors import ClosedError, FormatError, MissingExtraError, SchemaError, class_name
from recollect.indexing import normalize
from recollect.spaces import Layout, compile_layout
from recollect.storage.filed.chunks import CACHE_NBYTES, ChunkCache, check_sizes, chunk_ends

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
_CHUNK_NBYTES = 4 << 20


def need(package: str, extra: str, why: str) -> Any:
    """Import an optional package; MissingExtraError with the command that installs it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(f'{why}: needs {package}; run pip install "recollect[{extra}]"') from error


class DatasetBatch(BatchBase):
    """A data set of episodes, read-only and lazy; a subclass gives `_load`.

    `left_out` names the columns that are no leaves here, and why. Copy into a buffer with `buf.extend_from(batch)`.

    Ownership: what a read returns is the caller's own. Holds at most about `cache_nbytes` of decoded rows.
    Concurrency: threads take turns; a copy in another process opens the files again.

    >>> import numpy as np, recollect as rc
    >>> from recollect.datasets import DatasetBatch
    >>> class Squares(DatasetBatch):
    ...     def _load(self, key, episode, first, end):
    ...         return np.arange(first, end) ** 2
    >>> squares = Squares({"x": ((), "int64")}, [3, 2])
    >>> squares[[-1, 2]]["x"].tolist(), squares.get_segments()
    ([1, 4], [(0, 3), (3, 5)])
    """

    def __init__(self, single_space: Any, lengths: Sequence[int], *, has_episodes: bool = True,
                 cache_nbytes: int = CACHE_NBYTES, left_out: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Show episodes of these lengths; without `has_episodes` they are only how the rows are kept."""
        super().__init__(single_space)
        if not isinstance(self.single_space, spaces.Dict):
            raise TypeError(f"single_space: must be a Dict, got {class_name(self.single_space)}")
        self.left_out = dict(left_out or {})
        self.cache_nbytes = cache_nbytes
        self._has_episodes = has_episodes
        self._layouts: dict[str, Layout] = {
            key: compile_layout(space) for key, space in self.single_space.spaces.items()
        }
        check_sizes(lengths, type(self).__name__)
        self._ends: Ints = np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)
        row = sum(layout.row_nbytes for layout in self._layouts.values())
        longest = max((int(n) for n in lengths), default=1)
        self._rows = max(1, min(1024, longest, _CHUNK_NBYTES // max(1, row)))
        self._chunk_ends = chunk_ends(self._ends, self._rows, type(self).__name__)
        self._open()

    @abstractmethod
    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        """Read the steps `[first, end)` of one top-level key of an episode; threads may call it side by side."""

    def _open(self) -> None:
        self._lock = RLock()
        self._closed = False
        total = sum(layout.row_nbytes for layout in self._layouts.values()) or 1
        self._caches = {
            key: ChunkCache(layout, self._rows, self.cache_nbytes * layout.row_nbytes // total,
                            partial(self._load_chunk, key))
            for key, layout in self._layouts.items()
        }  # fmt: skip

    def _load_chunk(self, key: str, number: int) -> tuple[Layout, list[Array]]:
        first = int(self._chunk_ends[number - 1]) if number else 0
        end = int(self._chunk_ends[number])
        episode = int(np.searchsorted(self._ends, first, side="right"))
        start = int(self._ends[episode - 1]) if episode else 0
        value = self._load(key, episode, first - start, end - start)
        layout = self._layouts[key]
        try:
            n, arrays = layout.encode_batch(value)
        except SchemaError as error:
            raise FormatError(
                f"{key}: episode {episode} does not fit the data set's own schema: {error}"
            ) from None
        if n != end - first:
            raise FormatError(
                f"{key}: episode {episode} must have {end - first} rows here, got {n}; it is damaged"
            )
        return layout, arrays

    # -- what it is

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def n_episodes(self) -> int:
        """How many episodes there are."""
        return len(self._ends)

    def get_segments(self) -> list[tuple[int, int]] | None:
        if not self._has_episodes:
            return None
        ends = self._ends.tolist()
        return list(zip([0, *ends], ends))

    # -- reads

    def get_at(self, idx: Any, *, out: Any = None) -> Any:
        found = normalize(idx, len(self))
        data = {key: self._part(key, found) for key in self._layouts}
        return data if out is None else fill(out, data)

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        if not keys:
            return self.get_at(idx)
        return pick(self._part(str(keys[0]), normalize(idx, len(self))), keys[1:])

    def _part(self, key: str, index: int | Ints) -> Any:
        rows = np.atleast_1d(np.asarray(index, np.int64))
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"{type(self).__name__}: must be open, got a use after close(); open it again"
                )
            layout, arrays = self._caches[key].gather(self._chunk_ends, rows)
        if isinstance(index, int):
            return layout.decode_one([a[0] for a in arrays])
        return layout.decode_batch(arrays, len(rows))

    def _chunks(self) -> tuple[Ints, int] | None:
        sizes = np.diff(self._chunk_ends, prepend=0)
        slots = min((cache.n_slots for cache in self._caches.values()), default=2)
        return np.repeat(np.arange(len(sizes)), sizes), max(1, min(64, slots // 2))

    # -- life

    def close(self) -> None:
        """Free the cache and end its threads; may be called twice."""
        with self._lock:
            self._closed = True
            for cache in self._caches.values():
                cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_caches", "_closed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

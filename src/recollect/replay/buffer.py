"""ReplayBuffer: a storage, a cursor and segments; index 0 is the oldest sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from recollect.backends import Backend
from recollect.batch.base import BatchBase, Draws
from recollect.batch.location import Bools, Ints, Location
from recollect.errors import ContentionError, ReadOnlyError
from recollect.indexing import normalize, positions
from recollect.memory.rows import Closed, packed_codec
from recollect.replay import snapshot
from recollect.replay.engine import REFUSED, Engine, Keys, RowsEngine, Segments, n_offered
from recollect.replay.lane import Lane
from recollect.replay.lowest import LowestEngine
from recollect.replay.plain import PlainEngine
from recollect.spaces import as_numpy
from recollect.storage import MemmapStorage, RowStorage, SpaceStorage, ToBackendOrDeviceStorage, find_storage
from recollect.storage.base import PathName

OLDEST = {"by": "oldest", "key": None}


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """What a buffer holds and by which door every sample left: offered = live + all the doors."""

    kind: str
    length: int
    capacity: int | None
    is_mutable: bool
    nbytes: int | None
    offered: int
    live: int
    evicted: int
    removed: int
    rejected: int
    dropped: int


class ReplayBuffer(BatchBase):
    """Samples of one space in a ring (or unbounded), with segments, lanes, and crash-safe dumps.

    Ownership: owns its storage and closes it. What a read returns is the caller's; what a write takes is copied.
    Concurrency: reads anywhere, without locks, each at one moment; one writer per lane, whose threads take turns.
    With `multiprocessing=True` it pickles to a small handle, and other processes read and write the same rows.

    >>> import numpy as np, recollect as rc
    >>> space = {"obs": ((3,), "float32"), "reward": ((), "float32")}
    >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=100)
    >>> buf.append({"obs": np.ones(3, "float32"), "reward": 1.0})
    >>> buf.extend({"obs": np.zeros((4, 3), "float32"), "reward": np.arange(4, dtype="float32")})
    >>> len(buf), buf[-1]["reward"].item(), buf[[0, 1, -1]]["obs"].shape
    (5, 3.0, (3, 3))
    """

    def __init__(
        self,
        storage: SpaceStorage,
        storage_path_relative: str,
        count: int = 0,
        offset: int = 0,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        *,
        maintain_segment_metadata: bool = False,
        physical_segments: Sequence[tuple[int, int]] | None = None,
        active_segment_start_physical: int | None = None,
        active_segment_length: int = 0,
    ) -> None:
        """Adopt a storage whose rows hold `count` samples from row `offset` on; segments are (first row, length)."""
        self._setup(storage, maintain_segment_metadata, OLDEST, multiprocessing, cache_path, None)
        self.storage_path_relative = storage_path_relative
        active = None
        if active_segment_start_physical is not None:
            active = (active_segment_start_physical, active_segment_length)
        elif active_segment_length:
            raise ValueError(
                f"active_segment_start_physical: needed with a length, got only {active_segment_length=}"
            )
        self.engine.adopt(count, offset, list(physical_segments or ()), active)  # type: ignore[attr-defined]

    @classmethod
    def _over(cls, storage: SpaceStorage, *, tracked: bool, evict: dict[str, Any], multiprocessing: bool,
              cache_path: PathName | None, state: dict[str, Any] | None) -> Self:  # fmt: skip
        """Make a buffer over a storage that already knows what it holds."""
        buffer = cls.__new__(cls)
        buffer._setup(storage, tracked, evict, multiprocessing, cache_path, state)
        buffer.storage_path_relative = "storage"
        return buffer

    def _setup(self, storage: SpaceStorage, tracked: bool, evict: dict[str, Any], multiprocessing: bool,
               cache_path: PathName | None, state: dict[str, Any] | None) -> None:  # fmt: skip
        super().__init__(storage.single_instance_space)
        self.storage = storage
        self.inner_storage = storage.inner if isinstance(storage, ToBackendOrDeviceStorage) else storage
        self._outward: Any = storage.outward if isinstance(storage, ToBackendOrDeviceStorage) else None
        if multiprocessing and not self.inner_storage.is_multiprocessing_safe:
            name = type(self.inner_storage).__name__
            raise ValueError(f"multiprocessing: {name} belongs to one process; use SharedMemoryStorage")
        self.multiprocessing, self.cache_path, self._evict = multiprocessing, cache_path, evict
        self.engine: Engine = self._make_engine(tracked, state)
        self._append, self._draw_rows = self.engine.append, self.engine.draw
        self._many_lanes = (
            isinstance(self.inner_storage, RowStorage) and self.inner_storage.rows.geometry.n_lanes > 1
        )

    def _make_engine(self, tracked: bool, state: dict[str, Any] | None) -> Engine:
        inner = self.inner_storage
        if not isinstance(inner, RowStorage):
            return PlainEngine(inner, tracked, state)
        if self._evict["by"] == "lowest":
            return LowestEngine(inner, self._evict["key"])
        if tracked and not inner.rows.geometry.tagged:
            raise ValueError(
                "maintain_segment_metadata: this storage keeps no segments; create it with segments=True"
            )
        return RowsEngine(inner, tracked)

    @staticmethod
    def create(
        storage_cls: type[SpaceStorage] | str,
        single_instance_space: Any,
        *args: Any,
        cache_path: PathName | None = None,
        capacity: int | None = None,
        multiprocessing: bool = False,
        maintain_segment_metadata: bool = False,
        num_lanes: int = 1,
        cast: bool = False,
        evict: str = "oldest",
        evict_key: str | None = None,
        limiter: Any = None,
        max_lengths: dict[str, int] | None = None,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> ReplayBuffer:
        """Make a buffer and its storage (a class or short name).

        `capacity=None` is unbounded. `maintain_segment_metadata` keeps episode boundaries. `num_lanes` cuts the
        capacity into equal rings, one writer each. `cast` allows casts within a kind. `evict="lowest"` with
        `evict_key` keeps the best by a scalar leaf. `max_lengths` sizes Sequence leaves.
        """
        cls = find_storage(storage_cls)
        record = _checked_evict(evict, evict_key, maintain_segment_metadata, num_lanes, capacity)
        if limiter is not None:
            raise TypeError(f"limiter: must be a RateLimiter or None, got {type(limiter).__name__}")
        if multiprocessing and not cls.is_multiprocessing_safe:
            raise ValueError(
                f"multiprocessing: {cls.__name__} belongs to one process; use SharedMemoryStorage"
            )
        if issubclass(cls, RowStorage):
            kwargs |= {
                "num_lanes": num_lanes,
                "cast": cast,
                "max_lengths": max_lengths,
                "overwrite": overwrite,
            }
            kwargs["segments"] = maintain_segment_metadata or evict == "lowest"
            if issubclass(cls, MemmapStorage):
                kwargs["live_as"] = (snapshot.FORMAT, {"evict": record})
        elif num_lanes != 1 or evict == "lowest":
            raise ValueError(
                f"num_lanes, evict: {cls.__name__} has one lane and evicts the oldest; use a row storage"
            )
        storage = cls.create(
            single_instance_space, *args, capacity=capacity, cache_path=cache_path, multiprocessing=multiprocessing,
            **kwargs,
        )  # fmt: skip
        try:
            buffer = ReplayBuffer._over(
                storage, tracked=maintain_segment_metadata, evict=record, multiprocessing=multiprocessing,
                cache_path=cache_path, state=None,
            )  # fmt: skip
        except BaseException:
            storage.close()
            raise
        return buffer

    # -- what it is

    def __len__(self) -> int:
        return self.engine.count()

    @property
    def count(self) -> int:
        """How many samples there are now."""
        return self.engine.count()

    @property
    def offset(self) -> int:
        """The row of the oldest sample (of lane 0)."""
        return self.engine.offset

    @property
    def capacity(self) -> int | None:
        """The most samples it holds; None is unbounded."""
        return self.storage.capacity

    @property
    def backend(self) -> Backend:
        return self.storage.backend

    @property
    def device(self) -> Any:
        return self.storage.device

    @property
    def is_mutable(self) -> bool:
        return self.storage.is_mutable

    def stats(self) -> ReplayStats:
        """Return a frozen record of what is here and by which door samples left."""
        nbytes = getattr(self.inner_storage, "nbytes", None)
        return ReplayStats(
            type(self.inner_storage).__name__, len(self), self.capacity, self.is_mutable, nbytes,
            **self.engine.counters(),
        )  # fmt: skip

    def evict_record(self) -> dict[str, Any]:
        """What a manifest says of eviction."""
        return dict(self._evict)

    # -- reads

    def get_at(self, idx: Any, *, out: Any = None) -> Any:
        """Fetch samples, into the caller's buffers `out` if they are given."""
        return self._at(idx, lambda index, **counted: self._read_at(index, out, **counted))

    def _read_at(self, index: Any, out: Any, **counted: int) -> Any:
        if out is not None:
            return self._filled(index, out, **counted)
        data = self.engine.read(index, (), None, **counted)
        return data if self._outward is None else self._outward(data)

    def _at(self, idx: Any, read: Callable[..., Any]) -> Any:
        """Read at an index that means the buffer of one moment, while writers displace the oldest samples.

        Where several lanes follow one another, a write to one moves the numbers of the next. So what counts from the
        end is counted again until count and read agree; in one lane it is enough that the index is in range.
        """
        if self._many_lanes and _counts_from_the_end(idx):
            return self._counted_again(idx, read)
        try:
            return read(normalize(idx, self.engine.count()))
        except IndexError:
            return self._counted_again(idx, read)

    def _counted_again(self, idx: Any, read: Callable[..., Any]) -> Any:
        end = time.monotonic() + 1.0
        while True:
            n = self.engine.count()
            index = normalize(idx, n)  # raises what is out of range now
            try:
                return read(index, counted=n) if self._many_lanes else read(index)
            except IndexError:
                if time.monotonic() > end:
                    raise ContentionError("writers overtook every try of 1 s; read fewer samples") from None

    def _filled(self, index: Any, out: Any, **counted: int) -> Any:
        from recollect.batch.structure import fill

        if isinstance(self.engine, RowsEngine) and self.engine.layout.is_fixed and not isinstance(index, int):
            return self.engine.read(index, (), out, **counted)
        return fill(out, self.engine.read(index, (), None, **counted))

    def get_packed_at(self, idx: Any, *, out: Any = None) -> Any:
        """Fetch whole packed rows as bytes, `(n, row_nbytes)` or `(row_nbytes,)`: one block, one transfer."""
        return self._at(idx, lambda index, **counted: self._read_packed(index, out, **counted))

    def _read_packed(self, index: Any, out: Any, **counted: int) -> Any:
        if not isinstance(self.engine, RowsEngine):
            raise TypeError(
                f"get_packed_at: {type(self.inner_storage).__name__} has no packed rows; use a row storage"
            )
        single = isinstance(index, int)
        rows = np.array([index]) if single else np.ascontiguousarray(index)
        codec = packed_codec(self.engine.layout.row_nbytes)
        if out is None or not single:
            return self.engine.native.read(codec, rows, single, out, **counted)
        self.engine.native.read(codec, rows, False, np.asarray(out)[None], **counted)
        return out

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        data = self._at(idx, lambda index, **counted: self.engine.read(index, keys, **counted))
        return data if self._outward is None else self._outward(data)

    def draw_at(self, stream: Draws, n: int) -> Any:
        data = self._draw_rows(stream.key, stream.counter, n)  # type: ignore[attr-defined]
        if data is None:
            raise self._empty()
        stream.counter += n  # type: ignore[attr-defined]
        return data if self._outward is None else self._outward(data)

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        data = self._draw_rows(stream.key, stream.counter, n, keys)  # type: ignore[attr-defined]
        if data is None:
            raise self._empty()
        stream.counter += n  # type: ignore[attr-defined]
        return data if self._outward is None else self._outward(data)

    def locate(self, idx: Any) -> Location:
        """Return where samples are: row, generation, segment (its id) and step, all at one moment."""
        found: Location = self._at(idx, self._locate)
        return found

    def _locate(self, index: Any, **counted: int) -> Location:
        if isinstance(index, int):
            return Location(*self.engine.locate(np.array([index]), **counted), np.array([index])).take(0)
        return Location(*self.engine.locate(index, **counted), index)

    def is_current(self, location: Location) -> Bools:
        """Tell which rows still hold the samples that were located there; False for removed ones."""
        return np.asarray(self.relocate(location) >= 0)

    def relocate(self, location: Location) -> Ints:
        row, generation = np.atleast_1d(location.row), np.atleast_1d(location.generation)
        return self.engine.index_of(row, generation).reshape(np.shape(location.row))

    # -- writes

    def append(self, value: Any) -> None:
        """Add one sample; readers see it once this returns. A full lane gives up its oldest."""
        try:
            self._append(value)
        except REFUSED:
            self.engine.reject(1)
            raise

    def extend(self, value: Any, *, ends: Any = None) -> None:
        """Add a block of samples as one segment; `ends` (bool, one per sample) closes one after each True."""
        try:
            self.engine.extend(value, ends)
        except REFUSED:
            self.engine.reject(n_offered(self.storage, value))
            raise

    def _extend_part(self, block: Any, closes: bool) -> None:
        try:
            self.engine.extend_part(block, closes)
        except REFUSED:
            self.engine.reject(n_offered(self.storage, block))
            raise

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite samples in place; their generations are renewed, their segments stay."""
        self._check_mutable("set_at")
        self.engine.overwrite(normalize(idx, self.engine.count()), value)

    def remove_at(self, idx: Any) -> None:
        """Remove samples at any fill level; the others keep their order."""
        self._check_mutable("remove_at")
        self.engine.remove(positions(idx, self.engine.count()))

    def clear(self) -> None:
        """Drop everything; counted as removed."""
        self._check_mutable("clear")
        self.engine.clear()

    def _check_mutable(self, verb: str) -> None:
        if not self.is_mutable:
            raise ReadOnlyError(
                f"ReplayBuffer: was opened for reading, got {verb}(); load it with read_only=False"
            )

    # -- segments and lanes

    def mark_segment_end(self) -> None:
        """Close the caller's open segment; none: nothing happens."""
        self.engine.end_segment()

    @property
    def open_segment(self) -> tuple[int, int] | None:
        """The caller's open segment as `(start, end)`, or None."""
        return self.engine.open_segment()

    def get_segments(self) -> Segments | None:
        """Return the closed segments; None when they are not tracked."""
        return self.engine.segments()

    def on_lane(self, number: int) -> Lane:
        """Claim a lane by number and return a handle that writes to it."""
        self.engine.count()  # raises when closed
        if not isinstance(self.engine, RowsEngine) or isinstance(self.engine, LowestEngine):
            raise ValueError("on_lane: this buffer has no lanes; use a row storage that evicts the oldest")
        return Lane(self.engine, number)

    # -- disk

    def dumps(self, path: PathName, *, cut_open: bool = False) -> None:
        """Write the buffer to a directory, so that a crash at any point leaves the old dump or the new one."""
        snapshot.dump(self, path, cut_open)

    @staticmethod
    def load_from(
        path: PathName,
        *,
        backend: Any = "numpy",
        device: Any = None,
        read_only: bool = True,
        multiprocessing: bool = False,
        single_instance_space: Any = None,
        storage: Any = None,
        **storage_kwargs: Any,
    ) -> ReplayBuffer:
        """Load a dump. `storage` (a short name) loads rows as another kind; `verify=True` checks all checksums."""
        return snapshot.load(
            ReplayBuffer, path, backend=backend, device=device, read_only=read_only, multiprocessing=multiprocessing,
            space=single_instance_space, storage=storage, **storage_kwargs,
        )  # fmt: skip

    @staticmethod
    def is_loadable_from(path: PathName) -> bool:
        """Tell whether there is a dump that this release can load."""
        try:
            return snapshot.peek(path) is not None
        except (ValueError, OSError):
            return False

    @staticmethod
    def get_length_from_path(path: PathName) -> int | None:
        """Return how many samples a dump holds, None if there is no dump; reads no rows."""
        found = snapshot.peek(path)
        return None if found is None else int(found["count"])

    @staticmethod
    def get_capacity_from_path(path: PathName) -> int | None:
        """Return the capacity of a dump; None if it is unbounded or there is no dump."""
        found = snapshot.peek(path)
        return None if found is None else found["capacity"]

    @staticmethod
    def get_space_from_path(path: PathName, *, backend: Any = "numpy", device: Any = None) -> Any:
        """Return the space of a dump, None if there is no dump. Spaces are the same for every backend."""
        from pathlib import Path

        found = snapshot.peek(path)
        return None if found is None else snapshot.stored_space(Path(path), found)

    # -- life

    def close(self) -> None:
        """Give up the storage; may be called twice."""
        self.engine = self._append = self._draw_rows = Closed()
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind, capacity = type(self.inner_storage).__name__, self.capacity
        return f"ReplayBuffer({kind}, {self.single_space}, capacity={capacity})"

    def __reduce__(self) -> Any:
        if not self.inner_storage.is_multiprocessing_safe:
            raise TypeError(
                f"ReplayBuffer: {type(self.inner_storage).__name__} cannot be sent to another process; create it with "
                "SharedMemoryStorage and multiprocessing=True, or load it with multiprocessing=True"
            )
        return _rebuild, (
            self.storage,
            self.engine.tracked,
            self._evict,
            self.multiprocessing,
            self.cache_path,
        )

    def _identity(self) -> object:
        rows = getattr(self.inner_storage, "rows", None)
        return self.inner_storage if rows is None else rows.identity


def _counts_from_the_end(idx: Any) -> bool:
    """Whether an index means other samples when the length is another."""
    if isinstance(idx, int | np.integer):
        return bool(idx < 0)
    if isinstance(idx, slice) or idx is ...:
        return True
    try:
        numbers = as_numpy(idx)
        return bool(numbers.dtype == bool or (numbers.size and (numbers < 0).any()))
    except (TypeError, ValueError):
        return False  # no index at all, which will be said


def _rebuild(storage: SpaceStorage, tracked: bool, evict: dict[str, Any], multiprocessing: bool,
             cache_path: PathName | None) -> ReplayBuffer:  # fmt: skip
    return ReplayBuffer._over(
        storage,
        tracked=tracked,
        evict=evict,
        multiprocessing=multiprocessing,
        cache_path=cache_path,
        state=None,
    )


def _checked_evict(
    evict: str, key: str | None, tracked: bool, num_lanes: int, capacity: int | None
) -> dict[str, Any]:
    if evict == "oldest":
        if key is not None:
            raise ValueError(f"evict_key: is only for evict='lowest', got {key!r}")
        return dict(OLDEST)
    if evict != "lowest":
        raise ValueError(f"evict: must be 'oldest' or 'lowest', got {evict!r}")
    if tracked or num_lanes != 1 or capacity is None:
        raise ValueError("evict: 'lowest' keeps no segments, has one lane and needs a capacity")
    return {"by": "lowest", "key": key}

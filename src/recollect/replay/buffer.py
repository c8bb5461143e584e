"""ReplayBuffer: a storage, a cursor and segments; index 0 is the oldest sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from recollect.backends import Backend
from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Ask, Boundaries, Found
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.structure import select
from recollect.errors import ClosedError, ContentionError, ReadOnlyError, class_name
from recollect.indexing import normalize, positions
from recollect.memory.segment import Closed
from recollect.replay import snapshot
from recollect.replay.engines import make_engine
from recollect.replay.engines.base import REFUSED, Keys, Segments, n_offered, writers
from recollect.replay.lane import Lane
from recollect.replay.limiter import RateLimiter
from recollect.spaces import as_numpy
from recollect.spaces.tree import brief
from recollect.storage import MemmapStorage, RowStorage, SpaceStorage, ToBackendOrDeviceStorage, find_storage
from recollect.storage.contract import PathName
from recollect.storage.filed.base import DirectoryStorage
from recollect.storage.filed.commits import commits_of
from recollect.text import refuse_unknown

OLDEST = {"by": "oldest", "key": None}
_INT64 = np.dtype(np.int64)


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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Point whoever has no storage to adopt to `create`."""
        given = args[0] if args else kwargs.get("storage")
        if not isinstance(given, SpaceStorage):
            raise TypeError(
                f"{cls.__name__}: must adopt a storage that is there already, got {given!r}; "
                f"make one with {cls.__name__}.create(rc.MemoryStorage, space, capacity=100_000)"
            )
        return super().__new__(cls)

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
        self.engine.adopt(count, offset, list(physical_segments or ()), active)

    @classmethod
    def _over(cls, storage: SpaceStorage, *, tracked: bool, evict: dict[str, Any], multiprocessing: bool,
              cache_path: PathName | None, state: dict[str, Any] | None,
              limiter: RateLimiter | None = None) -> Self:  # fmt: skip
        """Make a buffer over a storage that already knows what it holds."""
        buffer = cls.__new__(cls, storage)
        buffer._setup(storage, tracked, evict, multiprocessing, cache_path, state, limiter)
        buffer.storage_path_relative = "storage"
        return buffer

    def _setup(self, storage: SpaceStorage, tracked: bool, evict: dict[str, Any], multiprocessing: bool,
               cache_path: PathName | None, state: dict[str, Any] | None,
               limiter: RateLimiter | None = None) -> None:  # fmt: skip
        super().__init__(storage.single_instance_space)
        self.storage = storage
        self.inner_storage = storage.inner if isinstance(storage, ToBackendOrDeviceStorage) else storage
        self._outward: Any = storage.outward if isinstance(storage, ToBackendOrDeviceStorage) else None
        self.multiprocessing, self.cache_path, self._evict = multiprocessing, cache_path, evict
        live_as = {"evict": dict(evict), "format": snapshot.FORMAT}
        self.engine = engine = make_engine(self.inner_storage, tracked, evict, state, live_as)
        self._shares_writes = engine.shares_writes
        if multiprocessing and not self.is_multiprocessing_safe:
            name = type(self.inner_storage).__name__
            raise ValueError(f"multiprocessing: {name} belongs to one process; use SharedMemoryStorage")
        self.limiter = limiter
        if limiter is not None:
            self._attach(limiter)
        self._append, self._extend, self._extend_piece = writers(engine, limiter)
        self._draw_rows = engine.bound_draw()
        self._many_lanes, self._has_runs = engine.n_lanes > 1, engine.has_runs

    def _attach(self, limiter: RateLimiter) -> None:
        """Let a limiter count in words beside the rows, and writes wait for it."""
        # Not `self`, nor what refers to it: who forgets to close a buffer should not have to wait for the collector.
        counters = self.engine.own_counters()

        def counts() -> tuple[int, int]:
            found = counters()
            return found["offered"] - found["rejected"], found["live"]

        limiter.attach(*self.engine.limiter_words(), counts)

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
        `evict_key` keeps the best by a scalar leaf. `limiter` (a RateLimiter) holds writes and samplers' draws in
        proportion. `max_lengths` sizes Sequence leaves.
        """
        cls = find_storage(storage_cls)
        own: tuple[str, ...] | None = vars(cls).get("create_options")  # not that of the class it is made of
        if kwargs and own is not None:
            refuse_unknown("ReplayBuffer.create", kwargs, ReplayBuffer.create, own)
        record = _checked_evict(evict, evict_key, maintain_segment_metadata, num_lanes, capacity)
        _check_limiter(limiter, capacity)
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
                kwargs["live_as"] = (snapshot.FORMAT, {"evict": record, **snapshot.limiter_record(limiter)})
        elif num_lanes != 1 or evict == "lowest":
            raise ValueError(
                f"num_lanes, evict: {cls.__name__} has one lane and evicts the oldest; use a row storage"
            )
        else:  # a storage of yours need not know these
            asked = {"cast": cast, "max_lengths": max_lengths, "overwrite": overwrite}
            kwargs |= {name: value for name, value in asked.items() if value}
            if issubclass(cls, DirectoryStorage) and cache_path is not None:
                kwargs["owned"] = True
        storage = cls.create(
            single_instance_space, *args, capacity=capacity, cache_path=cache_path, multiprocessing=multiprocessing,
            **kwargs,
        )  # fmt: skip
        try:
            buffer = ReplayBuffer._over(
                storage, tracked=maintain_segment_metadata, evict=record, multiprocessing=multiprocessing,
                cache_path=cache_path, state=None, limiter=limiter,
            )  # fmt: skip
            if "owned" in kwargs:
                storage.flush()  # one commit makes both
        except BaseException:
            commits = commits_of(storage)
            try:
                if commits is not None:
                    commits.directory.give_up()  # else its close would commit a storage without a buffer
            finally:
                storage.close()
            raise
        if limiter is not None:
            limiter.begin()
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
            return self.engine.read_into(index, out, **counted)
        data = self.engine.read(index, (), None, **counted)
        return data if self._outward is None else self._outward(data)

    def _at(self, idx: Any, read: Callable[..., Any]) -> Any:
        """Read at an index that means the buffer of one moment, while writers displace the oldest samples.

        Where several lanes follow one another, a write to one moves the numbers of the next. So what counts from the
        end is counted again until count and read agree; in one lane it is enough that the index is in range.
        An array of places goes to the engine as it is, which checks each: only negative ones need the count.
        """
        if type(idx) is np.ndarray and idx.dtype is _INT64 and idx.ndim == 1:
            try:
                return read(idx)
            except IndexError:
                pass
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

    def get_packed_at(self, idx: Any, *, out: Any = None) -> Any:
        """Fetch whole packed rows as bytes, `(n, row_nbytes)` or `(row_nbytes,)`: one block, one transfer."""
        return self._at(idx, lambda index, **counted: self.engine.read_packed(index, out, **counted))

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        data = self._at(idx, lambda index, **counted: self.engine.read(index, keys, **counted))
        return data if self._outward is None else self._outward(data)

    def draw_at(self, stream: Draws, n: int) -> Any:
        data = self._draw_rows(stream, n)
        if data is None:
            raise self._empty()
        return data if self._outward is None else self._outward(data)

    def bound_draw(self) -> Callable[[Any, int], Any]:
        draw: Callable[[Any, int], Any] = self._draw_rows if self._draws_rows() else self.draw_at
        return draw

    def drawn_rows(self) -> tuple[Any, Any] | None:
        """Return the core's rows and codec if a draw is nothing but a gather of those, else None."""
        return self.engine.drawn_rows() if self._draws_rows() else None

    def _draws_rows(self) -> bool:
        return self._outward is None and type(self).draw_at is ReplayBuffer.draw_at

    def draw_into(self, stream: Draws, n: int, out: Any) -> Any:
        if self._outward is not None:
            return super().draw_into(stream, n, out)
        if self.engine.draw_into(stream, n, out) is None:
            raise self._empty()
        return out

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        data = self.engine.draw(stream, n, keys)
        if data is None:
            raise self._empty()
        return data if self._outward is None else self._outward(data)

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> tuple[Any, dict[str, Any] | None] | None:
        data = self.engine.read_located(location.row, location.generation, keys)
        if data is None:
            return None
        data = data if self._outward is None else self._outward(data)
        return self._flatten(data, False, keys) if flat else data, None

    def _boundaries(self) -> Boundaries:
        return self.engine.boundaries(self)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        if not self._has_runs:
            return super()._read_frames(ask, keys, flat)
        engine = self.engine
        if ask.index is None:
            found = engine.read_frames(ask, keys)
        else:
            found = self._at(
                ask.index, lambda index, **counted: engine.read_frames(ask, keys, index, **counted)
            )
        if found is None:
            return None
        data = found[0] if self._outward is None else self._outward(found[0])
        return self._flatten(data, False, keys) if flat else data, *found[1:]

    def locate(self, idx: Any) -> Location:
        """Return where samples are: row, generation, segment (its id) and step, all at one moment."""
        found: Location = self._at(idx, self._locate)
        return found

    def _locate(self, index: Any, **counted: int) -> Location:
        if isinstance(index, int):
            return Location(*self.engine.locate(np.array([index]), **counted), np.array([index])).take(0)
        return Location(*self.engine.locate(index, **counted), index)

    def _chunks(self) -> tuple[Ints, int] | None:
        return self.engine.chunks()

    def _expect(self, idx: Ints, keys: Keys = ()) -> None:
        self.engine.expect(idx, keys)

    def _reads_ahead(self) -> int:
        return self.engine.reads_ahead() if self._outward is None else 0

    @property
    def _moves(self) -> bool:
        return self.engine.moves

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

    def extend(self, value: Any, *, ends: Any = None, rows: Any = None) -> None:
        """Add a block of samples: a whole segment, or with `ends` a part of one, or of several.

        `ends` (bool, one per sample) closes the segment after each True and nowhere else. So the block goes on with
        the open segment, if there is one, and after a False at its end the next block or `append` goes on with it.
        Without `ends` the block must not begin inside an open segment (SegmentOpenError), and its last sample ends one.
        `rows` (positions in the block) adds only those samples, in that order, without a copy by the caller.
        """
        if rows is not None:
            return self._extend_chosen(value, np.ascontiguousarray(rows, np.int64), ends)
        try:
            self._extend(value, ends)
        except REFUSED:
            self.engine.reject(n_offered(self.storage, value))
            raise
        return None

    def _extend_chosen(self, value: Any, rows: Ints, ends: Any) -> None:
        engine = self.engine
        if len(rows) and rows.min() < 0:
            raise IndexError(f"rows: must be positions in the block, got {int(rows.min())}")
        if ends is None and self.limiter is None and engine.extend_chosen(value, rows):
            return
        try:
            self._extend(select(self.single_space, value, rows), ends)
        except REFUSED:
            engine.reject(len(rows))
            raise

    def extend_lanes(self, value: Any, lanes: Any, *, ends: Any = None, rows: Any = None) -> None:
        """Append sample i of a block to lane `lanes[i]`; `ends` (bool, one per lane) closes its segment after it.

        The way of a vector environment, one slot per lane: each row is an `append` to its lane, all in one call.
        `rows[i]` names the sample instead of i. Nothing is written if one of the lanes belongs to another process.
        """
        self.engine.count()  # raises when closed
        if not self.engine.has_lanes:
            raise ValueError(
                "extend_lanes: this buffer has no lanes; use a row storage that evicts the oldest"
            )
        numbers = np.ascontiguousarray(lanes, np.int64)
        chosen = None if rows is None else np.ascontiguousarray(rows, np.int64)
        try:
            with nullcontext() if self.limiter is None else self.limiter.inserting(len(numbers)):
                self.engine.extend_lanes(value, numbers, ends, chosen)
        except REFUSED:
            self.engine.reject(n_offered(self.storage, value) if chosen is None else len(chosen))
            raise

    def _extend_part(self, block: Any, closes: bool) -> None:
        try:
            self._extend_piece(block, closes)
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

    def _check_set_at(self, idx: Any, value: Any) -> None:
        self._check_mutable("set_at")
        self.engine.check_overwrite(normalize(idx, self.engine.count()), value)

    def _check_remove_at(self, idx: Any) -> None:
        self._check_mutable("remove_at")
        self.engine.check_remove(positions(idx, self.engine.count()))

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
        if not self.engine.has_lanes:
            raise ValueError("on_lane: this buffer has no lanes; use a row storage that evicts the oldest")
        return Lane(self, self.engine, number)

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

        from recollect.storage.manifest import stored_space

        found = snapshot.peek(path)
        return None if found is None else stored_space(Path(path), found)

    # -- life

    def close(self) -> None:
        """Give up the storage; may be called twice. Whoever waits for the limiter is woken."""
        commits = commits_of(self.inner_storage)
        if commits is not None:
            commits.check_free()
        if self.limiter is not None:
            self.limiter.detach()
        closed: Any = Closed()
        self.engine = self._append = self._extend = self._extend_piece = self._draw_rows = closed
        self.storage.close()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody: any later call anywhere raises ClosedError.

        Whoever waits for its limiter, in any process, gets that error at once. What lies in a file stays there.
        """
        with suppress(ClosedError):
            self.engine.close_for_all()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        length, capacity, kind = self._told_length(), self.capacity, type(self.inner_storage).__name__
        held = f"{length}," if capacity is None or length == "closed" else f"{length} of {capacity:,},"
        return f"{type(self).__name__}({held} {kind}: {brief(self.single_space)})"

    @property
    def is_multiprocessing_safe(self) -> bool:
        """Whether other processes see the same samples: those of shared rows, or of what nobody changes."""
        inner = self.inner_storage
        return inner.is_multiprocessing_safe and (self._shares_writes or not inner.is_mutable)

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe:
            raise TypeError(
                f"ReplayBuffer: {type(self.inner_storage).__name__} cannot be pickled or sent to another process; "
                "save it with dumps(path), or create it with SharedMemoryStorage and multiprocessing=True"
            )
        return _rebuild, (
            self.storage,
            self.engine.tracked,
            self._evict,
            self.multiprocessing,
            self.cache_path,
            None if self.limiter is None else self.limiter.configuration(),
            self.engine.handle_state(),
        )

    def _identity(self) -> object:
        rows = getattr(self.inner_storage, "rows", None)
        return self.inner_storage if rows is None else rows.identity


ReplayBuffer.__new__.__wrapped__ = ReplayBuffer.__init__  # type: ignore[attr-defined]  # for help() and editors


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
             cache_path: PathName | None, limiter: dict[str, Any] | None = None,
             state: dict[str, Any] | None = None) -> ReplayBuffer:  # fmt: skip
    return ReplayBuffer._over(
        storage,
        tracked=tracked,
        evict=evict,
        multiprocessing=multiprocessing,
        cache_path=cache_path,
        state=state,
        limiter=None if limiter is None else RateLimiter(**limiter),
    )


def _check_limiter(limiter: Any, capacity: int | None) -> None:
    if limiter is None:
        return
    if not isinstance(limiter, RateLimiter):
        raise TypeError(f"limiter: must be a RateLimiter or None, got {class_name(limiter)}")
    limiter.check_free()
    if capacity is not None and limiter.min_size > capacity:
        raise ValueError(
            f"limiter: min_size must be at most the capacity {capacity}, got {limiter.min_size}; nothing could be drawn"
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

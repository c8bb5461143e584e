"""CombinedBatch: several batches of one space, end to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from recollect.backends import Backend, move
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import counted
from recollect.batch.location import Bools, Ints, Location, Segments
from recollect.batch.structure import Keys, as_batch, assemble, checked_batch, select, unbatch
from recollect.batch.view import Read, ReadsOnce
from recollect.errors import SchemaError, class_name
from recollect.indexing import normalize, positions
from recollect.spaces import first_difference, space_at
from recollect.spaces.tree import make_dict

T = TypeVar("T")


class _Share:
    """What one member has of an index: the positions in the index, and the member's own indices."""

    __slots__ = ("at", "index", "member")

    def __init__(self, member: int, at: Ints, index: Ints) -> None:
        self.member = member
        self.at = at
        self.index = index


class CombinedBatch(ReadsOnce):
    """The samples of `batches`, one batch after the other; lengths are read at each call.

    A read is one gather in each member that it touches, in any index order. Metadata gains `batch_index` (of
    this view, if members are combined themselves). `set_at` and `remove_at` are checked in all members that
    they touch before any changes; `append` and `extend` go to the last. A member without segments counts as
    one.

    Ownership: owns nothing but its thread pool, which ends with it.
    Concurrency: as the members, each for itself; `use_thread_pool` reads them in parallel.

    Example:
        >>> import numpy as np, recollect as rc
        >>> old, new = (rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=4) for _ in range(2))
        >>> old.extend(np.arange(3)); new.extend(np.arange(10, 12))
        >>> both = rc.CombinedBatch([old, new])
        >>> data, meta = both.get_at_with_metadata([4, 0, 2])
        >>> data.tolist(), meta["batch_index"].tolist()
        ([11, 0, 2], [1, 0, 0])
    """

    def __init__(
        self, batches: Sequence[BatchBase], device: Any = None, use_thread_pool: bool = False
    ) -> None:
        """Combine `batches`, of equal backends and spaces; `device` moves what reads return."""
        self.batches = tuple(batches)
        if not self.batches:
            raise ValueError(
                "CombinedBatch: batches must be at least one, got none; pass the batches to combine"
            )
        self._check_equal()
        first = self.batches[0]
        self._inner_metadata_space = _metadata_space(first)
        super().__init__(first.single_space, self._with_batch_index(self._inner_metadata_space))
        self._device = device
        self.use_thread_pool = use_thread_pool
        self._pool = _Pool(len(self.batches))

    def _check_equal(self) -> None:
        first = self.batches[0]
        for k, batch in enumerate(self.batches):
            if not isinstance(batch, BatchBase):
                raise TypeError(f"batches[{k}]: must be a BatchBase, got {class_name(batch)}; wrap it")
            if batch.backend.name != first.backend.name:
                names = f"{batch.backend.name}; wrap it in ToBackendOrDeviceBatch"
                raise ValueError(
                    f"batches[{k}]: backend must be {first.backend.name} as in batches[0], got {names}"
                )
            differs = first_difference(first.single_space, batch.single_space)
            if differs is None:
                differs = _metadata_difference(first, batch)
            if differs is not None:
                raise ValueError(
                    f"batches[{k}]: space must equal that of batches[0], got {differs}; transform it"
                )

    def _with_batch_index(self, space: spaces.Dict | None) -> spaces.Dict:
        parts = {} if space is None else dict(space.spaces)
        parts["batch_index"] = spaces.Discrete(len(self.batches))
        return make_dict(parts.items())

    # What it is

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    @property
    def backend(self) -> Backend:
        return self.batches[0].backend

    @property
    def device(self) -> Any:
        return self.batches[0].device if self._device is None else self._device

    @property
    def is_mutable(self) -> bool:
        return any(batch.is_mutable for batch in self.batches)

    def _sources(self) -> tuple[BatchBase, ...]:
        return self.batches

    def _ends(self) -> Ints:
        return np.cumsum([len(batch) for batch in self.batches])

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        return counted(self, idx, lambda index: self._read_at(index, keys, flat, metadata))

    def _read_at(self, index: Any, keys: Keys, flat: bool, metadata: bool) -> Read:
        ends = self._ends()
        normalize(index, int(ends[-1]))  # it may have shrunk since it was counted
        if isinstance(index, int):
            (share,) = _split(np.array([index]), ends)
            found = self.batches[share.member]._read(int(share.index[0]), keys, flat, metadata)
            return self._outward(found, np.int64(share.member), metadata)
        shares = _split(index, ends)
        parts = self._each(
            shares, lambda share: self.batches[share.member]._read(share.index, keys, flat, metadata)
        )
        return self._merge(shares, parts, keys, flat, metadata)

    def _each(self, shares: Sequence[_Share], fn: Callable[[_Share], T]) -> list[T]:
        if self.use_thread_pool and len(shares) > 1:
            return list(self._pool.get().map(fn, shares))
        return [fn(share) for share in shares]

    def _merge(
        self, shares: Sequence[_Share], parts: Sequence[Read], keys: Keys, flat: bool, metadata: bool
    ) -> Read:
        places = [share.at for share in shares]
        space = None if flat else space_at(self.single_space, keys)
        data = assemble(space, [part[0] for part in parts], places, self.backend)
        if not metadata:
            return self._outward((data, None), None, False)
        found = [part[1] for part in parts]
        inner = self._inner_metadata_space
        merged = None if inner is None else assemble(inner, found, places, self.backend)
        member = np.empty(sum(map(len, places)), np.int64)
        for share in shares:
            member[share.at] = share.member
        return self._outward((data, merged), member, True)

    def _outward(self, found: Read, member: Any, metadata: bool) -> Read:
        data, meta = found
        if metadata:
            meta = {**(meta or {}), "batch_index": move(member, self.backend, self.batches[0].device)}
        if self._device is None:
            return data, meta
        moved = None if meta is None else move(meta, self.backend, self._device)
        return move(data, self.backend, self._device), moved

    # Segments and places

    def get_segments(self) -> Segments:
        found: Segments = []
        start = 0
        for batch in self.batches:
            length = len(batch)
            known = batch.get_segments()
            own = ([(0, length)] if length else []) if known is None else known
            found.extend((start + a, start + b) for a, b in own)
            start += length
        return found

    @property
    def _moves(self) -> bool:
        return any(batch._moves for batch in self.batches)

    def _chunks(self) -> tuple[Ints, int] | None:
        """Those of all members; one that is read row by row counts as chunks of a thousand."""
        found = [batch._chunks() for batch in self.batches]
        if all(part is None for part in found):
            return None
        chunks, first = [], 0
        for batch, part in zip(self.batches, found):
            chunk = np.arange(len(batch)) // 1000 if part is None else part[0]
            chunks.append(chunk + first)
            first += int(chunk.max(initial=-1)) + 1
        return np.concatenate(chunks), min(part[1] for part in found if part is not None)

    def _existing(self) -> Any:
        parts = [batch._existing() for batch in self.batches]
        starts = self._ends() - [len(batch) for batch in self.batches]
        return np.concatenate([np.asarray(part, np.int64) + start for part, start in zip(parts, starts)])

    # A row of member m is row * M + m here: unique among members, and found again when lengths have changed.

    def locate(self, idx: Any) -> Location:
        ends = self._ends()
        index = normalize(idx, int(ends[-1]))
        at = np.atleast_1d(np.asarray(index, np.int64))
        shares = _split(at, ends)
        fields = np.empty((4, len(at)), np.int64)
        for share in shares:
            fields[:, share.at] = self._locate_in(share)
        place = Location(fields[0], fields[1], fields[2], fields[3], at)
        return place.take(0) if isinstance(index, int) else place

    def _locate_in(self, share: _Share) -> tuple[Ints, ...]:
        place, m, n = self.batches[share.member].locate(share.index), share.member, len(self.batches)
        unknown = place.segment == -1
        segment = np.where(unknown, 0, place.segment)
        step = np.where(unknown, share.index, place.step)
        apart = np.where(segment < 0, -2 - ((-2 - segment) * n + m), segment * n + m)
        return place.row * n + m, place.generation, apart, step

    def _shares_of(self, location: Location) -> list[tuple[_Share, Location]]:
        member = np.asarray(location.row) % len(self.batches)
        starts = self._ends() - [len(batch) for batch in self.batches]
        found = []
        for m in np.unique(member):
            at = np.flatnonzero(member == m)
            own = location.take(at)
            index = None if own.index is None else own.index - starts[m]
            place = Location.of(own.row // len(self.batches), own.generation, index)
            found.append((_Share(int(m), at, at), place))
        return found

    def is_current(self, location: Location) -> Bools:
        if np.ndim(location.row) == 0:
            return np.asarray(self.is_current(location.take(np.newaxis))[0])
        current = np.zeros(len(location), np.bool_)
        for share, place in self._shares_of(location):
            current[share.at] = self.batches[share.member].is_current(place)
        return current

    def relocate(self, location: Location) -> Ints:
        index = np.full(len(location), -1)
        for share, place in self._shares_of(location):
            own = self.batches[share.member].relocate(place)
            start = sum(map(len, self.batches[: share.member]))
            index[share.at] = np.where(own < 0, -1, own + start)
        return index

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        split = self._shares_of(location)
        if not split:
            return self._read(np.empty(0, np.int64), keys, flat, metadata)
        place_of = {share.member: place for share, place in split}
        shares = [share for share, _ in split]
        parts = self._each(
            shares, lambda s: self.batches[s.member].get_located(place_of[s.member], keys, flat, metadata)
        )
        whole = [part for part in parts if part is not None]
        return self._merge(shares, whole, keys, flat, metadata) if len(whole) == len(parts) else None

    # Writes

    def append(self, value: Any) -> None:
        """Append to the last member."""
        self.batches[-1].append(value)

    def extend(self, value: Any) -> None:
        """Extend the last member."""
        self.batches[-1].extend(value)

    def append_flattened(self, value: Any) -> None:
        """Append a vector to the last member."""
        self.batches[-1].append_flattened(value)

    def extend_flattened(self, value: Any) -> None:
        """Extend the last member by vectors."""
        self.batches[-1].extend_flattened(value)

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite samples in their members, once all members have accepted their part."""
        writes = self._writes(idx, value)
        for member, index, part in writes:
            self.batches[member]._check_set_at(index, part)
        for member, index, part in writes:
            self.batches[member].set_at(index, part)

    def remove_at(self, idx: Any) -> None:
        """Remove samples from their members, once all members have accepted it."""
        ends = self._ends()
        shares = _split(positions(idx, int(ends[-1])), ends)
        for share in shares:
            self.batches[share.member]._check_remove_at(share.index)
        for share in shares:
            self.batches[share.member].remove_at(share.index)

    def _writes(self, idx: Any, value: Any) -> list[tuple[int, Any, Any]]:
        ends = self._ends()
        index = normalize(idx, int(ends[-1]))
        if isinstance(index, int):
            (share,) = _split(np.array([index]), ends)
            block = as_batch(self.single_space, self._layout, value)
            return [(share.member, int(share.index[0]), unbatch(self.single_space, block, 0))]
        n, block = checked_batch(self.single_space, self._layout, value)
        if n != len(index):
            raise SchemaError(
                f"value: length must equal the index's {len(index)}, got {n}; give one sample each"
            )
        shares = _split(index, ends)
        return [(s.member, s.index, select(self.single_space, block, s.at)) for s in shares]

    def _written(self) -> BatchBase:
        return self.batches[-1]._written()

    def _extend_part(self, block: Any, closes: bool) -> None:
        self.batches[-1]._extend_part(block, closes)

    def _check_set_at(self, idx: Any, value: Any) -> None:
        for member, index, part in self._writes(idx, value):
            self.batches[member]._check_set_at(index, part)

    def _check_remove_at(self, idx: Any) -> None:
        ends = self._ends()
        for share in _split(positions(idx, int(ends[-1])), ends):
            self.batches[share.member]._check_remove_at(share.index)


def _metadata_space(batch: BatchBase) -> spaces.Dict | None:
    """The metadata that members have in common: not the `batch_index` of members that are combined too."""
    space = batch.single_metadata_space
    parts = {} if space is None else {k: s for k, s in space.spaces.items() if k != "batch_index"}
    return make_dict(parts.items()) if parts else None


def _metadata_difference(a: BatchBase, b: BatchBase) -> str | None:
    ours, theirs = _metadata_space(a), _metadata_space(b)
    if ours is None or theirs is None:
        return None if ours is theirs else "metadata in only one of them"
    return first_difference(ours, theirs)


def _split(index: Ints, ends: Ints) -> list[_Share]:
    """Return the share of each member that `index` touches; an empty index is the first one's."""
    if not len(index):
        return [_Share(0, index, index)]
    member = np.searchsorted(ends, index, side="right")
    starts = np.concatenate(([0], ends[:-1]))
    shares = []
    for m in np.unique(member):
        at = np.flatnonzero(member == m)
        shares.append(_Share(int(m), at, index[at] - starts[m]))
    return shares


class _Pool:
    """A thread pool made at first use, once per process: a forked child has none of its parent's threads."""

    def __init__(self, n_members: int) -> None:
        self._n = min(n_members, 32)
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def get(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._n, thread_name_prefix="recollect-combined")
                self._pid = os.getpid()
            return self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pool, (self._n,)

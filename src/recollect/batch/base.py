"""BatchBase: anything that can be indexed into samples of one space.

The class is wide because it is the contract, but everything rests on `__len__` and one getter. The other
reads, the flattened forms, the views and the walks are derived from these two, here and in the modules
beside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from gymnasium import Space, spaces

from recollect.backends import Backend, get_backend, move
from recollect.batch.boundaries import (
    CONTENTION_S,
    Ask,
    Boundaries,
    Found,
    Lapped,
    again_and_again,
    drawn,
    read_frames,
)
from recollect.batch.location import Bools, Ints, Location, Segments, segments_of
from recollect.batch.structure import Key, Keys, as_batch, checked_batch, fill, flat_layout, layout_of, pick
from recollect.errors import ContentionError, EmptyError, ReadOnlyError, SchemaError
from recollect.indexing import is_single, normalize, positions
from recollect.spaces import Layout, as_numpy, as_space, space_at
from recollect.spaces.tree import brief
from recollect.text import refuse_unknown

if TYPE_CHECKING:
    from recollect.batch.subindex import SubIndexedBatch
    from recollect.batch.subitem import SubItemBatch

_WRITERS = (
    "append",
    "extend",
    "set_at",
    "append_flattened",
    "extend_flattened",
    "set_flattened_at",
    "remove_at",
)


class Draws(Protocol):
    """A stream of random indices; `recollect.sampling.IndexStream` is one."""

    def indices(self, bound: int, n: int) -> Ints:
        """Return the next `n` indices, uniform in [0, bound)."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What a batch is and how much it holds; `sources` are the records of the batches that it views."""

    kind: str
    length: int
    is_mutable: bool
    sources: tuple[Any, ...] = ()


_DRAW = "a sampler: rc.StepSampler(batch, batch_size).sample()"
_WRITE = "append(sample) for one sample, extend(batch) for many"
_CALLED_HERE = {
    "sample": _DRAW,
    "sample_batch": _DRAW,
    "add": _WRITE,
    "push": _WRITE,
    "put": _WRITE,
    "store": _WRITE,
    "save": "dumps(path), and rc.ReplayBuffer.load_from(path) to read it again",
    "load": "rc.ReplayBuffer.load_from(path)",
    "size": "len(batch)",
    "is_full": "len(batch) == batch.capacity",
    "reset": "clear()",
    "update_priorities": "a sampler: rc.PrioritizedSampler(batch, batch_size).update_priorities(meta, values)",
}


class _CalledOtherwise:
    """What a name of most other buffers gives: the AttributeError of a missing one that tells what to use.

    (A `__getattr__` of the batch would do, but makes each of its attributes slower to read.)
    """

    def __init__(self, name: str, here: str) -> None:
        self._name, self._here = name, here

    def __get__(self, batch: Any, kind: type) -> Any:
        text = f"{kind.__name__}: has no {self._name}(); use {self._here}"
        raise AttributeError(text, name=self._name, obj=kind if batch is None else batch)


class BatchBase(ABC):
    """The contract of every indexable collection of samples; views and samplers work over any of them.

    A subclass gives `__len__` and `get_at` or `get_flattened_at`, and with a metadata space one of the
    `_with_metadata` getters. What it does not give is derived; writers that it does not give raise
    ReadOnlyError.

    Hooks, for sources that can do better than the default:

    `draw_at(stream, n)`, `draw_into(stream, n, out)`, `draw_column_at(keys, stream, n)`
        Draw `n` uniform indices with replacement and gather them. A native one must take its indices from
        `stream.key` and `stream.counter` as `stream.indices(len(self), n)` would, and advance the counter by
        `n`.
    `bound_draw()`
        A callable that does `draw_at` with fewer steps, for samplers that bind it once.
    `get_column_at(keys, idx)`
        Read one nested field; override it if the others need not be touched.
    `locate(idx)`, `is_current(location)`, `relocate(location)`, `get_located(location, keys, flat, metadata)`
        Samples by row and generation. A source whose indices move (a ring) gives all four: `locate` at one
        moment, `relocate` to today's index or -1, `get_located` to `(data, metadata)`, or None if any of them
        is gone. The defaults are right for a source whose samples never move.
    `_chunks()`, `_expect(idx, keys)`, `_reads_ahead()`
        For sources that are read a chunk at a time: the chunk of each index, and how many chunks are kept, so
        that a shuffled epoch reads each chunk once; the place to be told which samples' chunks come next; and
        how many samples are read at a time if they stay as they are.
    `_extend_part(block, closes)`
        Used by `extend_from`: append the block to the segment that the previous part left open, else start
        one; then end it if `closes`. An empty block with `closes=True` only ends it. All or nothing. If a
        segment is open that no part began, raise SegmentOpenError.
    `_check_set_at(idx, value)`, `_check_remove_at(idx)`
        Raise whatever the write would raise, and change nothing.
    `_identity()`
        An object that is the same for two batches over the same rows.

    Ownership: what a read returns is the caller's; what a write takes is copied before it returns.
    Concurrency: reads are safe from any thread; what writes allow is up to the subclass.

    Example:
        >>> import numpy as np, recollect as rc
        >>> class Squares(rc.BatchBase):
        ...     def __init__(self):
        ...         super().__init__(((1,), "int64"))
        ...     def __len__(self):
        ...         return 5
        ...     def get_flattened_at(self, idx):
        ...         return np.arange(5)[:, None][idx] ** 2
        >>> squares = Squares()
        >>> squares[-1], squares[1:3].tolist()
        (array([16]), [[1], [4]])
    """

    single_space: Space[Any]
    single_metadata_space: spaces.Dict | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a class that gives no getter, whatever its constructor does, and a keyword that it does not have."""
        if not (_gives(cls, "get_at") or _gives(cls, "get_flattened_at")):
            raise TypeError(f"{cls.__name__}: must define get_at or get_flattened_at, got neither; add one")
        if kwargs:
            refuse_unknown(cls.__name__, kwargs, cls.__init__)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # a type checker that saw them would take them for attributes
        vars().update({name: _CalledOtherwise(name, here) for name, here in _CALLED_HERE.items()})

    def __init__(self, single_space: Any, single_metadata_space: Any = None) -> None:
        """Set the space of one sample and of its metadata (a Dict, or None); short forms are accepted."""
        self.single_space = as_space(single_space)
        self.single_metadata_space = self._as_metadata_space(single_metadata_space)

    def _as_metadata_space(self, spec: Any) -> spaces.Dict | None:
        space = None if spec is None else as_space(spec)
        if space is None:
            return None
        name = type(self).__name__
        if not isinstance(space, spaces.Dict):
            kind = type(space).__name__
            raise TypeError(f"{name}: metadata space must be a Dict or None, got {kind}; wrap it in a Dict")
        if not any(_gives(type(self), f"{form}_with_metadata") for form in ("get_at", "get_flattened_at")):
            raise TypeError(f"{name}: must define get_at_with_metadata, got a metadata space only; add it")
        return space

    # What it is

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples there are now."""

    @property
    def backend(self) -> Backend:
        """The backend whose arrays reads return."""
        return get_backend(None)

    @property
    def device(self) -> Any:
        """Where the arrays that reads return are."""
        return self.backend.default_device

    @property
    def is_mutable(self) -> bool:
        """Whether any writer works."""
        return any(_gives(type(self), writer) for writer in _WRITERS)

    def stats(self) -> Any:
        """Return a frozen record of what this is and holds."""
        sources = tuple([source.stats() for source in self._sources()])
        return BatchStats(type(self).__name__, len(self), self.is_mutable, sources)

    def _told_length(self) -> str:
        """How much there is, for a person; a closed one can still be shown."""
        try:
            n = len(self)
        except RuntimeError:
            return "closed"
        return f"{n:,} sample{'s' if n != 1 else ''}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._told_length()}: {brief(self.single_space)})"

    def get_segments(self) -> Segments | None:
        """Return sorted, disjoint, half-open index pairs, or None when boundaries are unknown."""
        return None

    # Reads

    def get_at(self, idx: Any) -> Any:
        """Fetch samples in their structured form."""
        return self._unflatten(self.get_flattened_at(idx))

    def get_flattened_at(self, idx: Any) -> Any:
        """Fetch samples as vectors, `(D,)` or `(n, D)`."""
        return self._flatten(self.get_at(idx), is_single(idx))

    def get_at_with_metadata(self, idx: Any) -> tuple[Any, dict[str, Any] | None]:
        """Fetch samples together with their metadata, None without a metadata space."""
        if self.single_metadata_space is None:
            return self.get_at(idx), None
        flat, metadata = self.get_flattened_at_with_metadata(idx)
        return self._unflatten(flat), metadata

    def get_flattened_at_with_metadata(self, idx: Any) -> tuple[Any, dict[str, Any] | None]:
        """Fetch vectors together with their metadata, None without a metadata space."""
        if self.single_metadata_space is None:
            return self.get_flattened_at(idx), None
        data, metadata = self.get_at_with_metadata(idx)
        return self._flatten(data, is_single(idx)), metadata

    def __getitem__(self, idx: Any) -> Any:
        """Return `get_at(idx)`."""
        return self.get_at(idx)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples that exist at the first `next`, but for any overwritten before their turn."""
        from recollect.batch.walk import iterate

        return iterate(self)

    @cached_property
    def _layout(self) -> Layout | None:
        return layout_of(self.single_space)

    @property
    def _flat_layout(self) -> Layout:
        return self._flat_layout_at(())

    def _flat_layout_at(self, keys: Keys) -> Layout:
        layout = self._flat_layouts.get(keys)
        if layout is None:
            layout = self._flat_layouts[keys] = flat_layout(space_at(self.single_space, keys))
        return layout

    @cached_property
    def _flat_layouts(self) -> dict[Keys, Layout]:
        return {}

    def _flatten(self, data: Any, single: bool, keys: Keys = ()) -> Any:
        layout = self._flat_layout_at(keys)
        flat = layout.flatten_one(data) if single else layout.flatten_batch(data)
        return move(flat, self.backend, self.device)

    def _unflatten(self, flat: Any) -> Any:
        vectors = as_numpy(flat)
        layout = self._flat_layout
        data = layout.unflatten_one(vectors) if vectors.ndim == 1 else layout.unflatten_batch(vectors)
        return move(data, self.backend, self.device)

    # Writes

    def append(self, value: Any) -> None:
        """Add one sample."""
        if not _gives(type(self), "append_flattened"):
            raise self._read_only("append")
        self.append_flattened(self._flat_layout.flatten_one(value))

    def extend(self, value: Any) -> None:
        """Add a block of samples; an empty one changes nothing."""
        if not _gives(type(self), "extend_flattened"):
            raise self._read_only("extend")
        self.extend_flattened(self._flat_layout.flatten_batch(value))

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite existing samples; of duplicate indices the last value wins."""
        if not _gives(type(self), "set_flattened_at"):
            raise self._read_only("set_at")
        index = normalize(idx, len(self))
        layout = self._flat_layout
        self.set_flattened_at(
            index, layout.flatten_one(value) if isinstance(index, int) else layout.flatten_batch(value)
        )

    def remove_at(self, idx: Any) -> None:
        """Remove samples; the others keep their order."""
        raise self._read_only("remove_at")

    def append_flattened(self, value: Any) -> None:
        """Add one sample, given as a vector."""
        if not _gives(type(self), "append"):
            raise self._read_only("append_flattened")
        self.append(self._flat_layout.unflatten_one(as_numpy(value)))

    def extend_flattened(self, value: Any) -> None:
        """Add a block of samples, given as vectors."""
        if not _gives(type(self), "extend"):
            raise self._read_only("extend_flattened")
        self.extend(self._flat_layout.unflatten_batch(as_numpy(value)))

    def set_flattened_at(self, idx: Any, value: Any) -> None:
        """Overwrite existing samples, given as vectors."""
        if not _gives(type(self), "set_at"):
            raise self._read_only("set_flattened_at")
        index, flat = normalize(idx, len(self)), as_numpy(value)
        layout = self._flat_layout
        self.set_at(
            index, layout.unflatten_one(flat) if isinstance(index, int) else layout.unflatten_batch(flat)
        )

    def __setitem__(self, idx: Any, value: Any) -> None:
        """Do `set_at(idx, value)`."""
        self.set_at(idx, value)

    def __delitem__(self, idx: Any) -> None:
        """Do `remove_at(idx)`."""
        self.remove_at(idx)

    def extend_from(self, other: BatchBase, chunk_size: int = 8, tqdm: bool = False) -> None:
        """Copy what `other` holds now, `chunk_size` samples at a time; its segments stay segments.

        An open segment arrives closed; without segments the call is one. Each chunk is all or nothing: an
        error carries the number of samples already here as `.copied`. Samples that `other` loses before their
        turn are left out, and the segment that held them ends there. `tqdm=True` shows a progress bar.
        """
        from recollect.batch.extend_from import copy_into

        copy_into(self, other, chunk_size, tqdm)

    def _extend_part(self, block: Any, closes: bool) -> None:
        self.extend(block)

    def _check_set_at(self, idx: Any, value: Any) -> None:
        if not (self.is_mutable and _gives(type(self), "set_at")):
            raise self._read_only("set_at")
        index = normalize(idx, len(self))
        if isinstance(index, int):
            as_batch(self.single_space, self._layout, value)
            return
        n, _ = checked_batch(self.single_space, self._layout, value)
        if n != len(index):
            raise SchemaError(
                f"value: length must equal the index's {len(index)}, got {n}; give one sample each"
            )

    def _check_remove_at(self, idx: Any) -> None:
        if not (self.is_mutable and _gives(type(self), "remove_at")):
            raise self._read_only("remove_at")
        positions(idx, len(self))

    def _read_only(self, verb: str) -> ReadOnlyError:
        name = type(self).__name__
        source = next(iter(self._sources()), None)
        remedy = "copy it into a ReplayBuffer"
        if source is not None:
            remedy = f"change the {type(source).__name__} it reads"
        return ReadOnlyError(f"{name}: must not be changed this way, got {verb}(); {remedy}")

    # Views

    def get_slice(self, idx: Any) -> SubIndexedBatch:
        """Return a lazy view of the samples at `idx`."""
        from recollect.batch.subindex import SubIndexedBatch

        return SubIndexedBatch(self, idx)

    def get_column(self, nested_keys: Key | Sequence[Key]) -> SubItemBatch:
        """Return a lazy view of one nested field; a plain string is one key."""
        from recollect.batch.subitem import SubItemBatch

        return SubItemBatch(self, nested_keys)

    # Hooks with defaults (see the class docstring)

    def draw_at(self, stream: Draws, n: int) -> Any:
        """Draw `n` uniform indices with replacement and gather them; again if the source shrank meanwhile."""
        return self._draw(stream, n)[0]

    def bound_draw(self) -> Callable[[Any, int], Any]:
        """Return what `draw_at` does, for many calls; it may return None instead of raising EmptyError."""
        return self.draw_at

    def draw_into(self, stream: Draws, n: int, out: Any) -> Any:
        """Draw as `draw_at`, into the arrays `out`, and return them."""
        return fill(out, self.draw_at(stream, n))

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        """Draw as `draw_at`, but gather one nested field."""
        return self._draw(stream, n, keys)[0]

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        """Read one nested field of some samples."""
        return pick(self.get_at(idx), keys)

    def locate(self, idx: Any) -> Location:
        """Return where samples are: their row, generation, segment and step, all at one moment."""
        index = np.asarray(normalize(idx, len(self)), np.int64)
        segment, step = segments_of(index, self.get_segments())
        return Location(index[()], np.zeros_like(index)[()], segment[()], step[()], index[()])

    def is_current(self, location: Location) -> Bools:
        """Tell which rows still hold the samples that were located there."""
        row = np.asarray(location.row)
        return np.asarray((row >= 0) & (row < len(self)) & (np.asarray(location.generation) == 0))

    def relocate(self, location: Location) -> Ints:
        """Return the index at which each located sample is now, -1 where it is gone."""
        if self._moves:
            name = type(self).__name__
            raise NotImplementedError(f"{name}: must override relocate, got only locate; see BatchBase")
        return np.where(self.is_current(location), location.row, -1)

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> tuple[Any, dict[str, Any] | None] | None:
        """Read located samples with a batch axis, as `(data, metadata)`; None if any of them is gone.

        The default reads by index and looks again whether the samples stayed there.
        """

        def attempt() -> tuple[Any, dict[str, Any] | None] | None:
            index = self.relocate(location)
            if (index < 0).any():
                return None
            try:
                found = self._read(index, keys, flat, metadata)
            except IndexError:
                raise Lapped from None
            if not np.array_equal(self.relocate(location), index):
                raise Lapped
            return found

        return again_and_again(self, attempt)

    def _identity(self) -> object:
        return self

    def _chunks(self) -> tuple[Ints, int] | None:
        """The chunk that each index lies in, and how many can be held; None where samples are read one by one."""
        return None

    def _expect(self, idx: Ints, keys: Keys = ()) -> None:
        """Take note that all chunks of these samples, or one nested field of them, are read soon."""

    def _reads_ahead(self) -> int:
        """How many samples an epoch may read at a time for later batches; 0 where a batch must be a read of its own."""
        return 0

    # What the views share

    def _sources(self) -> tuple[BatchBase, ...]:
        """The batches that this one reads; none for a source."""
        return ()

    def _written(self) -> BatchBase:
        """The batch that appended samples end up in."""
        return self

    @property
    def _moves(self) -> bool:
        """Whether samples may change their index under a reader."""
        return _gives(type(self), "locate")

    def _existing(self) -> Sequence[int] | Ints:
        """The indices at which there is a sample now."""
        return range(len(self))

    def _located(self) -> tuple[Sequence[int] | Ints, Location | None]:
        """What exists now, by index and, if samples may move, by place: at one moment."""
        order = self._existing()
        if not self._moves or not len(order):
            return order, None
        return order, self.locate(np.arange(len(order)) if isinstance(order, range) else np.asarray(order))

    def _boundaries(self) -> Boundaries:
        """Where the runs of this batch's samples begin and end."""
        return Boundaries(self)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        """Read samples with their neighbours; see `recollect.batch.boundaries`. A source may do it in one go."""
        return read_frames(self, ask, keys, flat)

    def _read(
        self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> tuple[Any, dict[str, Any] | None]:
        """Read in any of the forms there are; the one way in which views read their source."""
        if not keys and metadata:
            return self.get_flattened_at_with_metadata(idx) if flat else self.get_at_with_metadata(idx)
        if not keys:
            return self.get_flattened_at(idx) if flat else self.get_at(idx), None
        # The index goes on as it came: only the source can count at the moment it reads.
        found: dict[str, Any] | None = None
        if metadata and self.single_metadata_space is not None:
            whole, found = self.get_at_with_metadata(idx)
            data = pick(whole, keys)
        else:
            data = self.get_column_at(keys, idx)
        if flat:
            data = self._flatten(data, is_single(idx), keys)
        return data, found

    def _draw(
        self, stream: Draws, n: int, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> tuple[Any, dict[str, Any] | None]:
        def draw(size: int) -> tuple[Any, dict[str, Any] | None]:
            if not size:
                raise self._empty()
            return self._read(self._pick(stream, size, n), keys, flat, metadata)

        return drawn(self, draw)

    def _pick(self, stream: Draws, size: int, n: int) -> Ints:
        """Draw the indices of `n` samples, uniform over those that exist among the first `size`."""
        return stream.indices(size, n)

    def _empty(self) -> EmptyError:
        return EmptyError(
            f"{type(self).__name__}: must hold samples to draw from, got none; append some first"
        )

    def _contention(self) -> ContentionError:
        name = type(self).__name__
        return ContentionError(
            f"{name}: read must end within {CONTENTION_S} s, got lapped by writers all that time; "
            "read fewer samples at once or give the buffer more capacity"
        )


BatchBase.__new__.__wrapped__ = BatchBase.__init__  # type: ignore[attr-defined]  # for help() and editors


def _gives(cls: type[BatchBase], name: str) -> bool:
    """Tell whether a subclass defines a method itself."""
    return getattr(cls, name) is not getattr(BatchBase, name)

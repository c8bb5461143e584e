"""BatchSampler: the contract of everything that chooses samples and gathers them into batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import checks
from recollect._core import Turn
from recollect.backends import Backend
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import drawn
from recollect.batch.combined import CombinedBatch
from recollect.batch.location import Location
from recollect.batch.structure import fill
from recollect.batch.to_backend import ToBackendOrDeviceBatch
from recollect.batch.transformed import TransformedBatch
from recollect.batch.view import Read, View, as_source
from recollect.errors import class_name
from recollect.interrupts import is_entered
from recollect.replay import RateLimiter, ReplayBuffer
from recollect.replay.limiter import Admission
from recollect.sampling.epoch import Epoch
from recollect.sampling.stream import IndexStream, Ints, mix
from recollect.spaces import batch_space
from recollect.spaces.tree import brief


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What a sampler is and has done; `skipped` samples were overwritten before their turn in an epoch."""

    kind: str
    length: int
    batch_size: int
    batches: int
    skipped: int
    source: Any


class BatchSampler(View):
    """A read-only batch over `data` that draws mini-batches from it; subclasses say how.

    A subclass assigns `self.data` and gives `_draw_index()`, which returns the indices of one batch. Getters
    pass on to the source, `len` counts it, and iterating is one epoch. `rng` is a numpy Generator for
    transformations, restarted with the index stream by `manual_seed`, which also calls `manual_seed` of every
    transformation in the source that has one.

    Ownership: holds no data; a batch is the caller's own.
    Concurrency: one thread at a time, a second raises RuntimeError; several samplers may share a source.

    Example:
        >>> import numpy as np, recollect as rc
        >>> class Newest(rc.BatchSampler):
        ...     def __init__(self, data, batch_size):
        ...         super().__init__(data.single_space, data.single_metadata_space, batch_size)
        ...         self.data = data
        ...     def _draw_index(self):
        ...         return np.arange(len(self) - self.batch_size, len(self))
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=8)
        >>> buf.extend(np.arange(6))
        >>> Newest(buf, 2).sample()
        array([4, 5])
    """

    batch: Any
    _data: Any
    _wanted: tuple[Any, str | Backend | None] = (None, None)
    draws_in_parent = False
    """Whether only one process can draw (priorities): MultiprocessingSampler then calls `_draw_places` itself."""

    def __init__(self, single_space: Any, single_metadata_space: Any = None, batch_size: int = 1) -> None:
        """Set the spaces of one sample and how many a batch has; `data` is assigned by the subclass."""
        BatchBase.__init__(self, single_space, single_metadata_space)
        self.batch_size = checks.count("batch_size", batch_size, advice="pass how many to draw")
        self.batch = self._data = _NoSource(type(self).__name__)
        self._limiter: RateLimiter | None = None
        self._stream = IndexStream()
        self._rng: np.random.Generator | None = None
        self._rng_seed = self._stream.seed
        self._skipped = 0
        self._epoch: Epoch | None = None
        self._resumed: Epoch | None = None
        self._lock()

    def _lock(self, batches: int = 0) -> None:
        # Much faster than a Lock, and a native draw takes it by itself.
        name = type(self).__name__
        self._turn = Turn(
            f"{name}: must be used by one thread at a time, got a second; make one sampler each", is_entered
        )
        self._turn.batches = batches

    @property
    def _batches(self) -> int:
        return self._turn.batches

    @_batches.setter
    def _batches(self, n: int) -> None:
        self._turn.batches = n

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the turn: a copy has its own."""
        kept = {key: value for key, value in vars(self).items() if key not in self._unpicklable()}
        return {**kept, "_batches": self._batches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock(vars(self).pop("_batches"))
        self._limiter = limiter_of(self._data) if isinstance(self._data, BatchBase) else None

    def _unpicklable(self) -> tuple[str, ...]:
        return ("_turn", "_limiter")

    # The source

    @property
    def data(self) -> BatchBase:
        """The batch that samples are drawn from."""
        return self._data if isinstance(self._data, BatchBase) else self._data.refuse()

    @data.setter
    def data(self, data: BatchBase) -> None:
        self._bind(data, *self._wanted)

    def _bind(self, data: BatchBase, device: Any, backend: str | Backend | None = None) -> None:
        self._data = unweighted(data, type(self).__name__)
        self._limiter = limiter_of(data)
        self.batch = self._moved(data, device, backend)

    def _moved(self, data: BatchBase, device: Any, backend: str | Backend | None) -> BatchBase:
        """`data` with the arrays that the caller wants, and note which these are."""
        self._wanted = device, backend
        is_as_wanted = device is None and backend is None
        return data if is_as_wanted else ToBackendOrDeviceBatch(data, backend, device)

    def _located(self) -> Any:
        return self.batch._located()

    def _drawn_rows(self) -> tuple[Any, Any] | None:
        """Return the core's rows and codec if a batch is nothing but uniform draws of whole rows, else None."""
        return None

    @property
    def sampled_space(self) -> Space[Any]:
        """The space of one batch."""
        return batch_space(self.single_space, self.batch_size)

    @property
    def sampled_metadata_space(self) -> spaces.Dict | None:
        """The space of one batch's metadata, or None."""
        if self.single_metadata_space is None:
            return None
        space = batch_space(self.single_metadata_space, self.batch_size)
        return space if isinstance(space, spaces.Dict) else None

    def stats(self) -> Any:
        """Return a frozen record of what was drawn and skipped."""
        name = type(self).__name__
        return SamplerStats(name, len(self), self.batch_size, self._batches, self.skipped, self._data.stats())

    @property
    def skipped(self) -> int:
        """How many samples epochs have left out because they were overwritten before their turn."""
        return self._skipped

    def __repr__(self) -> str:
        backend = "" if self._wanted[1] is None else f", {self.backend.name}"
        length = self._told_length() if isinstance(self._data, BatchBase) else "no data yet"
        return f"{type(self).__name__}({self.batch_size} of {length}{backend}: {brief(self.single_space)})"

    # Draws

    def sample(self, *, out: Any = None) -> Any:
        """Draw a batch, into the arrays `out` if they are given."""
        data = self._sample(False, False)[0]
        return data if out is None else fill(out, data)

    def sample_flat(self) -> Any:
        """Draw a batch of flattened samples."""
        return self._sample(True, False)[0]

    def sample_with_metadata(self) -> Read:
        """Draw a batch together with its metadata."""
        return self._sample(False, True)

    def sample_flat_with_metadata(self) -> Read:
        """Draw a batch of flattened samples together with its metadata."""
        return self._sample(True, True)

    def sample_index(self) -> Ints:
        """Draw the indices of a batch, and gather nothing."""
        with self._turn, self._drawing(self.batch_size):
            return self._draw_index()

    def _drawing(self, n: int) -> AbstractContextManager[Admission | None]:
        """A block that draws `n` samples: it waits for the source's limiter and counts unless it raises."""
        return nullcontext() if self._limiter is None else self._limiter.drawing(n)

    def _unlimit(self) -> None:
        """Draw without waiting or counting: somebody else does, where batches are handed out."""
        self._limiter = None

    def _draw_index(self) -> Ints:
        raise NotImplementedError(
            f"{type(self).__name__}: must define _draw_index, got none; see BatchSampler"
        )

    def _draw_places(self) -> tuple[Location, dict[str, Any] | None]:
        """Draw where a batch is, and what metadata the draw has; given by a class that `draws_in_parent`."""
        raise NotImplementedError(
            f"{type(self).__name__}: must define _draw_places, got none; see BatchSampler"
        )

    def _labels_at(self, places: dict[str, Any]) -> dict[str, Any] | None:
        """What metadata the samples at some places have that only the process that draws can tell."""
        return None

    def _sample(self, flat: bool, metadata: bool) -> Read:
        with self._turn:
            if self._limiter is None:
                found = self._sample_once(flat, metadata)
            else:
                with self._drawing(self.batch_size):
                    found = self._sample_once(flat, metadata)
            self._batches += 1
            return found

    def _sample_once(self, flat: bool, metadata: bool) -> Read:
        found: Read = drawn(self._data, lambda size: self.batch._read(self._draw_index(), (), flat, metadata))
        return found

    # Epochs

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch."""
        return self.epoch_iter()

    def epoch_iter(self, *, drop_last: bool = False) -> Iterator[Any]:
        """Yield every sample that exists at the first `next` once, in batches, in a fresh permutation.

        The last batch may be short; `drop_last` drops it. After `load_state_dict` inside an epoch the next
        iterator yields the rest of it.
        """
        for data, _ in self._run_epoch(drop_last, False, False):
            yield data

    def epoch_iter_with_metadata(self, *, drop_last: bool = False) -> Iterator[Read]:
        """Yield an epoch as `epoch_iter`, with metadata."""
        yield from self._run_epoch(drop_last, False, True)

    def epoch_flat_iter(self, *, drop_last: bool = False) -> Iterator[Any]:
        """Yield an epoch as `epoch_iter`, flattened."""
        for data, _ in self._run_epoch(drop_last, True, False):
            yield data

    def epoch_flat_iter_with_metadata(self, *, drop_last: bool = False) -> Iterator[Read]:
        """Yield an epoch as `epoch_iter`, flattened and with metadata."""
        yield from self._run_epoch(drop_last, True, True)

    @property
    def _epoch_batch(self) -> BatchBase:
        """What an epoch walks over and reads from."""
        source: BatchBase = self.batch
        return source

    def _run_epoch(self, drop_last: bool, flat: bool, metadata: bool) -> Iterator[Read]:
        epoch = self._begin_epoch()
        try:
            while (found := self._next_of(epoch, drop_last, flat, metadata)) is not None:
                yield found
        finally:
            self._end_epoch(epoch)

    def _begin_epoch(self) -> Epoch:
        with self._turn:
            epoch = self._resumed or Epoch.start(self._epoch_batch, self._stream)
            self._epoch, self._resumed = epoch, None
            return epoch

    def _next_of(self, epoch: Epoch, drop_last: bool, flat: bool, metadata: bool) -> Read | None:
        with self._turn:
            before = epoch.skipped
            n = epoch.next_size(self.batch_size, drop_last)
            with self._drawing(n) as admission:
                found = epoch.take(self.batch_size, drop_last, flat, metadata)
                if admission is not None:
                    admission.keep(epoch.taken)  # the others were gone before their turn
            self._skipped += epoch.skipped - before
            self._batches += found is not None
            return found

    def _end_epoch(self, epoch: Epoch) -> None:
        if self._epoch is epoch:
            self._epoch = None

    # Seeds and state

    @property
    def rng(self) -> np.random.Generator:
        """A generator for transformations, restarted with the index stream."""
        if self._rng is None:  # made when asked for: restarting it must cost a worker nothing
            self._rng = _generator(self._rng_seed)
        return self._rng

    def manual_seed(self, seed: int) -> None:
        """Restart the index stream and the transformations' randomness, and forget a resumed epoch."""
        with self._turn:
            self._seed(seed)

    def _seed(self, seed: int) -> None:
        stream = IndexStream(seed)
        self._stream = stream
        self._rng, self._rng_seed = None, stream.seed
        self._epoch = self._resumed = None
        for k, transformation in enumerate(self._transformations("manual_seed")):
            transformation.manual_seed(mix(stream.seed + k + 1) >> 1)

    def _transformations(self, method: str) -> list[Any]:
        found = [t for t in _transformations_in(self._data) if callable(getattr(t, method, None))]
        return list({id(t): t for t in found}.values())

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and arrays from which the next draws go on, inside an epoch too."""
        epoch = self._epoch or self._resumed
        return {
            **self._configuration(),
            "views": _views_of(self._data),
            "stream": self._stream.state_dict(),
            "rng": _copied(self.rng.bit_generator.state),
            "transformations": [t.state_dict() for t in self._transformations("state_dict")],
            "epoch": None if epoch is None else epoch.state_dict(),
            "batches": self._batches,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        A state of another configuration, or one that is damaged, raises ValueError, and nothing is changed.
        """
        name = type(self).__name__
        if not isinstance(state, dict):
            raise ValueError(f"{name}: state must be what state_dict() returned, got {class_name(state)}")
        self._check_configuration(state)
        with self._turn:
            try:
                self._load(state)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{name}: state must be what state_dict() returned, got another ({error!r}); it is damaged"
                ) from error

    def _load(self, state: dict[str, Any]) -> None:
        """Take over a state: first all that may fail, then the change."""
        epoch = state["epoch"]
        resumed = None if epoch is None else Epoch.restore(self._epoch_batch, epoch)
        stream, rng = IndexStream.restored(state["stream"]), _restored_generator(state["rng"])
        batches, skipped = counted_in(state)
        transformations = self._transformations("load_state_dict")
        before = [t.state_dict() for t in transformations]
        try:
            for t, saved in zip(transformations, state["transformations"]):
                t.load_state_dict(saved)
        except BaseException:
            for t, saved in zip(transformations, before):
                t.load_state_dict(saved)
            raise
        self._stream, self._rng = stream, rng
        self._epoch, self._resumed = None, resumed
        self._batches, self._skipped = batches, skipped

    def _configuration(self) -> dict[str, Any]:
        """What must be equal for a state to be loaded."""
        return {"kind": type(self).__name__, "batch_size": self.batch_size}

    def _check_configuration(self, state: dict[str, Any]) -> None:
        name = type(self).__name__
        for key, value in self._configuration().items():
            if state.get(key) != value:
                given = state.get(key)
                raise ValueError(
                    f"{name}: {key} must be {value!r} to load this state, got {given!r}; make it so"
                )
        views = _views_of(self._data)
        if state.get("views", views) != views:  # older states do not say
            raise ValueError(
                f"{name}: data must be seen through {state['views']} to load this state, got {views}; give the sampler "
                "the views that it had"
            )


def _views_of(data: Any) -> list[str]:
    """The kinds of views through which samples are seen, outermost first; not those that change values alone."""
    found = []
    while isinstance(data, View):
        if not isinstance(data, ToBackendOrDeviceBatch | TransformedBatch):
            found.append(type(data).__name__)
        data = data.batch
    return found


class _NoSource:
    """Stands where the source of a sampler will be; whatever is asked of it says what is missing.

    (A `__getattr__` of the sampler itself would do, but makes each of its attributes slower to read.)
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self) -> Any:
        raise RuntimeError(f"{self._name}: data must be assigned first, got none; set .data")

    def __len__(self) -> int:
        return int(self.refuse())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse()


def _transformations_in(batch: BatchBase) -> Iterator[Any]:
    """Yield the transformations of every view under `batch`, outermost first."""
    if isinstance(batch, TransformedBatch):
        yield from (t for t in (batch.transformation, batch.metadata_transformation) if t is not None)
    for source in batch._sources():
        yield from _transformations_in(source)


def unweighted(data: Any, name: str) -> BatchBase:
    """Return `data`, or raise TypeError if it is no batch, or draws by priorities that would not be used."""
    if isinstance(data, BatchSampler) and data.draws_in_parent:
        inner = type(data).__name__
        raise TypeError(
            f"{name}: data must be a batch to draw from, got a {inner}, whose priorities would not be used; write "
            f"{inner}({name}(data, ...), batch_size)"
        )
    return as_source(data)


def limiter_of(batch: BatchBase) -> RateLimiter | None:
    """The limiter of the buffer that a batch draws from; ValueError if it draws from several and one has any."""
    found = [limiter for source in batch._sources() if (limiter := limiter_of(source)) is not None]
    if found and isinstance(batch, CombinedBatch):
        raise ValueError(
            "data: a CombinedBatch cannot say beforehand how much it draws from each, got one with a limiter; "
            "make a sampler for each buffer"
        )
    if isinstance(batch, ReplayBuffer):
        return batch.limiter
    return found[0] if found else None


def _generator(seed: int) -> np.random.Generator:
    # Philox: its state is words and arrays of words, which any file format can hold.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 0x7261_6E64])))


def counted_in(state: dict[str, Any]) -> tuple[int, int]:
    """The batches that a state says were drawn, and the samples skipped; ValueError if they cannot be."""
    batches, skipped = int(state["batches"]), int(state["skipped"])
    if not (0 <= batches < 1 << 62 and 0 <= skipped < 1 << 62):
        raise ValueError(f"batches and skipped must be counts, got {batches} and {skipped}")
    return batches, skipped


def _restored_generator(state: Any) -> np.random.Generator:
    found = _generator(0)
    if int(state["buffer_pos"]) < 0:  # it is an index, which numpy does not check
        raise ValueError(f"rng: buffer_pos must be at least 0, got {state['buffer_pos']}; it is damaged")
    found.bit_generator.state = state
    return found


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state

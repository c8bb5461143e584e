"""PrioritizedSampler: steps or sequences, in proportion to what they can still teach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import numpy as np
from gymnasium import spaces

from recollect import checks
from recollect.backends import Backend, move
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import CONTENTION_S, Lapped, again_and_again, counted, is_same
from recollect.batch.location import Ints, Location
from recollect.batch.structure import Keys, fill, unbatch
from recollect.batch.to_backend import ToBackendOrDeviceBatch
from recollect.batch.transformed import TransformedBatch
from recollect.batch.view import Read, View, as_source
from recollect.errors import EmptyError
from recollect.indexing import is_single
from recollect.sampling.base import BatchSampler, SamplerStats
from recollect.sampling.priorities import Drawn, Floats, RowLedger, ledger_of
from recollect.sampling.stream import mix
from recollect.spaces import as_numpy, space_at

LABELS = {
    "row": ((), "int64"),
    "generation": ((), "int64"),
    "probability": ((), "float32"),
    "weight": ((), "float32"),
}


@dataclass(frozen=True, slots=True)
class PrioritizedStats(SamplerStats):
    """Also what became of priorities: `applied`, or `late`, for samples that were gone when theirs came."""

    applied: int
    late: int
    top: float


class PrioritizedSampler(BatchSampler):
    """Draws samples of `data` in proportion to `(priority + eps)**alpha`, one in each of `batch_size` equal parts.

    Metadata is `row, generation, probability, weight` besides the source's own; the weight is `(N·P)**-beta` over the
    largest that any sample has. New samples, whoever wrote them, have the largest priority so far (at first 1).
    `update_priorities(meta, values)` gives those drawn their own. Sources of packed rows, and views that show them one
    by one, cost O(log capacity) a sample and what was written since the last call; others a pass when they change.
    Over a SequenceSampler every sequence that it could draw has a priority; its own `batch_size` plays no part.
    `backend="torch"` (or `"jax"`) gives tensors.

    Ownership: a batch is one copy, the caller's own; of what was dropped up to two are kept to be filled again.
    Concurrency: one thread at a time, a second raises RuntimeError; priorities are this sampler's, writers anywhere.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"obs": ((3,), "float32")}, capacity=100)
        >>> buf.extend({"obs": np.zeros((50, 3), "float32")})
        >>> sampler = rc.PrioritizedSampler(buf, 16, seed=0)
        >>> batch, meta = sampler.sample_with_metadata()
        >>> sampler.update_priorities(meta, np.linspace(0.0, 2.0, 16))
        16
        >>> sampler.sample_with_metadata()[1]["weight"].max() <= 1
        np.True_
    """

    draws_in_parent = True

    def __init__(
        self,
        data: BatchBase,
        batch_size: int,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        seed: int | None = None,
        device: Any = None,
        *,
        backend: str | Backend | None = None,
    ) -> None:
        """Draw from `data`; nothing is read yet. `alpha=0` is uniform; `beta` may be assigned."""
        as_source(data)
        self.alpha, self.eps = _weight("alpha", alpha), _weight("eps", eps)
        self.beta = beta
        self._applied = self._late = 0
        super().__init__(data.single_space, _labelled_space(data), batch_size)
        self._bind(data, device, backend)
        if seed is not None:
            self._seed(seed)

    @property
    def beta(self) -> float:
        """How much of the bias weights take back: 0 none, 1 all."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = _weight("beta", beta)

    def _bind(self, data: BatchBase, device: Any, backend: str | Backend | None = None) -> None:
        self._ledger = ledger_of(data, self.alpha, self.eps)
        super()._bind(data, device, backend)
        self._source = self.batch  # the data, on its device
        self.batch = _WithPriorities(self._source, self)
        at_home = self._source.backend.name == "numpy"
        self._elsewhere = None if at_home else (self._source.backend, self._source.device)
        self._rows = self._ledger if isinstance(self._ledger, RowLedger) else None
        self._shapes = _outward_views(self._source)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_priorities": self._ledger.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_priorities")
        super().__setstate__(state)
        self._ledger = ledger_of(self._data, self.alpha, self.eps)
        self._ledger.load(saved)
        self._rows = self._ledger if isinstance(self._ledger, RowLedger) else None

    def _unpicklable(self) -> tuple[str, ...]:
        return (*super()._unpicklable(), "_ledger", "_rows")

    # Draws

    def sample(self, *, out: Any = None) -> Any:
        """Draw a batch, into the arrays `out` if they are given."""
        data = self._sample(False, False)[0]
        return data if out is None else fill(out, data)

    def _sample_once(self, flat: bool, metadata: bool) -> Read:
        if self._rows is None or self._shapes is None or flat:
            read, *labels = self._drawn(lambda found: self._gathered(found, flat, metadata))
            return read[0], self._labels(read[1], *labels) if metadata else None
        # The fast path: rows are drawn and gathered in one native call, which also draws again what is overwritten.
        found = self._rows.next(self._stream, self.batch_size, self._beta)
        if found is None:
            raise self._nothing()
        if metadata and not self._shapes and self._elsewhere is None:
            return found
        data, labels = found
        for view in self._shapes:
            data = view._outward((data, None), (), False)[0]
        return data, self._labels(None, **labels) if metadata else None

    def _draw_places(self) -> tuple[Location, dict[str, Any] | None]:
        """Draw where a batch is, for workers that gather it."""
        stream, n = self._stream, self.batch_size
        found = self._ledger.draw(stream.key, stream.counter, n, self._beta)
        if found is None:
            raise self._nothing()
        stream.counter += n
        row, generation, index, probability, weight = found
        return Location.of(row, generation, index), self._labels(None, row, generation, probability, weight)

    def _gathered(self, found: Drawn, flat: bool, metadata: bool) -> Any:
        row, generation, index, probability, weight = found
        read = self._source.get_located(Location.of(row, generation, index), (), flat, metadata)
        return None if read is None else (read, row, generation, probability, weight)

    def _draw_index(self) -> Ints:
        found: Ints = self._drawn(self._found)
        return found

    def _found(self, found: Drawn) -> Ints | None:
        row, generation, hint, _, _ = found
        index = self._data.relocate(Location.of(row, generation, hint))
        return None if (index < 0).any() else index

    def _drawn(self, use: Callable[[Drawn], Any]) -> Any:
        """Draw until `use` can make something of it: until none was overwritten since."""
        stream, n, end = self._stream, self.batch_size, 0.0
        for again in count():
            found = self._ledger.draw(_key(stream.key, again), stream.counter, n, self._beta)
            if found is None:
                raise self._nothing()
            if (used := use(found)) is not None:
                stream.counter += n
                return used
            end = end or monotonic() + CONTENTION_S
            if monotonic() > end:
                raise self._contention()
        return None

    def _labels(
        self, own: Any, row: Ints, generation: Ints, probability: Floats, weight: Floats
    ) -> dict[str, Any]:
        if self._elsewhere is not None:
            probability, weight = move((probability, weight), *self._elsewhere)
        labels = {"row": row, "generation": generation, "probability": probability, "weight": weight}
        return labels if own is None else {**own, **labels}

    def _labels_at(self, places: dict[str, Any]) -> dict[str, Any]:
        if "row" not in places:  # samples that never move are known by index alone
            place = self._source.locate(places["index"])
            places = {"row": place.row, "generation": place.generation}
        row, generation = (np.ascontiguousarray(places[name], np.int64) for name in ("row", "generation"))
        return self._labels(None, row, generation, *self._ledger.look(row, generation, self._beta))

    def _nothing(self) -> EmptyError:
        if not len(self._data._existing()):
            return self.data._empty()
        return EmptyError(
            "PrioritizedSampler: some sample must have a mass above zero, got none; update priorities or pass eps"
        )

    # Priorities

    def update_priorities(self, meta: Mapping[str, Any], values: Any) -> int:
        """Give drawn samples new priorities; return how many still exist and took them.

        `meta` is what `sample_with_metadata` returned (its `row` and `generation`), `values` one number each, of any
        backend. Those of samples overwritten or removed meanwhile are dropped and counted in `stats().late`. A
        negative or non-finite value raises ValueError, and none is applied.
        """
        with self._turn:
            if self._rows is not None:
                # The core takes exact arrays only, all or nothing. What it refuses is converted or explained below.
                try:
                    row = meta["row"]
                    return self._applied_of(self._rows.update(row, meta["generation"], values), len(row))
                except (KeyError, TypeError, ValueError):
                    pass
            row, generation = _ints(meta, "row"), _ints(meta, "generation")
            numbers = _numbers(values, row.shape)
            if generation.shape != row.shape:
                raise ValueError(
                    f"meta: row and generation must have one shape, got {row.shape} and {generation.shape}"
                )
            return self._applied_of(self._ledger.update(row, generation, numbers), len(row))

    def _applied_of(self, applied: int, n: int) -> int:
        self._applied += applied
        self._late += n - applied
        return applied

    def stats(self) -> PrioritizedStats:
        """Return a frozen record of what was drawn, skipped, and became of priorities."""
        name = type(self).__name__
        return PrioritizedStats(
            name, len(self), self.batch_size, self._batches, self.skipped, self._data.stats(), self._applied,
            self._late, self._ledger.top,
        )  # fmt: skip

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and arrays from which the next draws go on, inside an epoch too."""
        return {
            **super().state_dict(),
            "beta": self.beta,
            "priorities": self._ledger.state(),
            "applied": self._applied,
            "late": self._late,
        }

    def _load(self, state: dict[str, Any]) -> None:
        beta, applied, late = _weight("beta", state["beta"]), int(state["applied"]), int(state["late"])
        before = self._ledger.state()
        try:
            self._ledger.load(state["priorities"])
            super()._load(state)
        except BaseException:
            self._ledger.load(before)
            raise
        self._beta, self._applied, self._late = beta, applied, late

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "alpha": self.alpha, "eps": self.eps}


class _WithPriorities(View):
    """The source of a PrioritizedSampler with the labels that its samples have now; getters and epochs read it."""

    def __init__(self, batch: BatchBase, sampler: PrioritizedSampler) -> None:
        super().__init__(batch, batch.single_space, sampler.single_metadata_space)
        self._sampler = sampler

    def _located(self) -> Any:
        return self.batch._located()

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        if not metadata:
            return self.batch._read(idx, keys, flat, False)
        found = again_and_again(
            self,
            lambda: counted(self.batch, idx, lambda index: self._read_at(np.atleast_1d(index), keys, flat)),
        )
        return self._first(found, keys, flat) if is_single(idx) else found

    def _read_at(self, index: Ints, keys: Keys, flat: bool) -> Read:
        """Samples and the labels of the very same; Lapped if any was overwritten meanwhile."""
        place = self.batch.locate(index)
        found = self.get_located(place, keys, flat, True)
        if found is not None:
            return found
        # Where no sequence begins, none is found by its place: read by index, if that is of the same sample afterwards.
        data, own = self.batch._read(index, keys, flat, True)
        if not is_same(self.batch.locate(index), place):
            raise Lapped
        return data, {**(own or {}), **self._labels_of(place)}

    def _first(self, found: Read, keys: Keys, flat: bool) -> Read:
        data, meta = found
        if self.single_metadata_space is not None:
            meta = unbatch(self.single_metadata_space, meta, 0)
        return data[0] if flat else unbatch(space_at(self.single_space, keys), data, 0), meta

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        found = self.batch.get_located(location, keys, flat, metadata)
        if found is None or not metadata:
            return found
        return found[0], {**(found[1] or {}), **self._labels_of(location)}

    def _labels_of(self, location: Location) -> dict[str, Any]:
        return self._sampler._labels_at({"row": location.row, "generation": location.generation})


def _key(key: int, again: int) -> int:
    """The first draw is a function of key and counter alone; one that must be made again, of the try too."""
    return key if again == 0 else mix(key ^ again)


def _outward_views(batch: BatchBase) -> tuple[View, ...] | None:
    """The views through which a buffer's rows come out, innermost first; None if reading is not as simple."""
    found: list[View] = []
    while isinstance(batch, View):
        if not isinstance(batch, ToBackendOrDeviceBatch | TransformedBatch) or batch.single_metadata_space:
            return None
        found.insert(0, batch)
        batch = batch.batch
    if getattr(batch, "_outward", None) is not None:  # a buffer whose storage gives another backend's arrays
        return None
    return tuple(found)


def _labelled_space(data: BatchBase) -> spaces.Dict | dict[str, Any]:
    own: spaces.Dict | None = data.single_metadata_space
    taken = sorted(set(LABELS) & set(own.spaces if own is not None else ()))
    if taken:
        raise ValueError(f"data: metadata must not be named {taken}, which the sampler adds; rename it")
    return {**({} if own is None else own.spaces), **LABELS}


def _weight(name: str, value: Any) -> float:
    return checks.number(name, value, advice="0 to 1 is usual")


def _ints(meta: Mapping[str, Any], name: str) -> Ints:
    if name not in meta:
        raise KeyError(f"meta: must have {name!r}, got {sorted(meta)}; pass what sample_with_metadata gave")
    found = meta[name]
    array = found if type(found) is np.ndarray else as_numpy(found)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"meta: {name} must be 1-D integers, got {array.dtype} of shape {array.shape}; "
            "pass what sample_with_metadata gave"
        )
    return np.ascontiguousarray(array, np.int64)


def _numbers(values: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    array = values if type(values) is np.ndarray else as_numpy(values)
    if array.shape != shape or array.dtype.kind not in "fiub":
        raise ValueError(
            f"values: must be one number for each of {shape[0]} samples, got {array.dtype} of shape {array.shape}"
        )
    return np.ascontiguousarray(array, np.float64)

"""Who has which mass: the priorities of the samples of a batch, kept up with its writers.

`RowLedger` is for buffers of packed rows, and for views that show them row by row: the native core notices what is
new, changed and gone by the lanes' windows, at the cost of what was written. `AnyLedger` is for every other batch: it
asks where all samples are and compares, which costs a pass over the batch whenever it has changed. Sequences are known
by the row at which they begin, in both.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from recollect import _core
from recollect.batch.base import BatchBase
from recollect.batch.combined import CombinedBatch
from recollect.batch.location import Ints, Location
from recollect.batch.subindex import SubIndexedBatch
from recollect.batch.view import View
from recollect.batch.windows import WindowBatch
from recollect.replay import ReplayBuffer
from recollect.sampling.stream import unit_floats

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Drawn = tuple[Ints, Ints, "Ints | None", Floats, Floats]
"""Row, generation, index if it is known, probability, weight."""
LABELS = {"row": np.int64, "generation": np.int64, "probability": np.float32, "weight": np.float32}
LABEL_CODEC = _core.Codec(
    [(8 * k, np.dtype(dtype), (), False) for k, dtype in enumerate(LABELS.values())],
    ("dict", tuple((name, ("leaf", k)) for k, name in enumerate(LABELS))),
    8 * len(LABELS),
)


class Ledger(Protocol):
    """Masses of the samples of a batch, by (row, generation)."""

    def draw(self, key: int, counter: int, n: int, beta: float) -> Drawn | None:
        """Draw one in each of `n` equal parts of the mass; None when there is none."""

    def update(self, row: Ints, generation: Ints, values: Doubles) -> int:
        """Give values to the samples that still exist; return how many."""

    def look(self, row: Ints, generation: Ints, beta: float) -> tuple[Floats, Floats]:
        """Return probability and weight as they are now, zeros for what is gone."""

    def total(self) -> float:
        """Return the mass of all that exists now."""

    @property
    def top(self) -> float:
        """The largest priority so far."""

    def state(self) -> dict[str, Any]:
        """Return plain numbers and arrays."""

    def load(self, state: dict[str, Any]) -> None:
        """Take over a state; samples that it does not know are new."""


class RowLedger:
    """Priorities of packed rows, in the native core.

    Ownership: 12 bytes a row and about a tenth more; no samples.
    Concurrency: one thread at a time; writers anywhere.
    """

    def __init__(
        self, buffer: ReplayBuffer, alpha: float, eps: float, windows: WindowBatch | None = None
    ) -> None:
        """Begin with every sample new, or every one of `windows`; nothing is read yet."""
        engine: Any = buffer.engine
        self.buffer = buffer
        wanted = () if windows is None else (windows.wanted.length, windows.wanted.pad)
        self._native = _core.Priorities(engine.native.share(), alpha, eps, *wanted)
        self._next = _core.PriorityDrawer(self._native, engine.codec, LABEL_CODEC).next
        self._decode = None if engine.layout.is_fixed else engine.layout.decode_batch

    def draw(self, key: int, counter: int, n: int, beta: float) -> Drawn | None:
        found = self._native.draw(None, key, counter, n, beta)
        if found is None:
            return None
        _, row, generation, probability, weight = found
        return row, generation, None, probability, weight  # type: ignore[return-value]

    def next(self, stream: _core.Stream, n: int, beta: float) -> tuple[Any, dict[str, Any]] | None:
        """Draw and gather in one native call: a batch and its labels; None when there is nothing to draw from."""
        found = self._next(stream, n, beta)
        if found is None or self._decode is None:
            return found
        return self._decode(found[0], n), found[1]

    def update(self, row: Ints, generation: Ints, values: Doubles) -> int:
        return self._native.update(row, generation, values)

    def look(self, row: Ints, generation: Ints, beta: float) -> tuple[Floats, Floats]:
        return self._native.look(row, generation, beta)

    def total(self) -> float:
        return self._native.total()

    @property
    def top(self) -> float:
        return self._native.top

    def state(self) -> dict[str, Any]:
        row, generation, mass = self._native.state()
        return {"row": row, "generation": generation, "mass": mass, "top": self.top}

    def load(self, state: dict[str, Any]) -> None:
        row, generation, mass, top = checked_state(state)
        self._native.restore(row, generation, mass, top)


class AnyLedger:
    """Priorities of the samples of any batch, by the places that it gives them.

    Ownership: about 50 bytes a sample; no samples.
    Concurrency: one thread at a time.
    """

    def __init__(self, batch: BatchBase, alpha: float, eps: float) -> None:
        """Begin with every sample new; nothing is read yet."""
        self.batch, self._alpha, self._eps = batch, alpha, eps
        self.top = 1.0
        self._moment: Any = None
        self._place(Location.of([], [], []), np.empty(0))

    def _place(self, location: Location, masses: Doubles) -> None:
        self._location, self._masses = location, masses
        self._order = np.lexsort((location.generation, location.row))
        self._sum, self._min = _core.SumTree(max(len(masses), 1)), _core.MinTree(max(len(masses), 1))
        self._set(np.arange(len(masses)), masses)

    def _set(self, at: Ints, masses: Doubles) -> None:
        self._masses[at] = masses
        masses = self._masses[at]  # of duplicates the last
        self._sum.set(at, masses)
        self._min.set(at, np.where(masses > 0, masses, np.inf), np.zeros_like(at))

    def _mass(self, values: Any) -> Any:
        return (np.asarray(values, np.float64) + self._eps) ** self._alpha

    def _keep_up(self) -> None:
        moment = _moment_of(self.batch)
        if moment is not None and moment == self._moment:
            return
        existing = np.asarray(self.batch._existing(), np.int64)
        now = self.batch.locate(existing).at(existing)
        before = self._location
        if not (np.array_equal(now.row, before.row) and np.array_equal(now.generation, before.generation)):
            _, at, which = self._matches(now)
            masses = np.full(len(now), self._mass(self.top))
            masses[at] = self._masses[which]
            self._place(now, masses)
        else:
            self._location = now
        self._moment = moment

    def _matches(self, wanted: Location) -> tuple[int, Ints, Ints]:
        """How many pairs are known, and all (place in `wanted`, leaf) at which they are; one may be shown twice."""
        known = self._location.take(self._order)
        low, high = (_search(known, wanted, side) for side in ("left", "right"))
        n = high - low
        at = np.repeat(np.arange(len(wanted)), n)
        offsets = np.arange(len(at)) - np.repeat(np.cumsum(n) - n, n)
        return int((n > 0).sum()), at, self._order[np.repeat(low, n) + offsets]

    def draw(self, key: int, counter: int, n: int, beta: float) -> Drawn | None:
        self._keep_up()
        if not self._sum.total > 0:
            return None
        parts = (np.arange(n) + unit_floats(key, counter, n)) * (self._sum.total / n)
        at = self._sum.find(parts)
        place = self._location.take(at)
        return place.row, place.generation, place.index, *self._label(self._masses[at], beta)

    def _label(self, masses: Doubles, beta: float) -> tuple[Floats, Floats]:
        least, there = self._min.lowest()[0], masses > 0
        probability = masses / (self._sum.total or 1.0)
        weight = np.where(there, (least / np.where(there, masses, 1.0)) ** beta, 0.0)
        return probability.astype(np.float32), weight.astype(np.float32)

    def update(self, row: Ints, generation: Ints, values: Doubles) -> int:
        masses = self._checked_masses(values)
        self._keep_up()
        n, at, which = self._matches(Location.of(row, generation))
        if len(at):
            self.top = max(self.top, float(values[at].max()))
            self._set(which, masses[at])
        return n

    def _checked_masses(self, values: Doubles) -> Doubles:
        numbers = np.isfinite(values) & (values >= 0)
        with np.errstate(over="ignore", invalid="ignore"):
            masses: Doubles = self._mass(values)
        for wrong, rule in (
            (~numbers, "be finite and not negative"),
            (~(masses <= _core.MOST_MASS), "have a (value + eps)**alpha below 2**900"),
        ):
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ValueError(f"values: must {rule}, got {values[i]} at {i}; none was applied")
        return masses

    def look(self, row: Ints, generation: Ints, beta: float) -> tuple[Floats, Floats]:
        self._keep_up()
        masses = np.zeros(len(row))
        _, at, which = self._matches(Location.of(row, generation))
        masses[at] = self._masses[which]
        return self._label(masses, beta)

    def total(self) -> float:
        self._keep_up()
        return self._sum.total

    def state(self) -> dict[str, Any]:
        self._keep_up()
        place = self._location
        return {
            "row": place.row.copy(),
            "generation": place.generation.copy(),
            "mass": self._masses.copy(),
            "top": self.top,
        }

    def load(self, state: dict[str, Any]) -> None:
        row, generation, mass, top = checked_state(state)
        self.top, self._moment = top, None
        self._place(
            Location.of(row, generation, row), mass.copy()
        )  # which changes; the state is the caller's
        self._keep_up()


def ledger_of(batch: BatchBase, alpha: float, eps: float) -> Ledger:
    """Return the ledger that fits a batch; TypeError if samples of several batches cannot be told apart by row."""
    _refuse_combined(batch)
    source = shown_by(batch)
    windows = source if isinstance(source, WindowBatch) else None
    if windows is not None:
        source = shown_by(windows.batch)
    if isinstance(source, ReplayBuffer) and source.engine.native is not None:
        return RowLedger(source, alpha, eps, windows)
    return AnyLedger(batch, alpha, eps)


def shown_by(batch: BatchBase) -> BatchBase:
    """Return the batch whose samples `batch` shows one by one, in the same places."""
    while isinstance(batch, View) and _keeps_places(batch):
        batch = batch.batch
    return batch


def _keeps_places(view: View) -> bool:
    if isinstance(view, SubIndexedBatch):
        return view._index is None
    cls = type(view)
    return cls.locate is View.locate and cls._existing is View._existing and cls.__len__ is View.__len__


def _refuse_combined(batch: BatchBase) -> None:
    if isinstance(batch, CombinedBatch):
        raise TypeError(
            "data: must be one batch to have priorities, got a CombinedBatch; make a sampler for each of its "
            "batches, or copy them into one buffer with extend_from"
        )
    for source in batch._sources():
        _refuse_combined(source)


def _moment_of(batch: BatchBase) -> Any:
    """Something that is equal as long as nothing has changed, None if only looking can tell."""
    if not batch._moves:
        return len(batch)
    source = shown_by(batch)
    if isinstance(source, WindowBatch):
        source = shown_by(source.batch)
    return getattr(source.engine, "moment", None) if isinstance(source, ReplayBuffer) else None


def _search(known: Location, wanted: Location, side: Any) -> Ints:
    """searchsorted by (row, generation)."""
    pair = np.dtype([("row", np.int64), ("generation", np.int64)])
    keys = [np.empty(len(place), pair) for place in (known, wanted)]
    for place, key in zip((known, wanted), keys, strict=True):
        key["row"], key["generation"] = place.row, place.generation
    return np.searchsorted(keys[0], keys[1], side=side)


def checked_state(state: dict[str, Any]) -> tuple[Ints, Ints, Doubles, float]:
    """The arrays of a saved state; ValueError if they cannot be."""
    row, generation = (np.ascontiguousarray(state[key], np.int64) for key in ("row", "generation"))
    mass, top = np.ascontiguousarray(state["mass"], np.float64), float(state["top"])
    if not (row.ndim == 1 and row.shape == generation.shape == mass.shape):
        raise ValueError("state: row, generation and mass must be 1-D of one length; it is damaged")
    if not (np.isfinite(top) and top >= 0 and ((mass >= 0) & (mass <= _core.MOST_MASS)).all()):
        raise ValueError("state: masses must be finite and not negative; it is damaged")
    return row, generation, mass, top

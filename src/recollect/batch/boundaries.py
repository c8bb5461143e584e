"""Where runs of consecutive samples of one segment begin and end: the one place that knows, for every batch.

Stacks, sequences, n-step returns and relabelling ask here and nowhere else. Two samples of one `locate` call are in
one run when they have the same segment; that already accounts for the write cursor of a ring, its lanes, removed
samples, open segments and heads that were overwritten. What is a run of packed rows is decided by the same rule in
the core (`_core/windows.hpp`), which `RowBoundaries` calls; `Boundaries` serves every other batch by `locate` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from recollect import _core
from recollect.backends import Backend, move
from recollect.batch.frames import stand_ins
from recollect.batch.location import Bools, Ints, Location, runs_of
from recollect.indexing import normalize

if TYPE_CHECKING:
    from recollect.batch.base import BatchBase

T = TypeVar("T")

CONTENTION_S = 1.0  # how long a read that is lapped by writers starts again
_ONLY = np.zeros(1, np.int64)
_WORD = 2**64 - 1


class Stream(Protocol):
    """A stream of random numbers that is two numbers; `recollect.sampling.IndexStream` is one."""

    key: int
    counter: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which windows: `length` samples of one segment, or with `pad` all of a shorter one. 0: any sample."""

    length: int = 0
    pad: bool = False

    def count_in(self, n: Ints) -> Ints:
        """Return how many windows runs of `n` samples have."""
        return np.maximum(n - self.length + 1, np.minimum(n, 1) if self.pad else 0)


@dataclass(frozen=True, slots=True)
class Ask:
    """Which frames to read: those at `offsets` from the anchors at `index`, or at `place`, or from `n` drawn ones.

    Unless they are to be `labelled`, nobody needs the segments and steps of drawn anchors.
    """

    offsets: Ints
    index: Any = None
    place: Location | None = None
    stream: Stream | None = None
    n: int = 0
    wanted: Wanted = Wanted()
    labelled: bool = True


Found = tuple[Any, Bools, Ints, Ints]
"""A batch of B * T samples, which of them are valid [B, T], and the anchors' segments and steps [B]."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The samples round some anchors at one moment: positions [B, S], which exist, where they are (B * S).

    A position outside the batch has the place of the batch's first or last sample.
    """

    expanded: Ints
    inside: Bools
    place: Location

    def valid(self, anchor: int, columns: Any = ...) -> Bools:
        """Return which of some columns are in the run of the one that is the anchor."""
        segment = self.place.segment.reshape(self.expanded.shape)
        return np.asarray(self.inside[:, columns] & (segment[:, columns] == segment[:, anchor, None]))

    def column(self, j: int) -> Location:
        """Return the places of one column."""
        return self.place.take(np.arange(len(self.expanded)) * self.expanded.shape[1] + j)


@dataclass(frozen=True, slots=True)
class Runs:
    """Where samples are, and the steps of the first sample of the run of each and of the one behind its last."""

    place: Location
    first: Ints
    end: Ints


class Boundaries:
    """The runs of any batch, found by locating its samples.

    Concurrency: as the batch; every answer is of one moment.
    """

    def __init__(self, batch: BatchBase) -> None:
        self.batch = batch

    @property
    def are_known(self) -> bool:
        """Whether the batch knows its segments."""
        return self.batch.get_segments() is not None

    def frames(self, anchors: Ints, offsets: Ints) -> Frames:
        """Locate the samples at `offsets` ([S], or [B, S]) from the anchors."""
        n = len(self.batch)
        if anchors.max(initial=-1) >= n:
            raise IndexError(f"index: must be below the {n} samples that are left, got {anchors.max()}")
        expanded = anchors[:, None] + offsets
        place = self.batch.locate(np.clip(expanded, 0, max(n - 1, 0)).ravel())
        return Frames(expanded, (expanded >= 0) & (expanded < n), place)

    def frames_round(self, location: Location, offsets: Ints, anchor: int) -> Frames | None:
        """Locate the samples round located anchors (column `anchor` of the offsets); None if any is gone."""
        return again_and_again(self.batch, lambda: self._frames_round(location, offsets, anchor))

    def _frames_round(self, location: Location, offsets: Ints, anchor: int) -> Frames | None:
        index = self.batch.relocate(location)
        if (index < 0).any():
            return None
        try:
            frames = self.frames(index, offsets)
        except IndexError:
            raise Lapped from None
        if not is_same(frames.column(anchor), location):
            raise Lapped
        return frames

    def runs(self, index: Ints) -> Runs:
        """Locate samples and find where their runs begin and end."""
        everything, bounds = again_and_again(self.batch, self._all)
        order = np.asarray(everything.index)
        at = np.minimum(np.searchsorted(order, index), len(order) - 1)
        if not len(order) or (order[at] != index).any():
            raise IndexError(f"index: must be among the {len(order)} samples there are; count again")
        run = np.searchsorted(bounds[:, 0], at, side="right") - 1
        steps = everything.step
        return Runs(everything.take(at), steps[bounds[run, 0]], steps[bounds[run, 1] - 1] + 1)

    def starts(self, wanted: Wanted) -> Location:
        """Locate the first sample of every window there is, in index order."""
        everything, bounds = again_and_again(self.batch, self._all)
        bounds = bounds[everything.segment[bounds[:, 0]] >= 0]
        count = wanted.count_in(bounds[:, 1] - bounds[:, 0])
        before = np.cumsum(count) - count
        return everything.take(np.repeat(bounds[:, 0] - before, count) + np.arange(count.sum()))

    def draw(self, stream: Stream, n: int, wanted: Wanted) -> Location | None:
        """Locate `n` starts, uniform over all windows, each by one count of the stream; None if there is none.

        As in the core: starts are drawn until a window begins there, and if windows are so rare that
        WINDOW_TRIES starts have none, one is chosen among all of them.
        """
        found = drawn(self.batch, lambda total: self._draw(stream, n, wanted, total))
        stream.counter += n
        return found

    def _draw(self, stream: Stream, n: int, wanted: Wanted, total: int) -> Location | None:
        fields = np.full((5, n), -1, np.int64)
        pending = np.arange(n)
        # Where indices have holes only a list of what there is will do.
        tries = _core.WINDOW_TRIES if total and isinstance(self.batch._existing(), range) else 0
        for r in range(tries):
            index = _core.draw_indices(_key(stream.key, r), stream.counter, total, n)[pending]
            ok, place = self._try(index, total, wanted)
            fields[:, pending[ok]] = [field[ok] for field in fields_of(place)]
            pending = pending[~ok]
            if not len(pending):
                break
        if len(pending):
            every = self.starts(wanted)
            if not len(every):
                return None
            key = _key(stream.key, _core.WINDOW_TRIES)
            number = _core.draw_indices(key, stream.counter, len(every), n)[pending]
            fields[:, pending] = fields_of(every.take(number))
        return Location(fields[0], fields[1], fields[2], fields[3], fields[4])

    def _try(self, index: Ints, total: int, wanted: Wanted) -> tuple[Bools, Location]:
        offsets = np.array([-1, 0, max(wanted.length, 1) - 1])
        expanded = index[:, None] + offsets
        place = self.batch.locate(np.clip(expanded, 0, total - 1).ravel())
        frames = Frames(expanded, (expanded >= 0) & (expanded < total), place)
        before, _, last = frames.valid(1).T
        anchor = frames.column(1)
        return (last | (wanted.pad & ~before)) & (anchor.segment >= 0), anchor

    def _all(self) -> tuple[Location, Ints]:
        """Locate every sample; return them in index order and the runs [R, 2] of neighbours."""
        order = np.asarray(self.batch._existing(), np.int64)
        try:
            place = self.batch.locate(order)
        except IndexError:  # it shrank
            raise Lapped from None
        apart = np.cumsum(np.diff(order, prepend=order[:1]) != 1)  # where samples are missing a run ends
        keys = np.unique(np.stack([apart, place.segment]), axis=1, return_inverse=True)[1]
        return place.at(order), np.array(runs_of(keys.ravel()), np.int64).reshape(-1, 2)


class RowBoundaries(Boundaries):
    """The runs of packed rows, found by the core from the tags on the rows."""

    def __init__(self, batch: BatchBase, native: Any, tracked: bool) -> None:
        super().__init__(batch)
        self._native, self._tracked = native, tracked

    @property
    def are_known(self) -> bool:
        return self._tracked

    def runs(self, index: Ints) -> Runs:
        *fields, first, end = _core.runs_at(self._native, np.ascontiguousarray(index), self._tracked)
        return Runs(_located(fields), first, end)

    def starts(self, wanted: Wanted) -> Location:
        return _located(_core.window_starts(self._native, self._tracked, wanted.length, wanted.pad))

    def draw(self, stream: Stream, n: int, wanted: Wanted) -> Location | None:
        found = _core.draw_frames(
            self._native, None, stream.key, stream.counter, n, _ONLY, self._tracked, wanted.length, wanted.pad
        )
        stream.counter += n
        return None if found is None else _located(found)


def _located(fields: Any) -> Location:
    index, row, generation, segment, step = fields
    return Location(row, generation, segment, step, index)


def _key(key: int, r: int) -> int:
    """The key of try number r; the mixing is that of the core's `mix`."""
    if not r:
        return key
    z = (key ^ r) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def fields_of(place: Location) -> list[Any]:
    """The arrays of a location: row, generation, segment, step, index."""
    return [place.row, place.generation, place.segment, place.step, place.index]


def is_same(a: Location, b: Location) -> bool:
    """Tell whether two locations are of the same samples."""
    return np.array_equal(a.row, b.row) and np.array_equal(a.generation, b.generation)


class Lapped(Exception):
    """What was being read has moved; `again_and_again` tries once more. Never reaches a caller."""


def again_and_again(batch: BatchBase, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it does not raise Lapped; ContentionError after a second."""
    deadline = monotonic() + CONTENTION_S
    while True:
        try:
            return attempt()
        except Lapped:
            if monotonic() > deadline:
                raise batch._contention() from None


def drawn(batch: BatchBase, draw: Callable[[int], T]) -> T:
    """Call `draw(length)` again while an index below the length of the batch is not there when it is read.

    A ring is shorter while a block is being written to it, and as long as before by the time one looks again. So
    where samples move, an IndexError is believed only after a second of them.
    """
    deadline = 0.0
    while True:
        size = len(batch)
        try:
            return draw(size)
        except IndexError:
            deadline = deadline or monotonic() + CONTENTION_S
            if monotonic() > deadline or not (batch._moves or len(batch) < size):
                raise


def counted(batch: BatchBase, idx: Any, read: Callable[[Any], T]) -> T:
    """Call `read(index)` with what `idx` means now; again if the batch shrank between the count and the read."""
    deadline = 0.0
    while True:
        size = len(batch)
        index = normalize(idx, size)  # raises what is out of range now
        try:
            return read(index)
        except IndexError:
            deadline = deadline or monotonic() + CONTENTION_S
            if monotonic() > deadline or not (batch._moves or len(batch) < size):
                raise


def read_frames(batch: BatchBase, ask: Ask, keys: Any, flat: bool) -> Found | None:
    """Read frames of any batch by locating them; in the place of those outside the anchor's run, the nearest in it.

    None if a located anchor is gone, or if there is nothing to draw from.
    """
    boundaries, anchor = batch._boundaries(), int(np.searchsorted(ask.offsets, 0))

    def attempt() -> Found | None:
        frames = _frames_asked(boundaries, ask, anchor)
        if frames is None:
            return None
        found = show(batch, frames, anchor, keys, flat)
        if found is None:
            raise Lapped
        return found

    return again_and_again(batch, attempt)


def _frames_asked(boundaries: Boundaries, ask: Ask, anchor: int) -> Frames | None:
    stream = ask.stream
    if stream is None and ask.place is not None:
        return boundaries.frames_round(ask.place, ask.offsets, anchor)
    if stream is None:
        return counted(
            boundaries.batch, ask.index, lambda index: boundaries.frames(np.atleast_1d(index), ask.offsets)
        )
    if ask.wanted.length:
        place = boundaries.draw(stream, ask.n, ask.wanted)
        frames = None if place is None else boundaries.frames_round(place, ask.offsets, anchor)
        if place is not None and frames is None:
            raise Lapped
        return frames
    return drawn(boundaries.batch, lambda size: _frames_drawn(boundaries, ask, size))


def _frames_drawn(boundaries: Boundaries, ask: Ask, size: int) -> Frames | None:
    stream = ask.stream
    if stream is None or not size:
        return None
    index = _core.draw_indices(stream.key, stream.counter, size, ask.n)
    stream.counter += ask.n
    return boundaries.frames(index, ask.offsets)


def show(batch: BatchBase, frames: Frames, anchor: int, keys: Any, flat: bool) -> Found | None:
    """Read located frames; None if any of them is gone."""
    valid = frames.valid(anchor)
    valid[:, anchor] = True
    n, t = valid.shape
    rows = (np.arange(n)[:, None] * t + stand_ins(valid, anchor)).ravel()
    found = batch.get_located(frames.place.take(rows), keys, flat)
    if found is None:
        return None
    at = frames.column(anchor)
    return found[0], valid, at.segment, at.step


def as_labels(batch: BatchBase, labels: dict[str, Any]) -> dict[str, Any]:
    """Return arrays about samples (masks, segments, steps) as arrays of the batch's backend, on its device.

    JAX without 64-bit types has no place for an id: there the integers stay numpy's.
    """
    backend, device = batch.backend, batch.device
    if backend.name == "numpy":
        return labels
    return {key: _as_label(value, backend, device) for key, value in labels.items()}


def _as_label(value: Any, backend: Backend, device: Any) -> Any:
    try:
        return move(value, backend, device)
    except ValueError:
        return value


def check_known(batch: BatchBase, name: str) -> None:
    """Raise ValueError unless the batch knows its segments."""
    if not batch._boundaries().are_known:
        kind = type(batch).__name__
        raise ValueError(
            f"{name}: data must keep segments, got a {kind} that does not; create the buffer with "
            "maintain_segment_metadata=True"
        )

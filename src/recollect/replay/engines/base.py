"""The seam inside a ReplayBuffer: what a ring of samples must be able to do, whatever it is made of.

A buffer asks its engine, and never asks what its engine is. Data here is always numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from recollect import _core
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Ask, Boundaries, Found
from recollect.batch.structure import fill, leaf_paths, pick
from recollect.errors import SegmentOpenError
from recollect.replay.limiter import RateLimiter
from recollect.storage.contract import SpaceStorage
from recollect.storage.dump import DumpWriter

Ints = np.ndarray[Any, np.dtype[np.int64]]
Keys = tuple[str | int, ...]
Segments = list[tuple[int, int]]

OPEN = (
    "extend: a block without `ends` is a whole segment, got one while a segment is open; call mark_segment_end() "
    "first, or pass `ends` to go on with the open one"
)
REFUSED = (ValueError, SegmentOpenError)  # a write that raises one of these counts as rejected


class Engine:
    """A ring of samples with segments; indices count from the oldest and are already normalised.

    What is written out here fits a ring that one process keeps and that has no packed rows.
    """

    storage: Any
    tracked: bool
    native: Any = None
    """The core's object over packed rows; None where there are no packed rows."""
    n_lanes: int = 1
    has_lanes: ClassVar[bool] = False
    """Whether its lanes can be written by number."""
    has_runs: bool = False
    """Whether the core finds the neighbours of a sample: then `read_frames` serves stacks and sequences."""
    turns_away: ClassVar[bool] = False
    """Whether a full ring may refuse a sample instead of giving up another."""
    shares_writes: ClassVar[bool] = False
    """Whether other processes see what is written, if the storage is one that processes share."""

    # -- what it holds

    @property
    def offset(self) -> int:
        """The row of the oldest sample."""
        raise NotImplementedError

    @property
    def moves(self) -> bool:
        """Whether samples can come, go or change."""
        return True

    def count(self) -> int:
        """How many samples can be read."""
        raise NotImplementedError

    def counters(self) -> dict[str, int]:
        """What came in, what is here, and by which doors samples left."""
        raise NotImplementedError

    def own_counters(self) -> Callable[[], dict[str, int]]:
        """Return `counters` as a function; one of packed rows does not keep this object alive."""
        return self.counters

    def reject(self, n: int) -> None:
        """Count samples that were refused."""
        raise NotImplementedError

    def limiter_words(self) -> tuple[Any, int]:
        """Where a limiter counts: shared words, and the byte of the first."""
        return _core.Mapping(-1, 0, 4096, True), 0

    def adopt(
        self, count: int, offset: int, segments: list[tuple[int, int]], active: tuple[int, int] | None
    ) -> None:
        """Take over rows that hold `count` samples from row `offset` on; what cannot be is a ValueError."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise ClosedError if what holds the samples was closed."""
        self.count()

    # -- reads

    def read(self, index: int | Ints, keys: Keys = (), out: Any = None, **counted: int) -> Any:
        """Return the samples at an index, or one leaf of them."""
        raise NotImplementedError

    def read_into(self, index: int | Ints, out: Any, **counted: int) -> Any:
        """Copy the samples at an index into the caller's arrays."""
        return fill(out, self.read(index, (), None, **counted))

    def read_packed(self, index: int | Ints, out: Any, **counted: int) -> Any:
        """Return whole packed rows as bytes."""
        raise TypeError(f"get_packed_at: {type(self.storage).__name__} has no packed rows; use a row storage")

    def draw(self, stream: Any, n: int, keys: Keys = (), out: Any = None) -> Any:
        """Return `n` random samples; None if there is none."""
        raise NotImplementedError

    def draw_into(self, stream: Any, n: int, out: Any) -> Any:
        """Draw into the caller's arrays; None if there is none."""
        data = self.draw(stream, n)
        return None if data is None else fill(out, data)

    def bound_draw(self) -> Callable[[Any, int], Any]:
        """Return `draw` of whole samples, without the frames that have nothing to decide."""
        return self.draw

    def drawn_rows(self) -> tuple[Any, Any] | None:
        """Return the core's rows and codec if a draw is nothing but a gather of those, else None."""
        return None

    def read_located(self, row: Ints, generation: Ints, keys: Keys = ()) -> Any:
        """Return samples by row and generation at one moment; None if any of them is gone."""
        raise NotImplementedError

    def read_frames(
        self, ask: Ask, keys: Keys = (), index: Ints | None = None, **counted: int
    ) -> Found | None:
        """Return samples with their neighbours, by index, by place or drawn; only where `has_runs`."""
        raise NotImplementedError

    def boundaries(self, batch: BatchBase) -> Boundaries:
        """Return what knows where the runs of consecutive samples begin and end."""
        return Boundaries(batch)

    def locate(self, index: Ints, **counted: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return row, generation, segment and step of samples."""
        raise NotImplementedError

    def index_of(self, row: Ints, generation: Ints) -> Ints:
        """Return where samples are now; -1 for those that are gone."""
        raise NotImplementedError

    # -- writes

    def append(self, value: Any) -> None:
        """Add one sample."""
        raise NotImplementedError

    def extend(self, value: Any, ends: Any = None) -> None:
        """Add a block of samples."""
        raise NotImplementedError

    def extend_part(self, value: Any, closes: bool) -> None:
        """Add a part of a segment that is copied in parts."""
        raise NotImplementedError

    def extend_chosen(self, value: Any, rows: Ints) -> bool:
        """Add the samples `rows` of a block in one call; False (nothing done) if it needs more than that."""
        return False

    def extend_lanes(self, value: Any, lanes: Ints, ends: Any = None, rows: Ints | None = None) -> None:
        """Append sample i to lane `lanes[i]`; only where `has_lanes`."""
        raise NotImplementedError

    def claimed(self, lane: int) -> Engine:
        """Claim a lane and return an engine that writes to it; only where `has_lanes`."""
        raise NotImplementedError

    def release(self) -> None:
        """Give up the lane that `claimed` took."""

    def overwrite(self, index: int | Ints, value: Any) -> None:
        """Change samples in place."""
        raise NotImplementedError

    def remove(self, index: Ints) -> None:
        """Take samples out; the others keep their order."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Drop the newest samples so that `length` stay."""
        if length < (n := self.count()):
            self.remove(np.arange(length, n))

    def check_overwrite(self, index: int | Ints, value: Any) -> Any:
        """Raise what `overwrite` would, and change nothing."""
        raise NotImplementedError

    def check_remove(self, index: Ints) -> None:
        """Raise what `remove` would, and change nothing."""
        raise NotImplementedError

    def clear(self) -> None:
        """Take out all samples."""
        raise NotImplementedError

    # -- segments

    def end_segment(self) -> None:
        """Close the caller's open segment, if there is one."""
        raise NotImplementedError

    def open_segment(self) -> tuple[int, int] | None:
        """Return the caller's open segment."""
        raise NotImplementedError

    def has_open_segment(self) -> bool:
        """Tell whether any segment is open."""
        raise NotImplementedError

    def segments(self) -> Segments | None:
        """Return the closed segments; None when they are not tracked."""
        raise NotImplementedError

    # -- chunks, where the storage reads many samples at once

    def chunks(self) -> tuple[Ints, int] | None:
        """Return the chunk that each sample is in, and how many can be held at once; None: rows are read singly."""
        return None

    def expect(self, index: Ints, keys: Keys = ()) -> None:
        """Tell the storage that these samples are read soon."""

    def reads_ahead(self) -> int:
        """Return how many samples make a block of a sensible size; 0 where rows are read singly."""
        return 0

    # -- disk, other processes, and the end

    def dump(self, writer: DumpWriter) -> dict[str, Any]:
        """Write the samples below `storage/`; return the manifest's part."""
        raise NotImplementedError

    def handle_state(self) -> dict[str, Any] | None:
        """Return what an object in another process needs besides the storage."""
        return None

    def close_for_all(self) -> None:
        """End what processes share, for every process."""


def writers(engine: Engine, limiter: RateLimiter | None) -> list[Callable[..., Any]]:
    """`append`, `extend` and `extend_part` of an engine, which wait for its limiter if there is one.

    Chosen once, so that a buffer without one pays nothing.
    """
    if limiter is None:
        return [engine.append, engine.extend, engine.extend_part]
    storage, turns_away = engine.storage, engine.turns_away

    def many(value: Any) -> int:
        return n_offered(storage, value)

    return [
        limiter.around_write(engine.append, lambda value: 1, turns_away),
        limiter.around_write(engine.extend, many, turns_away),
        limiter.around_write(engine.extend_part, many, turns_away),
    ]


def n_offered(storage: SpaceStorage, value: Any) -> int:
    """How many samples a refused block held, by the first leaf that has a length; one if none has."""
    for path, _ in leaf_paths(storage.single_instance_space):
        with suppress(TypeError, KeyError, IndexError):
            return len(pick(value, path))
    return 1


def checked_ends(ends: Any, tracked: bool) -> Any:
    """The flags as an array, or None; ValueError for what cannot end segments."""
    if ends is None:
        return None
    if not tracked:
        raise ValueError("ends: this buffer keeps no segments; create it with maintain_segment_metadata=True")
    flags = np.asarray(ends)
    if flags.dtype != bool or flags.ndim != 1:
        raise ValueError(f"ends: must be a 1-D bool array, got {flags.dtype} of shape {flags.shape}")
    return np.ascontiguousarray(flags)


def check_adoption(storage: SpaceStorage, lanes: int, count: int, offset: int, segments: list[tuple[int, int]],
                   tracked: bool) -> None:  # fmt: skip
    """Raise ValueError for a count, offset or segments that no ring over this storage could have."""
    run = None if storage.capacity is None else storage.capacity // lanes
    most = len(storage) if run is None else run
    if not 0 <= count <= most:
        raise ValueError(f"count: must be in [0, {most}], the rows there are, got {count}")
    if not 0 <= offset < (run or 1):
        raise ValueError(f"offset: must be a row of the ring (0 when unbounded), got {offset}")
    if segments and not tracked:
        raise ValueError("physical_segments: need maintain_segment_metadata=True")
    expected = 0
    for first, length in segments:
        at = offset + expected if run is None else (offset + expected) % run
        if length < 1 or first != at or expected + length > count:
            found = (first, length)
            raise ValueError(
                f"physical_segments: must follow each other within the {count} samples, got {found}"
            )
        expected += length
    if tracked and expected != count:
        raise ValueError(f"physical_segments: must cover the {count} samples, got {expected}")

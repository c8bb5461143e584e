"""Sinks: where the samples of B slots go, one class for each layout of buffers.

A sink writes, ends segments, counts what could not be recorded and dumps. It knows nothing of episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from recollect import checks
from recollect.errors import ClosedError, ReadOnlyError, SchemaError, class_name
from recollect.replay import Lane, ReplayBuffer
from recollect.replay.engines.base import REFUSED
from recollect.spaces import first_difference
from recollect.spaces.nested import compile_build, compile_pick
from recollect.storage.contract import PathName

MODES = ("auto", "shared", "per_env")
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Faults = dict[int, Exception]
Targets = ReplayBuffer | Lane | Sequence[ReplayBuffer | Lane]


class Sink(Protocol):
    """Takes the samples of an environment's slots."""

    mode: ClassVar[str]
    buffers: list[ReplayBuffer]

    def write(self, batch: Any, rows: Ints | None, slots: Ints, ends: Bools) -> Faults:
        """Write sample i (or `rows[i]`) of a batch for `slots[i]`, end its segment if `ends[i]`; return what failed."""
        ...

    def reject(self, slot: int) -> None: ...
    def end(self, slots: Iterable[int]) -> None: ...
    def open_slots(self) -> list[int]: ...
    def dump(self, path: PathName, slots: Iterable[int], *, always: bool) -> None: ...
    def release(self) -> None: ...


def make_sink(buffers: Targets, mode: str, n: int) -> Sink:
    """Return the sink for a layout of `n` slots; ValueError names what is needed for one that there is not."""
    given, lanes = checked_buffers(buffers), given_lanes(buffers)
    checks.choice("replay_mode", mode, MODES)
    if lanes:
        return _sink_of_lanes(given, lanes, mode, n)
    if mode == "auto":
        mode = "per_env" if len(given) == n > 1 else "shared"
    needed = n if mode == "per_env" else 1
    if len(given) != needed:
        raise ValueError(
            f"replay_buffers: {mode} mode of {n} slots needs {needed} buffer{'s' * (needed != 1)}, got {len(given)}"
            + (
                f"; pass {n}, or one created with num_lanes={n}, and the replay_mode of that"
                if n > 1
                else "; pass one"
            )
        )
    if mode == "per_env":
        return PerEnvSink(given)
    (buffer,) = given
    if n == 1:
        return EnvSink(given)
    n_own = n_lanes(buffer)
    if n_own == n and has_lanes(buffer):
        return LaneSink(given)
    if n_own == 1 and buffer.get_segments() is None:
        return BlockSink(given)
    what = "keeps segments" if n_own == 1 else f"has {n_own} lanes"
    raise ValueError(
        f"replay_buffers: one buffer of {n} slots must have a lane for each or be untracked with one lane, got one "
        f"that {what}; create it with num_lanes={n}, or pass {n} buffers"
    )


def _sink_of_lanes(given: list[ReplayBuffer], lanes: list[Lane], mode: str, n: int) -> Sink:
    if mode == "per_env" or len(lanes) != n:
        raise ValueError(
            f"replay_buffers: {n} slots need {n} lanes and shared mode, got {len(lanes)} and {mode}; pass "
            "buf.on_lane(k) for each slot"
        )
    return EnvSink(given, lanes[0]) if n == 1 else LaneSink(given, lanes)


def given_lanes(buffers: Targets) -> list[Lane]:
    """Return the lanes that were given in the place of buffers; they must be open, and different ones of one buffer."""
    given = list(buffers) if isinstance(buffers, Sequence) else [buffers]
    lanes = [lane for lane in given if isinstance(lane, Lane)]
    numbers = {lane.number for lane in lanes}
    if lanes and (len(numbers) < len(given) or any(lane.buffer is not lanes[0].buffer for lane in lanes)):
        raise ValueError(
            f"replay_buffers: lanes must be different ones of one buffer, got {len(given)} in which that is not so; "
            "pass buf.on_lane(k) for each slot"
        )
    for lane in lanes:
        lane.check_open()
    return lanes


def checked_buffers(buffers: Targets) -> list[ReplayBuffer]:
    """Return the buffers as a list: at least one, all different, writable and of one space. Lanes are of one."""
    lanes = given_lanes(buffers)
    if lanes:
        buffers = lanes[0].buffer
    if not isinstance(buffers, ReplayBuffer | Sequence):
        raise TypeError(
            f"replay_buffers: must be ReplayBuffers, got {class_name(buffers)}; pass one or a list"
        )
    given: list[Any] = [buffers] if isinstance(buffers, ReplayBuffer) else list(buffers)
    if not given:
        raise ValueError("replay_buffers: must be at least one, got none; pass a ReplayBuffer")
    for buffer in given:
        if not isinstance(buffer, ReplayBuffer):
            raise TypeError(f"replay_buffers: must be ReplayBuffers, got {class_name(buffer)}")
        if not buffer.is_mutable:
            raise ReadOnlyError("replay_buffers: one was opened for reading; load it with read_only=False")
    if len({_key(buffer._identity()) for buffer in given}) < len(given):
        raise ValueError("replay_buffers: must be different buffers, got one twice; pass one for each slot")
    for number, buffer in enumerate(given[1:], 1):
        difference = first_difference(given[0].single_space, buffer.single_space)
        if difference:
            raise ValueError(f"replay_buffers: must have one space, got buffer {number} with {difference}")
    return given


def _key(identity: object) -> object:
    return identity if isinstance(identity, bytes) else id(identity)


def has_lanes(buffer: ReplayBuffer) -> bool:
    """Tell whether a buffer's lanes can be written by number."""
    return buffer.engine.has_lanes


def n_lanes(buffer: ReplayBuffer) -> int:
    """Return how many lanes a buffer has."""
    rows = getattr(buffer.inner_storage, "rows", None)
    return 1 if rows is None else int(rows.geometry.n_lanes)


def state_of(buffer: ReplayBuffer) -> Any:
    """Return a value that changes with everything that a dump of the buffer would hold."""
    rows = getattr(buffer.inner_storage, "rows", None)
    return buffer.engine.counters() if rows is None else rows.native.windows()


def samples(buffer: ReplayBuffer, batch: Any, rows: Ints | None, n: int) -> list[Any]:
    """Return the `n` samples of a batch, or those of `rows`, one by one; SchemaError for what does not fit."""
    layout = buffer.inner_storage.layout
    size, fields = layout.encode_batch(batch, bool(getattr(buffer.inner_storage, "cast", False)))
    if rows is None and size != n:
        raise SchemaError(
            f"transitions: must be one for each of {n} slots, got {size}; return a batch of all slots"
        )
    leaves: list[Any] = []
    compile_pick(layout.template)(layout.decode_batch(fields, size), leaves)
    at = range(size) if rows is None else rows.tolist()
    build = compile_build(layout.template)
    return [build(values) for values in zip(*([leaf[i] for i in at] for leaf in leaves))]


class _Dumps:
    """Dumps that skip what has not changed since the last one to the same place."""

    def __init__(self, buffers: list[ReplayBuffer]) -> None:
        self._start = [state_of(buffer) for buffer in buffers]
        self._last: dict[int, tuple[Path, Any]] = {}

    def dump(self, number: int, buffer: ReplayBuffer, path: Path, *, cut_open: bool, always: bool) -> None:
        """Dump a buffer, unless it would be the same again; what nobody has written to is not dumped at all."""
        state = state_of(buffer)
        if not always and (state == self._start[number] or self._last.get(number) == (path, state)):
            return
        buffer.dumps(path, cut_open=cut_open)
        self._last[number] = (path, state)


class _OneBuffer:
    mode: ClassVar[str] = "shared"

    def __init__(self, buffers: list[ReplayBuffer]) -> None:
        self.buffers = buffers
        (self._buffer,) = buffers
        self._dumps = _Dumps(buffers)

    def reject(self, slot: int) -> None:
        self._buffer.engine.reject(1)

    def dump(self, path: PathName, slots: Iterable[int], *, always: bool) -> None:
        self._dumps.dump(0, self._buffer, Path(path), cut_open=True, always=always)

    def release(self) -> None:
        """Nothing was claimed."""

    def _failed(self, error: Exception, slots: Ints) -> Faults:
        if not isinstance(error, REFUSED):  # the buffer has counted those itself
            with suppress(ClosedError):
                self._buffer.engine.reject(len(slots))
        return dict.fromkeys(slots.tolist(), error)


class EnvSink(_OneBuffer):
    """One slot: appends, a segment per episode; to one lane of the buffer if it is given."""

    def __init__(self, buffers: list[ReplayBuffer], lane: Lane | None = None) -> None:
        super().__init__(buffers)
        self._writer: ReplayBuffer | Lane = self._buffer if lane is None else lane

    def append(self, sample: Any) -> None:
        """Write the sample of a step."""
        self._writer.append(sample)

    def write(self, batch: Any, rows: Ints | None, slots: Ints, ends: Bools) -> Faults:
        try:
            (sample,) = samples(self._buffer, batch, rows, 1)
        except Exception as error:
            self.reject(0)
            return {0: error}
        try:
            self._writer.append(sample)
            if ends[0]:
                self._writer.mark_segment_end()
        except Exception as error:
            return self._failed(error, slots)
        return {}

    def end(self, slots: Iterable[int]) -> None:
        self._writer.mark_segment_end()

    def open_slots(self) -> list[int]:
        return [] if self._writer.open_segment is None else [0]


class BlockSink(_OneBuffer):
    """B slots interleaved in one untracked buffer: one `extend` per step, no segments."""

    def write(self, batch: Any, rows: Ints | None, slots: Ints, ends: Bools) -> Faults:
        try:
            self._buffer.extend(batch, rows=rows)
        except Exception as error:
            return self._failed(error, slots)
        return {}

    def end(self, slots: Iterable[int]) -> None:
        """There are no segments."""

    def open_slots(self) -> list[int]:
        return []


class LaneSink(_OneBuffer):
    """B slots, each its own lane of one buffer: one native call per step.

    Ownership: holds all lanes from the start until `release`; lanes that are given stay the caller's.
    """

    def __init__(self, buffers: list[ReplayBuffer], lanes: list[Lane] | None = None) -> None:
        super().__init__(buffers)
        self._native = self._buffer.engine.native
        self._tracked = self._buffer.engine.tracked
        self._given = lanes
        if lanes is not None:
            self._numbers = np.array([lane.number for lane in lanes], np.int64)
            return
        self._numbers = np.arange(n_lanes(self._buffer))
        claimed: list[int] = []
        try:
            for lane in self._numbers.tolist():
                self._native.claim(lane)
                claimed.append(lane)
        except BaseException:
            for lane in claimed:
                self._native.release(lane)
            raise

    def write(self, batch: Any, rows: Ints | None, slots: Ints, ends: Bools) -> Faults:
        try:
            lanes = slots if self._given is None else self._given_numbers(slots)
            self._buffer.extend_lanes(batch, lanes, ends=ends if self._tracked else None, rows=rows)
        except Exception as error:
            return self._failed(error, slots)
        return {}

    def _given_numbers(self, slots: Ints) -> Ints:
        for slot in slots.tolist():
            self._given[slot].check_open()  # type: ignore[index]
        return self._numbers[slots]

    def end(self, slots: Iterable[int]) -> None:
        if self._tracked:
            for slot in slots:
                self._native.end_segment(int(self._numbers[slot]))

    def open_slots(self) -> list[int]:
        return [slot for slot, lane in enumerate(self._numbers.tolist()) if self._native.has_open(lane)]

    def release(self) -> None:
        """Give up the lanes, but for those whose segment is still open: that would end it."""
        if self._given is not None:
            return
        with suppress(ClosedError):  # the buffer has given them up already
            for lane in self._numbers.tolist():
                if not self._native.has_open(lane):
                    self._native.release(lane)


class PerEnvSink:
    """B slots, B buffers: slot i into buffer i, a segment per episode."""

    mode: ClassVar[str] = "per_env"

    def __init__(self, buffers: list[ReplayBuffer]) -> None:
        self.buffers = buffers
        self._dumps = _Dumps(buffers)

    def append(self, sample: Any) -> None:
        """Write the sample of an Env's step."""
        self.buffers[0].append(sample)

    def write(self, batch: Any, rows: Ints | None, slots: Ints, ends: Bools) -> Faults:
        faults: Faults = {}
        try:
            found = samples(self.buffers[0], batch, rows, len(slots))
        except Exception as error:
            for slot in slots.tolist():
                self.reject(slot)
            return dict.fromkeys(slots.tolist(), error)
        for slot, ended, sample in zip(slots.tolist(), ends.tolist(), found):
            buffer = self.buffers[slot]
            try:
                buffer.append(sample)
                if ended:
                    buffer.mark_segment_end()
            except Exception as error:
                faults[slot] = error
                if not isinstance(error, REFUSED):
                    with suppress(ClosedError):
                        self.reject(slot)
        return faults

    def reject(self, slot: int) -> None:
        self.buffers[slot].engine.reject(1)

    def end(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.buffers[slot].mark_segment_end()

    def open_slots(self) -> list[int]:
        return [i for i, buffer in enumerate(self.buffers) if buffer.open_segment is not None]

    def dump(self, path: PathName, slots: Iterable[int], *, always: bool) -> None:
        for slot in slots:
            place = Path(path) / f"env-{slot:04d}"
            self._dumps.dump(slot, self.buffers[slot], place, cut_open=False, always=always)

    def release(self) -> None:
        """Nothing was claimed."""

"""Recorder: a builder and a sink; steps go in, and what could not be recorded is counted and comes out as an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from recollect.batch.structure import select
from recollect.collect.bounds import outside
from recollect.collect.builders import Builder, Built, make_builder
from recollect.collect.sinks import Faults, Sink, Targets, checked_buffers, make_sink
from recollect.errors import ClosedError, SchemaError
from recollect.replay import ReplayBuffer
from recollect.replay.engines.base import REFUSED
from recollect.spaces import as_numpy

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Recorder:
    """Builds transitions and writes them; one for each set of buffers.

    A transition that cannot be recorded counts as rejected and ends its slot's segment, so that no window spans
    the gap; the other slots' are recorded all the same.
    """

    def __init__(
        self,
        env: Any,
        n: int,
        buffers: Targets,
        mode: str,
        transition_builder: Any,
        validate: bool,
        finals: bool = False,
    ) -> None:
        checked = checked_buffers(buffers)
        if finals:
            _check_finals(checked[0], transition_builder)
        self.builder: Builder = make_builder(env, checked[0], transition_builder)
        self.sink: Sink = make_sink(buffers, mode, n)  # last: it claims lanes
        self.space = checked[0].single_space
        self._layout = checked[0].inner_storage.layout
        self._cast = bool(getattr(checked[0].inner_storage, "cast", False))
        self._validate = validate
        self._every = np.arange(n)
        self._finals = finals  # whether an episode's last observation gets a row of its own
        self._last: dict[str, Any] | None = (
            None  # the newest step, in whose arrays the newest observations are
        )

    def end(self, slots: Iterable[int]) -> Exception | None:
        """End the open segments of these slots, after their last observation if that is recorded."""
        error: Exception | None = None
        if self._finals and self._last is not None:
            cut = np.intersect1d(np.fromiter(slots, np.int64), self.sink.open_slots())
            if len(cut):
                error = self._end_with_final(cut)
        self.sink.end(slots)
        return error

    def _end_with_final(self, slots: Ints) -> Exception | None:
        parts = _final_of(self._last or {})
        if isinstance(parts["done"], np.ndarray):
            return self._record(parts, slots, np.ones(len(self._every), bool), {})
        return self._record_one(parts, True)

    def record_one(self, parts: Mapping[str, Any], ends: bool) -> Exception | None:
        """Record an Env's step; return the error if it could not be."""
        if not self._finals:
            return self._record_one(parts, ends)
        self._last = dict(parts)
        error = self._record_one(parts, False)
        if error is None and ends:
            error = self._record_one(_final_of(parts), True)
        return error

    def _record_one(self, parts: Mapping[str, Any], ends: bool) -> Exception | None:
        sink = self.sink
        try:
            sample = self.builder.one(parts)
            if self._validate:
                self._check_one(sample)
        except Exception as error:
            sink.reject(0)
            sink.end((0,))
            return error
        try:
            sink.append(sample)  # type: ignore[attr-defined]
        except Exception as error:
            with suppress(ClosedError):
                if not isinstance(error, REFUSED):
                    sink.reject(0)
                sink.end((0,))
            return error
        if ends:
            sink.end((0,))
        return None

    def _check_one(self, sample: Any) -> None:
        fields = self._layout.encode_one(sample, self._cast)
        batch = self._layout.decode_batch([field[None] for field in fields], 1)
        for problem in outside(self.space, batch, 1).values():
            raise SchemaError(f"{problem}; change the value or the space")

    def record(
        self, parts: Mapping[str, Any], slots: Ints | None, done: Bools, wrong: Faults
    ) -> Exception | None:
        """Record these slots' transitions (None: all) but for those already `wrong`; return the first error."""
        if not self._finals:
            return self._record(parts, slots, done, wrong)
        self._last = dict(parts)
        error = self._record(parts, slots, np.zeros_like(done), wrong)
        # A slot whose step could not be recorded is not open any more.
        over = done & np.isin(self._every, self.sink.open_slots()) if done.any() else done
        if over.any():
            error = error or self._record(_final_of(parts), np.flatnonzero(over), done, {})
        return error

    def _record(
        self, parts: Mapping[str, Any], slots: Ints | None, done: Bools, wrong: Faults
    ) -> Exception | None:
        faults = dict(wrong)
        if wrong:
            slots = _without(self._every if slots is None else slots, wrong)
        chosen = self._every if slots is None else slots
        built, rows, failed = self._build(parts, slots, chosen)
        faults |= failed
        for slot in faults:
            self.sink.reject(slot)
        if failed:
            chosen = _without(chosen, failed)
        if len(chosen):
            ends = done if len(chosen) == len(done) else done[chosen]
            faults |= self.sink.write(built, rows, chosen, ends)
        return self._closed(faults) if faults else None

    def _build(self, parts: Mapping[str, Any], slots: Ints | None, chosen: Ints) -> Built:
        if not len(chosen):
            return None, None, {}
        try:
            built, rows, failed = self.builder.batch(parts, slots)
            if self._validate and built is not None:
                built = built if rows is None else select(self.space, built, rows)
                return self._checked(built, _without(chosen, failed), failed)
            return built, rows, failed
        except Exception as error:
            return None, None, dict.fromkeys(chosen.tolist(), error)

    def _checked(self, built: Any, chosen: Ints, failed: Faults) -> Built:
        n, fields = self._layout.encode_batch(built, self._cast)
        batch = self._layout.decode_batch(fields, n)
        off = outside(self.space, batch, n)
        for i, problem in off.items():
            slot = int(chosen[i])
            failed[slot] = SchemaError(f"slot {slot}: {problem}; change the value or the space")
        kept = np.setdiff1d(np.arange(n), list(off)) if off else None
        return batch, kept, failed

    def _closed(self, faults: Faults) -> Exception:
        with suppress(ClosedError):
            self.sink.end(faults)
        first = faults[min(faults)]
        if len(faults) > 1:
            first.add_note(f"{len(faults)} slots could not be recorded: {sorted(faults)[:16]}")
        return first


def _final_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the row that keeps where a step led; its action is that of the step, which is sure to fit."""
    none = np.zeros_like(parts["done"]) if isinstance(parts["done"], np.ndarray) else False
    reward = np.zeros_like(np.asarray(as_numpy(parts["reward"])))
    flags = {"terminated": none, "truncated": none, "done": none}
    return {**parts, "obs": parts["next_obs"], "reward": reward, **flags}


def _check_finals(buffer: ReplayBuffer, transition_builder: Any) -> None:
    """Raise ValueError unless rows of their own for last observations make sense in a buffer."""
    if transition_builder is not None:
        raise ValueError(
            "record_final_obs: must go with the default builder, got a transition_builder; leave one of them out"
        )
    keys = getattr(buffer.single_space, "spaces", {})
    if "obs" not in keys or "next_obs" in keys:
        raise ValueError(
            f"record_final_obs: must be for rows with obs and without next_obs, got {list(keys)}; create the buffer "
            'with transition_space(env, ["obs", "action", "reward", "terminated", "truncated"])'
        )
    if buffer.get_segments() is None:
        raise ValueError(
            "record_final_obs: must be for a buffer that keeps segments, got one that does not; create it with "
            "maintain_segment_metadata=True"
        )


def _without(slots: Ints, wrong: Mapping[int, Any]) -> Ints:
    return slots[~np.isin(slots, list(wrong))] if wrong else slots

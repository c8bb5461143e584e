"""Recorder: a builder and a sink; steps go in, and what could not be recorded is counted and comes out as an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from recollect.batch.structure import select
from recollect.collect.bounds import outside
from recollect.collect.builders import Builder, Built, make_builder
from recollect.collect.sinks import Faults, Sink, checked_buffers, make_sink
from recollect.errors import ClosedError, SchemaError
from recollect.replay import ReplayBuffer
from recollect.replay.engine import REFUSED

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
        buffers: ReplayBuffer | Sequence[ReplayBuffer],
        mode: str,
        transition_builder: Any,
        validate: bool,
    ) -> None:
        checked = checked_buffers(buffers)
        self.builder: Builder = make_builder(env, checked[0], transition_builder)
        self.sink: Sink = make_sink(checked, mode, n)  # last: it claims lanes
        self.space = checked[0].single_space
        self._layout = checked[0].inner_storage.layout
        self._cast = bool(getattr(checked[0].inner_storage, "cast", False))
        self._validate = validate
        self._every = np.arange(n)

    def record_one(self, parts: Mapping[str, Any], ends: bool) -> Exception | None:
        """Record an Env's step; return the error if it could not be."""
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


def _without(slots: Ints, wrong: Mapping[int, Any]) -> Ints:
    return slots[~np.isin(slots, list(wrong))] if wrong else slots

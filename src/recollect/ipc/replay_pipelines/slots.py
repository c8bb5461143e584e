"""PackSlots: two packed batches in shared memory, and the words by which learner and collector agree who packs one.

At most one request is open at a time. Its number and state are one word, so every step is one compare-and-swap::

    FREE ── ask ──▶ OPEN ── take ──▶ TAKEN ── done / failed ──▶ DONE, FAILED
                     ├── cancel ──▶ FREE
                     └── take_over (also from TAKEN, of a dead collector) ──▶ LEARNER

A slot is written only by whoever moved that word to TAKEN or LEARNER. A collector that takes the place of a dead one
opens again what that one had taken. Queues between the two are doorbells: what is true stands in the words.
"""

from __future__ import annotations

import os
import queue
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

import msgspec
import numpy as np

from recollect import _core, checks, interrupts
from recollect.errors import AttachError, ClosedError, LaneBusyError
from recollect.memory import segment as segments
from recollect.memory.segment import WORDS_AT, SharedSegment, page_up
from recollect.text import told_briefly

KIND = "slots"
FREE, OPEN, TAKEN, DONE, FAILED, LEARNER = range(6)
RING_DEPTH = 2
_NAMES = ("free", "open", "taken", "done", "failed", "learner")
_MOST_REQUESTS = 1 << 54  # the next number fits its word too
_LEFT = 1  # in the packer's word: it went away by itself; the word of no live process
_CLAIM, _PACKER, ASKED_AT, READY_AT, STOP_AT = (WORDS_AT + 8 * i for i in range(5))
_REQUEST_AT, _RESULT_AT, _TEXT_AT, _TEXT_NBYTES = WORDS_AT + 64, WORDS_AT + 128, WORDS_AT + 192, 512
_WORDS_NBYTES = 192 + _TEXT_NBYTES
SLICE_S = 0.1


@dataclass(frozen=True, slots=True)
class PackRequest:
    """One tick to pack: where to, how, and how many rows must have been added before."""

    number: int
    sample_seed: int
    headroom: int
    floor: int
    slot: int


class PackResult(msgspec.Struct, frozen=True):
    """What came of it."""

    snapshot_ptr: int
    snapshot_size: int
    redrawn: int
    pack_ns: int


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Requests ever made, what became of the last one, and who packs."""

    requests: int
    state: str
    packer_pid: int | None
    nbytes: int


class PackSlots:
    """Two host slots `[sample_count, row_bytes]` for packed batches, between a learner and one collector.

    Ownership: the memory goes with its last user. `slot(i)` borrows it.
    Concurrency: one learner asks, one collector process packs (LaneBusyError for another while it lives).

    >>> slots = PackSlots(4, 24)
    >>> slots.slot(1).shape, slots.stats().state
    ((4, 24), 'free')
    >>> slots.cleanup()
    """

    def __init__(self, sample_count: int, row_bytes: int) -> None:
        """Make the memory."""
        checks.count("sample_count", sample_count)
        checks.count("row_bytes", row_bytes)
        stride = page_up(sample_count * row_bytes)
        schema = [int(sample_count), int(row_bytes)]
        self._setup(segments.create(KIND, schema, _WORDS_NBYTES, RING_DEPTH * stride, "sample_count"))

    def _setup(self, segment: SharedSegment) -> None:
        self.segment: SharedSegment | None = segment.hold(lambda _: _Nothing())
        self.sample_count, self.row_bytes = segment.schema
        self.stride = page_up(self.sample_count * self.row_bytes)
        self._enlisted = (0, 0)  # pid and word of the process, if it packs; a forked child does not

    # -- what it is

    @property
    def name(self) -> str:
        """The handle as text."""
        return self._open().name

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self._open().nbytes

    @property
    def mapping(self) -> _core.Mapping:
        """The memory: words, and the slots behind them."""
        return self._open().mapping

    def place(self, slot: int) -> tuple[_core.Mapping, int]:
        """The memory, and where in it a slot begins."""
        segment = self._open()
        return segment.mapping, segment.data_at + slot * self.stride

    def slot(self, slot: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a slot, `[sample_count, row_bytes]`."""
        mapping, at = self.place(slot)
        flat = mapping.view(at, self.sample_count * self.row_bytes)
        return flat.reshape(self.sample_count, self.row_bytes)

    def stats(self) -> SlotStats:
        """Return a frozen record."""
        number, state = self.claim()
        packer = self.mapping.load(_PACKER)
        pid = None if _core.is_dead(packer) else _core.pid_of(packer)
        return SlotStats(number, _NAMES[state], pid, self.nbytes)

    def claim(self) -> tuple[int, int]:
        """Number and state of the newest request."""
        word = self.mapping.load(_CLAIM)
        number, state = word >> 8, word & 0xFF
        if state >= len(_NAMES) or number >= _MOST_REQUESTS:
            raise AttachError(
                f"slots: the newest request must have a number and a state, got {word:#x}; "
                "the memory was overwritten: create it again"
            )
        return number, state

    def _move(self, number: int, before: int, after: int) -> bool:
        return self.mapping.swap_if(_CLAIM, number << 8 | before, number << 8 | after)

    # -- the learner's side

    def ask(self, seed: int, headroom: int, floor: int, slot: int) -> int | None:
        """Open a request and return its number; None while a live collector still packs an earlier one."""
        number, state = self.claim()
        if state == OPEN and not self._move(number, OPEN, FREE):
            return None
        if state == TAKEN and not (self.packer_is_gone() and self._move(number, TAKEN, LEARNER)):
            return None
        for i, value in enumerate((seed, headroom, floor, slot)):
            self.mapping.store(_REQUEST_AT + 8 * i, value)
        self.mapping.store(_CLAIM, (number + 1) << 8 | OPEN)
        return number + 1

    def take_over(self, number: int) -> bool:
        """Take a request back from a collector that is gone; True if the learner may write the slot now."""
        return self._move(number, OPEN, LEARNER) or self._move(number, TAKEN, LEARNER)

    def cancel(self, number: int) -> bool:
        """Withdraw a request that nobody has taken."""
        return self._move(number, OPEN, FREE)

    def packer_is_gone(self) -> bool | None:
        """Whether the collector that packed is dead or has left; None if there never was one."""
        packer = self.mapping.load(_PACKER)
        return _core.is_dead(packer) if packer else None

    def result(self) -> PackResult:
        """What the collector packed; after DONE."""
        return PackResult(*(self.mapping.load(_RESULT_AT + 8 * i) for i in range(4)))

    def error(self) -> tuple[str, str]:
        """Name and text of the exception that packing raised; after FAILED."""
        text = self.mapping.view(_TEXT_AT, _TEXT_NBYTES).tobytes().rstrip(b"\0").decode(errors="replace")
        name, _, message = text.partition("\n")
        return name, message

    def stop(self) -> None:
        """Tell this process's packer to stop; it may sleep on rows or on the bell."""
        self.mapping.store(STOP_AT, 1)
        self.ring(READY_AT)

    def ring(self, at: int) -> None:
        self.mapping.add(at, 1)
        self.mapping.wake(at)

    # -- the collector's side

    def enlist(self) -> None:
        """Become the process that packs; another live one is LaneBusyError."""
        pid = os.getpid()
        me = self._enlisted[1] if self._enlisted[0] == pid else _core.own_word()
        mapping = self.mapping
        while (packer := mapping.load(_PACKER)) != me:
            if not _core.is_dead(packer):
                raise LaneBusyError(
                    f"slots: must be packed by one process, {_core.describe_process(packer)} does; close there first"
                )
            with interrupts.deferred():
                if mapping.swap_if(_PACKER, packer, me):
                    number, state = self.claim()
                    if state == TAKEN:  # by the one before, which can write no more
                        self._move(number, TAKEN, OPEN)
        self._enlisted = (pid, me)

    def request(self) -> PackRequest | None:
        """The open request, if there is one."""
        number, state = self.claim()
        if state != OPEN:
            return None
        load = self.mapping.load
        request = PackRequest(number, *(load(_REQUEST_AT + 8 * i) for i in range(4)))
        if self.claim() != (number, OPEN):  # the words may be of the next one
            return None
        if request.slot >= RING_DEPTH:
            raise AttachError(
                f"slots: a request must name one of {RING_DEPTH} slots, got {request.slot}; "
                "the memory was overwritten: create it again"
            )
        return request

    def take(self, number: int) -> bool:
        """Take it; True if this process, and nobody else, may write the slot."""
        return self._move(number, OPEN, TAKEN)

    def done(self, number: int, packed: PackResult) -> None:
        """Hand over the packed slot."""
        values = packed.snapshot_ptr, packed.snapshot_size, packed.redrawn, packed.pack_ns
        for i, value in enumerate(values):
            self.mapping.store(_RESULT_AT + 8 * i, value)
        self._move(number, TAKEN, DONE)

    def fail(self, number: int, error: BaseException) -> None:
        """Hand over an error instead."""
        text = told_briefly(error).replace(": ", "\n", 1).encode()[:_TEXT_NBYTES]
        view = self.mapping.view(_TEXT_AT, _TEXT_NBYTES)
        view[:] = 0
        view[: len(text)] = np.frombuffer(text, np.uint8)
        self._move(number, TAKEN, FAILED)

    # -- life

    def close(self) -> None:
        """Detach this object, and give up packing if this process does; may be called twice."""
        if self.segment is not None:
            with interrupts.deferred():
                segment, self.segment = self.segment, None
                if self._enlisted[0] == os.getpid() and segment.mapping.swap_if(
                    _PACKER, self._enlisted[1], _LEFT
                ):
                    segment.mapping.add(READY_AT, 1)
                    segment.mapping.wake(READY_AT)
                segment.release()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody."""
        if self.segment is not None and self.segment.is_owner:
            self.segment.mark_closed([ASKED_AT, READY_AT])
        self.close()

    def _open(self) -> SharedSegment:
        segment = self.segment
        if segment is None:
            raise ClosedError("this object was closed; open or create it again")
        if segment.is_closed:
            raise ClosedError("this object was closed by its owner; create it again")
        return segment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name,)


class Wakeup:
    """A queue of one between two processes: `put` wakes, `get` waits. What is put is not kept.

    Ownership: a word of its PackSlots. Concurrency: one process gets, any thread puts.
    """

    def __init__(self, slots: PackSlots, at: int) -> None:
        self._slots, self._at, self._seen = slots, at, 0

    def put(self, item: object) -> None:
        """Ring; `item` is what a real queue would carry."""
        self._slots.ring(self._at)

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        """Wait until it has rung since the last `get`; queue.Empty when `timeout` seconds (60 for None) passed."""
        end = monotonic() + (checks.timeout(timeout, 60.0) if block else 0.0)
        while (rung := self._slots.mapping.load(self._at)) == self._seen:
            left = end - monotonic()
            if left <= 0:
                raise queue.Empty
            self._slots.mapping.wait(self._at, self._seen & 0xFFFFFFFF, min(left, SLICE_S))
        self._seen = rung
        return rung

    def __reduce__(self) -> tuple[Any, ...]:
        return Wakeup, (self._slots, self._at)


class _Nothing:
    def close(self) -> None:
        """There is no native object to close."""


def _attach(name: str) -> PackSlots:
    slots = PackSlots.__new__(PackSlots)
    slots._setup(segments.attach(name, KIND, _WORDS_NBYTES))
    return slots

"""Ring: the next whole value. A FIFO of shared slots, with back-pressure or counted drops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from time import monotonic
from typing import Any

import numpy as np

from recollect import _core, checks, interrupts
from recollect.errors import ClosedError, DeadlineError, EmptyError, LaneBusyError, PeerDiedError
from recollect.memory import segment as segments
from recollect.memory.segment import CLOSED_AT, WORDS_AT, Closed, SharedSegment
from recollect.memory.waiting import LOOK_S, Watch, process_watch
from recollect.spaces import Layout, compile_layout

KIND = "ring"
POLICIES = ("block", "drop_oldest", "drop_newest")
TIMEOUT, CLOSED, PEER_DIED, BUSY, NOTHING = -1, -2, -3, -4, -5  # outcomes of the native ring
Array = np.ndarray[Any, Any]
Views = dict[str, Array]


@dataclass(frozen=True, slots=True)
class RingLaneStats:
    """One lane: written = delivered + dropped + skipped + available; an abandoned slot was never written."""

    written: int
    delivered: int
    dropped: int
    skipped: int
    available: int
    abandoned: int


@dataclass(frozen=True, slots=True)
class RingStats(RingLaneStats):
    """A ring: the sums over its lanes, and each of them."""

    lanes: tuple[RingLaneStats, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """A value on loan until `release()`: read-only views by field name, and what its writer said beside it."""

    values: Views
    sequence: int
    lane: int
    committed_ns: int
    info: tuple[int, ...]


class Ring:
    """Slots of one layout between processes: each lane has one writer, the ring one reader, which merges lanes.

    `claim`, fill, `commit`; on the other side `take`, read, `release`. When a lane is full, policy `block` waits,
    `drop_oldest` gives up the oldest value that nobody reads, `drop_newest` the one being committed.

    Ownership: the kernel frees the memory with its last user. Views are on loan: a write view until `commit`, a read
    view until `release`; later reads of a view that was kept give whatever is there by then, never a crash.
    Concurrency: one writer process per lane, one reader process; threads of a process take turns. A dead process
    is replaced by the next that asks: its half-written slot is counted `abandoned`, the slot it was reading is
    delivered again.

    >>> ring = Ring.create({"obs": ((3,), "float32")}, num_slots=2)
    >>> ring.claim()["obs"][:] = 7
    >>> ring.commit(41)
    True
    >>> ring.take().values["obs"].tolist(), ring.take().info[0]
    ([7.0, 7.0, 7.0], 41)
    >>> ring.release(); ring.stats().delivered
    1
    >>> ring.cleanup()
    """

    def __init__(self, segment: SharedSegment, lane: int | None = None, deadline: float = 60.0) -> None:
        schema = segment.schema
        self.layout = Layout.from_json(schema["layout"])
        self.num_slots, self.num_lanes = int(schema["num_slots"]), int(schema["num_lanes"])
        self.policy, self.slot_nbytes = POLICIES[schema["policy"]], int(schema["slot_nbytes"])
        self.deadline, self.lane = checks.seconds("deadline", deadline), lane
        self._segment: SharedSegment | None = segment.hold(_make_core)
        self.native: _core.Ring = segment.core
        self._held: set[int] = set()  # lanes that this object claimed
        self._lane_now = -1
        self._is_maker = False  # `with` over a lane of it, or over an attached one, closes no more than that
        self._reads = False
        self._watch: Watch | None = process_watch()
        self._loans: list[Array] = []  # arrays to turn read-only at commit

    @classmethod
    def create(
        cls,
        slot: Any,
        num_slots: int = 4,
        num_lanes: int = 1,
        *,
        policy: str = "block",
        deadline: float = 60.0,
        least_nbytes: int = 0,
        wake_free: int = 1,
        about: Any = None,
    ) -> Ring:
        """Make a ring of `num_slots` slots a lane; `slot` is a space or short form of fixed size.

        `least_nbytes` makes slots larger than the layout; `wake_free` lets a waiting writer sleep until so many of
        its slots are free (fewer wake-ups, for a reader that is sure to come back for more). `about` (JSON) is kept
        for whoever attaches.
        """
        checks.count("num_slots", num_slots, 2)
        checks.count("num_lanes", num_lanes)
        checks.count("wake_free", wake_free)
        checks.choice("policy", policy, POLICIES)
        checks.seconds("deadline", deadline)
        plan = _plan(slot, num_slots, num_lanes, policy, least_nbytes, wake_free, about)
        ring = cls(segments.create(KIND, *plan, "num_slots"), None, deadline)
        ring._is_maker = True
        return ring

    @classmethod
    def attach(cls, name: str, *, lane: int | None = None, deadline: float = 60.0) -> Ring:
        """Attach to the ring of that name, from any process of the same user."""
        return cls(segments.attach(name, KIND), lane, deadline)

    def on_lane(self, number: int) -> Ring:
        """Return a ring over the same slots that writes to lane `number`."""
        segment = self.segment()
        checks.count("lane", number, 0, most=self.num_lanes - 1, advice="create more lanes")
        return type(self)(segment, number, self.deadline)

    # -- writing

    def claim(self, timeout: float | None = None) -> Views:
        """Return writable views of the slot to fill next, the same slot until `commit`.

        Waits while the lane is full under `block`; DeadlineError after `timeout` seconds (None: the ring's).
        """
        slot = self.claim_slot(timeout)
        raw = self.slot_bytes(slot)
        views = self._views(raw)
        self.lend([raw, *views.values()])
        return views

    def claim_slot(self, timeout: float | None = None) -> int:
        """Claim as `claim`, and return the number of the slot."""
        self.segment()
        native, end = self.native, self._seconds(timeout)
        slot = BUSY
        while slot == BUSY:
            lane = self._writer_lane()
            before = native.writer(lane)
            try:
                slot = self._waited(partial(native.claim, lane), end)
                if slot == BUSY and self.lane is not None:
                    raise _busy(f"lane {lane}", native.writer(lane))
                if slot != BUSY:
                    self._check(slot, f"a free slot in lane {lane}", end)
                    self._hold(lane)
            except KeyboardInterrupt:
                if before != native.writer(lane) == _core.own_word():  # it was claimed all the same
                    self._hold(lane)
                raise
        if self._segment is None:  # closed meanwhile, perhaps too early to give this lane up
            self._give_up(native)
            self._check(CLOSED, "", end)
        return slot

    def commit(self, *info: int) -> bool:
        """Publish the claimed slot with up to 6 numbers beside it; False if it was dropped (`drop_newest`)."""
        self.segment()
        outcome = NOTHING if not self._held else self.native.commit(self._lane_now, info)
        if outcome == NOTHING:
            self.segment()  # or there was one, until somebody closed this object
            raise EmptyError("commit: a slot must be claimed first, got none; call claim()")
        self._check(outcome, "commit", 1.0)
        self._end_loans()
        return outcome == 0

    def release_lane(self) -> None:
        """Give up the lane of this object; a slot claimed and not committed is free again."""
        self.segment()
        self._give_up(self.native)

    # -- reading

    def take(self, timeout: float | None = None, lane: int | None = None) -> Taken:
        """Return the oldest value (of one lane, or of all), the same until `release`.

        Waits while there is none; DeadlineError after `timeout` seconds, PeerDiedError if all writers are dead.
        """
        slot = self.take_slot(timeout, lane)
        raw = self.slot_bytes(slot)
        raw.flags.writeable = False
        sequence, lane, committed_ns, info = self.native.about(slot)
        return Taken(self._views(raw), sequence, lane, committed_ns, info)

    def take_slot(self, timeout: float | None = None, lane: int | None = None) -> int:
        """Take as `take`, and return the number of the slot."""
        self.segment()
        native, end = self.native, self._seconds(timeout)
        slot = self._waited(partial(native.take, -1 if lane is None else lane), end)
        return self._taken(native, slot, end)

    def try_take_slot(self) -> int:
        """Take as `take_slot` if there is a value, else return -1; does not wait."""
        self.segment()
        native = self.native
        slot = native.take(-1, 0.0)
        return -1 if slot in (TIMEOUT, PEER_DIED) else self._taken(native, slot, 0.0)

    def release(self) -> None:
        """Give the slot that was taken back to its writer; EmptyError if none was."""
        self.segment()
        self._release(False)

    def skip(self) -> None:
        """Pass over the oldest value unread, counted as skipped; EmptyError if there is none."""
        self.segment()
        if self.try_take_slot() < 0:
            raise EmptyError("skip: the ring must hold a value, got none; see available()")
        self._release(True)

    def wait(self, timeout: float | None = None, lane: int | None = None) -> bool:
        """Wait until `take` would have a value, as it has while one is taken; False when the time is over."""
        self.segment()
        end = self._seconds(timeout)
        if self.native.reading() >= 0:
            return True
        outcome = self._waited(partial(self.native.wait_ready, -1 if lane is None else lane), end)
        if outcome == TIMEOUT:
            return False
        self._check(outcome, "a value", end)
        return True

    def available(self) -> int:
        """How many values are published and not released, the one being read included."""
        self.segment()
        return sum(self.native.available(k) for k in range(self.num_lanes))

    def watch(self, look: Callable[[], bool] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise. While it says True a dead peer is waited for."""
        self._watch = None if look is None else Watch(look)

    # -- what it is

    @property
    def name(self) -> str:
        """The handle as text: what `attach` takes in another process."""
        return self.segment().name

    @property
    def about(self) -> Any:
        """What `create` was given to keep."""
        return self.segment().schema["about"]

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; untouched pages cost nothing."""
        return self.segment().nbytes

    def stats(self) -> RingStats:
        """Return a frozen record of what came in and by which door it left."""
        self.segment()
        lanes = tuple(RingLaneStats(**self.native.counters(k)) for k in range(self.num_lanes))
        names = RingLaneStats.__slots__
        return RingStats(**{n: sum(getattr(lane, n) for lane in lanes) for n in names}, lanes=lanes)

    def slot_views(self, slot: int) -> Views:
        """Views of a slot by number, writable, whoever has it; for code that keeps to the protocol by itself."""
        return self._views(self.slot_bytes(slot))

    def slot_bytes(self, slot: int) -> Array:
        """The bytes of a slot by number, writable, whoever has it; for code that keeps to the protocol by itself."""
        segment = self.segment()
        return segment.mapping.view(segment.data_at + slot * self.slot_nbytes, self.slot_nbytes)

    def lend(self, arrays: Iterable[Array]) -> None:
        """Turn these arrays, which somebody got of the claimed slot, read-only when it is committed."""
        self._loans += arrays

    # -- the end

    def close(self) -> None:
        """Detach: give up this object's lane and its place as reader. Views that were handed out stay readable."""
        with interrupts.deferred():
            segment, self._segment = self._segment, None
            if segment is None:
                return
            if segment.users == 1:
                self.native.close()  # first: threads that wait hold the turns which are taken below
            self._end_loans()
            self._give_up(self.native)
            if self._reads:
                self.native.release_reader()
            self.native = Closed()  # type: ignore[assignment]  # the mapping goes with its last user
            segment.release()

    def cleanup(self) -> None:
        """Close; in the process that made the ring also for everybody else, whose waits end with ClosedError."""
        if self._segment is not None and self._segment.is_owner:
            self._segment.mark_closed()
            self.native.wake_all()
        self.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup() if self._is_maker else self.close()

    def __reduce__(self) -> tuple[Callable[..., Ring], tuple[Any, ...]]:
        return _attached, (self.name, self.lane, self.deadline)

    # -- parts

    def segment(self) -> SharedSegment:
        """The segment that this object maps; ClosedError once it was closed."""
        segment = self._segment
        if segment is None or self.native.is_closed():
            raise ClosedError("ring: was closed; create or attach it again")
        return segment

    def _seconds(self, timeout: float | None) -> float:
        return self.deadline if timeout is None else checks.seconds("timeout", timeout)

    def _waited(self, wait: Callable[[float], int], seconds: float) -> int:
        """The outcome of a native wait in slices: in between somebody looks after things, or has closed this object."""
        if self._watch is not None:
            self._watch.by_the_way()
        end = monotonic() + seconds
        while True:
            left = end - monotonic()
            outcome = wait(min(LOOK_S, max(0.0, left)))
            if outcome not in (TIMEOUT, PEER_DIED):
                return outcome
            if self._segment is None:
                return CLOSED
            if self._watch is not None and self._watch.look():
                outcome = TIMEOUT  # somebody works, or will again
            if left <= LOOK_S or outcome == PEER_DIED:
                return outcome

    def _check(self, outcome: int, awaited: str, timeout: float, reader: int = 0) -> None:
        if outcome >= 0:
            return
        if outcome == CLOSED:
            raise ClosedError("ring: was closed; create or attach it again")
        if outcome == BUSY:
            raise _busy("reading", reader)
        if outcome == PEER_DIED:
            raise PeerDiedError(
                f"ring: {awaited} must come from a live process, but all on the other side have ended; start one again"
            )
        raise DeadlineError(f"ring: {awaited} must come within {timeout:g} s, got none; see stats()")

    def _writer_lane(self) -> int:
        """The lane of this object: its own, a free one, or one that another object here holds."""
        if self.lane is not None:
            return self.lane
        if self._held and self.native.writer(self._lane_now) == _core.own_word():
            return self._lane_now
        me, mine, holder = _core.own_word(), -1, 0
        for k in range(self.num_lanes):
            writer = self.native.writer(k)
            if writer == 0 or (writer != me and _core.is_dead(writer)):
                return k
            if writer == me:
                mine = k
            else:
                holder = writer
        if mine < 0:
            raise _busy("every lane", holder)
        return mine

    def _hold(self, lane: int) -> None:
        self._lane_now = lane  # first: it is asked for as soon as a lane is held
        self._held.add(lane)

    def _taken(self, native: _core.Ring, slot: int, seconds: float) -> int:
        """Take note that this object reads; it gives up again what was taken while it was closed."""
        self._check(slot, "a value", seconds, native.reader())
        self._reads = True
        if self._segment is None:
            native.release_reader()
            self._check(CLOSED, "", seconds)
        return slot

    def _release(self, skips: bool) -> None:
        outcome = self.native.release(skips)
        if outcome == NOTHING:
            self.segment()  # or there was one, until somebody closed this object
            raise EmptyError("release: a value must be taken first, got none; call take()")
        self._check(outcome, "release", 1.0)

    def _give_up(self, native: _core.Ring) -> None:
        with interrupts.deferred():
            with suppress(KeyError):  # two threads may be at it: each lane is given up once
                while True:
                    native.release_lane(self._held.pop())
            self._end_loans()

    def _end_loans(self) -> None:
        for array in self._loans:
            array.flags.writeable = False
        self._loans.clear()

    def _views(self, raw: Array) -> Views:
        return {
            f.name: raw[f.offset : f.offset + prod(f.shape) * f.dtype.itemsize].view(f.dtype).reshape(f.shape)
            for f in self.layout.fields
        }


def _plan(slot: Any, num_slots: int, num_lanes: int, policy: str, least_nbytes: int, wake_free: int,
          about: Any) -> tuple[dict[str, Any], int, int]:  # fmt: skip
    """The schema of a ring, and the bytes of its words and of its slots."""
    layout = compile_layout(slot)
    slot_nbytes = -(-max(layout.row_nbytes, least_nbytes) // 64) * 64
    schema = {
        "layout": layout.to_json(),
        "num_slots": int(num_slots),
        "num_lanes": int(num_lanes),
        "policy": POLICIES.index(policy),  # a number: the size of a segment does not depend on it
        "slot_nbytes": slot_nbytes,
        "wake_free": min(int(wake_free), int(num_slots)),
        "about": about,
    }
    return schema, _core.ring_control_nbytes(num_lanes, num_slots), slot_nbytes * num_slots * num_lanes


def ring_nbytes(slot: Any, num_slots: int, num_lanes: int, *, least_nbytes: int = 0,
                wake_free: int = 1, about: Any = None) -> int:  # fmt: skip
    """Bytes of the segment that `Ring.create` would make."""
    return segments.segment_nbytes(
        *_plan(slot, num_slots, num_lanes, POLICIES[0], least_nbytes, wake_free, about)
    )


def _make_core(segment: SharedSegment) -> _core.Ring:
    s = segment.schema
    return _core.Ring(segment.mapping, WORDS_AT, CLOSED_AT, segment.data_at, s["slot_nbytes"], s["num_lanes"],
                      s["num_slots"], s["policy"], s["wake_free"])  # fmt: skip


def _attached(name: str, lane: int | None, deadline: float) -> Ring:
    return Ring.attach(name, lane=lane, deadline=deadline)


def _busy(what: str, word: int) -> LaneBusyError:
    holder = _core.describe_process(word)
    return LaneBusyError(f"{what}: must be free, got one held by {holder}; wait, or create more lanes")

"""FakeDevice: a device of streams and events that does everything as late and as oddly as it may.

Streams are queues of operations, run in random legal orders; bytes move only when an operation runs. Every stream and
every host thread has a vector clock; an event carries one from where it was recorded to who waits for it. Two accesses
to one slot, at least one of them a write, must be ordered by these clocks, whatever order they happened to run in. So a
missing wait is found even when the run was lucky.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recollect.ipc.replay_pipelines.transfer import Block, StreamTransfer, describe

Clock = dict[object, int]


@dataclass
class _Op:
    run: Callable[[Clock], None]
    clock: Clock  # of the thread that queued it
    gate: FakeEvent | None = None  # it may not run before this has passed (as it was recorded by then)
    gate_round: int = 0


class FakeStream:
    """A queue of operations that run in order, at any time."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[_Op] = deque()
        self.clock: Clock = {}

    def wait_event(self, event: FakeEvent) -> None:
        """What is queued from now on runs after `event` has passed."""
        self.device.queue_wait(self, event)


class FakeEvent:
    """A mark in a stream; waiting for one that was never recorded is reported."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.recorded, self.passed = 0, 0  # how often
        self.clocks: list[Clock] = []  # of each time it was passed
        self.at_ms = 0.0

    def record(self, stream: FakeStream) -> None:
        """Mark this place of the stream."""
        self.device.queue_record(stream, self)

    def query(self) -> bool:
        """Whether the mark was passed. Some operations run meanwhile, or none."""
        return self.device.look(self)

    def synchronize(self) -> None:
        """Wait on the host until the mark was passed."""
        self.device.run_until(self)

    def elapsed_time(self, later: FakeEvent) -> float:
        """Fake milliseconds: how many operations ran between the two."""
        self.device.check_passed(self, later)
        return later.at_ms - self.at_ms


@dataclass
class _Place:
    """Who wrote a slot last, and who has read it since."""

    write: tuple[str, object, int] | None = None
    reads: list[tuple[str, object, int]] = field(default_factory=list)


class FakeDevice(StreamTransfer):
    """A device for tests of whatever orders copies by streams and events; pass it as `transfer`.

    The pipeline's part is that of any real device: streams and events are fake, the calls are not. The learner's work
    is `read(array)`, queued on the compute stream. `check()` (and `close()`) raise AssertionError for every pair
    of accesses that nothing orders and for every wait on an event that was never recorded.

    Concurrency: any thread.

    >>> import numpy as np
    >>> device = FakeDevice(seed=0)
    >>> device.register_host_slots([np.full((2, 4), 7, np.uint8)])
    >>> blocks = device.allocate_device_slots(1)
    >>> device.submit_h2d(0); device.wait_current_stream_for_ready(0)
    >>> work = device.read(blocks[0])
    >>> device.finish(); work.value.sum()
    np.uint64(56)
    >>> _ = device.read(blocks[0]); device.submit_h2d(0)   # nothing says that the reader is done
    >>> device.check()
    Traceback (most recent call last):
    AssertionError: device slot 0: written by copy 0 while read 0 may still use it
    """

    def __init__(self, seed: int) -> None:
        super().__init__("fake")
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self.compute = FakeStream(self, "compute")
        self._streams = [self.compute]
        self._host_clocks: dict[object, Clock] = {}
        self._places: dict[tuple[str, int], _Place] = {}
        self._ran = 0
        self.problems: list[str] = []

    # -- what StreamTransfer asks of a device

    def new_stream(self) -> FakeStream:
        stream = FakeStream(self, f"side {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def new_event(self, name: str) -> FakeEvent:
        return FakeEvent(self, name)

    def current_stream(self) -> FakeStream:
        return self.compute

    def new_block(self, like: Block) -> Block:
        return np.zeros_like(like)

    def allocate_device_slots(self, count: int) -> list[Block]:
        blocks = super().allocate_device_slots(count)
        self._bounds = [np.lib.array_utils.byte_bounds(block) for block in blocks]
        return blocks

    def queue_copy(self, to: Block, source: Block, stream: FakeStream) -> None:
        slot = next(i for i, host in enumerate(self._host) if host is source)

        def run(clock: Clock) -> None:
            self._access("host", slot, clock, stream, f"copy {slot}", writes=False)
            self._access("device", slot, clock, stream, f"copy {slot}", writes=True)
            to[...] = source

        self._queue(stream, run)

    def clear_ready(self, slot: int) -> None:
        super().clear_ready(slot)
        with self._lock:  # the packer is about to write the host slot
            clock, me = self._host_clock(), self._me()
            self._tick(clock, me)
            self._access("host", slot, clock, me, "the packer", writes=True)

    def describe(self) -> dict[str, Any]:
        return describe(type(self), "fake", "fake", "fake", asynchronous=True, timing=True)

    def close(self) -> None:
        """Run what is queued and raise AssertionError if anything was wrong."""
        super().close()
        self.check()

    # -- the learner's work

    def read(self, array: Block) -> FakeRead:
        """Queue a read of (a view of) a device slot on the compute stream; `.value` once it has run."""
        low, _ = np.lib.array_utils.byte_bounds(array)
        slot = next(i for i, (first, end) in enumerate(self._bounds) if first <= low < end)
        work = FakeRead()

        def run(clock: Clock) -> None:
            self._access("device", slot, clock, self.compute, f"read {slot}", writes=False)
            work.value = array.copy()

        self._queue(self.compute, run)
        return work

    # -- running

    def step(self) -> bool:
        """Run one operation of a random stream that can go on; False if none can."""
        with self._lock:
            able = [s for s in self._streams if s.queue and self._can_run(s.queue[0])]
            if not able:
                return False
            stream = self._random.choice(able)
            op = stream.queue.popleft()
            _join(stream.clock, op.clock)
            if op.gate is not None:
                _join(stream.clock, op.gate.clocks[op.gate_round - 1] if op.gate_round else {})
            self._tick(stream.clock, stream)
            self._ran += 1
            op.run(stream.clock)
            return True

    def finish(self) -> None:
        """Run everything that is queued."""
        while self.step():  # a wait is for what was recorded before it, so there is always one that can run
            pass

    def check(self) -> None:
        """Raise AssertionError if anything was wrong so far."""
        self.finish()
        if self.problems:
            raise AssertionError("; ".join(dict.fromkeys(self.problems)))

    # -- streams and events

    def queue_wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            if not event.recorded:
                self.problems.append(
                    f"event {event.name}: {stream.name} waits for it, but it was never recorded"
                )
            op = _Op(lambda clock: None, dict(self._host_clock()), event, event.recorded)
            stream.queue.append(op)
            self._run_some()

    def queue_record(self, stream: FakeStream, event: FakeEvent) -> None:
        def run(clock: Clock) -> None:
            event.passed += 1
            event.clocks.append(dict(clock))
            event.at_ms = float(self._ran)

        with self._lock:
            event.recorded += 1
            self._queue(stream, run)

    def look(self, event: FakeEvent) -> bool:
        with self._lock:
            self._run_some()
            if not event.recorded:
                self.problems.append(f"event {event.name}: asked for, but it was never recorded")
                return True  # as CUDA says of such an event
            if event.passed < event.recorded:
                return False
            _join(self._host_clock(), event.clocks[-1])
            return True

    def run_until(self, event: FakeEvent) -> None:
        while not self.look(event):
            self.step()

    def check_passed(self, *events: FakeEvent) -> None:
        with self._lock:
            for event in events:
                if not event.recorded or event.passed < event.recorded:
                    self.problems.append(f"event {event.name}: timed, but it has not passed")

    def _queue(self, stream: FakeStream, run: Callable[[Clock], None]) -> None:
        with self._lock:
            stream.queue.append(_Op(run, dict(self._host_clock())))
            self._run_some()

    def _run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 2, 5))):
            if not self.step():
                return

    @staticmethod
    def _can_run(op: _Op) -> bool:
        return op.gate is None or op.gate.passed >= op.gate_round

    # -- clocks

    @staticmethod
    def _me() -> object:
        return threading.get_ident()

    def _host_clock(self) -> Clock:
        return self._host_clocks.setdefault(self._me(), {})

    @staticmethod
    def _tick(clock: Clock, who: object) -> None:
        clock[who] = clock.get(who, 0) + 1

    def _access(self, kind: str, slot: int, clock: Clock, who: object, label: str, *, writes: bool) -> None:
        place = self._places.setdefault((kind, slot), _Place())
        before = [place.write] if place.write else []
        if writes:
            before += place.reads
        for other, actor, at in before:
            if clock.get(actor, 0) < at:
                verb, done = ("written", "use") if writes else ("read", "write")
                self.problems.append(
                    f"{kind} slot {slot}: {verb} by {label} while {other} may still {done} it"
                )
        mine = (label, who, clock[who])
        if writes:
            place.write, place.reads = mine, []
        else:
            place.reads.append(mine)


class FakeRead:
    """What a queued read found; `value` is None until it has run."""

    value: Any = None


def _join(into: Clock, other: Clock) -> None:
    for who, n in other.items():
        into[who] = max(into.get(who, 0), n)


def read_all(device: FakeDevice, batch: dict[str, Block]) -> dict[str, FakeRead]:
    """Queue a read of every field of a batch."""
    return {name: device.read(array) for name, array in batch.items()}


__all__: Sequence[str] = ["FakeDevice", "FakeEvent", "FakeRead", "FakeStream", "read_all"]

"""Bringing packed batches to the device: one backend for each way a device wants its bytes.

A slot is a pair of host and device memory with two events. `copied` says that the device slot is filled and the host
slot free again; `released` that the learner's queued work has read the device slot. No wait stops the learner's
thread: streams wait for events, and the packer (a thread of its own) waits for a host slot that it wants to fill.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from recollect import interrupts
from recollect.backends import get_backend
from recollect.errors import DeadlineError
from recollect.ipc.shared_buffer import NUMPY

Block = Any  # uint8 [sample_count, row_bytes]: a numpy array on the host, an array or tensor on the device


@runtime_checkable
class TransferBackend(Protocol):
    """How packed batches reach the device. The packer's calls and the learner's come from two threads.

    Packer: `synchronize_ready`, `clear_ready` (then it fills the host slot), `submit_h2d`. Learner: `ready_query`,
    `wait_current_stream_for_ready`, `record_release`; where `submits_in_learner` is set `submit_h2d` too, in the first
    call that waits for the tick or takes it.
    """

    submits_in_learner: bool

    def register_host_slots(self, slots: Sequence[Block]) -> None:
        """Take the host slots, once; pin them if the device wants that."""
        ...

    def allocate_device_slots(self, count: int) -> list[Block]:
        """Return as many device blocks, once; the host slots themselves where no copy is needed."""
        ...

    def submit_h2d(self, slot: int) -> None:
        """Queue the copy of a filled host slot, after whatever still reads its device slot."""
        ...

    def clear_ready(self, slot: int) -> None:
        """Say that the host slot is about to be filled: what was copied from it counts no longer."""
        ...

    def ready_query(self, slot: int) -> bool:
        """Whether the copy of this slot is finished. Never waits."""
        ...

    def synchronize_ready(self, slot: int, timeout: float) -> None:
        """Wait on the host until the copy is finished; DeadlineError when that takes too long."""
        ...

    def wake(self) -> None:
        """End every `synchronize_ready` under way with DeadlineError at once: the pipeline is about to close."""
        ...

    def wait_current_stream_for_ready(self, slot: int) -> None:
        """Make the learner's stream wait for the copy; the host does not wait."""
        ...

    def record_release(self, slot: int) -> None:
        """Say on the learner's stream that what was queued so far are the last readers of the device slot."""
        ...

    def copy_us(self, slot: int) -> float:
        """How long the last finished copy of this slot took; 0 where there is none or it cannot be told."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return this backend's part of the `transfer_manifest`."""
        ...

    def close(self) -> None:
        """Give up memory and registrations; may be called twice."""
        ...


class UnqueuedTransfer:
    """Part of a backend that queues nothing: what it has copied is there, so nothing ever has to wait."""

    def clear_ready(self, slot: int) -> None: ...

    def ready_query(self, slot: int) -> bool:
        return True

    def synchronize_ready(self, slot: int, timeout: float) -> None: ...

    def wake(self) -> None: ...

    def wait_current_stream_for_ready(self, slot: int) -> None: ...

    def record_release(self, slot: int) -> None: ...

    def copy_us(self, slot: int) -> float:
        return 0.0


class InPlaceTransfer(UnqueuedTransfer):
    """numpy and cpu: the learner reads the packed shared slot itself, so there is nothing to copy."""

    submits_in_learner = False

    def __init__(self, device: str) -> None:
        self.device, self._slots = device, list[Block]()
        self._torch: Any = None if device == NUMPY else get_backend("torch")

    def register_host_slots(self, slots: Sequence[Block]) -> None:
        self._slots = list(slots)

    def allocate_device_slots(self, count: int) -> list[Block]:
        if self._torch is None:
            return self._slots[:count]
        return [self._torch.from_numpy(slot) for slot in self._slots[:count]]

    def submit_h2d(self, slot: int) -> None: ...

    def describe(self) -> dict[str, Any]:
        return describe(type(self), self.device, "cpu", "in_place")

    def close(self) -> None:
        self._slots = []


class EventWaiter:
    """Waits for events of a device until a deadline: an event's own wait has none, so a thread of its own waits for it.

    Ownership: the thread ends with `close()` or with this object; if a device hangs, when that lets go of it.
    Concurrency: any thread.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waits: set[queue.SimpleQueue[bool | BaseException]] = set()
        self.close = weakref.finalize(self, self._asked.put, None)
        self.thread = threading.Thread(
            target=_wait_for_events, args=(self._asked,), name="recollect-events", daemon=True
        )
        self.thread.start()

    def wait(self, event: Any, timeout: float) -> bool:
        """Sleep until `event` has passed; False if that takes longer, or at `wake()`. What it raises is raised here."""
        done: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()
        self._waits.add(done)
        self._asked.put((event, done))
        try:
            passed = done.get(timeout=timeout)
        except queue.Empty:
            return False
        finally:
            self._waits.discard(done)
        if isinstance(passed, BaseException):
            raise passed
        return passed

    def wake(self) -> None:
        """End every wait under way; those that come later wait."""
        for done in tuple(self._waits):
            done.put(False)


def _wait_for_events(asked: queue.SimpleQueue[Any]) -> None:
    while (request := asked.get()) is not None:
        event, done = request
        try:
            event.synchronize()
            done.put(True)
        except BaseException as error:
            done.put(error)
        del request, event, done  # or they would keep their device until the next wait


class StreamTransfer(ABC):
    """A side stream copies, events order it against the learner's stream. What a stream is, the subclass says.

    Concurrency: as TransferBackend. Slots alternate, so packer and learner never work on one slot's events at a time.
    """

    submits_in_learner = False

    def __init__(self, device: str) -> None:
        self.device = device
        self._host: list[Block] = []
        self._blocks: list[Block] = []
        self._pending = [False, False]  # submitted, and not known to have finished
        self._copy_us = [0.0, 0.0]
        self._waiter: EventWaiter | None = None

    # -- what a stream is

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream with `wait_event(event)`."""

    @abstractmethod
    def new_event(self, name: str) -> Any:
        """An event with `record(stream)`, `query()`, `synchronize()` and `elapsed_time(later)` in ms."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream on which the learner's work is queued."""

    @abstractmethod
    def new_block(self, like: Block) -> Block:
        """Device memory of the size of a host slot."""

    @abstractmethod
    def queue_copy(self, to: Block, source: Block, stream: Any) -> None:
        """Queue a copy of a host slot."""

    # -- slots

    def register_host_slots(self, slots: Sequence[Block]) -> None:
        self._host = list(slots)

    def allocate_device_slots(self, count: int) -> list[Block]:
        self._blocks = [self.new_block(slot) for slot in self._host[:count]]
        self._side = self.new_stream()
        self._started, self._copied, self._released = (
            [self.new_event(f"{name} {i}") for i in range(count)]
            for name in ("started", "copied", "released")
        )
        for event in self._released:  # memory may still be in use by earlier work of the learner's stream
            event.record(self.current_stream())
        self._waiter = EventWaiter()
        return list(self._blocks)

    def submit_h2d(self, slot: int) -> None:
        with interrupts.deferred():  # a copy that nobody waits for would read what is packed next
            self._side.wait_event(self._released[slot])
            self._started[slot].record(self._side)
            self.queue_copy(self._blocks[slot], self._host[slot], self._side)
            self._copied[slot].record(self._side)
            self._pending[slot] = True

    def clear_ready(self, slot: int) -> None:
        self._pending[slot] = False

    def ready_query(self, slot: int) -> bool:
        return bool(self._copied[slot].query())

    def synchronize_ready(self, slot: int, timeout: float) -> None:
        # The packer comes here a whole tick after the copy was queued, so the first look nearly always suffices.
        if self._waiter is None or not self._pending[slot]:
            return
        end, event = monotonic() + timeout, self._copied[slot]
        while not event.query():
            if not self._waiter.wait(event, max(0.0, end - monotonic())):
                raise DeadlineError(
                    f"slot {slot}: its copy must finish in {timeout:g} s, it did not; does {self.device} hang?"
                )
        self._copy_us[slot] = 1e3 * self._started[slot].elapsed_time(self._copied[slot])

    def wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    def wait_current_stream_for_ready(self, slot: int) -> None:
        self.current_stream().wait_event(self._copied[slot])

    def record_release(self, slot: int) -> None:
        self._released[slot].record(self.current_stream())

    def copy_us(self, slot: int) -> float:
        return self._copy_us[slot]

    def trace_events(self, slot: int) -> tuple[Any, Any]:
        """The events round the last copy of a slot."""
        return self._started[slot], self._copied[slot]

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.close()
        self._host, self._blocks = [], []


def describe(
    backend: type,
    device: str,
    family: str,
    submitter: str,
    *,
    kind: str = "shared",
    pinned: bool = False,
    direct: bool = False,
    asynchronous: bool = False,
    timing: bool = False,
) -> dict[str, Any]:
    """A backend's part of the manifest."""
    return {
        "backend": backend.__name__, "device": device, "device_family": family, "host_memory_kind": kind,
        "host_pinned": pinned, "direct_pinned_shared": direct, "supports_async_submit": asynchronous,
        "supports_timing_events": timing, "h2d_submitter": submitter,
    }  # fmt: skip


def make_transfer(device: Any) -> TransferBackend:
    """Return the backend for "numpy" or a device of torch; ValueError for a device that has none.

    >>> make_transfer("numpy").describe()["h2d_submitter"]
    'in_place'
    """
    if device == NUMPY:
        return InPlaceTransfer(NUMPY)
    found = get_backend("torch").as_device(device)
    if found.type == "cpu":
        return InPlaceTransfer("cpu")
    from recollect.ipc.replay_pipelines import transfer_torch

    return transfer_torch.make(found)

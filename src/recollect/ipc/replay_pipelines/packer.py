"""The packer: a thread beside the learner's that gets one tick ready at a time, by itself or by a collector."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

from recollect import _core, errors
from recollect.errors import ClosedError, DeadlineError, EmptyError, PeerDiedError, PrepareError
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import packing
from recollect.ipc.replay_pipelines.base import ReplayTickMetadata
from recollect.ipc.replay_pipelines.reports import PipelineTrace, TickLog
from recollect.ipc.replay_pipelines.slots import DONE, FAILED, SLICE_S, PackResult, PackSlots
from recollect.ipc.replay_pipelines.transfer import InPlaceTransfer, TransferBackend

PENDING, READY, BROKEN = "pending", "ready", "failed"
_AS_THEMSELVES = (PeerDiedError, DeadlineError, EmptyError, ClosedError)


@dataclass(slots=True, eq=False)
class PackJob:
    """One tick on its way. The packer writes it until `state` leaves PENDING, and then puts something into `done`.

    Something is in `asked` once the collector that packs it can know of it, or never will.
    """

    tick: int
    seed: int
    slot: int
    floor: int
    headroom: int
    deadline: float
    snapshot: _core.PackSnapshot | None
    end: float = 0.0
    state: str = PENDING
    done: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    asked: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    error: BaseException | None = None
    metadata: ReplayTickMetadata | None = None
    redrawn: int = 0
    pack_us: float = 0.0
    wait_us: float = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until its deadline."""
        return self.end - monotonic()


class Packer:
    """Prepares one job at a time, in a thread of its own or, when nothing is under way, in the caller's.

    Ownership: the thread ends with `stop()`. It keeps no reference to the pipeline.
    Concurrency: whoever prepares a job writes the counts. The queues are of C: a learner that hands over a job pays
    for one wake-up and nothing else.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        slots: PackSlots,
        transfer: TransferBackend,
        queues: tuple[Any, Any] | None,
        trace: PipelineTrace,
        log: TickLog,
    ) -> None:
        self._buffer, self._slots, self._transfer, self._queues = buffer, slots, transfer, queues
        self._trace, self._log = trace, log
        self._is_copied = not isinstance(transfer, InPlaceTransfer)
        self._jobs: queue.SimpleQueue[PackJob | None] = queue.SimpleQueue()
        self.served: list[PackJob | None] = [None, None]  # by slot: what the learner was last given from it
        self.takeovers, self.failed, self.redrawn, self.pack_us, self.copy_us = 0, 0, 0, 0.0, 0.0
        self.watched = False  # somebody else decides what a dead collector means
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="recollect-packer", daemon=True)
        self._thread.start()

    def start(self, job: PackJob) -> None:
        """Hand over a job; there must be no other under way."""
        job.end = monotonic() + job.deadline
        self._jobs.put(job)

    def do(self, job: PackJob) -> None:
        """Prepare a job here and now; there must be no other under way."""
        job.end = monotonic() + job.deadline
        self._work(job)

    def stop(self, timeout: float = 2.0) -> bool:
        """End the thread, whatever it waits for; False if it has not ended in time."""
        self._stopped = True
        self._jobs.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            with suppress(ClosedError):  # by which the thread was woken, too
                self._slots.stop()
                _core.wake_waiters(packing.memory_of(self._buffer))
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def retire(self, slot: int) -> None:
        """Tell of the tick that was last given out from this slot: by now its copy has finished."""
        job, self.served[slot] = self.served[slot], None
        if job is None or job.metadata is None:
            return
        copy_us = self._transfer.copy_us(slot)
        self.copy_us += copy_us
        self._log.write(
            job.metadata, redrawn=job.redrawn, pack_us=job.pack_us, copy_us=copy_us, wait_us=job.wait_us
        )

    # -- the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopped:
            self._work(job)

    def _work(self, job: PackJob) -> None:
        try:
            self._finish(job, self._prepare(job))
        except BaseException as error:
            job.error, job.state = _told(error, job), BROKEN
            if not isinstance(error, Exception):
                raise  # Ctrl-C in the learner's thread is no failure of the tick
            self.failed += 1
        finally:
            job.asked.put(None)
            job.done.put(None)

    def _finish(self, job: PackJob, packed: PackResult) -> None:
        device_slot = job.slot if self._is_copied else None
        job.metadata = ReplayTickMetadata(
            job.tick, packed.snapshot_ptr, packed.snapshot_size, job.seed, self._slots.sample_count,
            job.slot, device_slot,
        )  # fmt: skip
        job.redrawn, job.pack_us = packed.redrawn, packed.pack_ns / 1e3
        self.redrawn += packed.redrawn
        self.pack_us += job.pack_us
        job.state = READY

    def _prepare(self, job: PackJob) -> PackResult:
        start = monotonic_ns()
        # The host slot may still be copied from.
        self._transfer.synchronize_ready(job.slot, max(0.0, job.left_s))
        if self._is_copied:
            self._trace.slice("batch_h2d_wait", start, tick=job.tick)
        self.retire(job.slot)
        self._transfer.clear_ready(job.slot)
        packed = self._pack(job) if self._queues is None else self._ask_collector(job, *self._queues)
        if self._is_copied and not self._transfer.submits_in_learner:
            start = monotonic_ns()
            self._transfer.submit_h2d(job.slot)
            self._trace.slice("batch_h2d_submit", start, tick=job.tick)
            self._trace.copy(self._transfer, job.slot, tick=job.tick)
        return packed

    def _pack(self, job: PackJob) -> PackResult:
        while job.snapshot is None:
            self._wait_for_rows(job)
            taken = _core.take_snapshot(packing.memory_of(self._buffer), job.headroom)
            job.snapshot = taken if taken.ptr >= job.floor else None
        start = monotonic_ns()
        packed = packing.pack(self._buffer, self._slots, job.slot, job.seed, job.headroom, job.snapshot)
        self._trace.slice("pack", start, tick=job.tick, redrawn=packed.redrawn)
        return packed

    def _wait_for_rows(self, job: PackJob) -> None:
        while True:
            left = max(0.0, job.left_s)
            found = packing.wait_for_rows(self._buffer, self._slots, job.floor, min(left, SLICE_S))
            if found == packing.REACHED:
                return
            if found != packing.TIMED_OUT:
                raise ClosedError("this object was closed while a tick waited for rows")
            there = self._buffer.ptr
            if not self.watched and _core.writers_gone(packing.memory_of(self._buffer)) and there < job.floor:
                raise PeerDiedError(
                    f"tick {job.tick}: needs {job.floor} rows, there are {there} and every collector is gone; "
                    "start one again"
                )
            if left <= 0:
                raise DeadlineError(
                    f"tick {job.tick}: needs {job.floor} rows in {job.deadline:g} s, there are {there}; "
                    "lower min_snapshot_ptr or raise the deadline"
                )

    # -- packing by a collector

    def _ask_collector(self, job: PackJob, request: Any, ready: Any) -> PackResult:
        start, slots = monotonic_ns(), self._slots
        while (number := slots.ask(job.seed, job.headroom, job.floor, job.slot)) is None:
            self._wait_for_bell(job, ready)  # a collector still packs what was given up before
        request.put(number)
        job.asked.put(None)
        while (state := slots.claim()[1]) not in (DONE, FAILED):
            if self._collector_is_gone() and slots.take_over(number):
                self.takeovers += 1
                return self._pack(job)
            try:
                self._wait_for_bell(job, ready)
            except BaseException:
                slots.cancel(number)
                raise
        self._trace.slice("collector_pack_request", start, tick=job.tick)
        if state == FAILED:
            name, text = slots.error()
            raise getattr(errors, name, PrepareError)(text)
        return slots.result()

    def _wait_for_bell(self, job: PackJob, ready: Any) -> None:
        if self._stopped:
            raise ClosedError("this object was closed while a tick waited for its collector")
        if job.left_s <= 0:
            raise DeadlineError(
                f"tick {job.tick}: the collector must pack it in {job.deadline:g} s, it did not; does it call "
                "serve_pack_requests, and are there enough rows?"
            )
        with suppress(queue.Empty):
            ready.get(True, min(max(0.0, job.left_s), SLICE_S))

    def _collector_is_gone(self) -> bool:
        gone = self._slots.packer_is_gone()
        return _core.writers_gone(packing.memory_of(self._buffer)) if gone is None else gone


def _told(error: BaseException, job: PackJob) -> BaseException:
    if isinstance(error, _AS_THEMSELVES):
        return error
    told = PrepareError(
        f"tick {job.tick}: could not be prepared, {type(error).__name__}: {error}; start it again"
    )
    told.__cause__ = error
    return told

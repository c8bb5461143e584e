"""Batches one tick ahead: packed by a thread or a collector, copied by the device, hot for one tick."""

from __future__ import annotations

import operator
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Any, Self

from recollect import _core, checks, interrupts
from recollect.errors import ClosedError, DeadlineError, WrongTickError, class_name
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import native_h2d, packing
from recollect.ipc.replay_pipelines.base import SEEDS, ReplayTickMetadata, sample_seed
from recollect.ipc.replay_pipelines.packer import BROKEN, PENDING, READY, Packer, PackJob
from recollect.ipc.replay_pipelines.packing import make_collector_pack, serve_pack_requests
from recollect.ipc.replay_pipelines.reports import PipelineStats, PipelineTrace, TickLog
from recollect.ipc.replay_pipelines.slots import RING_DEPTH, SLICE_S, STOP_AT, PackSlots
from recollect.ipc.replay_pipelines.transfer import TransferBackend, make_transfer
from recollect.ipc.transitions import fields_of
from recollect.memory.waiting import Watch

__all__ = ["CPUPinnedDoubleBufferReplayPipeline", "make_collector_pack", "serve_pack_requests"]
_GRACE_S = 0.25  # a tick that ends at its own deadline says so itself, before who waits for it gives up


class CPUPinnedDoubleBufferReplayPipeline:
    """Draws, packs and copies the batch of the next tick while the learner uses this one.

    Without the three collector arguments a thread of this process packs; with all of them the collector does, by
    `serve_pack_requests`. Batches are views into one of two slots, valid until `after_tick()`.

    Ownership: the slots are its own (or the caller's, if passed); `close()` ends thread, slots and registrations.
    Concurrency: one learner thread calls; `close()` from any. Collectors write to the buffer meanwhile, unhindered.

    >>> import numpy as np, recollect as rc
    >>> buf = rc.ipc.ReplayBuffer(1000, 3, 2, "numpy")
    >>> obs, no = np.ones((8, 3), "float32"), np.zeros(8, bool)
    >>> buf.add(obs, np.zeros((8, 2), "float32"), np.arange(8.0), obs, no, no)
    >>> with CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=64) as pipe:
    ...     for t in range(3):
    ...         batch = pipe.sample_large_batch(t, 64)
    ...         started = pipe.start_prepare(t + 1, 64)
    ...         total = batch["obs"].sum()
    ...         pipe.after_tick()
    ...     pipe.stats().ticks, pipe.h2d_submitter
    (3, 'in_place')
    >>> buf.cleanup()
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        device: Any,
        sample_count: int,
        base_seed: int = 0,
        trace_recorder: Any = None,
        trace_cuda_events: bool = True,
        verbose: bool = False,
        verbose_output_dir: Any = None,
        collector_pack_request_queue: Any = None,
        collector_pack_ready_queue: Any = None,
        collector_pack_shared_slots: PackSlots | None = None,
        deadline: float = 60.0,
        transfer: TransferBackend | None = None,
    ) -> None:
        """Make slots and start the packer. `transfer` replaces the backend that `device` would get."""
        checks.count("sample_count", sample_count)
        if not isinstance(replay_buffer, ReplayBuffer):
            raise TypeError(
                f"replay_buffer: must be a recollect.ipc.ReplayBuffer, got {class_name(replay_buffer)}"
            )
        self.base_seed = checks.seed("base_seed", base_seed, below=SEEDS)
        self.sample_count = int(sample_count)
        self.deadline = checks.timeout(deadline, 60.0)
        queues = _checked_queues(
            collector_pack_request_queue, collector_pack_ready_queue, collector_pack_shared_slots
        )
        if collector_pack_shared_slots is not None:
            _check_slots(collector_pack_shared_slots, sample_count, replay_buffer.row_nbytes)
        n_rings = replay_buffer.num_lanes * max(1, replay_buffer.envs_per_lane)
        self._buffer, self._run = replay_buffer, replay_buffer.capacity // n_rings
        self._transfer = make_transfer(device) if transfer is None else transfer
        self._trace = PipelineTrace(trace_recorder, trace_cuda_events)
        self._log = TickLog(verbose, verbose_output_dir)
        self._owns_slots = collector_pack_shared_slots is None
        self._slots = collector_pack_shared_slots or PackSlots(sample_count, replay_buffer.row_nbytes)
        self._slots.mapping.store(STOP_AT, 0)
        self._transfer.register_host_slots([self._slots.slot(i) for i in range(RING_DEPTH)])
        blocks = self._transfer.allocate_device_slots(RING_DEPTH)
        self._fields = [fields_of(block, replay_buffer.layout) for block in blocks]
        self._manifest = self._transfer.describe() | {
            "ring_depth": RING_DEPTH, "pack_executor": "learner_thread" if queues is None else "collector",
            "sample_count": self.sample_count, "row_bytes": replay_buffer.row_nbytes,
            "native_h2d": native_h2d.get_diagnostic(),
        }  # fmt: skip
        self._packs_here = queues is None
        self._hot: PackJob | None = None
        self._cold: PackJob | None = None
        self._last_slot = 1
        self._closed = self._is_ended = False
        self._closing = threading.RLock()
        self._watch: Watch | None = None
        self._started, self._hits, self._misses, self._wait_us = 0, 0, 0, 0.0
        self._lock = threading.RLock()
        with interrupts.deferred():
            self._packer = Packer(replay_buffer, self._slots, self._transfer, queues, self._trace, self._log)
            self._end = weakref.finalize(self, self._packer.stop)  # also before the interpreter goes down

    # -- what it is

    @property
    def h2d_submitter(self) -> str:
        """Who copies to the device."""
        return str(self._manifest["h2d_submitter"])

    @property
    def transfer_manifest(self) -> dict[str, object]:
        """How batches reach the device, as JSON-ready facts; fixed after construction."""
        return dict(self._manifest)

    @property
    def metadata(self) -> ReplayTickMetadata | None:
        """What was packed for the hot batch, None without one."""
        hot = self._hot
        return None if hot is None else hot.metadata

    def watch(self, look: Callable[[], object] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise, and decides what a dead collector means."""
        self._watch, self._packer.watched = None if look is None else Watch(look), look is not None

    def stats(self) -> PipelineStats:
        """Return a frozen record of counts and times."""
        with self._lock:
            p = self._packer
            return PipelineStats(
                self._started, self._hits + self._misses, self._hits, self._misses, p.failed, p.takeovers,
                p.redrawn, p.pack_us, p.copy_us, self._wait_us,
            )  # fmt: skip

    # -- ticks

    def start_prepare(
        self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None, *, headroom: int = 0
    ) -> bool:
        """Start a tick; False if it is already pending, ready or hot. Another one pending or ready: WrongTickError.

        The snapshot is taken as soon as `min_snapshot_ptr` rows were ever added (None: now) and leaves out what the
        next `headroom` rows of each lane (of each environment, where they are kept apart) will overwrite.
        """
        if min_snapshot_ptr is not None:
            checks.count("min_snapshot_ptr", min_snapshot_ptr, 0)
        self._check_headroom(headroom)
        with self._lock:
            tick = self._check(tick_id, sample_count)
            if any(job is not None and job.tick == tick for job in (self._hot, self._cold)):
                return False
            if self._cold is not None:
                raise self._wrong(tick, self._cold)
            self._start(tick, min_snapshot_ptr, headroom)
            return True

    def wait_asked(self) -> None:
        """Wait until the collector that packs what is pending can know of it; nothing to wait for if none does.

        What the collector adds after its next `serve_pack_requests` is then no part of the snapshot.
        """
        with self._lock:
            self._check_open()
            job = None if self._packs_here else self._cold
        if job is not None:
            end = monotonic() + self.deadline  # then whoever takes the tick hears that it is late
            while (left := end - monotonic()) > 0 and not self._rings(job.asked, left):
                pass
            self._check_open()

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Whether the data of this tick is there, hot or cold, its copy finished. Never waits."""
        with self._lock:
            tick = self._check(tick_id, sample_count)
            job = next((j for j in (self._hot, self._cold) if j is not None and j.tick == tick), None)
            return job is not None and job.state == READY and self._transfer.ready_query(job.slot)

    def wait_ready(self) -> None:
        """Wait for whatever is pending; DeadlineError when that takes longer than the deadline."""
        with self._lock:
            self._check_open()
            job, end = self._cold, monotonic() + self.deadline
            if job is None:
                return
            if not self._wait(job, None):
                raise _late(job, self.deadline)
            self._bring(job)
        if not self._wait_copied(job, end):
            hung = f"does {self._manifest['device']} hang?"
            raise DeadlineError(f"tick {job.tick}: must be copied in {self.deadline:g} s, it is not; {hung}")

    def wait_until_ready(self, tick_id: int, sample_count: int, *, timeout: float | None = None) -> bool:
        """Wait for this tick, starting it if nothing is cold; False on timeout, and it stays pending."""
        seconds = checks.timeout(timeout, self.deadline)
        end = monotonic() + seconds
        with self._lock:
            tick = self._check(tick_id, sample_count)
            job = self._hot if self._hot is not None and self._hot.tick == tick else self._cold
            if job is None:
                job = self._start(tick, None, 0)
            if job.tick != tick:
                raise self._wrong(tick, job)
            if not self._wait(job, None if timeout is None else seconds):
                return False
            self._bring(job)
        begun = monotonic_ns()
        if not self._wait_copied(job, end):
            return False
        self._trace.slice("batch_h2d_wait", begun, tick=tick)
        return True

    def sample_large_batch(self, tick_id: int, sample_count: int) -> dict[str, Any]:
        """Make this tick hot and return its fields, views into its slot; the hot tick again gives the same ones.

        A tick that nobody started is started here. DeadlineError when it is not packed in time: it stays pending.
        """
        with self._lock:
            tick = self._check(tick_id, sample_count)
            if self._hot is not None:
                if self._hot.tick != tick:
                    raise self._wrong(tick, self._hot)
                return dict(self._fields[self._hot.slot])
            start = monotonic_ns()
            job, hit = self._cold, self._cold is not None and self._cold.state == READY
            if job is None:
                job = self._start(tick, None, 0, here=True)
            if job.tick != tick:
                raise self._wrong(tick, job)
            if not self._wait(job, None):
                raise _late(job, self.deadline)
            self._swap(job, start, hit)
            return dict(self._fields[job.slot])

    def after_tick(self) -> None:
        """Give the hot batch back: its slot may be filled again. Nothing happens without one."""
        with self._lock:
            self._check_open()
            if self._hot is not None:
                self._transfer.record_release(self._hot.slot)
                self._hot = None

    def close(self) -> None:
        """End thread, slots and registrations; whoever waits gets ClosedError. May be called twice.

        DeadlineError when the packer or a copy hangs: what they use is left to them, and the next call tries again.
        """
        with self._lock:
            was_open, self._closed = not self._closed, True
            if self._cold is not None:
                self._cold.asked.put(None)
                self._cold.done.put(None)
        if was_open:  # else whoever waits for a copy is another `close()`
            self._transfer.wake()
        with self._closing:
            if not self._is_ended:
                self._end_all()
                self._is_ended = True

    def _end_all(self) -> None:
        ended = self._packer.stop(10.0)
        self._end.detach()
        if not ended:
            raise DeadlineError(
                "close: the packer must end within 10 s, it did not; its slots are left to it"
            )
        for slot in (1 - self._last_slot, self._last_slot):
            self._transfer.synchronize_ready(slot, self.deadline)
            self._packer.retire(slot)
        with interrupts.deferred():
            self._log.close()
            self._hot = self._cold = None
            self._fields = []
            self._transfer.close()
            if self._owns_slots:
                self._slots.cleanup()

    # -- under the lock

    def _start(self, tick: int, floor: int | None, headroom: int, here: bool = False) -> PackJob:
        memory = packing.memory_of(self._buffer)
        there = _core.rows_added(memory)
        floor = there if floor is None else floor
        snapshot = _core.take_snapshot(memory, headroom) if self._packs_here and there >= floor else None
        slot = 1 - (self._last_slot if self._hot is None else self._hot.slot)
        seed = sample_seed(self.base_seed, tick)
        job = PackJob(tick, seed, slot, floor, headroom, self.deadline, snapshot)
        if here and snapshot is not None:  # the learner has nothing to do but wait: two wake-ups saved
            try:
                self._cold, self._started = job, self._started + 1
                self._packer.do(job)
            except BaseException as error:
                # Ctrl-C is no failure of the tick: it was never started.
                self._cold, self._started = None, self._started - (not isinstance(error, Exception))
                raise
        else:
            with interrupts.deferred():  # one that nobody has would stay pending
                self._cold, self._started = job, self._started + 1
                self._packer.start(job)
        return job

    def _bring(self, job: PackJob) -> None:
        """Copy a packed tick where the learner's thread must; what was copied is not copied again."""
        if self._transfer.submits_in_learner and not self._transfer.ready_query(job.slot):
            start = monotonic_ns()
            self._transfer.submit_h2d(job.slot)
            self._trace.slice("batch_h2d_submit", start, tick=job.tick)

    def _swap(self, job: PackJob, start: int, hit: bool) -> None:
        waited = monotonic_ns()
        self._bring(job)
        self._transfer.wait_current_stream_for_ready(job.slot)
        self._trace.slice("gpu_wait_for_batch", start, tick=job.tick, hit=hit)
        job.wait_us = 0.0 if hit else (waited - start) / 1e3
        self._hot, self._cold, self._last_slot = (
            job,
            None,
            job.slot,
        )  # no call from here: all of it or nothing
        self._packer.served[job.slot] = job
        self._hits, self._misses = self._hits + hit, self._misses + (not hit)
        self._wait_us += job.wait_us
        self._trace.slice("hot_cold_swap", waited, tick=job.tick)
        if not hit:
            self._trace.count("misses", self._misses)

    def _wait(self, job: PackJob, timeout: float | None) -> bool:
        """Wait until a job is ready; False on timeout. Raises what went wrong with it."""
        end = monotonic() + self.deadline if timeout is None else monotonic() + timeout
        if timeout is None:
            end = max(end, job.end + _GRACE_S)
        if self._watch is not None:
            self._watch.by_the_way()
        while job.state == PENDING:
            left = end - monotonic()
            if left <= 0:
                return False
            try:
                self._lock.release()
                self._rings(job.done, left)
            finally:
                self._lock.acquire()
            self._check_open()
        self._raise_failed()
        return True

    # -- not under the lock: `close()` must get on meanwhile

    def _rings(self, bell: queue.SimpleQueue[None], left: float) -> bool:
        """Sleep until something is put there; False after `left` seconds, or when it was time to look after others."""
        with suppress(queue.Empty):
            bell.get(timeout=left if self._watch is None else min(left, SLICE_S))
            return True
        if self._watch is not None:
            self._watch.look()
        return False

    def _wait_copied(self, job: PackJob, end: float) -> bool:
        """Wait until the copy of a packed tick has finished; False if it has not by `end`."""
        while True:
            left = max(0.0, end - monotonic())
            try:
                self._transfer.synchronize_ready(job.slot, min(left, SLICE_S))
                return True
            except DeadlineError:
                self._check_open()
            if self._watch is not None:
                self._watch.look()
            if left <= SLICE_S:
                return False

    def _check(self, tick_id: Any, sample_count: Any) -> int:
        self._check_open()
        tick = checks.seed("tick_id", tick_id, below=SEEDS)
        if isinstance(sample_count, bool) or sample_count != self.sample_count:
            raise ValueError(
                f"sample_count: must be the {self.sample_count} of the constructor, got {sample_count!r}; "
                "make another pipeline for another size"
            )
        self._raise_failed()
        return tick

    def _check_headroom(self, headroom: Any) -> None:
        checks.count("headroom", headroom, 0)
        if operator.index(headroom) >= self._run:
            raise ValueError(
                f"headroom: must be below the {self._run} rows of a lane, got {headroom}; use a larger buffer"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this pipeline was closed; make another one")

    def _raise_failed(self) -> None:
        job = self._cold
        if job is not None and job.state == BROKEN and job.error is not None:
            self._cold = None
            raise job.error

    def _wrong(self, tick: int, job: PackJob) -> WrongTickError:
        state = "hot; call after_tick() first" if job is self._hot else f"{job.state}; take it first"
        return WrongTickError(f"tick {tick}: the pipeline must be free for it, tick {job.tick} is {state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _checked_queues(request: Any, ready: Any, slots: Any) -> tuple[Any, Any] | None:
    given = [x is not None for x in (request, ready, slots)]
    if any(given) and not all(given):
        raise ValueError(
            "collector_pack_*: must be all three or none, got "
            f"{sum(given)} of them; pass all that make_collector_pack returned"
        )
    return (request, ready) if all(given) else None


def _check_slots(slots: PackSlots, sample_count: int, row_bytes: int) -> None:
    if not isinstance(slots, PackSlots):
        raise TypeError(
            "collector_pack_shared_slots: must be the slots that make_collector_pack returned, got "
            f"{type(slots).__name__}; pass its third value"
        )
    wanted, found = (sample_count, row_bytes), (slots.sample_count, slots.row_bytes)
    if wanted != found:
        raise ValueError(
            f"collector_pack_shared_slots: must be for {wanted[0]} rows of {wanted[1]} bytes, got {found[0]} of "
            f"{found[1]}; make them with make_collector_pack for this buffer and sample_count"
        )


def _late(job: PackJob, deadline: float) -> DeadlineError:
    return DeadlineError(f"tick {job.tick}: must be packed in {deadline:g} s, it is not; it stays pending")

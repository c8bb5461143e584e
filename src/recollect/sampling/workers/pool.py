"""The worker processes of a MultiprocessingSampler, their rings, and their end."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

from recollect import _core, interrupts
from recollect.batch.base import BatchBase
from recollect.errors import ClosedError, DeadlineError, LaneBusyError, WorkerDiedError, WorkerError
from recollect.memory.ring import BUSY, CLOSED, Ring
from recollect.sampling.base import BatchSampler
from recollect.sampling.workers import messages as requests
from recollect.sampling.workers import worker
from recollect.sampling.workers.messages import REST, WorkRequest
from recollect.sampling.workers.slots import ERROR, Format

LOOK_S = (
    0.2  # how often a wait asks whether the workers live; their rings tell, but only once they have begun
)
GRACE_S = 0.5  # for workers to end by themselves
NO_RUN = -1


class Pool:
    """`n_workers` processes, each with a lane of the ring of batches and a ring of requests.

    Ownership: `close` ends the processes and gives up the rings; the process that made it must call it.
    Concurrency: one thread at a time.
    """

    def __init__(self, sampler: BatchSampler, form: Format, n_workers: int, n_slots: int, context: Any,
                 doze_s: float, daemon: bool, deadline: float) -> None:  # fmt: skip
        self.form, self.n_workers, self.n_slots, self.deadline = form, n_workers, n_slots, deadline
        self.run = 0  # what the workers are asked for now
        self._pid = os.getpid()
        self.ring = form.make_ring(n_slots, n_workers)
        self.data = form.data.blocks(self.ring)
        self.metadata = None if form.metadata is None else form.metadata.blocks(self.ring)
        self.asked: list[Ring] = []
        self.processes: list[Any] = []
        try:
            for k in range(n_workers):
                self.asked.append(requests.make_ring(sampler.batch_size, n_slots))
                self._start(k, sampler, context, doze_s, daemon)
        except BaseException:
            self.close()
            raise

    def _start(self, k: int, sampler: BatchSampler, context: Any, doze_s: float, daemon: bool) -> None:
        method = context.get_start_method()
        payload: Any = sampler if method == "fork" else pickle.dumps(sampler)
        # A worker of the fork server has another parent; one of a thread that may end would end with it.
        dies = method != "forkserver" and threading.current_thread() is threading.main_thread()
        with self.ring.on_lane(k) as lane:
            process = context.Process(
                target=worker.run,
                args=(payload, self.form, lane, self.asked[k], _core.own_word(), doze_s, dies),
                name=f"recollect-sampler-{k}",
                daemon=daemon,
            )
            with interrupts.held_back(method):
                process.start()
                self.processes.append(process)

    def send(self, k: int, request: WorkRequest) -> None:
        """Ask worker `k` for something."""
        requests.send(self.asked[k], request)

    def begin(self) -> int:
        """Begin a new run: whatever the workers still do belongs to another."""
        self.run += 1
        return self.run

    def abandon(self) -> None:
        """Let the workers rest, and free the slots of what they had done."""
        run = self.begin()
        for k in range(self.n_workers):
            self.send(k, WorkRequest(REST, run))
        for k in range(self.n_workers):
            found = self.ring.native.fetch(k, 0.0, NO_RUN, self.data, None)
            if type(found) is tuple:
                raise self._error(k, found)

    def fetch(self, k: int, metadata: bool, out: Any = None) -> tuple[int, tuple[int, ...], Any, Any]:
        """Wait for the next batch of worker `k` in this run: what it is, its numbers, data, metadata."""
        end = monotonic() + self.deadline
        blocks = self.metadata if metadata else None
        while True:
            left = end - monotonic()
            found = self.ring.native.fetch(k, max(0.0, min(LOOK_S, left)), self.run, self.data, blocks, out)
            if type(found) is tuple:
                if found[0] == ERROR:
                    raise self._error(k, found)
                return found
            if found == CLOSED:
                raise ClosedError("MultiprocessingSampler: was closed; make another")
            if found == BUSY:
                reader = _core.describe_process(self.ring.native.reader())
                raise LaneBusyError(
                    f"batches: must be read by one process, got {reader} too; make a sampler each"
                )
            self.check_alive()
            if left <= 0:
                pid = self.processes[k].pid
                raise DeadlineError(
                    f"MultiprocessingSampler: a batch must come within {self.deadline:g} s, got none of worker {k} "
                    f"(process {pid}); raise deadline=, or see what it does"
                )

    def check_alive(self) -> None:
        """Raise WorkerDiedError if a worker is gone, WorkerError if it said why."""
        for k, process in enumerate(self.processes):
            code = process.exitcode
            if code is None:
                continue
            found = self.ring.native.fetch(k, 0.0, NO_RUN, self.data, None)
            if type(found) is tuple:
                raise self._error(k, found)
            raise WorkerDiedError(
                f"worker {k} (process {process.pid}): must live until close(), got exit code {code}; "
                + (
                    "see its traceback above; where it says that a process was started too early, put what runs below "
                    'if __name__ == "__main__":'
                    if code == 1
                    else "look for an out-of-memory kill, or a crash in a transformation"
                )
            )

    def _error(self, k: int, found: Any) -> WorkerError:
        text = found[2].decode(errors="replace")
        return WorkerError(f"worker {k} raised, and the sampler is closed; its traceback:\n{text}")

    def close(self) -> None:
        """End the workers, by force after half a second, and give up the rings; elsewhere do nothing."""
        if self._pid != os.getpid():
            return  # a forked copy: the workers are another process's
        with interrupts.deferred():  # it takes two seconds at most
            self._pid = -1
            self._end()

    def _end(self) -> None:
        for ring in (*self.asked, self.ring):
            ring.cleanup()
        end = monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, end - monotonic()))
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join(1.0)
            if process.exitcode is not None:
                process.close()
        self.processes = []


def check_shared(sampler: BatchSampler, method: str) -> None:
    """Raise ValueError for a source that other processes cannot read as it is now."""
    for source in _leaves(sampler):
        if not getattr(source, "is_multiprocessing_safe", not source.is_mutable):
            storage = getattr(source, "inner_storage", source)
            raise ValueError(
                f"sampler: its source must be readable by other processes, got a {type(source).__name__} in "
                f"{type(storage).__name__}; create it with SharedMemoryStorage and multiprocessing=True, or use "
                "load_from(..., multiprocessing=True)"
            )
    if method == "fork":
        return
    try:
        pickle.dumps(sampler)
    except Exception as error:
        raise ValueError(
            f"sampler: must be picklable to be started by {method}, got {type(error).__name__}: {error}; define "
            "transformations at the top of a module, use SharedMemoryStorage, or pass a fork context"
        ) from error


def _leaves(batch: BatchBase) -> Iterator[BatchBase]:
    sources = batch._sources()
    if not sources:
        yield batch
    for source in sources:
        yield from _leaves(source)

"""MpiCarrier: mpi4py; a frame is one MPI message.

MPI has no receive with a deadline, so a wait probes: without a pause for 2 ms, yielding the processor, then sleeping at
most 1 ms between two looks, so that more ranks than cores work and an idle rank costs next to nothing. MPI is entered
by one thread at a time, so `MPI_THREAD_SERIALIZED` is enough. A frame on its way moves on whenever any thread enters.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Self

import numpy as np

from recollect.errors import ClosedError, FrameError, MissingExtraError
from recollect.remote.carriers.base import (
    ANY,
    TIMEOUT,
    Frame,
    awaited,
    check_rank,
    check_tag,
    check_timeout,
    too_late,
)
from recollect.remote.frame import MAX_FRAME, check_max_frame

_SPIN_S = 0.002
_NAP_S = 0.001
_FLUSH_S = 0.002
_entry = threading.RLock()  # one for all carriers of the process
_making = threading.Lock()
_unsent: list[MpiHandle] = []  # of closed carriers: MPI may read these frames as long as it runs
_the_carrier: MpiCarrier | None = None


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(
            f'the carrier "mpi" needs mpi4py and an MPI library ({error}); run pip install "recollect[mpi]", '
            'or use "local", which needs nothing'
        ) from error
    return MPI


class MpiHandle:
    """An MPI send under way."""

    def __init__(self, wait: Any, request: Any, dest: int, frame: Any) -> None:
        self._wait, self._request, self.dest = wait, request, dest
        self.frame = frame  # MPI reads it until the request is complete
        self.is_done = False

    def is_complete(self) -> bool:
        """Whether the frame has left."""
        if not self.is_done:
            with _entry:
                self.test()
        return self.is_done

    def test(self) -> bool:
        """Whether the frame has left; by a thread that has entered MPI."""
        if not self.is_done and self._request.Test():
            self.is_done, self.frame = True, None
        return self.is_done

    def wait(self, timeout: float = TIMEOUT) -> None:
        """Wait until the frame has left."""
        what = f"send to rank {self.dest}"
        self._wait(lambda: True if self.is_complete() else None, check_timeout(timeout), lambda: what)


class MpiCarrier:
    """The ranks of an MPI communicator, COMM_WORLD unless another is given.

    Ownership: the communicator is duplicated, so that other messages of the job are never seen; `close()` leaves MPI
    itself alone. Concurrency: any thread; they enter MPI in turns.
    """

    sees_death = False

    def __init__(self, comm: Any = None, *, max_frame: int = MAX_FRAME, open_s: float = 300.0) -> None:
        """Duplicate the communicator: every rank of it must make its carrier."""
        mpi = _mpi()
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise RuntimeError("MpiCarrier: MPI must be initialised and not finalised")
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise RuntimeError(
                "MpiCarrier: MPI must allow several threads; initialise it with THREAD_SERIALIZED"
            )
        self._mpi = mpi
        base = mpi.COMM_WORLD if comm is None else comm
        self.rank: int = int(base.Get_rank())
        self.size: int | None = int(base.Get_size())
        self.max_frame = check_max_frame(max_frame)
        self.is_closed = False
        self._lock = _entry
        self._status = mpi.Status()  # used with the lock
        self.malformed: dict[int, int] = {}  # by rank: frames that were too large
        self._sending: deque[MpiHandle] = deque()
        self._flusher: threading.Thread | None = None
        with self._lock:
            self._comm, request = base.Idup()
        all_ranks = f"all {self.size} ranks to make their carrier"
        self._wait(lambda: self._tested(request), check_timeout(open_s), lambda: all_ranks)

    # -- waiting

    def _tested(self, request: Any) -> bool | None:
        with self._lock:
            return True if request.Test() else None

    def _wait(self, ready: Any, timeout: float, what: Any) -> Any:
        start = monotonic()
        end = start + timeout
        while True:
            if self.is_closed:
                raise ClosedError(f"MpiCarrier: was closed while waiting for {what()}")
            found = ready()
            if found is not None:
                return found
            now = monotonic()
            if now >= end:
                raise too_late(what(), timeout)
            if now - start < _SPIN_S:
                os.sched_yield()  # sleep(0) would be gone for 100 µs
            else:
                sleep(min(_NAP_S, end - now))

    # -- sending

    def send(self, dest: int, tag: int, parts: Sequence[Any], timeout: float = TIMEOUT) -> None:
        """Send a frame; the parts are copied into one message."""
        check_timeout(timeout)
        handle = self.isend(dest, tag, parts)
        if not handle.is_done:
            handle.wait(timeout)

    def isend(self, dest: int, tag: int, parts: Sequence[Any]) -> MpiHandle:
        """Begin to send a frame, and never wait."""
        self._check_open()
        check_rank(dest, self.size, "dest")
        check_tag(tag)
        frame = b"".join(parts) if len(parts) != 1 or not isinstance(parts[0], bytes) else parts[0]
        if len(frame) > self.max_frame:
            raise FrameError(
                f"frame: must have at most {self.max_frame} bytes, got {len(frame)}; send less at once"
            )
        with self._lock:
            self._push()
            request = self._comm.Isend([frame, self._mpi.BYTE], dest=dest, tag=tag)
            handle = MpiHandle(self._wait, request, dest, frame)
            if not handle.test():
                self._sending.append(handle)
                self._ensure_flusher()
        return handle

    def _push(self) -> None:
        """Let sends under way move on. With the lock."""
        for _ in range(len(self._sending)):
            handle = self._sending.popleft()
            if not handle.test():
                self._sending.append(handle)

    def _ensure_flusher(self) -> None:
        if self._flusher is None or not self._flusher.is_alive():
            self._flusher = threading.Thread(target=self._flush_all, name="recollect-mpi", daemon=True)
            self._flusher.start()

    def _flush_all(self) -> None:
        while True:
            sleep(_FLUSH_S)
            with self._lock:
                if self.is_closed or self._mpi.Is_finalized():
                    return
                self._push()
                if not self._sending:
                    self._flusher = None
                    return

    # -- receiving

    def recv(
        self, source: int = ANY, tag: int = ANY, timeout: float = TIMEOUT
    ) -> tuple[int, int, memoryview]:
        """Return (source, tag, frame); the frame is fresh memory, the caller's own."""
        check_timeout(timeout)
        check_tag(tag, any_allowed=True)
        check_rank(source, self.size, "source", any_allowed=True)
        self._check_open()
        found: Frame = self._wait(lambda: self._probe(source, tag), timeout, lambda: awaited(source, tag))
        return found

    def _probe(self, source: int, tag: int) -> Frame | None:
        mpi, status = self._mpi, self._status
        with self._lock:
            if self.is_closed:
                return None
            if self._sending:
                self._push()
            message = self._comm.Improbe(
                mpi.ANY_SOURCE if source == ANY else source, mpi.ANY_TAG if tag == ANY else tag, status
            )
            if message is None:
                return None
            found, its_tag, n = status.Get_source(), status.Get_tag(), status.Get_count(mpi.BYTE)
            if n > self.max_frame:
                self._discard(message, found)
                return None
            frame = np.empty(n, np.uint8)
            message.Recv([frame, mpi.BYTE])
        return found, its_tag, frame.data

    def _discard(self, message: Any, source: int) -> None:
        """Let a frame that is too large go, and take no memory for it. With the lock."""
        with suppress(self._mpi.Exception):  # it says that the message was cut
            message.Recv([bytearray(1), self._mpi.BYTE])
        self.malformed[source] = self.malformed.get(source, 0) + 1

    def take_malformed(self) -> dict[int, int]:
        """Return how many frames of each rank were too large, since the last call."""
        with self._lock:
            taken, self.malformed = self.malformed, {}
        return taken

    def alive(self) -> frozenset[int]:
        """All ranks: MPI does not tell which are gone; managers and clients look at the processes themselves."""
        self._check_open()
        return frozenset(range(self.size or 0))

    # -- ending

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("MpiCarrier: was closed; make another")

    def close(self) -> None:
        """Give frames on their way a moment, then stop; may be called twice."""
        global _the_carrier
        end = monotonic() + 2.0
        while self._sending and not self.is_closed and monotonic() < end:
            with self._lock:
                self._push()
            sleep(_NAP_S)
        with self._lock:
            self.is_closed = True
            _unsent.extend(self._sending)
            self._sending.clear()
        if _the_carrier is self:
            _the_carrier = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MpiCarrier(rank={self.rank}, size={self.size})"


def the_mpi_carrier() -> MpiCarrier:
    """This process's one carrier over COMM_WORLD, made at the first use."""
    global _the_carrier
    with _making:  # once: every rank of the world makes as many as the others
        if _the_carrier is None:
            _the_carrier = MpiCarrier()
        return _the_carrier

"""The loop of a manager over its carrier: it receives, lets the protocol decide, and sends the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Any, NamedTuple

from recollect import interrupts
from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import config
from recollect.remote.carriers.base import Carrier, is_over
from recollect.remote.carriers.by_name import carrier_of
from recollect.remote.config import Limits
from recollect.remote.frame import MAX_FRAME, decode, encode
from recollect.remote.manager.protocol import ManagerProtocol, Reply
from recollect.remote.messages import DATA_TAG, AnyMessage, Failed, Sample, note
from recollect.remote.stats import Timing

_TICK_S = 0.1
_MOST_MALFORMED = 16  # in a row, then a peer is shut out
_AT_HAND = 64  # messages that one sync of the log may serve
_MOST_WAITING = 1 << 20  # bytes of answers that wait; a peer that has more to take is given no items


class Received(NamedTuple):
    """What came: the message, the body of its frame, and the frame; or what is wrong with it."""

    message: AnyMessage | None
    body: memoryview
    frame: memoryview
    error: FrameError | None = None


Receive = Callable[[], tuple[int, Received, int]]
Handle = Callable[[int, Received, int], None]


class PendingAnswer(NamedTuple):
    """An answer on its way."""

    handle: Any
    dest: int
    nbytes: int = 0
    is_drawn: bool = False


class ManagerLoop:
    """The loop of one manager. Concurrency: one thread runs it; the manager's lock is held while the protocol works."""

    def __init__(
        self, protocol: ManagerProtocol, backend: Any, limits: Limits, timing: Timing, lock: AbstractContextManager[Any]
    ) -> None:  # fmt: skip
        self.protocol, self.workers = protocol, protocol.workers
        self.limits, self.timing, self._backend, self._lock = limits, timing, backend, lock
        self.pending: list[PendingAnswer] = []
        self.unsent = 0
        self.is_running = True  # it serves, or may serve
        self.is_stopping = False
        self.is_closed = threading.Event()
        self._carrier: Carrier | None = None
        self._in_a_row: dict[int, int] = {}  # malformed frames by rank, since its last good one
        self._next_tick = 0.0
        self._late_thread: threading.Thread | None = None

    @property
    def carrier(self) -> Carrier:
        """The carrier, opened when it is first needed."""
        if self._carrier is None:
            self._carrier = carrier_of(self._backend)
        return self._carrier

    # -- one message

    def recv(self) -> tuple[int, Received, int]:
        """Wait a moment for the next message: (rank, message, bytes); DeadlineError if none came."""
        left = max(0.0, min(self._next_tick - monotonic(), _TICK_S))
        with self.timing.phase("recv"):
            rank, _, frame = self.carrier.recv(timeout=left)
        return rank, self._opened(frame), frame.nbytes

    def _opened(self, frame: memoryview) -> Received:
        try:
            message, _, body = decode(frame, max_frame=self.carrier.max_frame)
        except FrameError as error:
            return Received(None, frame[:0], frame, error)
        return Received(message, body, frame)

    def handle(self, sender: int, received: Received) -> list[Reply]:
        """Do what a message asks, and return the answers; nothing that a peer sends raises here."""
        with self._lock:
            if self._in_a_row.get(sender, 0) >= _MOST_MALFORMED:
                return []
            if received.message is None:
                return self._malformed(sender, received)
            self.workers.note_message(sender, monotonic())
            max_frame = MAX_FRAME if self._carrier is None else self._carrier.max_frame
            may_draw = not isinstance(received.message, Sample) or self._may_draw(sender)
            try:
                replies = self.protocol.handle(
                    sender,
                    received.message,
                    received.body,
                    received.frame,
                    max_frame=max_frame,
                    may_draw=may_draw,
                )
            except FrameError as error:
                return self._malformed(sender, received._replace(error=error))
            self._in_a_row.pop(sender, None)
            return replies

    def _malformed(self, sender: int, received: Received) -> list[Reply]:
        for_ever = self._refuse(sender)
        if received.message is None or for_ever:
            return []
        failed = Failed(received.message.request, "FrameError", note(str(received.error)))
        return [Reply(sender, DATA_TAG, encode(failed))]

    def _refuse(self, sender: int) -> bool:
        """Count a malformed frame and close its sender's connection; True if that is for ever."""
        self.protocol.count_malformed(sender)
        self._in_a_row[sender] = self._in_a_row.get(sender, 0) + 1
        if len(self._in_a_row) > config.MOST_CLIENTS:
            del self._in_a_row[next(iter(self._in_a_row))]
        for_ever = self._in_a_row[sender] >= _MOST_MALFORMED
        refuse = getattr(self._carrier, "refuse", None)
        if refuse is not None:
            refuse(sender, for_ever)
        return for_ever

    def _count_refused_streams(self) -> None:
        """Count also the frames whose size alone was wrong: the carrier closed their connection."""
        seen: dict[int, int] = getattr(self.carrier, "take_malformed", dict)()
        for rank, n in seen.items():
            for _ in range(n):
                self._refuse(rank)

    # -- answers

    def answer(self, replies: list[Reply], is_async: bool) -> None:
        """Send answers; what cannot be sent is counted, and fetched by the client's retry."""
        carrier = self.carrier
        self.prune()
        try:
            with self._lock:
                self.protocol.checkpoint.commit()
        except OSError:  # what is not on disk is not acknowledged
            self.unsent += len(replies)
            return
        with self.timing.phase("send"):
            for reply in replies:
                try:
                    if is_async:
                        self._answer_soon(carrier, reply)
                    else:
                        carrier.send(reply.dest, reply.tag, reply.parts, self.limits.send_s)
                except (PeerDiedError, DeadlineError, FrameError, ValueError):
                    self.unsent += 1
        self._forward()

    def _answer_soon(self, carrier: Carrier, reply: Reply) -> None:
        if not reply.is_drawn and self._n_waiting(reply.dest) > self.limits.max_window:
            self.unsent += 1
            return
        handle = carrier.isend(reply.dest, reply.tag, reply.parts)
        if not is_over(handle):
            self.pending.append(PendingAnswer(handle, reply.dest, _nbytes(reply), reply.is_drawn))

    def _n_waiting(self, dest: int) -> int:
        return sum(p.dest == dest and not p.is_drawn for p in self.pending)

    def _may_draw(self, sender: int) -> bool:
        """Whether a peer has taken what it drew before; if not, it is given no more, and asks again."""
        self.prune()
        if sum(p.nbytes for p in self.pending if p.dest == sender) <= _MOST_WAITING:
            return True
        self.unsent += 1
        return False

    def prune(self) -> None:
        """Forget answers that are sent, or never can be."""
        if self.pending:
            self.pending = [pending for pending in self.pending if not is_over(pending.handle)]

    def _forward(self) -> None:
        forwarder = self.protocol.forwarder
        if forwarder is not None:
            forwarder.work(self.carrier)

    # -- the loop

    def run(self, receive: Receive, handle: Handle, async_send: bool) -> None:
        """Serve until every worker has left, or the manager is stopped; then let the last answers out.

        `receive` and `handle` are this loop's own, or what a user of the manager made of them.
        """
        carrier = self.carrier
        self._stop_answering_late()
        self.workers.begin(monotonic())
        self.is_running = not self._is_over()
        try:
            while self.is_running:
                self._serve(receive, handle, async_send)
            self._finish(carrier, async_send)
        except ClosedError:
            if not getattr(carrier, "is_closed", False):
                raise
        finally:
            self.is_running = False

    def _is_over(self) -> bool:
        return self.workers.is_over or self.is_stopping

    def _serve(self, receive: Receive, handle: Handle, async_send: bool) -> None:
        """Handle what comes within a moment, and do what is due."""
        try:
            first = receive()
        except DeadlineError:
            pass
        else:
            if self.protocol.checkpoint.waits_for_disk:
                self._serve_together(first, async_send)
            else:
                handle(*first)
        now = monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now)
        if self._is_over():
            self.is_running = False

    def _serve_together(self, first: tuple[int, Received, int], async_send: bool) -> None:
        """Handle all messages at hand, sync the log once, then answer."""
        replies = self.handle(*first[:2])
        for _ in range(_AT_HAND - 1):
            if sum(map(_nbytes, replies)) > _MOST_WAITING:
                break
            try:
                rank, _, frame = self.carrier.recv(timeout=0.0)
            except DeadlineError:
                break
            replies += self.handle(rank, self._opened(frame))
        self.answer(replies, async_send)

    def _tick(self, now: float) -> None:
        carrier = self.carrier
        self.prune()
        with self._lock:
            self._count_refused_streams()
            self.workers.tick(now, carrier.alive(), getattr(carrier, "sees_death", True))
            replies = self.protocol.tick(now)
        for reply in replies:  # to other managers, which may not be there
            with suppress(PeerDiedError, DeadlineError, ValueError):
                carrier.isend(reply.dest, reply.tag, reply.parts)
        self._forward()

    # -- the end

    def _finish(self, carrier: Carrier, async_send: bool) -> None:
        """Let the last answers out, flush what is forwarded, write a checkpoint."""
        end = monotonic() + self.limits.drain_s
        if self.protocol.forwarder is not None:
            self.protocol.forwarder.finish(carrier, end)
        while self.pending and monotonic() < end:
            with suppress(DeadlineError):
                rank, _, frame = carrier.recv(timeout=min(0.05, max(0.0, end - monotonic())))
                self.answer(self._late(rank, frame), async_send)
            self.prune()
        with self._lock:
            self.protocol.checkpoint.try_dump()
        if getattr(carrier, "sees_death", True):
            with interrupts.deferred():
                self._late_thread = threading.Thread(
                    target=self._answer_late,
                    args=(carrier,),
                    name=f"recollect-late-{carrier.rank}",
                    daemon=True,
                )
                self._late_thread.start()

    def _late(self, rank: int, frame: memoryview) -> list[Reply]:
        """The answer to a message after the end: a duplicate gets its answer, all else ClosedError."""
        received = self._opened(frame)
        if received.message is None:
            return []
        with self._lock:
            return self.protocol.late(rank, received.message)

    def _answer_late(self, carrier: Carrier) -> None:
        """After the end, while the process lives, tell this manager's own workers that it has ended."""
        ranks = sorted(self.workers.by_rank)
        while not self.is_closed.wait(0.05) and not self.is_running:
            try:
                for rank in ranks:
                    with suppress(DeadlineError, PeerDiedError):
                        _, _, frame = carrier.recv(rank, DATA_TAG, timeout=0.0)
                        for reply in self._late(rank, frame):
                            carrier.isend(reply.dest, reply.tag, reply.parts)
            except (ClosedError, OSError, RuntimeError):
                return

    def _stop_answering_late(self) -> None:
        if self._late_thread is not None:
            self.is_running = True
            self._late_thread.join(2.0)
            self._late_thread = None

    def close(self) -> None:
        """Wait for the thread that answers late."""
        if self._late_thread is not None and self._late_thread is not threading.current_thread():
            self._late_thread.join(2.0)


def _nbytes(reply: Reply) -> int:
    return sum(memoryview(part).nbytes for part in reply.parts)

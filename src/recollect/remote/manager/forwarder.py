"""Forwarder: a manager's own client, for what it keeps and another manager should have too.

With a checkpoint its writer, its numbers and what has no answer are part of the dump, and the log gives it the rest
again in the same order: so after a restart each container has the number it had, and the other manager stores it once.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec

from recollect import interrupts
from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote.carriers.base import is_over
from recollect.remote.client.protocol import ClientProtocol
from recollect.remote.frame import MOST_FRAME, cut_items, decode, encode, joined
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import ItemSpace
from recollect.remote.messages import DATA_TAG, AnyMessage, Data, Welcome
from recollect.remote.stats import ForwardStats

_RETRY_S = 1.0
MOST_QUEUED = 4096


class ForwardState(msgspec.Struct):
    """What a dump keeps of a forwarder."""

    dest: int
    writer: bytes
    next_seq: int
    acked: int
    doors: dict[str, int]
    sent: list[tuple[int, bytes]]  # by seq, without an answer
    queued: list[bytes]


_DOORS = ("offered", "kept", "rejected", "passed", "lost")


class Forwarder:
    """Sends containers to another manager, beside the loop that receives everything on this carrier.

    `is_bounded`: beyond some thousand queued containers they are lost, and counted. What is in a log is never lost.

    Concurrency: one thread works and finishes; `take`, `hear`, `stats` and `state` from any.
    """

    def __init__(self, items: ItemSpace, rank: int, dest: int, is_bounded: bool = True) -> None:
        self.dest = dest
        self._items, self._is_bounded = items, is_bounded
        self._protocol = ClientProtocol(items, rank)
        self._lock = threading.RLock()
        self._arrived = 0
        self._is_resumed = False
        self._n_old = 0  # at the head of the queue, from before the restart
        self._queue: deque[PackedItems] = deque()
        self._outbox: deque[Any] = deque()
        self._due = 0.0
        self._handles: list[Any] = []
        self._leave: int | None = None
        self._has_left = False

    def take(self, packed: PackedItems) -> None:
        """Queue items; they are sent after the answer to their sender."""
        if not packed.n:
            return
        with self._lock:
            self._protocol.doors.offered += packed.n
            if self._is_bounded and len(self._queue) >= MOST_QUEUED:
                self._protocol.doors.lost += packed.n
                return
            self._queue.append(packed)

    def receive(self, sender: int, message: AnyMessage) -> bool:
        """Take an answer; False if it is not from the manager that is forwarded to."""
        if sender != self.dest:
            return False
        with interrupts.deferred(), self._lock:
            stray = self._protocol.stray
            if self._is_resumed and isinstance(message, Welcome) and self._protocol.is_greeted_by(message):
                self._is_resumed = False
                self._skip(message.last_seq)
            with suppress(FrameError):
                self._outbox.extend(self._protocol.receive(message, memoryview(b"")))
            if self._leave is not None and self._protocol.expected.get(self._leave):
                self._has_left = True
            for entry in [e for e in self._protocol.entries.values() if e.answer is not None]:
                with suppress(Exception):
                    self._protocol.hand_out(entry)
            return self._protocol.stray == stray

    def work(self, carrier: Any) -> None:
        """Send what may be sent now; never waits."""
        with interrupts.deferred(), self._lock:
            self._work(carrier)

    def _work(self, carrier: Any) -> None:
        protocol, now = self._protocol, monotonic()
        protocol.max_frame = carrier.max_frame
        if not protocol.is_ready and (self._queue or protocol.entries) and now >= self._due:
            self._due = now + _RETRY_S
            self._outbox.append(protocol.greet())
        elif protocol.is_ready and protocol.n_unanswered and now >= self._due:
            self._due = now + _RETRY_S
            self._outbox.extend(protocol.unanswered())
        while protocol.is_ready and self._queue and protocol.n_unanswered < min(8, protocol.max_window):
            packed = self._queue.popleft()
            try:
                self._outbox.append(protocol.put(packed).parts)
                self._due = now + _RETRY_S
            except FrameError:
                protocol.doors.lost += packed.n
        self._handles = [handle for handle in self._handles if not is_over(handle)]
        while self._outbox:
            try:
                self._handles.append(carrier.isend(self.dest, DATA_TAG, self._outbox.popleft()))
            except (PeerDiedError, DeadlineError):
                protocol.is_ready = False
                reconnect = getattr(carrier, "reconnect", None)
                with suppress(PeerDiedError, DeadlineError, OSError):
                    if reconnect is not None:
                        reconnect(self.dest, 0.0)

    def finish(self, carrier: Any, end: float) -> None:
        """Deliver what waits, and leave; what cannot be delivered by then is lost, and counted."""
        protocol = self._protocol
        while (self._queue or protocol.n_unanswered) and monotonic() < end:
            self._pump(carrier, end)
        with interrupts.deferred(), self._lock:
            self._leave, parts = protocol.leave("manager ended")
            protocol.expected[self._leave] = []
            protocol.doors.lost += sum(packed.n for packed in self._queue)
            self._queue.clear()
            protocol.give_up("lost")
        with suppress(PeerDiedError, DeadlineError, ClosedError):
            carrier.isend(self.dest, DATA_TAG, parts)
            while not self._has_left and monotonic() < end:
                self._receive(carrier, end)

    def _pump(self, carrier: Any, end: float) -> None:
        self.work(carrier)
        self._receive(carrier, end)

    def _receive(self, carrier: Any, end: float) -> None:
        try:
            _, _, frame = carrier.recv(self.dest, DATA_TAG, max(0.0, min(0.05, end - monotonic())))
            message, _, _ = decode(frame, max_frame=carrier.max_frame)
        except (DeadlineError, FrameError, PeerDiedError):
            return
        self.receive(self.dest, message)

    def stats(self) -> ForwardStats:
        """What became of the items that were to be forwarded."""
        with self._lock:
            doors = self._protocol.doors
            pending = self._protocol.n_pending + sum(packed.n for packed in self._queue)
            return ForwardStats(
                doors.offered, doors.kept, doors.rejected, doors.passed, self._arrived, doors.lost, pending
            )

    # -- over a restart

    @property
    def writer(self) -> bytes:
        """Under which name the other manager numbers what it gets from here."""
        return self._protocol.writer

    def state(self) -> ForwardState:
        """What a dump must keep."""
        protocol = self._protocol
        with self._lock:
            doors = {name: getattr(protocol.doors, name) for name in _DOORS} | {"arrived": self._arrived}
            sent = [(seq, self._saved(packed)) for seq, packed in protocol.sent()]
            queued = [self._saved(packed) for packed in self._queue]
            return ForwardState(
                self.dest, protocol.writer, protocol.next_seq, protocol.acked, doors, sent, queued
            )

    def resume(self, state: ForwardState | None) -> None:
        """Go on from a dump, unless it was of another manager to forward to."""
        if state is None or state.dest != self.dest:
            return
        for name in _DOORS:
            setattr(self._protocol.doors, name, state.doors[name])
        self._arrived = state.doors["arrived"]
        sent = [(seq, self._restored(frame)) for seq, frame in state.sent]
        self._protocol.resume(state.writer, state.next_seq, state.acked, sent)
        self._queue.extend(map(self._restored, state.queued))
        self._is_resumed = True

    def log_is_repeated(self) -> None:
        """All that is queued by now is from before the restart."""
        self._n_old = len(self._queue)

    def _skip(self, last_seq: int) -> None:
        """What the other manager has was sent before the restart."""
        self._arrived += self._protocol.settle(last_seq)
        while self._n_old and self._protocol.next_seq <= last_seq:
            self._n_old -= 1
            self._arrived += self._queue.popleft().n
            self._protocol.pass_over()
        if (
            self._protocol.next_seq <= last_seq
        ):  # a power loss took the end of the log: those numbers are taken
            self._protocol.renumber()

    def _saved(self, packed: PackedItems) -> bytes:
        head = Data(0, bytes(16), 1, self._items.id, packed.n, len(packed.rows), packed.scoring_only)
        return joined(encode(head, packed.blocks(), max_frame=MOST_FRAME))

    def _restored(self, frame: bytes) -> PackedItems:
        head, _, body = decode(frame, max_frame=MOST_FRAME)
        if not isinstance(head, Data):
            raise FrameError(f"forwarded: must be a container, got {type(head).__name__}")
        rows, lengths, fields = cut_items(head, body, self._items.shapes)
        return PackedItems(head.n, rows, lengths, fields, scoring_only=head.scoring_only)

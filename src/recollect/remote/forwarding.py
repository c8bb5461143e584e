"""Forwarder: a manager's own client, for what it keeps and another manager should have too."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote.carriers.base import is_over
from recollect.remote.items import ItemSpace
from recollect.remote.messages import DATA_TAG, AnyMessage
from recollect.remote.packed import Packed
from recollect.remote.session import Session
from recollect.remote.wire import decode

_RETRY_S = 1.0
_MOST_QUEUED = 4096


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """Items that were to be forwarded, and what became of them."""

    offered: int
    kept: int
    rejected: int
    passed: int
    lost: int
    pending: int


class Forwarder:
    """Sends containers to another manager, beside the loop that receives everything on this carrier."""

    def __init__(self, items: ItemSpace, rank: int, dest: int) -> None:
        self.dest = dest
        self._session = Session(items, rank)
        self._queue: deque[Packed] = deque()
        self._outbox: deque[Any] = deque()
        self._due = 0.0
        self._handles: list[Any] = []
        self._leave: int | None = None
        self._has_left = False

    def take(self, packed: Packed) -> None:
        """Queue items; they are sent after the answer to their sender."""
        if not packed.n:
            return
        self._session.doors.offered += packed.n
        if len(self._queue) >= _MOST_QUEUED:
            self._session.doors.lost += packed.n
            return
        self._queue.append(packed)

    def hear(self, sender: int, message: AnyMessage) -> bool:
        """Take an answer; False if it is not from the manager that is forwarded to."""
        if sender != self.dest:
            return False
        stray = self._session.stray
        with suppress(FrameError):
            self._outbox.extend(self._session.hear(message, memoryview(b"")))
        if self._leave is not None and self._session.expected.get(self._leave):
            self._has_left = True
        for entry in [e for e in self._session.entries.values() if e.answer is not None]:
            with suppress(Exception):
                self._session.hand_out(entry)
        return self._session.stray == stray

    def work(self, carrier: Any) -> None:
        """Send what may be sent now; never waits."""
        session, now = self._session, monotonic()
        session.max_frame = carrier.max_frame
        if not session.is_ready and (self._queue or session.entries) and now >= self._due:
            self._due = now + _RETRY_S
            self._outbox.append(session.greet())
        elif session.is_ready and session.n_unanswered and now >= self._due:
            self._due = now + _RETRY_S
            self._outbox.extend(session.unanswered())
        while session.is_ready and self._queue and session.n_unanswered < min(8, session.max_window):
            packed = self._queue.popleft()
            try:
                self._outbox.append(session.put(packed).parts)
                self._due = now + _RETRY_S
            except FrameError:
                session.doors.lost += packed.n
        self._handles = [handle for handle in self._handles if not is_over(handle)]
        while self._outbox:
            try:
                self._handles.append(carrier.isend(self.dest, DATA_TAG, self._outbox.popleft()))
            except (PeerDiedError, DeadlineError):
                session.is_ready = False
                reconnect = getattr(carrier, "reconnect", None)
                with suppress(PeerDiedError, DeadlineError, OSError):
                    if reconnect is not None:
                        reconnect(self.dest, 0.0)

    def finish(self, carrier: Any, end: float) -> None:
        """Deliver what waits, and leave; what cannot be delivered by then is lost, and counted."""
        session = self._session
        while (self._queue or session.n_unanswered) and monotonic() < end:
            self._pump(carrier, end)
        self._leave, parts = session.leave("manager ended")
        session.expected[self._leave] = []
        session.doors.lost += sum(packed.n for packed in self._queue)
        self._queue.clear()
        session.give_up("lost")
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
        self.hear(self.dest, message)

    def stats(self) -> ForwardStats:
        """What became of the items that were to be forwarded."""
        doors = self._session.doors
        pending = self._session.n_pending + sum(packed.n for packed in self._queue)
        return ForwardStats(doors.offered, doors.kept, doors.rejected, doors.passed, doors.lost, pending)

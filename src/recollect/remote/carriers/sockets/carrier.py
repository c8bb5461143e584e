"""StreamCarrier: what carriers over stream sockets have in common, which is all but how a connection is made.

The thread that waits in `recv`, `send` or `wait` does the work of all threads (see `poll`). What `isend` could not send
at once is finished by a thread of its own, which ends when nothing is left to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Self

from recollect import interrupts
from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import config
from recollect.remote.carriers.base import ANY, TIMEOUT, Frame, awaited, check_rank, check_tag, check_timeout
from recollect.remote.carriers.sockets.framed import FramedSocket, Outgoing
from recollect.remote.carriers.sockets.poll import PollLeader, Wakeup
from recollect.remote.carriers.sockets.queues import DeferredFrames, Inbox
from recollect.remote.frame import MAX_FRAME, check_max_frame
from recollect.system.events import READABLE, READABLE_OR_GONE, WRITABLE, Poll, make_poll

LOOK_S = 0.01  # after which others are read too, however much lies here already
RETRY_S = 0.02  # between two tries to reach a peer that is not there yet

_open: weakref.WeakSet[StreamCarrier] = weakref.WeakSet()


class StreamCarrier:
    """Ranks connected by stream sockets; subclasses say how a connection is made.

    Ownership: owns its sockets; `close()` gives them up. What `recv` returns is the caller's own.
    Concurrency: any thread may send and receive; a forked child starts without any connection.
    """

    sees_death = True

    def __init__(self, rank: int, size: int | None, max_frame: int = MAX_FRAME) -> None:
        self.rank, self.size, self.max_frame = rank, size, check_max_frame(max_frame)
        self.is_closed = False
        self.malformed: dict[int, int] = {}
        self._reset()

    def _reset(self) -> None:
        self._leader = PollLeader(self._work, self._check_waiting)
        self._cond = self._leader.cond
        self._inbox, self._absent = Inbox(), DeferredFrames(self._cond)
        self._links: dict[int, FramedSocket] = {}  # by descriptor
        self._outward: dict[int, FramedSocket] = {}  # by rank
        self._known: set[int] = set()
        self._gone: dict[int, None] = {}  # in the order they left
        self._flusher: threading.Thread | None = None
        self._epoll: Poll | None = None
        self._wakeup: Wakeup | None = None
        self._looked_at = 0.0  # when the sockets were polled last
        self._closing = threading.RLock()
        self._is_released = False

    # -- opening

    def _ensure_open(self) -> None:
        self._check_open()
        if self._epoll is None:
            with interrupts.deferred(), self._cond:  # open or not, never half of it
                self._check_open()
                if self._epoll is None:
                    self._open()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError(f"{type(self).__name__}: was closed; make another")

    def _open(self) -> None:
        poll = make_poll()
        self._wakeup = Wakeup()
        poll.register(self._wakeup.fileno(), READABLE)
        self._epoll = poll
        _open.add(self)

    def _add(self, link: FramedSocket, outward: bool) -> None:
        with self._cond:
            if self.is_closed or self._epoll is None:
                link.close(True)
                raise ClosedError(f"{type(self).__name__}: was closed; make another")
            self._links[link.fd] = link
            if outward:
                self._outward[link.rank] = link
            self._known.add(link.rank)
            self._gone.pop(link.rank, None)
            self._epoll.register(link.fd, READABLE_OR_GONE)
            self._cond.notify_all()
        self._wake()

    def _drop(self, link: FramedSocket) -> None:
        """Forget a link that ended; its rank is gone unless another link leads there."""
        with self._cond:
            if self._links.get(link.fd) is link:
                del self._links[link.fd]
                if self._epoll is not None:
                    with contextlib.suppress(OSError, ValueError):
                        self._epoll.unregister(link.fd)
            if self._outward.get(link.rank) is link:
                del self._outward[link.rank]
            if not any(other.rank == link.rank for other in self._links.values()):
                self._gone.pop(link.rank, None)
                self._gone[link.rank] = None
                if len(self._gone) > config.MOST_CLIENTS:
                    self._forget(next(iter(self._gone)))
        link.close(self.is_closed)
        self._wake()  # the leading thread looks again, and wakes the others

    def _forget(self, rank: int) -> None:
        """Keep nothing of a rank that is gone; it may come again as one that was never here."""
        self._gone.pop(rank, None)
        self._known.discard(rank)
        self.malformed.pop(rank, None)

    def _sever(self, link: FramedSocket) -> None:
        """Send nothing more by a socket; the leading thread reads what came before its end, and drops it."""
        with self._cond:
            if self._outward.get(link.rank) is link:
                del self._outward[link.rank]
        link.sever()
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.wake()

    # -- waiting

    def _check_waiting(self, what: Callable[[], str]) -> None:
        if self.is_closed:
            raise ClosedError(f"{type(self).__name__}: was closed while waiting for {what()}")

    def _poll_now(self) -> None:
        """Do what is to do now, without waiting, unless another thread does it."""
        if self._epoll is not None:
            self._leader.poll_now()

    def _work(self, timeout: float) -> None:
        """Poll once; read and write what is possible. By the leader alone."""
        if self._absent:
            with interrupts.deferred():  # a frame that has left waits no more
                self._reach_absent()
            timeout = min(timeout, RETRY_S) if self._absent else 0.0
        poll, wakeup = self._epoll, self._wakeup
        if poll is None or wakeup is None:
            return
        self._looked_at = monotonic()
        found = poll.poll(min(timeout, 3600.0))
        with interrupts.deferred():  # a byte that was read or sent is counted, or the stream is out of step
            for fd, event in found:
                if fd == wakeup.fileno():
                    wakeup.clear()
                elif (link := self._links.get(fd)) is not None:
                    self._serve(link, event)

    def _serve(self, link: FramedSocket, event: int) -> None:
        try:
            if event & WRITABLE:
                self._send_more(link)
            if event & ~WRITABLE:
                self._take(link)
        except (EOFError, OSError):
            self._drop(link)
        except FrameError:
            with self._cond:
                self.malformed[link.rank] = self.malformed.get(link.rank, 0) + 1
            self._drop(link)

    def _take(self, link: FramedSocket) -> None:
        frames = link.read()
        with self._cond:
            for tag, frame in frames:
                self._inbox.put(link.rank, tag, frame)
            if self._inbox.nbytes(link.rank) > self.max_frame and not link.is_paused:
                link.is_paused = True
                self._watch(link)
        if link.error is not None:
            raise link.error

    def _watch(self, link: FramedSocket) -> None:
        if self._epoll is not None and link.is_open:
            events = (0 if link.is_paused else READABLE_OR_GONE) | (WRITABLE if link.out else 0)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.modify(link.fd, events)

    def _send_more(self, link: FramedSocket) -> None:
        try:
            self._flush(link)
        except OSError:
            self._sever(link)

    def _flush(self, link: FramedSocket) -> None:
        link.flush()
        with self._cond:
            self._watch(link)

    # -- sending

    def send(self, dest: int, tag: int, parts: Sequence[Any], timeout: float = TIMEOUT) -> None:
        """Send a frame; returns when the buffers are free again.

        A frame for a peer that has not come yet is kept here, and leaves when it comes.
        """
        check_timeout(timeout)
        with interrupts.deferred():  # as in `_work`
            outgoing = self._start(dest, tag, parts)
            if outgoing.is_done:
                return
            if self._absent.keep(outgoing):
                self._ensure_flusher()
                return
        self._wait_sent(outgoing, timeout)

    def isend(self, dest: int, tag: int, parts: Sequence[Any]) -> Outgoing:
        """Begin to send a frame, and never wait; the handle completes by itself."""
        with interrupts.deferred():
            outgoing = self._start(dest, tag, parts)
            if not outgoing.is_done:
                self._ensure_flusher()
        return outgoing

    def _start(self, dest: int, tag: int, parts: Sequence[Any]) -> Outgoing:
        self._ensure_open()
        check_rank(dest, self.size, "dest")
        check_tag(tag)
        outgoing = Outgoing(dest, tag, parts, self.max_frame, self._wait_sent)
        if dest not in self._absent and self._deliver(outgoing, tag, parts):
            return outgoing
        if self._absent.add(outgoing, only_behind=True):
            return outgoing
        link = self._link_to(dest)
        if link is None:
            self._absent.add(outgoing)
            self._wake()
            return outgoing
        self._put(link, outgoing)
        return outgoing

    def _put(self, link: FramedSocket, outgoing: Outgoing) -> None:
        try:
            link.put(outgoing)
        except OSError as error:
            self._sever(link)
            raise PeerDiedError(f"rank {link.rank}: is gone ({error.strerror or error})") from None
        if not outgoing.is_done and link.is_open:
            with self._cond:
                self._watch(link)
            self._wake()

    def _deliver(self, outgoing: Outgoing, tag: int, parts: Sequence[Any]) -> bool:
        """Hand a frame to an end in this process, if the peer is one."""
        return False

    def _link_to(self, dest: int) -> FramedSocket | None:
        """The link to send by; None to wait for the peer; PeerDiedError if it is gone."""
        raise NotImplementedError

    def _reach_absent(self) -> None:
        for dest in self._absent.peers():
            is_near = self._is_near(dest)
            try:
                link = None if is_near else self._link_to(dest)
            except (PeerDiedError, OSError) as error:
                self._absent.fail(dest, PeerDiedError(f"rank {dest}: is gone ({error})"))
                continue
            if link is not None or is_near:
                self._send_absent(dest, link)

    def _send_absent(self, dest: int, link: FramedSocket | None) -> None:
        """Send what waited for a peer, in order; what is sent meanwhile queues up behind it."""
        while (outgoing := self._absent.first(dest)) is not None:
            parts = list(outgoing.views)[1:]
            try:
                if link is not None:
                    self._put(link, outgoing)
                elif outgoing.error is None and not self._deliver(outgoing, outgoing.tag, parts):
                    self._absent.stays()
                    return
            except PeerDiedError as error:
                outgoing.finish(error)
            self._absent.sent(outgoing)

    def _is_near(self, dest: int) -> bool:
        """Whether the peer is an end in this process."""
        return False

    def _wait_sent(self, outgoing: Outgoing, timeout: float) -> None:
        def sent() -> bool | None:
            if outgoing.error is not None:
                raise outgoing.error
            return True if outgoing.is_done else None

        check_timeout(timeout)
        self._ensure_open()
        try:
            self._leader.wait(sent, timeout, lambda: f"send to rank {outgoing.dest}")
        except DeadlineError:
            self._give_up(outgoing)
            raise

    def _give_up(self, outgoing: Outgoing) -> None:
        """After a deadline a frame not begun is taken back; one half sent can only end with its connection."""
        if self._absent.give_up(outgoing):
            return
        link = self._outward.get(outgoing.dest)
        if link is not None and not link.take_back(outgoing):
            self._drop(link)

    def _has_unsent(self) -> bool:
        return bool(self._absent) or any(link.out for link in self._links.values())

    def _ensure_flusher(self) -> None:
        with self._cond:
            if self._flusher is None or not self._flusher.is_alive():
                self._flusher = threading.Thread(target=self._flush_all, name="recollect-flush", daemon=True)
                self._flusher.start()

    def _flush_all(self) -> None:
        try:
            while True:
                try:
                    self._leader.wait(
                        lambda: None if self._has_unsent() else True, 1.0, lambda: "unsent frames"
                    )
                except DeadlineError:
                    continue
                with self._cond:
                    if not self._has_unsent():
                        self._flusher = None
                        return
        except ClosedError:
            return

    # -- receiving

    def recv(
        self, source: int = ANY, tag: int = ANY, timeout: float = TIMEOUT
    ) -> tuple[int, int, memoryview]:
        """Return (source, tag, frame); the frame is fresh memory, the caller's own."""
        check_timeout(timeout)
        check_tag(tag, any_allowed=True)
        check_rank(source, self.size, "source", any_allowed=True)
        self._ensure_open()
        if self._inbox and monotonic() - self._looked_at > LOOK_S:
            self._poll_now()  # or a peer that sends without end would be the only one that is read
        found: Frame = self._leader.wait(
            lambda: self._matching(source, tag), timeout, lambda: awaited(source, tag)
        )
        return found

    def _matching(self, source: int, tag: int) -> Frame | None:
        found = self._inbox.take(source, tag)
        if found is not None:
            self._taken(found[0])
        elif source != ANY and source in self._gone:
            raise PeerDiedError(f"rank {source}: is gone; nothing more will come from it")
        return found

    def _taken(self, rank: int) -> None:
        """Room was made: a peer that had to pause may go on."""
        if self._inbox.nbytes(rank) <= self.max_frame // 2:
            for link in self._links.values():
                if link.is_paused and link.rank == rank:
                    link.is_paused = False
                    self._watch(link)

    def alive(self) -> frozenset[int]:
        """Ranks that joined and are not known to be gone, this one included."""
        self._ensure_open()
        self._poll_now()
        with self._cond:
            return frozenset((self._known - self._gone.keys()) | {self.rank})

    def take_malformed(self) -> dict[int, int]:
        """Return how many streams of each rank held no frames, since the last call."""
        with self._cond:
            taken, self.malformed = self.malformed, {}
        return taken

    def refuse(self, rank: int, for_ever: bool = False) -> None:
        """Close the connections of a peer that sends no frames; unless `for_ever`, it may connect again."""
        with self._cond:
            links = [link for link in self._links.values() if link.rank == rank]
        for link in links:
            self._drop(link)

    # -- ending

    def close(self) -> None:
        """Wake all waiters with ClosedError and give up all sockets; may be called twice."""
        with self._closing:
            if not self._is_released:
                self._close()
                self._is_released = True  # last: a call that was cut short goes on when it is made again

    def _close(self) -> None:
        with self._cond:
            self.is_closed = True
            self._cond.notify_all()
        self._wake()
        self._stop_listening()
        end = monotonic() + 5.0
        with self._cond:
            while self._leader.is_led and (left := end - monotonic()) > 0:
                self._cond.wait(left)
            flusher = self._flusher
        if flusher is not None and flusher is not threading.current_thread():
            flusher.join(5.0)
        with (
            interrupts.deferred()
        ):  # each descriptor is closed once: its number may be another file's by then
            self._release()

    def _stop_listening(self) -> None:
        pass

    def _release(self) -> None:
        for link in list(self._links.values()):
            self._finish_sending(link)
            link.close(True)
        for dest in self._absent.peers():
            self._absent.fail(dest, ClosedError(f"rank {dest}: this carrier was closed"))
        with self._cond:  # a thread that was sending may be about to watch or to drop its link
            self._links.clear()
            self._outward.clear()
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None
        if self._wakeup is not None:
            self._wakeup.close()
        _open.discard(self)

    def _finish_sending(self, link: FramedSocket) -> None:
        """Give frames already begun a moment: the peer would see half a frame otherwise."""
        end = monotonic() + 0.2
        while link.out and link.is_open:
            try:
                select.select([], [link.fd], [], 0.02)
                link.flush()
            except (OSError, ValueError):
                return
            if monotonic() >= end:  # after a try at least, however late it is
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def _forget_in_child(self) -> None:
        """In a forked child: give up what belongs to the parent, and send nothing."""
        for link in self._links.values():
            link.sock.close()
        if self._epoll is not None and self._wakeup is not None:
            self._epoll.close()
            self._wakeup.close_in_child()
        self._reset()


def _after_fork() -> None:
    for carrier in list(_open):
        carrier._forget_in_child()


os.register_at_fork(after_in_child=_after_fork)

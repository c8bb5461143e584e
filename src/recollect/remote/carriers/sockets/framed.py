"""One connected stream socket, with frames half read and half written.

On the stream a frame is `magic u32, tag u32, bytes u64` and its bytes. The number of bytes is checked against the
carrier's `max_frame` before memory is taken for them.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import numpy as np

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError

HEADER = struct.Struct("<IIQ")
MAGIC = 0x4D525453  # "STRM"
_STAGING = 1 << 16
_FAIR_NBYTES = 4 << 20  # what one link may bring before the others have their turn
_FAIR_FRAMES = 1024
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Tagged = tuple[int, memoryview]
WaitSent = Callable[["Outgoing", float], None]
_NAP_S = 0.02  # after a failure that may be over soon: too many open files, no memory
_ENDED = (errno.EBADF, errno.EINVAL)  # the listening socket was closed, or shut down


class Outgoing:
    """A frame on its way out; also its handle."""

    __slots__ = ("_wait", "dest", "error", "is_done", "nbytes", "tag", "views")

    def __init__(self, dest: int, tag: int, parts: Sequence[Any], max_frame: int, wait: WaitSent) -> None:
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        nbytes = sum(view.nbytes for view in views)
        if nbytes > max_frame:
            raise FrameError(f"frame: must have at most {max_frame} bytes, got {nbytes}; send less at once")
        self.views = deque([memoryview(HEADER.pack(MAGIC, tag, nbytes)), *views])
        self.is_done, self.dest, self.tag, self.nbytes = False, dest, tag, nbytes
        self.error: Exception | None = None
        self._wait = wait

    @classmethod
    def bare(cls, dest: int, data: bytes, wait: WaitSent) -> Outgoing:
        """Bytes that are no frame: the end of a handshake."""
        outgoing = cls(dest, 0, [], 0, wait)
        outgoing.views = deque([memoryview(data)])
        return outgoing

    def is_complete(self) -> bool:
        """Whether the buffers are free again; raises if the frame cannot arrive any more."""
        if self.error is not None:
            raise self.error
        return self.is_done

    def wait(self, timeout: float = 30.0) -> None:
        """Wait until the buffers are free again."""
        self._wait(self, timeout)

    def own(self) -> None:
        """Copy what is not sent yet, so that the buffers are free."""
        self.views = deque(memoryview(bytes(view)) for view in self.views)

    def finish(self, error: Exception | None = None) -> None:
        self.error, self.is_done = error, error is None
        self.views.clear()  # the buffers are no longer borrowed


class FramedSocket:
    """A socket to or from one rank. One thread at a time reads; writing takes `lock`.

    Where it is encrypted, reading takes `lock` too.
    """

    def __init__(self, sock: socket.socket, rank: int, max_frame: int) -> None:
        sock.setblocking(False)
        self.sock, self.rank, self.max_frame = sock, rank, max_frame
        self.fd = sock.fileno()
        self.lock = threading.Lock()
        self.out: deque[Outgoing] = deque()
        self.is_open = True
        self.is_paused = False
        self.error: FrameError | None = None
        self._is_ssl = isinstance(sock, ssl.SSLSocket)
        self._staging = bytearray(_STAGING)
        self._view = memoryview(self._staging)
        self._have = 0
        self._target: memoryview | None = None
        self._filled = self._tag = 0

    # -- out

    def put(self, outgoing: Outgoing) -> None:
        """Send it now as far as the socket takes it; the rest waits for `flush`."""
        with self.lock:
            if not self.is_open:
                raise PeerDiedError(f"rank {self.rank}: is gone")
            if outgoing.error is not None:
                return  # given up as it was about to leave
            self.out.append(outgoing)
            if len(self.out) == 1:
                self._push()

    def take_back(self, outgoing: Outgoing) -> bool:
        """Give up a frame that is not begun; False if half of it has left."""
        with self.lock:
            if self.out and self.out[0] is outgoing:
                return False
            if outgoing in self.out:
                self.out.remove(outgoing)
            if not outgoing.is_done:
                outgoing.finish(DeadlineError(f"send to rank {outgoing.dest}: was given up"))
            return True

    def flush(self) -> None:
        """Send more of what waits."""
        with self.lock:
            self._push()

    def _push(self) -> None:
        while self.out and self.is_open:
            first = self.out[0]
            try:
                while first.views:
                    self._send_some(first.views)
            except _WOULD_BLOCK:
                return
            self.out.popleft()
            first.finish()

    def _send_some(self, views: deque[memoryview]) -> None:
        n = self.sock.send(views[0]) if self._is_ssl else self.sock.sendmsg(list(views)[:64])
        while n:
            if n < views[0].nbytes:
                views[0] = views[0][n:]
                return
            n -= views.popleft().nbytes

    # -- in

    def read(self) -> list[Tagged]:
        """Return the frames that have come; EOFError at the end of the stream. `error` is set if it holds no frame."""
        frames: list[Tagged] = []
        total = 0
        try:
            while (total < _FAIR_NBYTES and len(frames) < _FAIR_FRAMES) or self._has_decrypted():
                n = self._read_some(frames)
                total += n
                if n < _STAGING // 2 and not self._is_ssl and self._target is None:
                    break  # very likely all there is; if not, the poll says so at once
        except _WOULD_BLOCK:
            pass
        except FrameError as error:
            self.error = error  # what came before it is whole
        except (EOFError, OSError):
            if not frames:
                raise  # the next look sees the end again
        return frames

    def _has_decrypted(self) -> bool:
        """Whether bytes of the record read last wait inside the TLS connection, where no poll sees them."""
        if not self._is_ssl:
            return False
        with self.lock:
            return bool(self.sock.pending())  # type: ignore[attr-defined]

    def _read_some(self, frames: list[Tagged]) -> int:
        if self._target is not None:
            n = self._received(self._target[self._filled :])
            self._filled += n
            if self._filled == self._target.nbytes:
                frames.append((self._tag, self._target))
                self._target = None
            return n
        n = self._received(self._view[self._have :])
        self._have += n
        self._cut(frames)
        return n

    def _received(self, into: memoryview) -> int:
        if self._is_ssl:
            with self.lock:  # two threads may not be in one TLS connection, not even one on each way
                n = self.sock.recv_into(into)
        else:
            n = self.sock.recv_into(into)
        if n == 0:
            raise EOFError
        return n

    def _cut(self, frames: list[Tagged]) -> None:
        """Take whole frames out of the staging memory; a long one goes on in memory of its own."""
        at = 0
        while self._have - at >= HEADER.size:
            magic, tag, nbytes = HEADER.unpack_from(self._view, at)
            if magic != MAGIC or tag > 0xFFFF or nbytes > self.max_frame:
                raise FrameError(
                    f"stream of rank {self.rank}: must hold frames of at most {self.max_frame} bytes"
                )
            start = at + HEADER.size
            if self._have - start >= nbytes:
                frames.append((tag, memoryview(bytearray(self._view[start : start + nbytes]))))
                at = start + nbytes
            elif nbytes > _STAGING - HEADER.size:
                target = np.empty(nbytes, np.uint8).data
                self._filled = self._have - start
                target[: self._filled] = self._view[start : self._have]
                self._target, self._tag, at = target, tag, self._have
            else:
                break
        if at:
            self._view[: self._have - at] = self._view[at : self._have]
            self._have -= at

    # -- the end

    def sever(self) -> None:
        """Send nothing more, and let what waits here fail; what came before the end can still be read."""
        with self.lock:
            self._fail(PeerDiedError, "it is gone, and a frame was on its way")
            with suppress(OSError):  # not by an SSLSocket's own: it would give out what is encrypted
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self, is_closing: bool = False) -> None:
        """Close the socket and let what waits here fail."""
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
            if is_closing:
                self._fail(ClosedError, "this carrier was closed")
            else:
                self._fail(PeerDiedError, "it is gone, and a frame was on its way")
            self.sock.close()

    def _fail(self, kind: type[Exception], why: str) -> None:
        for outgoing in self.out:
            outgoing.finish(kind(f"rank {self.rank}: {why}"))
        self.out.clear()


# -- before there are frames


def accept_each(listener: socket.socket, take: weakref.WeakMethod[Callable[[socket.socket], bool]]) -> None:
    """Give each connection to a method of a carrier, until it says False, or the carrier or the listener is gone."""
    while (sock := accepted(listener)) is not None:
        method = take()
        if method is None or not method(sock):
            sock.close()
            listener.close()
            return
        del method


def accepted(listener: socket.socket) -> socket.socket | None:
    """Wait for a connection; None once the listener is closed."""
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in _ENDED:
                return None
            sleep(_NAP_S)


def exactly(sock: socket.socket, n: int, end: float) -> bytes:
    """Read so many bytes until a time; EOFError if the other side closes before."""
    data = b""
    while len(data) < n:
        sock.settimeout(max(0.001, end - monotonic()))
        part = sock.recv(n - len(data))
        if not part:
            raise EOFError
        data += part
    return data

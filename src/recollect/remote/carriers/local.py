"""LocalCarrier: one machine, nothing to install.

Between threads of one process a frame is handed over in memory; between processes it goes through an abstract Unix
socket, which has no name in the file system and ends with its process. Each end listens at an address made of the
group's random number and its rank, and connects to another when it first sends to it. So either side may start first,
and a process that is started again takes its end again.

Every user of the machine can see an abstract address while a process listens there, and can listen there afterwards.
So addresses are digests under the group's number, which stays secret: no address tells another. An end has several of
them, listens at the first that is free, and both sides of a connection ask the kernel whose process the other is.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any

from recollect.errors import PeerDiedError
from recollect.remote.carriers.base import Frame, check_timeout
from recollect.remote.carriers.sockets.carrier import RETRY_S, StreamCarrier
from recollect.remote.carriers.sockets.framed import FramedSocket, Outgoing, accept_each, exactly
from recollect.remote.frame import MAX_FRAME
from recollect.system.sockets import address_of, leave, listen_at, peer_of, stop_listening

_GREETING = struct.Struct("<16sq")
_GREETING_S = 1.0
_ADDRESSES = 8  # of one end: another user must see an address before it can be taken
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_IN_PROCESS_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _End:
    """What other ends of a group in this process may do with one."""

    is_closed: Callable[[], bool]
    take: Callable[[int, Outgoing, int, memoryview, Callable[[], None]], bool]
    forget: Callable[[int], None]


_ends: weakref.WeakValueDictionary[tuple[bytes, int, int], _End] = weakref.WeakValueDictionary()


class LocalCarrier(StreamCarrier):
    """One end of a group on one machine; it pickles to children, and opens when it is first used.

    Ownership: `close()` gives up the sockets; nothing has a name that could be left behind.
    Concurrency: as StreamCarrier. An end belongs to one process at a time, the first to use it.

    Example:
        >>> from recollect.remote import LocalCarrier
        >>> a, b = LocalCarrier.group(2)
        >>> a.send(1, 0, [b"hello"])
        >>> bytes(b.recv(timeout=5.0)[2])
        b'hello'
        >>> a.close(), b.close()
        (None, None)
    """

    def __init__(self, group: bytes, rank: int, size: int, max_frame: int = MAX_FRAME) -> None:
        self.group_id, self.n_ranks = group, size
        self._listener: socket.socket | None = None
        self._address: bytes | None = None  # that it listens at
        self._acceptor: threading.Thread | None = None
        super().__init__(rank, size, max_frame)

    @classmethod
    def group(cls, n: Any, *, max_frame: int = MAX_FRAME) -> list[LocalCarrier]:
        """Return the n ends of a new group."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n: must be at least 1, got {n!r}")
        group = secrets.token_bytes(16)
        return [cls(group, rank, n, max_frame) for rank in range(n)]

    def __reduce__(self) -> Any:
        return LocalCarrier, (self.group_id, self.rank, self.n_ranks, self.max_frame)

    def _reset(self) -> None:
        super()._reset()
        self._overflow: deque[tuple[Outgoing, int, Callable[[], None], int, memoryview]] = deque()
        self._end: _End | None = None
        self._dialling: dict[int, threading.Lock] = {}  # by rank
        if self._listener is not None:
            self._listener.close()
        self._listener = self._acceptor = None

    def _addresses(self, rank: int) -> list[bytes]:
        """Where an end may listen; one address does not tell another."""
        names = (blake2b(b"%d/%d" % (rank, k), key=self.group_id, digest_size=16) for k in range(_ADDRESSES))
        return [address_of(name.hexdigest()) for name in names]

    # -- opening

    def _open(self) -> None:
        listener = self._listening()
        super()._open()
        self._listener = listener
        self._acceptor = threading.Thread(
            target=accept_each,
            args=(listener, weakref.WeakMethod(self._accepted)),
            name="recollect-accept",
            daemon=True,
        )
        self._acceptor.start()
        self._end = _End(lambda: self.is_closed, self._take_from, self._forget_neighbour)
        _ends[(self.group_id, self.rank, os.getpid())] = self._end

    def _listening(self) -> socket.socket:
        """Listen at the first address that is free, unless a process of this user listens at one of them."""
        listener, mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), None
        try:
            addresses = self._addresses(self.rank)
            mine = next((address for address in addresses if listen_at(listener, address)), None)
            for address in addresses:
                if address != mine and (other := _connected_to(address)) is not None:
                    other.close()
                    raise RuntimeError(
                        f"rank {self.rank}: this end is used by another live process or object; "
                        "give each process its own end"
                    )
            if mine is None:
                raise RuntimeError(
                    f"rank {self.rank}: must have a free address, got {len(addresses)} that another user has taken; "
                    "make another group"
                )
            listener.listen(128)
        except BaseException:
            listener.close()
            leave(mine)
            raise
        self._address = mine
        return listener

    def _accepted(self, sock: socket.socket) -> bool:
        """Take a connection of this user's process that names its group and rank; False once this end is closed."""
        if self.is_closed:
            return False
        try:
            peer_of(sock)
            group, rank = _GREETING.unpack(exactly(sock, _GREETING.size, monotonic() + _GREETING_S))
            if group != self.group_id or not 0 <= rank < self.n_ranks:
                raise PermissionError("another group")
            self._add(FramedSocket(sock, rank, self.max_frame), outward=False)
        except (OSError, EOFError, RuntimeError):
            sock.close()
        return True

    def _link_to(self, dest: int) -> FramedSocket | None:
        link = self._outward.get(dest)
        if link is not None and link.is_open:
            return link
        with self._dialling.setdefault(dest, threading.Lock()):  # one connection keeps what is sent in order
            link = self._outward.get(dest)
            return link if link is not None and link.is_open else self._connected(dest)

    def _connected(self, dest: int) -> FramedSocket | None:
        sock = None
        try:
            found = map(_connected_to, self._addresses(dest))
            sock = next((one for one in found if one is not None), None)
            if sock is None:
                raise ConnectionRefusedError(f"rank {dest}: no process listens")
            if peer_of(sock) == os.getpid():
                sock.close()  # it is near after all, and has just opened: frames go through memory, in one order
                return None
            sock.sendall(_GREETING.pack(self.group_id, self.rank))
        except OSError as error:
            if sock is not None:
                sock.close()
            if error.errno in _TOO_MANY_FILES:
                return None  # perhaps not for long
            if dest in self._gone:
                raise PeerDiedError(f"rank {dest}: is gone, and no process took its place yet") from None
            return None
        link = FramedSocket(sock, dest, self.max_frame)
        self._add(link, outward=True)
        return link

    def reconnect(self, dest: int, timeout: float = 30.0) -> None:
        """Connect again to a peer that was gone; PeerDiedError if no process takes its place in time."""
        end = monotonic() + check_timeout(timeout)
        while True:
            self._ensure_open()
            if self._neighbour(dest) is not None:
                with self._cond:
                    self._gone.pop(dest, None)
                return
            with suppress(PeerDiedError):
                if self._link_to(dest) is not None:
                    return
            left = end - monotonic()
            if left <= 0:
                raise PeerDiedError(
                    f"rank {dest}: is gone, and no process took its place within {timeout:g} s"
                )
            threading.Event().wait(min(left, RETRY_S))

    # -- within the process

    def _neighbour(self, dest: int) -> _End | None:
        other = _ends.get((self.group_id, dest, os.getpid()))
        return None if other is None or other.is_closed() else other

    def _is_near(self, dest: int) -> bool:
        return self._neighbour(dest) is not None

    def _deliver(self, outgoing: Outgoing, tag: int, parts: Sequence[Any]) -> bool:
        other = self._neighbour(outgoing.dest)
        if other is None:
            return False
        frame = memoryview(bytearray().join(parts))
        if not other.take(self.rank, outgoing, tag, frame, self._wake):
            return False
        self._known.add(outgoing.dest)
        return True

    def _take_from(
        self, source: int, outgoing: Outgoing, tag: int, frame: memoryview, wake_sender: Callable[[], None]
    ) -> bool:
        """Take a frame of another end in this process; False if this end is closed."""
        with self._cond:
            if self.is_closed:
                return False
            self._known.add(source)
            self._gone.pop(source, None)
            is_full = self._inbox.nbytes(source) > _IN_PROCESS_NBYTES or self._overflow
            if is_full:
                self._overflow.append((outgoing, source, wake_sender, tag, frame))
            else:
                self._inbox.put(source, tag, frame)
            is_led = self._leader.is_led
            self._cond.notify_all()
        if is_full:
            return True
        if is_led:
            self._wake()
        outgoing.finish()
        return True

    def _taken(self, rank: int) -> None:
        super()._taken(rank)
        while self._overflow and self._inbox.nbytes(self._overflow[0][1]) <= _IN_PROCESS_NBYTES // 2:
            outgoing, source, wake_sender, tag, frame = self._overflow.popleft()
            if outgoing.error is None:
                self._inbox.put(source, tag, frame)
                outgoing.finish()
                wake_sender()

    def _give_up(self, outgoing: Outgoing) -> None:
        super()._give_up(outgoing)
        if not outgoing.is_done and outgoing.error is None:
            outgoing.finish(PeerDiedError(f"send to rank {outgoing.dest}: was given up"))

    def _release(self) -> None:
        super()._release()
        for outgoing, _, wake_sender, _, _ in self._overflow:
            outgoing.finish(PeerDiedError(f"rank {self.rank}: it is gone, and a frame was on its way"))
            wake_sender()
        self._overflow.clear()

    def _matching(self, source: int, tag: int) -> Frame | None:
        if source in self._gone and self._neighbour(source) is not None:
            self._gone.pop(source, None)
        return super()._matching(source, tag)

    # -- ending

    def _stop_listening(self) -> None:
        if self._listener is not None:
            stop_listening(self._listener, self._address)
        if self._acceptor is not None:
            self._acceptor.join(5.0)
        for rank in range(self.n_ranks):
            other = self._neighbour(rank)
            if other is not None and rank != self.rank:
                other.forget(self.rank)

    def _forget_neighbour(self, rank: int) -> None:
        """Another end in this process was closed."""
        with self._cond:
            if rank in self._known:
                self._gone[rank] = None
            self._cond.notify_all()
        self._wake()


def _connected_to(address: bytes) -> socket.socket | None:
    """A connection to a process of this user that listens at an address; None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_GREETING_S)
    try:
        sock.connect(address)
        peer_of(sock)
    except (ConnectionError, FileNotFoundError, PermissionError, BlockingIOError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock

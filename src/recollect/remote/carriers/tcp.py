"""TcpCarrier: stdlib sockets; workers join a serving manager and leave at any time.

Both sides prove that they know the token, by HMAC-SHA256 over fresh nonces; it never travels. Until then at most 4 KiB
are read of a stranger, for at most 5 s, and at most 64 of them are listened to: when one more comes, the oldest of
those that have said nothing yet has to go.

    joining  → magic, version, nonce, session, rank asked for (-1: give me one)
    serving  → nonce
    joining  → proof over both nonces
    serving  → status, the rank given, its own rank, its max_frame, and its own proof
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import ssl
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from recollect import interrupts
from recollect.errors import AuthError, DeadlineError, PeerDiedError
from recollect.remote.carriers.base import check_rank, check_timeout
from recollect.remote.carriers.sockets.carrier import StreamCarrier
from recollect.remote.carriers.sockets.framed import FramedSocket, Outgoing, accept_each, exactly
from recollect.remote.frame import MAX_FRAME

PROOF_S = 5.0
MOST_STRANGERS = 64
TOKEN_NBYTES = 16
_HELLO = struct.Struct("<4sHH32s16sq")
_ANSWER = struct.Struct("<IqqQ32s")
_MAGIC, _VERSION = b"RCTC", 1
# A machine that vanished is seen within 20 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
_TRY_AGAIN = (ConnectionError, TimeoutError, socket.gaierror)
_SILENT, _SPOKE, _PROVED = range(3)  # how far a stranger has come
_OK, _WRONG_TOKEN, _RANK_TAKEN, _SHUT_OUT = range(4)
_WHY = {
    _WRONG_TOKEN: "the token does not match; set RECOLLECT_TOKEN to the manager's",
    _RANK_TAKEN: "the rank belongs to a live peer; ask for another or for none",
    _SHUT_OUT: "this rank was shut out for what it sent",
}


class TcpCarrier(StreamCarrier):
    """A serving end (`serve`), or one that has joined serving ends (`join`).

    Ownership: `close()` gives up the sockets. Concurrency: as StreamCarrier; connections are accepted in a thread.

    Example:
        >>> from recollect.remote import TcpCarrier
        >>> manager = TcpCarrier.serve(0)
        >>> worker = TcpCarrier.join([manager.address], token=manager.token)
        >>> worker.send(0, 0, [b"hello"])
        >>> manager.recv(timeout=5.0)[0] == worker.rank
        True
        >>> worker.close(), manager.close()
        (None, None)
    """

    def __init__(self, rank: int, token: bytes, max_frame: int, context: ssl.SSLContext | None) -> None:
        self._token, self._context = token, context
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._session = secrets.token_bytes(16)
        self._addresses: dict[int, str] = {}
        self._sessions: dict[int, bytes] = {}
        self._next_rank = 0
        self._greeting: dict[threading.Thread, _Stranger] = {}  # which thread listens to which of them
        self._admission = threading.Lock()
        self._banned: set[int] = set()
        self.refused = 0  # strangers without a proof
        self.address: str | None = None
        super().__init__(rank, None, max_frame)

    # -- making

    @classmethod
    def serve(
        cls, rank: int, address: str = "127.0.0.1:0", token: bytes | str | None = None, *,
        max_frame: int = MAX_FRAME, ssl_context: ssl.SSLContext | None = None,
    ) -> TcpCarrier:  # fmt: skip
        """Listen at an address; without a token, RECOLLECT_TOKEN or a random one (`carrier.token`)."""
        check_rank(rank, None)
        found = _token(token)
        host, port = _split(address)
        token = secrets.token_bytes(32) if found is None else found
        return cls(rank, token, max_frame, ssl_context)._listening(host, port)

    def _listening(self, host: str, port: int) -> Self:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with interrupts.deferred():
            listener = socket.create_server((host, port), family=family, backlog=128)
            bound = listener.getsockname()
            name = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
            self.address = f"{name}:{bound[1]}"
            self._listener = listener
            self._ensure_open()
            take = weakref.WeakMethod(self._listen_to)
            self._acceptor = threading.Thread(
                target=accept_each, args=(listener, take), name="recollect-accept", daemon=True
            )
            self._acceptor.start()
        return self

    @classmethod
    def join(
        cls, addresses: Sequence[str], token: bytes | str | None = None, rank: int | None = None, *,
        max_frame: int = MAX_FRAME, ssl_context: ssl.SSLContext | None = None, timeout: float = 30.0,
    ) -> TcpCarrier:  # fmt: skip
        """Connect to serving ends; the first gives a rank unless one is asked for."""
        found = _token(token)
        if found is None:
            raise AuthError(
                "token: must be given, or be in RECOLLECT_TOKEN, got none; take the manager's carrier.token"
            )
        if isinstance(addresses, str) or not addresses:
            raise ValueError(f"addresses: must be a list of 'host:port', got {addresses!r}")
        carrier = cls(-1 if rank is None else check_rank(rank, None), found, max_frame, ssl_context)
        try:
            carrier.link(addresses, timeout)
        except BaseException:
            carrier.close()
            raise
        return carrier

    def link(self, addresses: Sequence[str], timeout: float = 30.0) -> None:
        """Connect to more serving ends, as a manager does to others; or to one that serves at another address now."""
        end = monotonic() + check_timeout(timeout)
        self._ensure_open()
        for address in addresses:
            while True:
                self._check_open()
                try:
                    self._join(address, max(0.05, end - monotonic()))
                    break
                except _TRY_AGAIN as error:
                    if monotonic() >= end:
                        raise DeadlineError(f"{address}: no answer within {timeout:g} s ({error})") from None
                    threading.Event().wait(min(0.05, max(0.0, end - monotonic())))

    def link_others(self, addresses: Mapping[int, str], timeout: float = 30.0) -> None:
        """Connect to serving ends that may have ended by now; `reconnect` knows where to look for them later."""
        for rank, address in addresses.items():
            if rank in self._addresses:
                continue
            self._addresses[rank] = address
            with suppress(*_TRY_AGAIN):
                self._join(address, check_timeout(timeout))

    @property
    def token(self) -> bytes:
        """The token, to be given to the processes that shall join."""
        return self._token

    def __repr__(self) -> str:
        return f"TcpCarrier(rank={self.rank}, address={self.address!r})"

    def __reduce__(self) -> Any:
        raise TypeError("TcpCarrier: belongs to one process; make another with TcpCarrier.join")

    # -- joining

    def _join(self, address: str, timeout: float) -> None:
        sock = _connected(address, timeout)
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=_split(address)[0])
            end = monotonic() + min(timeout, PROOF_S)
            nonce = secrets.token_bytes(32)
            sock.sendall(_HELLO.pack(_MAGIC, _VERSION, 0, nonce, self._session, self.rank))
            theirs = exactly(sock, 32, end)
            sock.sendall(self._proof(b"join", nonce, theirs))
            status, mine, server, most, proof = _ANSWER.unpack(exactly(sock, _ANSWER.size, end))
            if status != _OK:
                raise AuthError(f"{address}: {_WHY.get(status, 'refused')}")
            if not hmac.compare_digest(proof, self._proof(b"serve", nonce, theirs)):
                raise AuthError(f"{address}: the other side does not know the token; is it the right one?")
        except (EOFError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            sock.close()
            raise ConnectionResetError("closed before it answered") from None
        except BaseException:
            sock.close()
            raise
        self.rank = mine
        self.max_frame = min(self.max_frame, most)  # more would end the connection
        self._addresses[server] = address
        self._admit(self._tuned(sock, server))

    def _tuned(self, sock: socket.socket, rank: int) -> FramedSocket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return FramedSocket(sock, rank, self.max_frame)

    def _admit(self, link: FramedSocket) -> None:
        """Take a connection whose other side has proved itself, in place of an older one."""
        old = self._outward.get(link.rank)
        if old is not None:
            self._drop(old)
        self._add(link, outward=True)

    def _proof(self, side: bytes, joining: bytes, serving: bytes) -> bytes:
        return hmac.digest(self._token, b"recollect " + side + joining + serving, "sha256")

    # -- serving

    def _greeted(self, stranger: _Stranger) -> None:
        """Let a stranger prove itself, within a few seconds and bytes. In a thread of its own."""
        sock = stranger.sock
        try:
            end = monotonic() + PROOF_S
            sock.settimeout(PROOF_S)
            if self._context is not None:
                sock = stranger.sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
                sock.do_handshake()
            magic, version, _, nonce, session, asked = _HELLO.unpack(exactly(sock, _HELLO.size, end))
            if magic != _MAGIC or version != _VERSION:
                raise PermissionError("another protocol")
            stranger.progress = _SPOKE
            mine = secrets.token_bytes(32)
            sock.sendall(mine)
            if not hmac.compare_digest(exactly(sock, 32, end), self._proof(b"join", nonce, mine)):
                sock.sendall(_ANSWER.pack(_WRONG_TOKEN, -1, -1, 0, bytes(32)))
                raise PermissionError("wrong token")
            stranger.progress = _PROVED
            proof = self._proof(b"serve", nonce, mine)
            with self._admission:  # or two that ask for one rank at once would both be given it
                status, rank = self._given(asked, session)
                if status == _OK:
                    self._sessions[rank] = session
                    self._answer_and_admit(sock, rank, proof)
            if status != _OK:
                sock.sendall(_ANSWER.pack(status, -1, self.rank, self.max_frame, proof))
                sock.close()
        except (OSError, EOFError, struct.error, RuntimeError, ValueError):
            self.refused += 1
            with suppress(OSError):
                sock.close()
        finally:
            with self._cond:
                self._greeting.pop(threading.current_thread(), None)

    def _listen_to(self, sock: socket.socket) -> bool:
        """Let a stranger prove itself in a thread of its own; where too many are at it, one of them has to go.

        False once this carrier is closed.
        """
        if self.is_closed:
            return False
        stranger = _Stranger(sock)
        thread = threading.Thread(target=self._greeted, args=(stranger,), name="recollect-greet", daemon=True)
        with self._cond:
            if len(self._greeting) >= MOST_STRANGERS:
                # A peer that knows the token has said so within a round trip, and comes again if not.
                oldest = min(self._greeting, key=lambda t: self._greeting[t].progress)
                self._greeting.pop(oldest).dismiss()
            self._greeting[thread] = stranger
        try:
            thread.start()
        except RuntimeError:  # no more threads, perhaps not for long
            with self._cond:
                self._greeting.pop(thread, None)
            self.refused += 1
            sock.close()
        return True

    def _answer_and_admit(self, sock: socket.socket, rank: int, proof: bytes) -> None:
        """The answer is the first to leave by the new link: once a peer has joined, it is known here."""
        link = self._tuned(sock, rank)
        answer = _ANSWER.pack(_OK, rank, self.rank, self.max_frame, proof)
        link.out.append(Outgoing.bare(rank, answer, self._wait_sent))
        self._admit(link)
        try:
            self._flush(link)
        except OSError:
            self._drop(link)
            raise

    def _given(self, asked: int, session: bytes) -> tuple[int, int]:
        """The rank of a peer that joins: what it asks for, unless a live peer has it, or the next new one."""
        self._poll_now()
        with self._cond:
            if asked < 0:
                while self._next_rank == self.rank or self._next_rank in self._known:
                    self._next_rank += 1
                self._known.add(self._next_rank)
                self._gone[self._next_rank] = None
                self._next_rank += 1  # given once, also when its peer is forgotten
                return _OK, self._next_rank - 1
            if asked in self._banned:
                return _SHUT_OUT, -1
            live = asked in self._outward and self._sessions.get(asked) != session
            if asked == self.rank or live:
                return _RANK_TAKEN, -1
            return _OK, asked

    def _forget(self, rank: int) -> None:
        super()._forget(rank)
        self._banned.discard(rank)
        self._sessions.pop(rank, None)

    def refuse(self, rank: int, for_ever: bool = False) -> None:
        """Close a peer's connection; for ever: it may not join again either."""
        with self._cond:
            if for_ever and rank in self._known:
                self._banned.add(rank)
        super().refuse(rank, for_ever)

    # -- links

    def _link_to(self, dest: int) -> FramedSocket | None:
        link = self._outward.get(dest)
        if link is not None and link.is_open:
            return link
        if dest == self.rank:
            raise ValueError(f"dest: must be another rank, got this one, {dest}")
        raise PeerDiedError(f"rank {dest}: {'is gone' if dest in self._known else 'has not joined'}")

    def reconnect(self, dest: int, timeout: float = 30.0) -> None:
        """Join a serving end again; PeerDiedError if it does not answer in time, or cannot be called from here."""
        end = monotonic() + check_timeout(timeout)
        self._ensure_open()
        link = self._outward.get(dest)
        if link is not None and link.is_open:
            return
        while True:
            self._check_open()
            address = self._look_up(dest, max(0.05, end - monotonic()))
            if address is None:
                raise PeerDiedError(f"rank {dest}: is gone, and has to join again by itself")
            try:
                self._join(address, max(0.05, end - monotonic()))
                return
            except _TRY_AGAIN as error:
                left = end - monotonic()
                if left <= 0:
                    raise PeerDiedError(f"rank {dest}: does not answer at {address} ({error})") from None
                threading.Event().wait(min(left, 0.02))

    def _look_up(self, dest: int, timeout: float) -> str | None:
        """Where a serving end listens, as far as this end knows."""
        return self._addresses.get(dest)

    # -- ending

    def _stop_listening(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.join(5.0)
        with self._cond:
            greeting = list(self._greeting.items())
        for thread, stranger in greeting:
            stranger.dismiss()
            with suppress(RuntimeError):  # it has not begun
                thread.join(1.0)

    def _forget_in_child(self) -> None:
        super()._forget_in_child()
        for stranger in self._greeting.values():
            stranger.sock.close()
        if self._listener is not None:
            self._listener.close()
        self.is_closed = self._is_released = True


class _Stranger:
    """A connection whose other side has not proved itself."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.progress = sock, _SILENT

    def dismiss(self) -> None:
        """Let the thread that listens to it end; that thread closes the socket."""
        with suppress(OSError):  # not by an SSLSocket's own: it would let go of what another thread is using
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def _connected(address: str, timeout: float) -> socket.socket:
    """A connection to an address; ConnectionError if there is no way to it, which may change."""
    try:
        return socket.create_connection(_split(address), timeout=timeout)
    except OSError as error:
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN):
            raise ConnectionError(error.errno, error.strerror) from None
        raise


def _token(token: bytes | str | None) -> bytes | None:
    if token is None:
        token = os.environ.get("RECOLLECT_TOKEN")
    if token is None:
        return None
    found = token.encode() if isinstance(token, str) else bytes(token)
    if len(found) < TOKEN_NBYTES:
        raise ValueError(
            f"token: must have at least {TOKEN_NBYTES} bytes, got {len(found)}; make a longer one"
        )
    return found


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address: must be 'host:port' with a port up to 65535, got {address!r}")
    return host.strip("[]"), int(port)

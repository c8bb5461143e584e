"""One stream socket: frames in and out of it, whole or refused, and what becomes of them when it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from recollect.errors import ClosedError, FrameError, PeerDiedError
from recollect.remote.carriers.inbox import Inbox
from recollect.remote.carriers.link import HEADER, MAGIC, Link, Outgoing

CARRIER = SimpleNamespace(max_frame=1 << 20, _glance=lambda: None)


def framed(data: bytes, tag: int = 3) -> bytes:
    return HEADER.pack(MAGIC, tag, len(data)) + data


@pytest.fixture
def far() -> Iterator[tuple[Link, socket.socket]]:
    near, other = socket.socketpair()
    link = Link(near, 1, CARRIER.max_frame)
    yield link, other
    link.close()
    other.close()


def test_what_came_before_rubbish_is_whole(far: tuple[Link, socket.socket]) -> None:
    link, other = far
    other.sendall(framed(b"one") + framed(b"two", 4) + b"\xff" * 64)
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, b"one"), (4, b"two")]
    assert isinstance(link.error, FrameError)


def test_what_came_before_the_end_is_whole(far: tuple[Link, socket.socket]) -> None:
    link, other = far
    data = bytes(range(256)) * 200
    other.sendall(framed(data))
    other.close()
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, data)]
    with pytest.raises(EOFError):
        link.read()


@pytest.mark.parametrize(("is_closing", "kind"), [(True, ClosedError), (False, PeerDiedError)])
def test_what_waits_when_a_connection_ends_says_why(
    far: tuple[Link, socket.socket], is_closing: bool, kind: type[Exception]
) -> None:
    link, _ = far
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    waiting = [Outgoing(CARRIER, 1, 0, [bytes(1 << 20)]) for _ in range(2)]
    for outgoing in waiting:
        link.put(outgoing)
    assert not any(outgoing.is_complete() for outgoing in waiting)
    link.close(is_closing)
    for outgoing in waiting:
        with pytest.raises(kind, match="rank 1"):
            outgoing.is_complete()


def test_nothing_is_put_where_nobody_would_send_it(far: tuple[Link, socket.socket]) -> None:
    link, _ = far
    link.close()
    with pytest.raises(PeerDiedError, match="rank 1: is gone"):
        link.put(Outgoing(CARRIER, 1, 0, [b"x"]))
    assert not link.out


def test_a_frame_of_no_bytes_takes_room_too() -> None:
    inbox = Inbox()
    for _ in range(100):
        inbox.put(5, 0, memoryview(b""))
    assert inbox.nbytes(5) >= 100 * 32 and inbox.nbytes(6) == 0
    while inbox.take(5, 0) is not None:
        pass
    assert inbox.nbytes(5) == 0

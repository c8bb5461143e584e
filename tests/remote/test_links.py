"""Below a carrier: one stream socket, frames for peers that have not come, and whose turn it is to wait for all."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import LocalCarrier
from recollect.remote.carriers import link as links
from recollect.remote.carriers import local
from recollect.remote.carriers.absent import Absent
from recollect.remote.carriers.bell import Bell
from recollect.remote.carriers.inbox import Inbox
from recollect.remote.carriers.link import HEADER, MAGIC, Link, Outgoing
from recollect.remote.carriers.listening import accepted
from recollect.remote.carriers.stream import StreamCarrier
from recollect.remote.carriers.turns import Turns
from recollect.testing.carrier_contract import SOON, eventually

CARRIER = SimpleNamespace(max_frame=1 << 20)


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


def test_what_came_before_a_reset_is_whole(far: tuple[Link, socket.socket]) -> None:
    """A peer that dies while something for it lies unread resets the connection."""
    link, other = far
    data = bytes(range(256)) * 200
    link.sock.sendall(b"unread")
    other.sendall(framed(data))
    other.close()
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, data)]
    with pytest.raises(EOFError):
        link.read()


def test_a_long_frame_is_given_out_with_its_last_byte(far: tuple[Link, socket.socket]) -> None:
    link, other = far
    data = bytes(range(256)) * 400
    other.sendall(framed(data)[:-1])
    assert link.read() == []
    other.sendall(data[-1:])
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, data)]


class Plenty:
    """A socket on which 16 MB of frames lie ready."""

    def __init__(self) -> None:
        self.data = framed(bytes(40_000)) * 400
        self.at = 0

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return -1

    def recv_into(self, into: memoryview) -> int:
        part = self.data[self.at : self.at + into.nbytes]
        if not part:
            raise BlockingIOError
        into[: len(part)] = part
        self.at += len(part)
        return len(part)


def test_who_brings_much_lets_the_others_have_their_turn() -> None:
    link = Link(Plenty(), 1, CARRIER.max_frame)  # type: ignore[arg-type]
    assert [50 < len(link.read()) < 200 for _ in range(2)] == [True, True]


def test_an_encrypted_link_brings_no_more_at_once_and_a_poll_tells_of_the_rest(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is decrypted is read; what is not lies in the socket, where a poll sees it."""
    monkeypatch.setattr(links, "_FAIR_NBYTES", 1 << 15)
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(contexts[0].wrap_socket, ours, server_side=True)
        sender = contexts[1].wrap_socket(theirs, server_hostname="127.0.0.1")
        link = Link(serving.result(SOON), 1, CARRIER.max_frame)
    sizes = [1, 70_000, 20_000, 5, 16_384, 40_000] * 20
    unsent = memoryview(b"".join(framed(bytes(n)) for n in sizes))
    sender.setblocking(False)
    come: list[int] = []
    most = 0
    while len(come) < len(sizes):
        with suppress(ssl.SSLWantWriteError):
            while unsent:
                unsent = unsent[sender.send(unsent[:10_000]) :]
        assert select.select([link.fd], [], [], SOON)[0]
        before = link._filled if link._target is not None else link._have
        frames = link.read()
        after = link._filled if link._target is not None else link._have
        most = max(most, sum(frame.nbytes for _, frame in frames) + after - before)
        come += [frame.nbytes for _, frame in frames]
    assert come == sizes and most < 3 << 15
    link.close()
    sender.close()


def test_an_encrypted_connection_is_entered_by_one_thread_at_a_time() -> None:
    """OpenSSL would mistake what one thread did for what another did, and say that a live peer is gone."""
    entered: list[bool] = []

    class Encrypted(Plenty):
        def pending(self) -> int:
            entered.append(link.lock.locked())
            return 0

        def recv_into(self, into: memoryview) -> int:
            entered.append(link.lock.locked())
            return super().recv_into(into)

        def send(self, data: memoryview) -> int:
            entered.append(link.lock.locked())
            return data.nbytes

    link = Link(Encrypted(), 1, CARRIER.max_frame)  # type: ignore[arg-type]
    link._is_ssl = True
    link.put(Outgoing(CARRIER, 1, 0, [b"x"]))
    link.read()
    assert len(entered) > 100 and all(entered) and not link.lock.locked()


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


def test_what_will_never_be_sent_borrows_nothing_any_more(far: tuple[Link, socket.socket]) -> None:
    link, _ = far
    block = bytearray(1 << 20)
    outgoing = Outgoing(CARRIER, 1, 0, [block])
    link.put(outgoing)
    with pytest.raises(BufferError):
        block.clear()
    link.close()
    with pytest.raises(PeerDiedError):
        outgoing.is_complete()
    block.clear()


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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED, errno.ENOBUFS])
def test_one_connection_that_cannot_be_taken_ends_nothing(number: int) -> None:
    near, other = socket.socketpair()
    outcomes: list[Any] = [OSError(number, "for now"), (near, None), OSError(errno.EINVAL, "shut down")]

    class Listener:
        def accept(self) -> Any:
            outcome = outcomes.pop(0)
            if isinstance(outcome, OSError):
                raise outcome
            return outcome

    listener: Any = Listener()
    assert accepted(listener) is near
    assert accepted(listener) is None
    near.close()
    other.close()


def test_nobody_listens_once_a_socket_is_closed() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(accepted, listener)
        listener.shutdown(socket.SHUT_RDWR)
        assert waiting.result(SOON) is None
    listener.close()
    assert accepted(listener) is None


# -- a carrier over one socket


class Piped(StreamCarrier):
    """Rank 0, connected to rank 1 by a pair of sockets."""

    def _link_to(self, dest: int) -> Link:
        return self._outward[dest]


@pytest.fixture
def piped() -> Iterator[tuple[Piped, socket.socket]]:
    near, other = socket.socketpair()
    carrier = Piped(0, None, CARRIER.max_frame)
    carrier._ensure_open()
    carrier._add(Link(near, 1, CARRIER.max_frame), outward=True)
    other.settimeout(SOON)
    yield carrier, other
    carrier.close()
    other.close()


def read(sock: socket.socket, n: int) -> bytes:
    """Read so many bytes, or all there are before the end."""
    got = b""
    while len(got) < n and (part := sock.recv(n - len(got))):
        got += part
    return got


def test_a_frame_given_up_before_it_began_never_leaves(piped: tuple[Piped, socket.socket]) -> None:
    carrier, other = piped
    block = bytes(1 << 20)
    first = carrier.isend(1, 0, [block])
    with pytest.raises(DeadlineError, match="send to rank 1"):
        carrier.send(1, 0, [b"late"], 0.0)
    borrowed = bytearray(b"later")
    later = carrier.isend(1, 0, [borrowed])
    for over in (lambda: later.wait(0.0), later.is_complete):
        with pytest.raises(DeadlineError, match="send to rank 1"):
            over()
    borrowed.clear()  # it is free again
    carrier.isend(1, 0, [b"after"])
    want = framed(block, 0) + framed(b"after", 0)
    assert read(other, len(want)) == want and 1 in carrier.alive()
    eventually(first.is_complete)


def test_a_frame_given_up_half_way_ends_the_connection(piped: tuple[Piped, socket.socket]) -> None:
    carrier, other = piped
    half = carrier.isend(1, 0, [bytes(1 << 20)])
    with pytest.raises(DeadlineError, match="send to rank 1"):
        half.wait(0.0)
    assert 1 not in carrier.alive()
    with pytest.raises(PeerDiedError):
        half.is_complete()
    assert len(read(other, 1 << 21)) < 1 << 20


@pytest.mark.parametrize("is_late", [False, True])
def test_a_frame_that_was_begun_has_a_moment_when_a_carrier_is_closed(
    piped: tuple[Piped, socket.socket], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    if is_late:  # the moment is over whenever somebody looks
        monkeypatch.setattr("recollect.remote.carriers.stream.monotonic", itertools.count().__next__)
    carrier, other = piped
    monkeypatch.setattr(carrier, "_ensure_flusher", lambda: None)  # so that nobody sends the rest before
    (link,) = carrier._links.values()
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    whole = framed(bytes(range(256)) * 1024, 0)
    carrier.isend(1, 0, [bytes(range(256)) * 1024])
    left = sum(view.nbytes for view in link.out[0].views)
    got = read(other, len(whole) - left)
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    carrier.close()
    assert left > 0 and got + read(other, left + 1) == whole


def test_peers_that_wait_for_room_go_on_when_there_is_some(piped: tuple[Piped, socket.socket]) -> None:
    carrier, other = piped
    frame = bytes(CARRIER.max_frame // 2)
    (link,) = carrier._links.values()
    sender = threading.Thread(target=other.sendall, args=(framed(frame) * 9,), daemon=True)
    sender.start()
    eventually(lambda: bool(carrier.alive()) and link.is_paused)
    n = 9
    while carrier._inbox.nbytes(1) > CARRIER.max_frame:
        assert carrier.recv(1, timeout=SOON)[2].nbytes == len(frame)
        n -= 1
    assert link.is_paused  # more than half of the room is taken
    for _ in range(n):
        assert carrier.recv(1, timeout=SOON)[2].nbytes == len(frame)
    sender.join(SOON)
    assert not sender.is_alive() and not link.is_paused


def test_all_who_wait_for_a_peer_hear_that_another_thread_let_it_go(
    piped: tuple[Piped, socket.socket],
) -> None:
    carrier, _ = piped
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(carrier.recv, 1, 0, 3 * SOON) for _ in range(2)]
        eventually(lambda: carrier._turns.is_led and carrier._cond.n_waiting == 1)
        carrier.refuse(1)
        for wait in waits:
            assert isinstance(wait.exception(SOON), PeerDiedError)


def test_nobody_joins_while_the_links_of_a_peer_are_looked_for(piped: tuple[Piped, socket.socket]) -> None:
    carrier, _ = piped
    held: list[bool] = []

    class Other:
        @property
        def rank(self) -> int:
            held.append(carrier._cond.is_held)
            return 2

    carrier._links[-1] = Other()  # type: ignore[assignment]
    carrier.refuse(1)
    del carrier._links[-1]
    assert held and all(held) and 1 not in carrier.alive()


def test_nobody_is_woken_for_room_that_is_not_needed_any_more(piped: tuple[Piped, socket.socket]) -> None:
    carrier, other = piped
    sent = carrier.isend(1, 0, [bytes(1 << 20)])
    read(other, len(framed(bytes(1 << 20), 0)))
    eventually(lambda: sent.is_complete() and carrier._flusher is None)
    carrier.alive()
    assert carrier._epoll is not None and carrier._epoll.poll(0) == []


def test_a_peer_that_takes_nothing_any_more_is_gone(
    piped: tuple[Piped, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(link: Link, outgoing: Outgoing) -> None:
        raise BrokenPipeError(32, "broken pipe")

    carrier, _ = piped
    monkeypatch.setattr(Link, "put", broken)
    with pytest.raises(PeerDiedError, match="rank 1: is gone"):
        carrier.send(1, 0, [b"x"], SOON)
    assert 1 not in carrier.alive()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when there is room again"])
def test_what_came_from_a_peer_that_takes_nothing_any_more_is_given_out(
    piped: tuple[Piped, socket.socket], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    def broken(*args: Any) -> None:
        raise BrokenPipeError(32, "broken pipe")

    carrier, other = piped
    waiting = carrier.isend(1, 0, [bytes(1 << 20)]) if is_late else None
    other.sendall(framed(b"one") + framed(b"two"))
    monkeypatch.setattr(Link, "_send_some", broken)
    if waiting is None:
        with pytest.raises(PeerDiedError, match="rank 1: is gone"):
            carrier.send(1, 0, [b"x"], SOON)
    else:
        read(other, 1 << 19)
        with pytest.raises(PeerDiedError, match="rank 1: it is gone"):
            waiting.wait(SOON)
    assert [bytes(carrier.recv(1, timeout=SOON)[2]) for _ in range(2)] == [b"one", b"two"]
    with pytest.raises(PeerDiedError, match="rank 1: is gone"):
        carrier.recv(1, timeout=SOON)


def test_a_link_that_ends_leaves_a_newer_one_alone(piped: tuple[Piped, socket.socket]) -> None:
    carrier, _ = piped
    (old,) = carrier._links.values()
    near, other = socket.socketpair()
    carrier._add(Link(near, 1, CARRIER.max_frame), outward=True)
    carrier._drop(old)
    assert 1 in carrier.alive()
    carrier.send(1, 0, [b"x"], SOON)
    assert read(other, len(framed(b"x", 0))) == framed(b"x", 0)
    other.close()


def test_who_looks_while_a_carrier_is_closed_hears_that_it_is_closed(
    piped: tuple[Piped, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look at `is_closed` and the poll it may be closed altogether."""
    carrier, _ = piped
    glance = carrier._turns.glance

    def late() -> None:
        carrier.close()
        glance()

    monkeypatch.setattr(carrier._turns, "glance", late)
    with pytest.raises(ClosedError, match="was closed"):
        carrier.alive()


def test_a_carrier_closed_before_its_first_use_opens_nothing() -> None:
    carrier = Piped(0, 2)
    opened: list[str] = []

    class Late:
        def __enter__(self) -> None:
            carrier.is_closed = True

        def __exit__(self, *error: object) -> None:
            pass

    carrier._open = lambda: opened.append("epoll")  # type: ignore[method-assign]
    carrier._cond = Late()  # type: ignore[assignment]
    with pytest.raises(ClosedError, match="was closed"):
        carrier._ensure_open()
    assert opened == []


def test_a_bell_that_is_closed_rings_nowhere() -> None:
    """Not even in what has its number by now."""
    bell = Bell()
    fd = bell.fileno()
    bell.ring()
    assert select.select([bell], [], [], 0)[0]
    bell.hush()
    bell.hush()
    assert not select.select([bell], [], [], 0)[0]
    near, far = socket.socketpair()
    bell.close()
    bell.close()
    os.dup2(near.fileno(), fd)
    bell.ring()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(8)
    os.close(fd)
    near.close()
    far.close()


def test_a_peer_is_refused_while_others_come(piped: tuple[Piped, socket.socket]) -> None:
    """Who looks through the connections is not disturbed by a new one."""
    carrier, _ = piped
    begun, is_there = threading.Event(), threading.Event()
    near, other = socket.socketpair()

    class Seen(Link):
        @property
        def rank(self) -> int:  # type: ignore[override]
            if threading.current_thread() is threading.main_thread():
                begun.set()
                is_there.wait(0.1)  # in vain while the look through them lasts
            return 7

        @rank.setter
        def rank(self, rank: int) -> None:
            pass

    def come() -> None:
        assert begun.wait(SOON)
        carrier._add(Link(near, 2, CARRIER.max_frame), outward=True)
        is_there.set()

    pairs = [socket.socketpair() for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        for mine, _ in pairs:
            pool.submit(carrier._add, Seen(mine, 7, CARRIER.max_frame), True).result(SOON)
        coming = pool.submit(come)
        carrier.refuse(3)
        coming.result(SOON)
    assert {1, 2, 7} <= carrier.alive()
    for sock in (other, *(theirs for _, theirs in pairs)):
        sock.close()


def test_a_thread_about_to_watch_its_link_is_not_disturbed_by_close(
    piped: tuple[Piped, socket.socket],
) -> None:
    carrier, _ = piped
    (link,) = carrier._links.values()
    released = threading.Event()

    class Closing:
        """Open, until another thread that closes the carrier has released everything."""

        fd, rank, out, is_paused = link.fd, 1, link.out, False

        @property
        def is_open(self) -> bool:
            threading.Thread(target=lambda: (carrier._release(), released.set()), daemon=True).start()
            released.wait(0.2)  # in vain while the carrier's lock is held
            return True

    with carrier._cond:
        carrier._watch(Closing())  # type: ignore[arg-type]
    assert released.wait(SOON) and carrier._epoll is None


def test_a_link_made_while_a_carrier_is_closed_is_closed_too(piped: tuple[Piped, socket.socket]) -> None:
    carrier, _ = piped
    near, other = socket.socketpair()
    link = Link(near, 1, CARRIER.max_frame)
    carrier.close()
    with pytest.raises(ClosedError, match="was closed"):
        carrier._add(link, outward=True)
    other.settimeout(SOON)
    assert not link.is_open and other.recv(1) == b""
    other.close()


def test_who_sends_the_rest_looks_again_before_it_ends(
    piped: tuple[Piped, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put while it is about to end finds it at work, and leaves the sending to it."""
    carrier, _ = piped
    unsent = [False, True, False, False]
    monkeypatch.setattr(carrier, "_has_unsent", lambda: unsent.pop(0))
    carrier._flush_all()
    assert unsent == []


def names(descriptors: list[int]) -> list[str]:
    """What they are, as the system calls it; empty for one that is closed."""
    paths = [f"/proc/self/fd/{fd}" for fd in descriptors]
    return [os.readlink(path) if os.path.lexists(path) else "" for path in paths]


@pytest.mark.process
def test_a_forked_child_begins_with_nothing_of_its_parents(piped: tuple[Piped, socket.socket]) -> None:
    """Though something there still refers to the links, and a thread of the parent was waiting."""
    carrier, other = piped
    (link,), epoll, bell = carrier._links.values(), carrier._epoll, carrier._bell
    assert epoll is not None and bell is not None
    descriptors = [link.fd, epoll.fileno(), bell.fileno()]
    held = names(descriptors)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def look() -> None:
        same = [now for now, before in zip(names(descriptors), held, strict=True) if now == before]
        alive = carrier.alive()
        try:
            carrier.recv(timeout=0.0)
        except DeadlineError:
            theirs.send((same, alive, link.sock.fileno(), epoll.closed))

    with ThreadPoolExecutor(1) as pool, ours, theirs:
        wait = pool.submit(carrier.recv, 1, 0, SOON)
        eventually(lambda: carrier._turns.is_led)
        child = fork.Process(target=look, daemon=True)
        child.start()
        assert ours.poll(SOON) and ours.recv() == ([], {0}, -1, True)
        child.join(SOON)
        child.close()
        other.sendall(framed(b"to the parent", 0))  # the child said nothing on the wire
        assert bytes(wait.result(SOON)[2]) == b"to the parent"


def test_a_frame_waits_while_no_more_files_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    end = LocalCarrier.group(2)[0]
    end.alive()
    with monkeypatch.context() as patch:
        patch.setattr("recollect.remote.carriers.local.socket.socket", full)
        sent = end.isend(1, 0, [b"x"])
    assert not sent.is_complete()
    end.close()


# -- turns


class Work:
    """Work that begins, and goes on until it is told to end; then everybody has what they want."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.is_done = threading.Event(), threading.Event(), False
        self.turns = Turns(self, lambda what: None)

    def __call__(self, timeout: float) -> None:
        self.begun.set()
        assert self.may_end.wait(SOON)
        self.is_done = True

    def wait(self, timeout: float = SOON) -> Any:
        return self.turns.wait(lambda: self.is_done or None, timeout, lambda: "work")

    def thread(self) -> threading.Thread:
        thread = threading.Thread(target=self.wait, daemon=True)
        thread.start()
        return thread


def test_who_has_no_time_at_all_still_looks_once() -> None:
    work = Work()
    work.may_end.set()
    assert work.wait(0.0) is True


def test_a_deadline_holds_while_another_leads() -> None:
    work = Work()
    leader = work.thread()
    assert work.begun.wait(SOON)
    with pytest.raises(DeadlineError, match="work: nothing within 0.01 s"):
        work.wait(0.01)
    assert not work.is_done
    work.may_end.set()
    leader.join(SOON)
    assert not leader.is_alive()


def test_who_leads_wakes_the_others() -> None:
    work = Work()
    leader = work.thread()
    assert work.begun.wait(SOON)
    other = threading.Thread(target=work.wait, args=(60.0,), daemon=True)
    other.start()
    eventually(lambda: work.turns.cond.n_waiting == 1)
    work.may_end.set()
    for thread in (leader, other):
        thread.join(SOON)
        assert not thread.is_alive()


def test_a_last_look_sees_that_waiting_is_in_vain() -> None:
    closed: list[str] = []

    def check(what: Callable[[], str]) -> None:
        if closed:
            raise ClosedError(what())

    turns = Turns(lambda timeout: closed.append("by the last poll"), check)
    with pytest.raises(ClosedError, match="a frame"):
        turns.wait(lambda: None, 0.0, lambda: "a frame")


@pytest.mark.parametrize("call", ["wait", "glance"])
def test_an_interrupt_right_after_the_lead_was_taken_leaves_it_to_others(call: str) -> None:
    class Interrupted(threading.Condition):
        is_due = True

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    work = Work()
    work.may_end.set()
    work.turns.cond = Interrupted(threading.Lock())
    with pytest.raises(KeyboardInterrupt):
        work.wait() if call == "wait" else work.turns.glance()
    assert not work.turns.is_led and not work.begun.is_set()
    assert work.wait() is True


def test_an_interrupt_of_one_who_waits_leaves_the_leader_alone() -> None:
    work = Work()
    leader = work.thread()
    assert work.begun.wait(SOON)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.turns.wait(interrupted, SOON, lambda: "work")
    assert work.turns.is_led
    work.may_end.set()
    leader.join(SOON)
    assert not leader.is_alive() and not work.turns.is_led


def test_a_glance_after_the_end_takes_no_lead() -> None:
    def closed(what: Callable[[], str]) -> None:
        raise ClosedError(what())

    work = Work()
    work.turns = Turns(work, closed)
    with pytest.raises(ClosedError, match="news of its peers"):
        work.turns.glance()
    assert not work.begun.is_set() and not work.turns.is_led


def test_work_that_raises_leaves_the_lead_to_others() -> None:
    work = Work()
    work.turns = Turns(lambda timeout: 1 / 0, lambda what: None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait(0.0)


# -- frames for peers that have not come


@pytest.fixture
def alone() -> Iterator[LocalCarrier]:
    end = LocalCarrier.group(2)[0]
    end.alive()
    yield end
    end.close()


def test_what_is_sent_behind_waiting_frames_does_not_overtake_them(
    alone: LocalCarrier, far: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = far
    with alone._cond:
        alone._turns._leader = alone  # so that nobody moves what waits
    handles = [alone.isend(1, 0, [b"first"])]
    monkeypatch.setattr(alone, "_link_to", lambda dest: link)
    handles.append(alone.isend(1, 0, [b"second"]))
    with alone._cond:
        alone._turns._leader = None
        alone._cond.notify_all()
    other.settimeout(SOON)
    want, got = framed(b"first", 0) + framed(b"second", 0), b""
    while len(got) < len(want):
        got += other.recv(1000)
    assert got == want
    eventually(lambda: all(handle.is_complete() for handle in handles))


def test_nor_does_it_once_the_peer_has_come_to_this_process() -> None:
    a, b = LocalCarrier.group(2)
    a.alive()
    with a._cond:
        a._turns._leader = a
    a.isend(1, 0, [b"first"])
    b.alive()
    a.isend(1, 0, [b"second"])
    with a._cond:
        a._turns._leader = None
        a._cond.notify_all()
    assert [bytes(b.recv(0, timeout=SOON)[2]) for _ in range(2)] == [b"first", b"second"]
    eventually(lambda: not a._absent and a._flusher is None)  # nobody looks for it any more
    a.close()
    b.close()


def test_what_waits_for_one_who_has_not_come_is_looked_after_by_who_leads() -> None:
    a, b = LocalCarrier.group(2)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(a.recv, 1, 5, 3 * SOON)
        eventually(lambda: a._turns.is_led)
        a.isend(1, 0, [b"x"])
        assert bytes(b.recv(0, timeout=SOON)[2]) == b"x"
        a.close()
        assert isinstance(wait.exception(SOON), ClosedError)
    b.close()


def test_little_is_kept_for_one_who_has_not_come(alone: LocalCarrier) -> None:
    alone.send(1, 0, [bytes(1 << 20)], 0.0)
    with pytest.raises(DeadlineError, match="send to rank 1"):
        alone.send(1, 0, [bytes(4 << 20)], 0.01)
    alone.send(1, 0, [bytes(1 << 20)], 0.0)  # what was given up takes no room


def test_what_waits_for_one_who_has_not_come_fails_when_it_never_can(alone: LocalCarrier) -> None:
    handles = [alone.isend(1, 0, [b"x"]), alone.isend(1, 0, [b"y"])]
    alone.close()
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.is_complete()


def test_what_was_given_up_is_waited_for_no_more(alone: LocalCarrier) -> None:
    with pytest.raises(DeadlineError, match="send to rank 1"):
        alone.isend(1, 0, [b"x"]).wait(0.0)
    assert alone._absent.peers() == []
    eventually(lambda: alone._flusher is None)


def assert_fail(handles: list[Any], text: str) -> None:
    """All of them end with the news that their peer is gone."""
    for handle in handles:
        with pytest.raises(PeerDiedError, match=text):
            handle.wait(SOON)


def test_what_waits_for_one_who_came_and_died_before_it_was_reached_fails(alone: LocalCarrier) -> None:
    handles = [alone.isend(1, 0, [b"x"]), alone.isend(1, 0, [b"y"])]
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(alone._addresses(0)[0])
        peer.sendall(struct.pack("<16sq", alone.group_id, 1))
    assert_fail(handles, "rank 1: is gone")
    eventually(lambda: not alone._absent and alone._flusher is None)


def test_what_waits_for_one_who_cannot_be_connected_to_fails_and_says_why(
    alone: LocalCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(dest: int) -> None:
        raise OSError(24, "too many open files")

    handle = alone.isend(1, 0, [b"x"])
    monkeypatch.setattr(alone, "_link_to", cannot)
    assert_fail([handle], r"rank 1: is gone \(.*too many open files")


def test_what_waited_fails_when_the_connection_ends_as_it_is_made(
    alone: LocalCarrier, far: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = far
    handles = [alone.isend(1, 0, [b"x"]), alone.isend(1, 0, [b"y"])]
    link.close()
    monkeypatch.setattr(alone, "_link_to", lambda dest: link)
    assert_fail(handles, "rank 1: is gone")
    eventually(lambda: not alone._absent and alone._flusher is None)


def test_what_has_no_room_at_one_who_leaves_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process no connection ends, so who leaves says so itself."""
    monkeypatch.setattr(local, "_IN_PROCESS_NBYTES", 100)
    a, b = LocalCarrier.group(2)
    b.alive()
    a.send(1, 0, [bytes(200)], SOON)
    waiting = a.isend(1, 0, [b"no room"])
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(a.send, 1, 0, [b"nor here"], SOON)
        eventually(lambda: len(b._overflow) == 2)
        b.close()
        with pytest.raises(PeerDiedError, match="rank 1: it is gone"):
            sending.result(SOON)
    with pytest.raises(PeerDiedError, match="rank 1: it is gone"):
        waiting.is_complete()
    a.close()


def test_who_looks_for_a_peer_that_is_gone_hears_of_close(alone: LocalCarrier) -> None:
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(alone.reconnect, 1, 2 * SOON)
        eventually(lambda: alone._epoll is not None)
        alone.close()
        with pytest.raises(ClosedError, match="was closed"):
            looking.result(SOON)


def test_two_threads_that_speak_to_a_peer_first_share_one_connection(
    alone: LocalCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two, what one thread sends second might arrive first."""
    there, both = LocalCarrier(alone.group_id, 1, 2), threading.Barrier(2)
    there.alive()
    monkeypatch.setattr(LocalCarrier, "_neighbour", lambda self, dest: None)  # as if in another process
    connected = alone._connected

    def slow(dest: int) -> Link | None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return connected(dest)

    monkeypatch.setattr(alone, "_connected", slow)
    monkeypatch.setattr(local, "peer_of", lambda sock: -1)
    with ThreadPoolExecutor() as pool:
        for sending in [pool.submit(alone.send, 1, 0, [b"x"], SOON) for _ in range(2)]:
            sending.result(SOON)
    assert len(alone._links) == 1
    assert [bytes(there.recv(timeout=SOON)[2]) for _ in range(2)] == [b"x", b"x"]
    there.close()


class Coming(StreamCarrier):
    """Rank 0, to which rank 1 comes when it is told so."""

    come: Link | None = None

    def _link_to(self, dest: int) -> Link | None:
        if self.come is not None and dest not in self._outward:
            self._add(self.come, outward=True)
        return self._outward.get(dest)


@pytest.mark.parametrize("when", ["first", "put", "_send_some"])
def test_a_frame_given_up_as_its_peer_comes_leaves_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its sender gives up while another thread, who leads, is about to send it, or in the middle of that."""
    near, other = socket.socketpair()
    carrier, block = Coming(0, None, 8 << 20), bytearray(8 << 20)
    monkeypatch.setattr(carrier, "_ensure_flusher", lambda: None)
    waiting, behind = carrier.isend(1, 0, [block]), carrier.isend(1, 0, [b"behind"])
    kind = Absent if when == "first" else Link
    real, done = getattr(kind, when), threading.Event()

    def give_up() -> None:
        carrier._give_up(waiting)
        done.set()

    def meanwhile(*args: Any) -> Any:
        outcome = real(*args) if when != "put" else None
        monkeypatch.setattr(kind, when, real)
        threading.Thread(target=give_up, daemon=True).start()
        done.wait(0.2)  # in vain where a lock is held
        return outcome if when != "put" else real(*args)

    monkeypatch.setattr(kind, when, meanwhile)
    carrier.come = Link(near, 1, 8 << 20)
    carrier.alive()
    assert done.wait(SOON)
    if when == "_send_some":  # it was half sent, and ends with its connection
        with pytest.raises(PeerDiedError, match="rank 1"):
            waiting.is_complete()
        assert 1 not in carrier.alive()
    else:
        with pytest.raises(DeadlineError, match="given up"):
            waiting.is_complete()
        assert behind.is_complete() and read(other, 22) == framed(b"behind", 0)
    block.clear()  # it is free again
    carrier.close()
    other.close()

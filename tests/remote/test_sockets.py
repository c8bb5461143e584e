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
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.remote.watched import Local

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import LocalCarrier
from recollect.remote.carriers import local
from recollect.remote.carriers.sockets import framed as links
from recollect.remote.carriers.sockets.carrier import StreamCarrier
from recollect.remote.carriers.sockets.framed import HEADER, MAGIC, FramedSocket, Outgoing, accepted
from recollect.remote.carriers.sockets.poll import PollLeader, Wakeup
from recollect.remote.carriers.sockets.queues import DeferredFrames, Inbox
from recollect.testing.carrier_contract import SOON, eventually

CARRIER = SimpleNamespace(max_frame=1 << 20, wait=lambda outgoing, timeout: None)


def framed(data: bytes, tag: int = 3) -> bytes:
    return HEADER.pack(MAGIC, tag, len(data)) + data


@pytest.fixture
def far() -> Iterator[tuple[FramedSocket, socket.socket]]:
    near, other = socket.socketpair()
    link = FramedSocket(near, 1, CARRIER.max_frame)
    yield link, other
    link.close()
    other.close()


def test_frames_before_what_is_none_are_whole(far: tuple[FramedSocket, socket.socket]) -> None:
    link, other = far
    other.sendall(framed(b"one") + framed(b"two", 4) + b"\xff" * 64)
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, b"one"), (4, b"two")]
    assert isinstance(link.error, FrameError)


def test_frames_before_the_end_are_whole(far: tuple[FramedSocket, socket.socket]) -> None:
    link, other = far
    data = bytes(range(256)) * 200
    other.sendall(framed(data))
    other.close()
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, data)]
    with pytest.raises(EOFError):
        link.read()


def test_frames_before_a_reset_are_whole(far: tuple[FramedSocket, socket.socket]) -> None:
    """A peer that dies while something for it lies unread resets the connection."""
    link, other = far
    data = bytes(range(256)) * 200
    link.sock.sendall(b"unread")
    other.sendall(framed(data))
    other.close()
    assert [(tag, bytes(frame)) for tag, frame in link.read()] == [(3, data)]
    with pytest.raises(EOFError):
        link.read()


def test_a_long_frame_is_given_out_with_its_last_byte(far: tuple[FramedSocket, socket.socket]) -> None:
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


def test_one_socket_is_not_read_without_end() -> None:
    link = FramedSocket(Plenty(), 1, CARRIER.max_frame)  # type: ignore[arg-type]
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
        link = FramedSocket(serving.result(SOON), 1, CARRIER.max_frame)
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
        frames = link.read()
        most = max(most, sum(frame.nbytes for _, frame in frames))
        come += [frame.nbytes for _, frame in frames]
    assert come == sizes and most < (3 << 15) + max(sizes)
    link.close()
    sender.close()


def test_an_encrypted_connection_is_entered_by_one_thread_at_a_time() -> None:
    """OpenSSL would mistake what one thread did for what another did, and say that a live peer is gone."""
    entered: list[bool] = []

    class Encrypted(Plenty, ssl.SSLSocket):
        def pending(self) -> int:
            entered.append(link.lock.locked())
            return 0

        def recv_into(self, into: memoryview) -> int:
            entered.append(link.lock.locked())
            return super().recv_into(into)

        def send(self, data: memoryview) -> int:
            entered.append(link.lock.locked())
            return data.nbytes

    link = FramedSocket(Encrypted(), 1, CARRIER.max_frame)  # type: ignore[arg-type]
    link.put(Outgoing(1, 0, [b"x"], CARRIER.max_frame, CARRIER.wait))
    link.read()
    assert len(entered) > 100 and all(entered) and not link.lock.locked()


@pytest.mark.parametrize(("is_closing", "kind"), [(True, ClosedError), (False, PeerDiedError)])
def test_what_waits_when_a_connection_ends_says_why(
    far: tuple[FramedSocket, socket.socket], is_closing: bool, kind: type[Exception]
) -> None:
    link, _ = far
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    waiting = [Outgoing(1, 0, [bytes(1 << 20)], CARRIER.max_frame, CARRIER.wait) for _ in range(2)]
    for outgoing in waiting:
        link.put(outgoing)
    assert not any(outgoing.is_complete() for outgoing in waiting)
    link.close(is_closing)
    for outgoing in waiting:
        with pytest.raises(kind, match="rank 1"):
            outgoing.is_complete()


def test_what_will_never_be_sent_borrows_nothing_any_more(far: tuple[FramedSocket, socket.socket]) -> None:
    link, _ = far
    block = bytearray(1 << 20)
    outgoing = Outgoing(1, 0, [block], CARRIER.max_frame, CARRIER.wait)
    link.put(outgoing)
    with pytest.raises(BufferError):
        block.clear()
    link.close()
    with pytest.raises(PeerDiedError):
        outgoing.is_complete()
    block.clear()


def test_a_closed_socket_takes_no_frame(far: tuple[FramedSocket, socket.socket]) -> None:
    link, _ = far
    link.close()
    with pytest.raises(PeerDiedError, match="rank 1: is gone"):
        link.put(Outgoing(1, 0, [b"x"], CARRIER.max_frame, CARRIER.wait))
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


def test_a_closed_listener_gives_no_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(accepted, listener)
        listener.shutdown(socket.SHUT_RDWR)
        assert waiting.result(SOON) is None
    listener.close()
    assert accepted(listener) is None


# -- a carrier over one socket


class Piped(StreamCarrier):
    """Rank 0, whose peers come when the test connects them."""

    def __init__(self, max_frame: int = CARRIER.max_frame, *, flushes: bool = True) -> None:
        self.flushes = flushes
        super().__init__(0, None, max_frame)

    def connect(self, sock: Any, rank: int, kind: type[FramedSocket] = FramedSocket) -> FramedSocket:
        self._ensure_open()
        link = kind(sock, rank, self.max_frame)
        self._add(link, outward=True)
        return link

    def add(self, link: FramedSocket) -> None:
        self._add(link, outward=True)

    def drop(self, link: FramedSocket) -> None:
        self._drop(link)

    def is_led(self) -> bool:
        return self._leader.is_led

    def flush(self) -> None:
        """Do the work of the thread that sends the rest, until it ends."""
        self._flush_all()

    def _link_to(self, dest: int) -> FramedSocket | None:
        return self._outward.get(dest)

    def _ensure_flusher(self) -> None:
        if self.flushes:
            super()._ensure_flusher()


@pytest.fixture
def piped() -> Iterator[tuple[Piped, FramedSocket, socket.socket]]:
    near, other = socket.socketpair()
    carrier = Piped()
    link = carrier.connect(near, 1)
    other.settimeout(SOON)
    yield carrier, link, other
    carrier.close()
    other.close()


def read(sock: socket.socket, n: int) -> bytes:
    """Read so many bytes, or all there are before the end."""
    got = b""
    while len(got) < n and (part := sock.recv(n - len(got))):
        got += part
    return got


def test_a_frame_given_up_before_it_began_never_leaves(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    carrier, _, other = piped
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


def test_a_frame_given_up_half_way_ends_the_connection(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    carrier, _, other = piped
    half = carrier.isend(1, 0, [bytes(1 << 20)])
    with pytest.raises(DeadlineError, match="send to rank 1"):
        half.wait(0.0)
    assert 1 not in carrier.alive()
    with pytest.raises(PeerDiedError):
        half.is_complete()
    assert len(read(other, 1 << 21)) < 1 << 20


@pytest.mark.parametrize("is_late", [False, True])
def test_a_frame_that_was_begun_has_a_moment_when_a_carrier_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    if is_late:  # the moment is over at every look at the clock
        monkeypatch.setattr("recollect.remote.carriers.sockets.carrier.monotonic", itertools.count().__next__)
    near, other = socket.socketpair()
    carrier = Piped(flushes=False)  # so that no thread sends the rest before
    link = carrier.connect(near, 1)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    whole = framed(bytes(range(256)) * 1024, 0)
    carrier.isend(1, 0, [bytes(range(256)) * 1024])
    left = sum(view.nbytes for view in link.out[0].views)
    got = read(other, len(whole) - left)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    carrier.close()
    assert left > 0 and got + read(other, left + 1) == whole
    other.close()


def test_a_peer_is_not_read_beyond_the_room_for_it_and_goes_on_when_there_is_some(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    carrier, link, other = piped
    frame = bytes(CARRIER.max_frame // 2)
    sender = threading.Thread(target=other.sendall, args=(framed(frame) * 9,), daemon=True)
    sender.start()
    eventually(lambda: bool(carrier.alive()) and link.is_paused)
    assert carrier.recv(1, timeout=SOON)[2].nbytes == len(frame)
    assert link.is_paused and sender.is_alive()  # more than half of the room is taken
    for _ in range(8):
        assert carrier.recv(1, timeout=SOON)[2].nbytes == len(frame)
    sender.join(SOON)
    assert not sender.is_alive() and not link.is_paused


def test_all_threads_that_wait_for_a_peer_hear_that_another_thread_dropped_it(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    carrier, _, _ = piped
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(carrier.recv, 1, 0, 3 * SOON) for _ in range(2)]
        eventually(carrier.is_led)
        carrier.refuse(1)
        for wait in waits:
            assert isinstance(wait.exception(SOON), PeerDiedError)


def test_a_wait_burns_no_time_once_all_is_sent(piped: tuple[Piped, FramedSocket, socket.socket]) -> None:
    """A poll for room that is not needed any more would return at once, again and again."""
    carrier, _, other = piped
    sent = carrier.isend(1, 0, [bytes(1 << 20)])
    read(other, len(framed(bytes(1 << 20), 0)))
    eventually(sent.is_complete)
    start = thread_time()
    with pytest.raises(DeadlineError):
        carrier.recv(1, timeout=0.3)
    assert thread_time() - start < 0.005  # a loop without pauses has more, however busy the machine is


def test_a_peer_that_takes_nothing_any_more_is_gone(
    piped: tuple[Piped, FramedSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(link: FramedSocket, outgoing: Outgoing) -> None:
        raise BrokenPipeError(32, "broken pipe")

    carrier, _, _ = piped
    monkeypatch.setattr(FramedSocket, "put", broken)
    with pytest.raises(PeerDiedError, match="rank 1: is gone"):
        carrier.send(1, 0, [b"x"], SOON)
    assert 1 not in carrier.alive()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when there is room again"])
def test_what_came_from_a_peer_that_takes_nothing_any_more_is_given_out(
    piped: tuple[Piped, FramedSocket, socket.socket], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    def broken(*args: Any) -> None:
        raise BrokenPipeError(32, "broken pipe")

    carrier, _, other = piped
    waiting = carrier.isend(1, 0, [bytes(1 << 20)]) if is_late else None
    other.sendall(framed(b"one") + framed(b"two"))
    monkeypatch.setattr(FramedSocket, "_send_some", broken)
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


def test_a_link_that_ends_leaves_a_newer_one_alone(piped: tuple[Piped, FramedSocket, socket.socket]) -> None:
    carrier, old, _ = piped
    near, other = socket.socketpair()
    carrier.connect(near, 1)
    carrier.drop(old)
    assert 1 in carrier.alive()
    carrier.send(1, 0, [b"x"], SOON)
    assert read(other, len(framed(b"x", 0))) == framed(b"x", 0)
    other.close()


def test_a_carrier_closed_before_its_first_use_opens_nothing() -> None:
    carrier = Piped()
    n_open = len(os.listdir("/proc/self/fd"))
    carrier.close()
    for use in (carrier.alive, carrier.recv, lambda: carrier.isend(1, 0, [b"x"])):
        with pytest.raises(ClosedError, match="was closed"):
            use()
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_wakeup_that_is_closed_rings_nowhere() -> None:
    """Not even in what has its number by now."""
    bell = Wakeup()
    fd = bell.fileno()
    bell.wake()
    assert select.select([bell], [], [], 0)[0]
    bell.clear()
    bell.clear()
    assert not select.select([bell], [], [], 0)[0]
    near, far = socket.socketpair()
    bell.close()
    bell.close()
    os.dup2(near.fileno(), fd)
    bell.wake()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(8)
    os.close(fd)
    near.close()
    far.close()


def test_a_peer_is_refused_while_others_come(piped: tuple[Piped, FramedSocket, socket.socket]) -> None:
    """A look through the connections is not disturbed by a new one."""
    carrier, _, _ = piped
    begun, is_there = threading.Event(), threading.Event()
    near, other = socket.socketpair()

    class Seen(FramedSocket):
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
        carrier.connect(near, 2)
        is_there.set()

    pairs = [socket.socketpair() for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        for mine, _ in pairs:
            pool.submit(carrier.connect, mine, 7, Seen).result(SOON)
        coming = pool.submit(come)
        carrier.refuse(3)
        coming.result(SOON)
    assert {1, 2, 7} <= carrier.alive()
    for sock in (other, *(theirs for _, theirs in pairs)):
        sock.close()


def test_threads_that_send_while_a_carrier_is_closed_hear_nothing_but_that() -> None:
    for _ in range(20):
        near, other = socket.socketpair()
        carrier = Piped()
        carrier.connect(near, 1)
        begun = threading.Barrier(3)

        def send(carrier: Piped = carrier, begun: threading.Barrier = begun) -> None:
            begun.wait(SOON)
            with suppress(ClosedError, PeerDiedError):
                while True:
                    carrier.isend(1, 0, [bytes(1 << 16)])

        with ThreadPoolExecutor(2) as pool:
            sending = [pool.submit(send) for _ in range(2)]
            begun.wait(SOON)
            carrier.close()
            for one in sending:
                one.result(SOON)
        other.close()


def test_a_link_made_while_a_carrier_is_closed_is_closed_too(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    carrier, _, _ = piped
    near, other = socket.socketpair()
    begun = FramedSocket(near, 1, CARRIER.max_frame)
    carrier.close()
    with pytest.raises(ClosedError, match="was closed"):
        carrier.add(begun)
    other.settimeout(SOON)
    assert not begun.is_open and other.recv(1) == b""
    other.close()


def test_each_isend_completes_by_itself_however_often_the_thread_that_sends_the_rest_ends(
    piped: tuple[Piped, FramedSocket, socket.socket],
) -> None:
    """A frame that is put while that thread is about to end is sent too."""
    carrier, _, other = piped
    one = framed(bytes(1 << 19), 0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            sent = carrier.isend(1, 0, [bytes(1 << 19)])
            got = pool.submit(read, other, len(one))
            assert got.result(SOON) == one
            eventually(sent.is_complete)


def test_the_thread_that_sends_the_rest_looks_again_before_it_ends() -> None:
    """What is put while it is about to end finds it at work, and leaves the sending to it."""

    class Late(Piped):
        looks = 0

        def _has_unsent(self) -> bool:
            self.looks += 1
            return self.looks == 2 or super()._has_unsent()  # something came after the first look

    near, other = socket.socketpair()
    carrier = Late()
    carrier.connect(near, 1)
    carrier.flush()
    assert carrier.looks == 4
    carrier.close()
    other.close()


def names(descriptors: list[int]) -> list[str]:
    """What they are, as the system calls it; empty for one that is closed."""
    paths = [f"/proc/self/fd/{fd}" for fd in descriptors]
    return [os.readlink(path) if os.path.lexists(path) else "" for path in paths]


@pytest.mark.process
def test_a_forked_child_begins_with_nothing_of_its_parents() -> None:
    """Though something there still refers to the links, and a thread of the parent was waiting."""
    before = set(os.listdir("/proc/self/fd"))
    near, other = socket.socketpair()
    carrier = Piped()
    link = carrier.connect(near, 1)
    descriptors = [int(fd) for fd in {*os.listdir("/proc/self/fd")} - before if int(fd) != other.fileno()]
    held = names(descriptors)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def look() -> None:
        same = [now for now, then in zip(names(descriptors), held, strict=True) if now == then and now]
        alive = carrier.alive()
        try:
            carrier.recv(timeout=0.0)
        except DeadlineError:
            theirs.send((same, alive, link.sock.fileno()))

    with ThreadPoolExecutor(1) as pool, ours, theirs:
        wait = pool.submit(carrier.recv, 1, 0, SOON)
        eventually(carrier.is_led)
        child = fork.Process(target=look, daemon=True)
        child.start()
        assert ours.poll(SOON) and ours.recv() == ([], {0}, -1)
        child.join(SOON)
        child.close()
        other.sendall(framed(b"to the parent", 0))  # the child said nothing on the wire
        assert bytes(wait.result(SOON)[2]) == b"to the parent"
    carrier.close()
    other.close()


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
    """Work that begins, and goes on until it is told to end; then all waits are over."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.is_done = threading.Event(), threading.Event(), False
        self.turns = PollLeader(self, lambda what: None)

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


def test_a_wait_of_no_time_still_polls_once() -> None:
    work = Work()
    work.may_end.set()
    assert work.wait(0.0) is True


def test_a_deadline_holds_while_another_thread_leads() -> None:
    work = Work()
    leader = work.thread()
    assert work.begun.wait(SOON)
    with pytest.raises(DeadlineError, match="work: nothing within 0.01 s"):
        work.wait(0.01)
    assert not work.is_done
    work.may_end.set()
    leader.join(SOON)
    assert not leader.is_alive()


def test_the_leading_thread_wakes_the_others() -> None:
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

    turns = PollLeader(lambda timeout: closed.append("by the last poll"), check)
    with pytest.raises(ClosedError, match="a frame"):
        turns.wait(lambda: None, 0.0, lambda: "a frame")


@pytest.mark.parametrize("call", ["wait", "poll_now"])
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
        work.wait() if call == "wait" else work.turns.poll_now()
    assert not work.turns.is_led and not work.begun.is_set()
    assert work.wait() is True


def test_an_interrupt_of_a_waiting_thread_leaves_the_leading_one_alone() -> None:
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
    work.turns = PollLeader(work, closed)
    with pytest.raises(ClosedError, match="news of its peers"):
        work.turns.poll_now()
    assert not work.begun.is_set() and not work.turns.is_led


def test_work_that_raises_leaves_the_lead_to_others() -> None:
    work = Work()
    work.turns = PollLeader(lambda timeout: 1 / 0, lambda what: None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait(0.0)


# -- frames for peers that have not come


@pytest.fixture
def alone() -> Iterator[Local]:
    end = Local.group(2)[0]
    end.alive()
    yield end
    end.close()


class Coming(Piped):
    """Rank 0, to which rank 1 comes when it is told so."""

    come: FramedSocket | None = None
    error: Exception | None = None

    def _link_to(self, dest: int) -> FramedSocket | None:
        if self.error is not None:
            raise self.error
        if self.come is not None and dest not in self._outward:
            self._add(self.come, outward=True)
        return self._outward.get(dest)


def test_a_frame_sent_behind_waiting_ones_does_not_overtake_them(
    far: tuple[FramedSocket, socket.socket],
) -> None:
    link, other = far
    carrier = Coming(flushes=False)  # so that no thread moves what waits
    handles = [carrier.isend(1, 0, [b"first"])]
    carrier.come = link
    handles.append(carrier.isend(1, 0, [b"second"]))
    carrier.alive()
    other.settimeout(SOON)
    want = framed(b"first", 0) + framed(b"second", 0)
    assert read(other, len(want)) == want
    eventually(lambda: all(handle.is_complete() for handle in handles))
    carrier.close()


def test_frames_stay_in_order_when_the_peer_comes_to_this_process() -> None:
    a, b = Local.group(2)
    for i in range(50):
        a.isend(1, 0, [b"%d" % i])
        if i == 20:
            b.alive()
    assert [bytes(b.recv(0, timeout=SOON)[2]) for _ in range(50)] == [b"%d" % i for i in range(50)]
    eventually(a.is_idle)  # no thread looks for it any more
    a.close()
    b.close()


def test_a_frame_for_a_peer_that_has_not_come_is_sent_by_a_thread_that_receives() -> None:
    a, b = Local.group(2)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(a.recv, 1, 5, 3 * SOON)
        eventually(a.is_led)
        a.isend(1, 0, [b"x"])
        assert bytes(b.recv(0, timeout=SOON)[2]) == b"x"
        a.close()
        assert isinstance(wait.exception(SOON), ClosedError)
    b.close()


def test_few_bytes_are_kept_for_a_peer_that_has_not_come(alone: Local) -> None:
    alone.send(1, 0, [bytes(1 << 20)], 0.0)
    with pytest.raises(DeadlineError, match="send to rank 1"):
        alone.send(1, 0, [bytes(4 << 20)], 0.01)
    alone.send(1, 0, [bytes(1 << 20)], 0.0)  # what was given up takes no room


def test_frames_for_a_peer_that_has_not_come_fail_when_the_carrier_closes(alone: Local) -> None:
    handles = [alone.isend(1, 0, [b"x"]), alone.isend(1, 0, [b"y"])]
    alone.close()
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.is_complete()


def test_a_frame_that_was_given_up_is_not_tried_any_more(alone: Local) -> None:
    with pytest.raises(DeadlineError, match="send to rank 1"):
        alone.isend(1, 0, [b"x"]).wait(0.0)
    eventually(alone.is_idle)


def assert_fail(handles: list[Any], text: str) -> None:
    """All of them end with the news that their peer is gone."""
    for handle in handles:
        with pytest.raises(PeerDiedError, match=text):
            handle.wait(SOON)


def test_frames_for_a_peer_that_came_and_died_fail(alone: Local) -> None:
    handles = [alone.isend(1, 0, [b"x"]), alone.isend(1, 0, [b"y"])]
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(alone.addresses()[0])
        peer.sendall(struct.pack("<16sq", alone.group_id, 1))
    assert_fail(handles, "rank 1: is gone")
    eventually(alone.is_idle)


def test_a_frame_for_a_peer_that_cannot_be_connected_to_fails_and_says_why() -> None:
    carrier = Coming()
    handle = carrier.isend(1, 0, [b"x"])
    carrier.error = OSError(24, "too many open files")
    assert_fail([handle], r"rank 1: is gone \(.*too many open files")
    carrier.close()


def test_frames_that_waited_fail_when_the_connection_ends_as_it_is_made(
    far: tuple[FramedSocket, socket.socket],
) -> None:
    carrier, (link, other) = Coming(), far
    handles = [carrier.isend(1, 0, [b"x"]), carrier.isend(1, 0, [b"y"])]
    other.close()
    link.sever()
    carrier.come = link
    assert_fail(handles, "rank 1: ")
    carrier.close()


def test_frames_without_room_at_a_peer_that_closes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process no connection ends, so an end that closes says so itself."""
    monkeypatch.setattr(local, "_IN_PROCESS_NBYTES", 100)
    a, b = Local.group(2)
    b.alive()
    a.send(1, 0, [bytes(200)], SOON)
    waiting = a.isend(1, 0, [b"no room"])
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(a.send, 1, 0, [b"nor here"], SOON)
        eventually(lambda: b.n_overflow() == 2)
        b.close()
        with pytest.raises(PeerDiedError, match="rank 1: it is gone"):
            sending.result(SOON)
    with pytest.raises(PeerDiedError, match="rank 1: it is gone"):
        waiting.is_complete()
    a.close()


def test_close_ends_a_reconnect_that_waits(alone: Local) -> None:
    with ThreadPoolExecutor() as pool:
        looking = pool.submit(alone.reconnect, 1, 2 * SOON)
        eventually(lambda: not looking.done() and alone.alive() == {0})
        alone.close()
        with pytest.raises(ClosedError, match="was closed"):
            looking.result(SOON)


def two_threads_send(there: Any, group: bytes) -> None:
    """In another process: two threads speak to a peer for the first time at once."""
    carrier, both = LocalCarrier(group, 0, 2), threading.Barrier(2)

    def send() -> None:
        both.wait(SOON)
        carrier.send(1, 0, [b"x"], SOON)

    before = n_sockets()
    carrier.alive()
    opened = n_sockets()
    with ThreadPoolExecutor(2) as pool:
        for sending in [pool.submit(send) for _ in range(2)]:
            sending.result(SOON)
    there.send(n_sockets() - opened)
    there.recv()
    assert opened - before == 1  # it listens
    carrier.close()


def n_sockets() -> int:
    return sum(name.startswith("socket:") for name in names([int(fd) for fd in os.listdir("/proc/self/fd")]))


@pytest.mark.process
def test_two_threads_that_send_to_a_peer_first_share_one_connection() -> None:
    """By two, what one thread sends second might arrive first."""
    fork = multiprocessing.get_context("fork")
    there = LocalCarrier.group(2)[1]
    there.alive()
    ours, theirs = fork.Pipe()
    child = fork.Process(target=two_threads_send, args=(theirs, there.group_id), daemon=True)
    child.start()
    assert [bytes(there.recv(timeout=SOON)[2]) for _ in range(2)] == [b"x", b"x"]
    assert ours.poll(SOON) and ours.recv() == 1
    ours.send("end")
    child.join(SOON)
    assert child.exitcode == 0
    child.close()
    for one in (ours, theirs, there):
        one.close()


@pytest.mark.parametrize("when", ["first", "put", "_send_some"])
def test_a_frame_given_up_as_its_peer_comes_leaves_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its sender gives up while the leading thread is about to send it, or in the middle of that."""
    near, other = socket.socketpair()
    carrier, block = Coming(8 << 20, flushes=False), bytearray(8 << 20)
    waiting, behind = carrier.isend(1, 0, [block]), carrier.isend(1, 0, [b"behind"])
    kind = DeferredFrames if when == "first" else FramedSocket
    real, done = getattr(kind, when), threading.Event()

    def give_up() -> None:
        with suppress(DeadlineError, PeerDiedError):
            waiting.wait(0.0)
        done.set()

    def meanwhile(*args: Any) -> Any:
        outcome = real(*args) if when != "put" else None
        monkeypatch.setattr(kind, when, real)
        threading.Thread(target=give_up, daemon=True).start()
        done.wait(0.2)  # in vain where a lock is held
        return outcome if when != "put" else real(*args)

    monkeypatch.setattr(kind, when, meanwhile)
    carrier.come = FramedSocket(near, 1, 8 << 20)
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

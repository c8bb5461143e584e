"""TcpCarrier: the contract, tokens, strangers, rubbish, and connections that break."""

from __future__ import annotations

import errno
import hmac
import multiprocessing
import os
import pickle
import random
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
import pytest

from recollect.errors import AuthError, ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import RemoteReplay, ReplayBufferManager, TcpCarrier
from recollect.remote import config as records
from recollect.remote.carriers import tcp
from recollect.remote.carriers.sockets import carrier as stream
from recollect.remote.carriers.sockets.framed import HEADER, MAGIC, accepted, exactly
from recollect.remote.frame import encode
from recollect.remote.messages import Sample
from recollect.testing import CarrierContract
from recollect.testing.carrier_contract import SOON, eventually

TOKEN = b"sixteen bytes or more"


class TestTcp(CarrierContract):
    def make(self, n: int) -> list[Any]:
        """The last serves; the others join it, and it is the one that is spoken to."""
        server = TcpCarrier.serve(n - 1, max_frame=2 << 20)
        joined = [
            TcpCarrier.join([server.address], token=server.token, rank=i, max_frame=2 << 20)
            for i in range(n - 1)
        ]
        return [*joined, server]


@pytest.fixture
def server() -> Iterator[TcpCarrier]:
    carrier = TcpCarrier.serve(0, token=TOKEN)
    yield carrier
    carrier.close()


HELLO, ANSWER = struct.Struct("<4sHH32s16sq"), struct.Struct("<IqqQ32s")


def hello(magic: bytes = b"RCTC", version: int = 1, nonce: bytes = bytes(32), rank: int = 5) -> bytes:
    return HELLO.pack(magic, version, 0, nonce, os.urandom(16), rank)


def place(server: TcpCarrier) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def half_joined(server: TcpCarrier, rank: int) -> tuple[socket.socket, bytes, bytes]:
    """A socket that has said hello, the proof that it is to send, and the one that the server is to send."""
    sock = socket.create_connection(place(server), SOON)
    mine = os.urandom(32)
    sock.sendall(hello(nonce=mine, rank=rank))
    theirs = exactly(sock, 32, monotonic() + SOON)
    sides = (
        hmac.digest(TOKEN, b"recollect " + side + mine + theirs, "sha256") for side in (b"join", b"serve")
    )
    return (sock, *sides)


def raw_peer(server: TcpCarrier, rank: int) -> socket.socket:
    """A peer that has joined, and can send what no carrier would."""
    sock, proof, _ = half_joined(server, rank)
    sock.sendall(proof)
    status, given, *_ = ANSWER.unpack(exactly(sock, ANSWER.size, monotonic() + SOON))
    assert (status, given) == (0, rank)
    sock.settimeout(SOON)
    return sock


def greeting() -> list[threading.Thread]:
    """The threads that listen to strangers."""
    return [thread for thread in threading.enumerate() if thread.name == "recollect-greet"]


def descriptors() -> list[tuple[int, str]]:
    """The open descriptors of this process, and what they are."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            found.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


def sockets() -> set[str]:
    return {name for _, name in descriptors() if name.startswith("socket:")}


def test_a_wrong_token_is_refused(server: TcpCarrier) -> None:
    with pytest.raises(AuthError, match=f"^{server.address}: the token does not match"):
        TcpCarrier.join([server.address], token=b"not the same token at all", timeout=SOON)
    eventually(lambda: server.refused == 1)
    assert server.alive() == {0}


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, server: TcpCarrier) -> None:
    with pytest.raises(AuthError, match="RECOLLECT_TOKEN"):
        TcpCarrier.join([server.address])
    monkeypatch.setenv("RECOLLECT_TOKEN", TOKEN.decode())
    TcpCarrier.join([server.address]).close()
    with pytest.raises(ValueError, match="16 bytes"):
        TcpCarrier.serve(0, token="short")


def test_the_token_never_shows_and_never_travels() -> None:
    """Listen in on a whole handshake: neither the token nor its bytes in the repr are there."""
    server = TcpCarrier.serve(0, token=TOKEN)
    proxy = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def relay() -> None:
        inner, _ = proxy.accept()
        outer = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))

        def pump(a: socket.socket, b: socket.socket) -> None:
            while data := a.recv(4096):
                seen.extend(data)
                b.sendall(data)

        back = threading.Thread(target=pump, args=(outer, inner), daemon=True)
        back.start()
        pump(inner, outer)
        outer.shutdown(socket.SHUT_RDWR)
        back.join(SOON)
        inner.close()
        outer.close()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    worker = TcpCarrier.join([f"127.0.0.1:{proxy.getsockname()[1]}"], token=TOKEN)
    worker.send(0, 0, [b"hello"], SOON)
    assert bytes(server.recv(timeout=SOON)[2]) == b"hello"
    worker.close()
    thread.join(SOON)
    proxy.close()
    server.close()
    assert b"hello" in seen and TOKEN not in seen
    assert TOKEN.decode() not in repr(server) and "token" not in repr(worker)


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    """An impostor that says yes to any proof cannot give its own."""
    fake = socket.create_server(("127.0.0.1", 0))

    def say_yes() -> None:
        sock, _ = fake.accept()
        sock.recv(4096)
        sock.sendall(bytes(32))
        sock.recv(4096)
        sock.sendall(struct.pack("<IqqQ32s", 0, 5, 0, 1 << 20, bytes(32)))
        sock.close()

    thread = threading.Thread(target=say_yes, daemon=True)
    thread.start()
    with pytest.raises(AuthError, match="does not know the token"):
        TcpCarrier.join([f"127.0.0.1:{fake.getsockname()[1]}"], token=TOKEN, timeout=SOON)
    thread.join(SOON)
    fake.close()


def test_ranks_are_given_or_asked_for_and_never_shared(server: TcpCarrier) -> None:
    a = TcpCarrier.join([server.address], token=TOKEN)
    b = TcpCarrier.join([server.address], token=TOKEN, rank=7)
    c = TcpCarrier.join([server.address], token=TOKEN)
    assert len({0, a.rank, b.rank, c.rank}) == 4 and b.rank == 7
    with pytest.raises(AuthError, match="live peer"):
        TcpCarrier.join([server.address], token=TOKEN, rank=7, timeout=SOON)
    with pytest.raises(AuthError, match="live peer"):
        TcpCarrier.join([server.address], token=TOKEN, rank=0, timeout=SOON)
    b.close()
    eventually(lambda: 7 not in server.alive())
    again = TcpCarrier.join([server.address], token=TOKEN, rank=7)
    for carrier in (a, c, again):
        carrier.close()


def test_a_peer_that_is_gone_before_its_answer_has_not_joined(server: TcpCarrier) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        sock, proof, _ = half_joined(server, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(proof)
        sock.close()  # by a reset
    eventually(lambda: server.alive() == {0} and len(os.listdir("/proc/self/fd")) == n_open)


def test_of_two_that_ask_for_one_rank_at_once_one_is_refused() -> None:
    both = threading.Barrier(2)

    class Slow(TcpCarrier):
        def _given(self, asked: int, session: bytes) -> tuple[int, int]:
            found = super()._given(asked, session)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # for the other one, in vain
            return found

    def join() -> TcpCarrier | None:
        with suppress(AuthError):
            return TcpCarrier.join([server.address], token=TOKEN, rank=5)
        return None

    with Slow.serve(0, token=TOKEN) as server:
        with ThreadPoolExecutor() as pool:
            found = [joining.result(SOON) for joining in [pool.submit(join) for _ in range(2)]]
        (one,) = [carrier for carrier in found if carrier is not None]
        one.send(0, 0, [b"hello"], SOON)
        assert server.recv(5, timeout=SOON)[0] == 5
        one.close()


@pytest.mark.parametrize("rank", [None, 5])
def test_of_several_that_join_at_once_no_two_have_one_rank(server: TcpCarrier, rank: int | None) -> None:
    both = threading.Barrier(8)

    def join() -> TcpCarrier | None:
        both.wait(SOON)
        with suppress(AuthError):
            return TcpCarrier.join([server.address], token=TOKEN, rank=rank)
        return None

    with ThreadPoolExecutor(8) as pool:
        found = [joining.result(SOON) for joining in [pool.submit(join) for _ in range(8)]]
    joined = [carrier for carrier in found if carrier is not None]
    assert len({carrier.rank for carrier in joined}) == len(joined) == (1 if rank else 8)
    for carrier in joined:
        carrier.send(0, 0, [b"hello"], SOON)
        assert server.recv(carrier.rank, timeout=SOON)[0] == carrier.rank
        carrier.close()


def test_the_rank_of_a_peer_that_left_is_free_at_once(server: TcpCarrier) -> None:
    for _ in range(3):
        TcpCarrier.join([server.address], token=TOKEN, rank=1).close()


def test_a_peer_that_has_joined_is_known_at_once(server: TcpCarrier) -> None:
    """The serving end takes the connection before the other hears that it joined."""
    for rank in range(1, 30):
        with TcpCarrier.join([server.address], token=TOKEN, rank=rank):
            assert rank in server.alive()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_silent_strangers_make_room_and_delay_no_join(
    monkeypatch: pytest.MonkeyPatch, contexts: tuple[ssl.SSLContext, ssl.SSLContext], is_encrypted: bool
) -> None:
    """The oldest silent one goes when another comes, though its time is not up; one that has spoken stays."""
    monkeypatch.setattr(tcp, "PROOF_S", 60.0)
    theirs, mine = contexts if is_encrypted else (None, None)
    server = TcpCarrier.serve(0, token=TOKEN, ssl_context=theirs)
    host, port = server.address.split(":")

    def stranger() -> socket.socket:
        n = len(greeting())
        sock = socket.create_connection((host, int(port)), timeout=SOON)
        eventually(lambda: len(greeting()) == min(n + 1, tcp.MOST_STRANGERS))
        return sock

    spoke = stranger()
    if mine is not None:
        spoke = mine.wrap_socket(spoke, server_hostname=host)
    spoke.sendall(hello())
    assert len(spoke.recv(32)) == 32
    silent = [stranger() for _ in range(tcp.MOST_STRANGERS - 1)]
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1, ssl_context=mine, timeout=SOON)
    assert silent[0].recv(1) == b"" and server.alive() == {0, 1}
    eventually(lambda: server.refused == 1)
    for sock in silent[1:]:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    spoke.sendall(bytes(32))
    assert len(spoke.recv(4)) == 4  # it hears that its token is wrong
    worker.close()
    server.close()
    for sock in (*silent, spoke):
        sock.close()


def test_a_peer_that_lost_its_connection_is_let_in_before_the_loss_is_seen(server: TcpCarrier) -> None:
    """Its rank is that of a live peer: itself."""
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    n_open = len(os.listdir("/proc/self/fd"))
    worker.link([server.address], SOON)
    worker.send(0, 0, [b"again"], SOON)
    assert bytes(server.recv(timeout=SOON)[2]) == b"again"
    eventually(lambda: len(os.listdir("/proc/self/fd")) == n_open)  # in place of the old connection
    worker.close()


def test_strangers_are_heard_no_longer_than_a_carrier_is_open(server: TcpCarrier) -> None:
    with socket.create_connection(place(server), SOON) as stranger:
        eventually(greeting)
        server.close()
        assert greeting() == []
        assert stranger.recv(1) == b""


def test_a_forked_child_holds_no_listener_and_no_stranger_of_its_parent() -> None:
    """It would keep the port, and that connection, after its parent's end."""
    before = sockets()
    with (
        TcpCarrier.serve(0, token=TOKEN) as server,
        socket.create_connection(place(server), SOON) as stranger,
    ):
        eventually(greeting)
        held = sockets() - before - {os.readlink(f"/proc/self/fd/{stranger.fileno()}")}
        assert len(held) == 2

        def be_child() -> None:
            with suppress(ClosedError):
                server.alive()
                os._exit(3)
            os._exit(len(sockets() & held))

        child = multiprocessing.get_context("fork").Process(target=be_child)
        child.start()
        child.join(SOON)
        assert child.exitcode == 0 and server.alive() == {0}
        child.close()


def test_strangers_are_heard_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PROOF_S", 0.2)
    server = TcpCarrier.serve(0, token=TOKEN)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=SOON) as silent:
        assert silent.recv(1) == b""  # its time is up
    eventually(lambda: server.refused == 1)
    monkeypatch.setattr(tcp, "PROOF_S", SOON)
    noise = socket.create_connection((host, int(port)))
    noise.sendall(os.urandom(64))
    noise.settimeout(SOON)
    assert noise.recv(100) in (b"",)
    noise.close()
    server.close()


def test_bytes_that_are_no_frames_close_that_connection_alone(server: TcpCarrier) -> None:
    rogue = raw_peer(server, 1)
    with TcpCarrier.join([server.address], token=TOKEN, rank=2) as good:
        rogue.sendall(b"\xff" * 100)
        eventually(lambda: 1 not in server.alive() and server.malformed == {1: 1})
        good.send(0, 0, [b"fine"], SOON)
        assert bytes(server.recv(timeout=SOON)[2]) == b"fine"
    with suppress(ConnectionResetError):
        assert rogue.recv(1) == b""
    rogue.close()
    with TcpCarrier.join([server.address], token=TOKEN, rank=1) as again:
        again.send(0, 0, [b"back"], SOON)
        assert server.recv(timeout=SOON)[0] == 1


def test_a_frame_that_promises_too_much_takes_no_memory(server: TcpCarrier) -> None:
    with raw_peer(server, 1) as rogue:
        rogue.sendall(struct.pack("<IIQ", 0x4D525453, 0, 1 << 60))
        eventually(lambda: server.alive() == {0})
    assert server.malformed == {1: 1}


def test_a_peer_that_is_shut_out_stays_out(server: TcpCarrier) -> None:
    a = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    server.refuse(1, for_ever=True)
    with pytest.raises(PeerDiedError):
        a.recv(0, timeout=SOON)
    with pytest.raises((AuthError, PeerDiedError), match="shut out"):
        a.reconnect(0, SOON)
    a.close()


def test_back_pressure_ends_in_a_deadline(server: TcpCarrier) -> None:
    a = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    start = monotonic()
    with pytest.raises(DeadlineError, match="send to rank 0"):
        for _ in range(100):
            a.send(0, 0, [bytes(4 << 20)], 0.3)
    assert monotonic() - start < 8.0
    a.close()


def test_joining_an_address_where_nothing_listens_is_a_deadline_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DeadlineError, match=rf"^127\.0\.0\.1:{port}: no answer within 0\.3 s"):
        TcpCarrier.join([f"127.0.0.1:{port}"], token=TOKEN, timeout=0.3)


def test_a_silent_listener_is_waited_for_as_long_as_told(server: TcpCarrier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = monotonic()
        with pytest.raises(DeadlineError, match=f"{address}: no answer"):
            TcpCarrier.join([address], token=TOKEN, timeout=0.1)
        with TcpCarrier.join([server.address], token=TOKEN) as worker:
            worker.link_others({5: address}, 0.1)  # it may have ended
            assert worker.alive() == {0, worker.rank}
        assert monotonic() - start < 4.0


@pytest.mark.parametrize("how", ["silent", "byte by byte", "its nonce, then byte by byte"])
def test_a_joining_end_gives_the_other_side_no_more_than_its_time(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(tcp, "PROOF_S", 0.1)
    accepts, is_over = [], threading.Event()

    def serve(listener: socket.socket) -> None:
        while (sock := accepted(listener)) is not None:
            accepts.append(sock)
            with suppress(OSError):
                if "nonce" in how:
                    sock.sendall(bytes(32))
                while how != "silent" and not is_over.wait(0.02):
                    sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, listener)
        with pytest.raises(DeadlineError, match="no answer within 0.4 s"):
            TcpCarrier.join([f"127.0.0.1:{listener.getsockname()[1]}"], token=TOKEN, timeout=0.4)
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        serving.result(SOON)
    assert len(accepts) >= 2 or how != "silent"  # it is looked for again as long as told
    for sock in accepts:
        sock.close()


def test_tries_to_connect_have_pauses(server: TcpCarrier, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    def refused(address: Any, timeout: float) -> Any:
        tries.append(address)
        raise ConnectionRefusedError("no process there")

    worker = TcpCarrier.join([server.address], token=TOKEN)
    server.refuse(worker.rank)
    eventually(lambda: 0 not in worker.alive())
    monkeypatch.setattr("socket.create_connection", refused)
    with pytest.raises(PeerDiedError, match="no process there"):
        worker.reconnect(0, 0.1)
    with pytest.raises(DeadlineError, match="no process there"):
        worker.link([server.address], 0.1)
    assert 2 <= len(tries) < 20
    worker.close()


def test_a_host_that_cannot_be_found_is_looked_for_as_long_as_told(
    server: TcpCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(*args: Any, **kw: Any) -> Any:
        raise socket.gaierror("name or service not known")

    worker = TcpCarrier.join([server.address], token=TOKEN)
    server.refuse(worker.rank)
    eventually(lambda: 0 not in worker.alive())
    monkeypatch.setattr("socket.create_connection", not_found)
    with pytest.raises(DeadlineError, match="not known"):
        TcpCarrier.join(["somewhere:7077"], token=TOKEN, timeout=0.1)
    with pytest.raises(PeerDiedError, match="not known"):
        worker.reconnect(0, 0.1)
    monkeypatch.undo()
    worker.reconnect(0, SOON)
    worker.close()


def test_a_machine_that_is_away_is_looked_for_as_long_as_told(
    server: TcpCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = TcpCarrier.join([server.address], token=TOKEN)
    server.close()
    eventually(lambda: 0 not in worker.alive())

    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EHOSTUNREACH, "no route to host")

    monkeypatch.setattr(tcp.socket, "create_connection", nowhere)
    with pytest.raises(DeadlineError, match="no route to host"):
        TcpCarrier.join(["10.1.2.3:4"], token=TOKEN, timeout=0.05)
    with pytest.raises(PeerDiedError, match="no route to host"):
        worker.reconnect(0, 0.05)
    worker.link_others({7: "10.1.2.3:4"})
    worker.close()


@pytest.mark.parametrize("n_read", [0, 1, 600], ids=["at once", "in its greeting", "after it"])
def test_a_server_that_vanishes_in_a_tls_handshake_is_tried_again(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], n_read: int
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def vanish() -> None:
        while (sock := accepted(listener)) is not None:
            if n_read > 1:
                with suppress(OSError):
                    sock = contexts[0].wrap_socket(sock, server_side=True)
            if n_read:
                sock.recv(n_read)
            sock.close()

    thread = threading.Thread(target=vanish, daemon=True)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        with pytest.raises(DeadlineError, match="no answer"):
            TcpCarrier.join([address], token=TOKEN, ssl_context=contexts[1], timeout=0.2)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SOON)
        listener.close()


def test_a_carrier_that_could_not_join_keeps_nothing_open(server: TcpCarrier) -> None:
    n = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(AuthError):
            TcpCarrier.join([server.address], token=b"x" * 16)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= n)


def test_a_peer_that_joins_several_has_one_rank_with_all(server: TcpCarrier) -> None:
    with TcpCarrier.serve(9, token=TOKEN) as other, TcpCarrier.join([server.address], token=TOKEN) as first:
        worker = TcpCarrier.join([server.address, other.address], token=TOKEN)
        assert worker.alive() == {0, 9, worker.rank} and worker.rank != first.rank
        for end in (server, other):
            worker.send(end.rank, 0, [b"hello"], SOON)
            assert end.recv(timeout=SOON)[0] == worker.rank
        worker.close()


def test_others_are_linked_once_and_remembered_for_later(server: TcpCarrier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with TcpCarrier.join([server.address], token=TOKEN) as worker:
        before = sockets()
        worker.link_others({0: server.address, 5: address}, 0.1)
        worker.reconnect(0, SOON)  # it is connected
        assert sockets() == before
        with TcpCarrier.serve(5, address, token=TOKEN) as later:
            worker.reconnect(5, SOON)
            worker.send(5, 0, [b"hello"])
            assert bytes(later.recv(timeout=SOON)[2]) == b"hello"


@pytest.mark.parametrize("rank", [-1, True, 2**31])
def test_ranks_are_numbers_that_may_be(server: TcpCarrier, rank: Any) -> None:
    with pytest.raises(ValueError, match="rank"):
        TcpCarrier.serve(rank)
    with pytest.raises(ValueError, match="rank"):
        TcpCarrier.join([server.address], token=TOKEN, rank=rank)


@pytest.mark.parametrize("address", ["here", "host:", "host:99999", "127.0.0.1:x"])
def test_addresses_have_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        TcpCarrier.join([address], token=TOKEN, timeout=0.1)


@pytest.mark.parametrize("addresses", [[], (), "127.0.0.1:7077"])
def test_join_needs_a_list_of_addresses(addresses: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of 'host:port'"):
        TcpCarrier.join(addresses, token=TOKEN, timeout=0.1)


def test_frames_may_be_encrypted(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    server = TcpCarrier.serve(0, token=TOKEN, ssl_context=contexts[0])
    a = TcpCarrier.join([server.address], token=TOKEN, rank=1, ssl_context=contexts[1])
    block = os.urandom(3 << 20)
    a.isend(0, 4, [block, b"end"])
    assert bytes(server.recv(1, 4, SOON)[2]) == block + b"end"
    server.send(1, 0, [b"answer"], SOON)
    assert bytes(a.recv(0, timeout=SOON)[2]) == b"answer"
    with pytest.raises((DeadlineError, AuthError, OSError)):
        TcpCarrier.join([server.address], token=TOKEN, rank=2, timeout=0.3)  # in the clear
    with pytest.raises((DeadlineError, OSError)):  # a certificate that this client does not know
        strict = ssl.create_default_context()
        TcpCarrier.join([server.address], token=TOKEN, rank=2, ssl_context=strict, timeout=0.3)
    with pytest.raises(ssl.SSLCertVerificationError):  # it is for 127.0.0.1, by no other name
        other = server.address.replace("127.0.0.1", "localhost")
        TcpCarrier.join([other], token=TOKEN, rank=2, ssl_context=contexts[1], timeout=SOON)
    assert server.alive() == {0, 1}
    a.close()
    server.close()


@pytest.mark.parametrize("n_peers", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_thousands_of_wrong_frames_cost_a_manager_nothing(n_peers: int) -> None:
    """A peer that knows the token sends random, cut and oversized frames, and comes back under new ranks."""
    server = TcpCarrier.serve(0, token=TOKEN, max_frame=1 << 16)
    env = {"id": ((), "int64")}
    made = ReplayBufferManager(env, 0, None, communication_backend=server).start()
    good = TcpCarrier.join([server.address], token=TOKEN, rank=1, max_frame=1 << 16)
    rng = random.Random(0)
    data = b"".join(encode(Sample(1, 1, "uniform", True)))
    with RemoteReplay(env, 0, good, deadline=SOON) as replay:
        for n in range(n_peers):
            burst = bytearray()
            for i in range(2500):
                frame = rng.randbytes(rng.randrange(40)) if i % 2 else data[: rng.randrange(len(data))]
                burst += HEADER.pack(MAGIC, 0, len(frame)) + frame
            burst += HEADER.pack(MAGIC, 0, 1 << 17)
            with raw_peer(server, 2 + n) as rogue, suppress(OSError):
                rogue.sendall(burst)
            assert replay.add({"id": np.array([n])}) == {"score": float("inf")}
        eventually(lambda: made.stats().malformed >= n_peers)
        stats = made.stats()
        assert stats.offered == n_peers and stats.senders[1].malformed == 0
        assert max(sender.malformed for sender in stats.senders.values()) <= 17
        assert made.is_running
    made.close()
    good.close()
    server.close()


def test_wrong_sizes_count_and_shut_a_peer_out_too(server: TcpCarrier) -> None:
    made = ReplayBufferManager({"id": ((), "int64")}, 0, None, communication_backend=server).start()
    for n in range(1, 17):
        with raw_peer(server, 5) as rogue:
            rogue.sendall(HEADER.pack(MAGIC, 0, 1 << 60))
            eventually(lambda n=n: made.stats().malformed == n)
            with suppress(ConnectionResetError):
                assert rogue.recv(1) == b""
    with pytest.raises(AuthError, match="shut out"):
        TcpCarrier.join([server.address], token=TOKEN, rank=5)
    assert made.stats().senders[5].malformed == 16
    made.close()


def test_a_frame_beyond_the_servers_max_frame_is_refused_by_the_client() -> None:
    """Sent, it would end the connection, again and again, until this peer is shut out."""
    env = {"x": ((1000,), "uint8")}
    with (
        TcpCarrier.serve(0, token=TOKEN, max_frame=1 << 16) as small,
        TcpCarrier.join([small.address], token=TOKEN, rank=1) as worker,
        TcpCarrier.join([small.address], token=TOKEN, rank=2, max_frame=4096) as smaller,
        ReplayBufferManager(env, 0, None, communication_backend=small) as made,
    ):
        assert (worker.max_frame, smaller.max_frame) == (1 << 16, 4096)
        made.start()
        with RemoteReplay(env, 0, worker, deadline=SOON) as replay:
            with pytest.raises(FrameError, match="65536 bytes, got 100512"):
                replay.add({"x": np.zeros((100, 1000), "uint8")})
            assert replay.add({"x": np.zeros((9, 1000), "uint8")}) == {"score": float("inf")}
        assert made.stats().malformed == 0


def test_a_machine_that_vanished_is_seen_within_20_s(server: TcpCarrier) -> None:
    """Both ends ask the system to look: silence of a peer, and frames that are not taken, end a connection."""
    before = sockets()
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    new = [fd for fd, name in descriptors() if name in sockets() - before]
    assert len(new) == 2
    for fd in new:
        with socket.socket(fileno=os.dup(fd)) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, every, tries, taken = (
                sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
            )
            assert idle + every * tries < 20 and 0 < taken < 20_000
    worker.close()


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    with TcpCarrier.serve(0) as alone, TcpCarrier.serve(0, "[::1]:0", token=TOKEN) as other:
        host, _, port = alone.address.rpartition(":")
        assert host == "127.0.0.1" and int(port) > 0 and len(alone.token) == 32
        assert other.address.startswith("[::1]:") and (alone.size, alone.rank) == (None, 0)
        with TcpCarrier.join([other.address], token=TOKEN, rank=1) as worker:
            worker.send(0, 0, [b"six"], SOON)
            assert bytes(other.recv(timeout=SOON)[2]) == b"six"


def test_tokens_are_given_or_in_the_environment_or_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOLLECT_TOKEN", raising=False)
    made = [TcpCarrier.serve(0) for _ in range(2)]
    assert made[0].token != made[1].token
    monkeypatch.setenv("RECOLLECT_TOKEN", "of the environment ü")
    made += [TcpCarrier.serve(0), TcpCarrier.serve(0, token=TOKEN.decode())]
    assert [carrier.token for carrier in made[2:]] == ["of the environment ü".encode(), TOKEN]
    made.append(TcpCarrier.serve(0, token="ü" * 8))  # of 16 bytes
    for carrier in made:
        carrier.close()
    monkeypatch.setenv(
        "RECOLLECT_TOKEN", ""
    )  # an empty token is not the same as none: it was meant to be one
    with pytest.raises(ValueError, match="16 bytes, got 0"):
        TcpCarrier.serve(0)


def test_join_needs_a_token(monkeypatch: pytest.MonkeyPatch, server: TcpCarrier) -> None:
    monkeypatch.delenv("RECOLLECT_TOKEN", raising=False)
    with pytest.raises(AuthError, match="must be given"):
        TcpCarrier.join([server.address])


def test_the_numbers_that_guard_strangers() -> None:
    assert (tcp.PROOF_S, tcp.MOST_STRANGERS, tcp.TOKEN_NBYTES) == (5.0, 64, 16)


@pytest.mark.parametrize(
    "data",
    [
        bytes(1 << 16),
        hello() + bytes(1 << 16),
        hello(version=2) + bytes(99),
        hello(magic=b"HTTP") + bytes(99),
        hello()[:9],
    ],
)
def test_a_stranger_that_proves_nothing_is_refused(server: TcpCarrier, data: bytes) -> None:
    with socket.create_connection(place(server), SOON) as stranger:
        with suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        heard = b""
        with suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                heard += part
    eventually(lambda: server.refused == 1)
    assert server.alive() == {0}
    if data[:4] != b"RCTC" or data[4] != 1 or len(data) < 64:
        assert heard == b""  # not even a nonce


def test_nonces_are_fresh_and_the_proofs_of_the_sides_differ(server: TcpCarrier) -> None:
    """What was heard in one handshake is of no use in the next, nor as the answer to itself."""
    nonces = set()
    for rank in (1, 2):
        sock, proof, expected = half_joined(server, rank)
        sock.sendall(proof)
        status, given, *_, theirs = ANSWER.unpack(exactly(sock, ANSWER.size, monotonic() + SOON))
        assert (status, given, theirs) == (0, rank, expected) and theirs != proof
        nonces.add(proof)
        sock.close()
    assert len(nonces) == 2


def test_join_makes_a_new_nonce_each_time() -> None:
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def listen() -> None:
            for _ in range(2):
                sock, _ = fake.accept()
                with sock:
                    heard.append(sock.recv(4096)[8:40])

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        for _ in range(2):
            with pytest.raises(DeadlineError):
                TcpCarrier.join([f"127.0.0.1:{fake.getsockname()[1]}"], token=TOKEN, timeout=0.0)
        thread.join(SOON)
    assert len(set(heard)) == 2


@pytest.mark.parametrize("n_at_once", [0, len(hello())], ids=["its hello", "its proof"])
def test_a_stranger_that_trickles_has_no_more_time(
    monkeypatch: pytest.MonkeyPatch, server: TcpCarrier, n_at_once: int
) -> None:
    monkeypatch.setattr(tcp, "PROOF_S", 0.2)
    data = hello() + bytes(32)
    with socket.create_connection(place(server), SOON) as stranger:
        stranger.sendall(data[:n_at_once])
        if n_at_once:
            assert len(stranger.recv(32)) == 32
        stranger.settimeout(0.05)  # a byte each 50 ms: all of them would take seconds
        for byte in data[n_at_once:]:
            try:
                stranger.sendall(bytes([byte]))
                assert stranger.recv(1) == b""  # its time is up
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it was listened to to the end")
    eventually(lambda: server.refused == 1)


def test_a_carrier_belongs_to_its_process(server: TcpCarrier) -> None:
    with pytest.raises(TypeError, match="one process"):
        pickle.dumps(server)


def test_a_server_cannot_reconnect_to_a_peer_that_joined(server: TcpCarrier) -> None:
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    worker.close()
    eventually(lambda: 1 not in server.alive())
    with pytest.raises(PeerDiedError, match="rank 1: is gone, and has to join again"):
        server.reconnect(1, 0.1)
    for rank, text in ((1, "is gone"), (2, "has not joined")):
        with pytest.raises(PeerDiedError, match=f"rank {rank}: {text}"):
            server.send(rank, 0, [b"x"], 0.1)
    with pytest.raises(ValueError, match="this one"):
        server.send(0, 0, [b"x"], 0.1)


def test_reconnecting_to_a_closed_server_says_its_address(server: TcpCarrier) -> None:
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    server.close()
    eventually(lambda: 0 not in worker.alive())
    with pytest.raises(PeerDiedError, match="rank 0: does not answer at 127"):
        worker.reconnect(0, 0.05)
    worker.close()


@pytest.mark.parametrize("call", ["reconnect", "link"])
def test_close_ends_tries_to_connect(server: TcpCarrier, call: str) -> None:
    worker = TcpCarrier.join([server.address], token=TOKEN)
    server.close()
    eventually(lambda: 0 not in worker.alive())
    tries = {
        "reconnect": lambda: worker.reconnect(0, 2 * SOON),
        "link": lambda: worker.link([server.address], 2 * SOON),
    }
    with ThreadPoolExecutor() as pool:
        trying = pool.submit(tries[call])
        worker.close()
        with pytest.raises(ClosedError, match="was closed"):
            trying.result(SOON)


def test_close_wakes_a_sender_that_waits(server: TcpCarrier) -> None:
    worker = TcpCarrier.join([server.address], token=TOKEN, rank=1)
    caught: list[Exception] = []

    def send() -> None:
        try:
            while True:
                worker.send(0, 0, [bytes(8 << 20)], SOON)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    eventually(lambda: not worker.isend(0, 0, [bytes(1 << 20)]).is_complete())
    handle = worker.isend(0, 0, [b"behind it"])
    worker.close()
    thread.join(SOON)
    assert [type(error) for error in caught] == [ClosedError]
    with pytest.raises(ClosedError):
        handle.is_complete()


def test_more_than_is_taken_waits_at_its_sender() -> None:
    """What lies unread is bounded; once it is taken, the rest comes."""
    small = TcpCarrier.serve(3, token=TOKEN, max_frame=1 << 16)
    worker = TcpCarrier.join([small.address], token=TOKEN, rank=1, max_frame=1 << 16)
    block = bytes(1 << 15)
    handles = [worker.isend(3, 0, [block]) for _ in range(1000)]
    for _ in range(50):
        small.alive()
    assert not handles[-1].is_complete()
    for _ in range(1000):
        assert small.recv(1, timeout=SOON)[2].nbytes == len(block)
    eventually(handles[-1].is_complete)
    worker.close()
    small.close()


@pytest.mark.parametrize(
    "header", [HEADER.pack(MAGIC + 1, 0, 4), HEADER.pack(MAGIC, 1 << 16, 4)], ids=["magic", "tag"]
)
def test_what_is_no_frame_closes_the_connection(server: TcpCarrier, header: bytes) -> None:
    rogue = raw_peer(server, 1)
    rogue.sendall(header + b"1234")
    eventually(lambda: 1 not in server.alive() and server.malformed == {1: 1})
    rogue.close()


def test_a_client_connects_again_when_its_connection_was_closed(server: TcpCarrier) -> None:
    """As after a frame that was damaged on its way: that connection ends, and nothing is lost."""
    env = {"id": ((), "int64")}
    with ReplayBufferManager(env, 0, None, communication_backend=server) as made:
        made.start()
        carrier = TcpCarrier.join([server.address], token=TOKEN, rank=1)
        with RemoteReplay(env, 0, carrier, deadline=SOON, retry_s=0.2) as replay:
            for i in range(5):
                replay.add({"id": np.array([i])})
                if i % 2:
                    carrier.send(0, 0, [b"damaged"], SOON)
                    eventually(lambda n=i // 2 + 1: made.stats().malformed == n)
                    eventually(lambda: 0 not in carrier.alive())
        assert made.buffer[:]["id"].tolist() == [0, 1, 2, 3, 4]
        carrier.close()


def test_a_peer_that_sends_without_end_delays_others_by_a_few_frames(
    server: TcpCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources take turns, and others are read though much lies here already."""
    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    rogue = raw_peer(server, 1)
    good = TcpCarrier.join([server.address], token=TOKEN, rank=2)
    rogue.sendall((HEADER.pack(MAGIC, 0, 1) + b"x") * 5000)
    assert server.recv(timeout=SOON)[0] == 1
    good.send(0, 0, [b"y"], SOON)
    n = 0
    while server.recv(timeout=SOON)[0] == 1:
        n += 1
    assert n < 100
    assert all(server.recv(timeout=SOON)[0] == 1 for _ in range(5000 - 1 - n))  # none is lost
    rogue.close()
    good.close()


def test_of_clients_that_left_only_so_many_are_remembered(
    server: TcpCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is given once, also when the peer that had it is forgotten."""
    monkeypatch.setattr(records, "MOST_CLIENTS", 2)
    given = []
    for _ in range(6):
        worker = TcpCarrier.join([server.address], token=TOKEN)
        worker.send(0, 0, [b"x"], SOON)
        server.recv(worker.rank, timeout=SOON)
        given.append(worker.rank)
        worker.close()
        eventually(lambda: server.alive() == {0})
    assert given == [1, 2, 3, 4, 5, 6]
    for rank in given:
        with pytest.raises(PeerDiedError, match="is gone" if rank > 4 else "has not joined"):
            server.send(rank, 0, [b"x"])

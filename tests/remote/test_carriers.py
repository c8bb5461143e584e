"""Each carrier keeps the contract."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.timing import Stopwatch

from recollect.errors import PeerDiedError
from recollect.remote import Carrier, LocalCarrier
from recollect.testing import CarrierContract
from recollect.testing.carrier_contract import SOON, eventually

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


class TestLocalThreads(CarrierContract):
    def make(self, n: int) -> list[Any]:
        return LocalCarrier.group(n, max_frame=2 << 20)


def test_it_is_a_carrier() -> None:
    assert isinstance(LocalCarrier.group(1)[0], Carrier)


def echo(end: Any) -> None:
    """Send back whatever comes, until an empty frame."""
    while True:
        source, tag, frame = end.recv(timeout=SOON)
        end.send(source, tag, [frame], SOON)
        if not frame.nbytes:
            end.close()
            return


@pytest.mark.process
@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_local_ends_pickle_to_children(context: Any) -> None:
    a, b = LocalCarrier.group(2)
    child = context.Process(target=echo, args=(b,))
    child.start()
    for size in (1, 70_000, 3_000_000):
        a.send(1, 3, [bytes(size)], SOON)
        assert a.recv(1, 3, SOON)[2].nbytes == size
    a.send(1, 0, [b""], SOON)
    child.join(SOON)
    assert child.exitcode == 0
    a.close()


@pytest.mark.process
def test_a_killed_peer_is_seen_within_a_second_and_its_successor_takes_its_end() -> None:
    a, b = LocalCarrier.group(2)
    child = FORK.Process(target=echo, args=(b,))
    child.start()
    a.send(1, 0, [b"x"], SOON)
    a.recv(1, timeout=SOON)
    os.kill(child.pid, signal.SIGKILL)
    start = Stopwatch()
    with pytest.raises(PeerDiedError, match="rank 1"):
        a.recv(1, timeout=SOON)
    assert start.s < 1.0
    assert 1 not in a.alive()
    child.join(SOON)
    child = FORK.Process(target=echo, args=(b,))
    child.start()
    a.reconnect(1, SOON)
    a.send(1, 0, [b"again"], SOON)
    assert bytes(a.recv(1, timeout=SOON)[2]) == b"again"
    a.send(1, 0, [b""], SOON)
    child.join(SOON)
    a.close()


@pytest.mark.process
def test_an_end_belongs_to_one_process() -> None:
    a, b = LocalCarrier.group(2)
    child = FORK.Process(target=echo, args=(b,))
    child.start()
    a.send(1, 0, [b"x"], SOON)
    a.recv(1, timeout=SOON)
    with pytest.raises(RuntimeError, match="another live process"):
        b.recv(timeout=0.1)
    a.send(1, 0, [b""], SOON)
    child.join(SOON)
    a.close()


def test_a_forked_child_does_not_hold_its_parents_connections() -> None:
    """A worker that forks helpers and dies is seen to die, though the helpers live on."""
    a, b = LocalCarrier.group(2)
    ready, stop = FORK.Event(), FORK.Event()

    def fork_and_die() -> None:
        b.send(0, 0, [b"here"], SOON)
        if os.fork() == 0:
            ready.set()
            stop.wait(SOON)
            os._exit(0)
        ready.wait(SOON)
        os._exit(0)

    child = FORK.Process(target=fork_and_die)
    child.start()
    a.recv(1, timeout=SOON)
    ready.wait(SOON)
    eventually(lambda: 1 not in a.alive(), 1.0)
    stop.set()
    child.join(SOON)
    a.close()


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    made = LocalCarrier.group(2)
    yield made
    for end in made:
        end.close()


def test_rubbish_on_the_stream_closes_that_connection_only(ends: list[Any]) -> None:
    import socket
    import struct

    a, b = ends
    eventually(lambda: a.alive() is not None)
    with socket.socket(socket.AF_UNIX) as rogue:
        rogue.connect(a._address(0))
        rogue.sendall(struct.pack("<16sq", a.group_id, 1) + b"\xff" * 64)
        eventually(lambda: a.alive() is not None and a.malformed.get(1))
        assert rogue.recv(1) == b""
    b.send(0, 0, [b"fine"], SOON)
    assert bytes(a.recv(timeout=SOON)[2]) == b"fine"

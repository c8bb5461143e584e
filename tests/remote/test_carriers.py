"""Each carrier keeps the contract."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.means import needs_linux
from tests.remote.watched import Local
from tests.timing import Stopwatch

from recollect.errors import DeadlineError, PeerDiedError
from recollect.remote import Carrier, LocalCarrier, TcpCarrier, TorchCarrier, launch
from recollect.remote.carriers import local
from recollect.remote.carriers.by_name import carrier_of
from recollect.system import sockets
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
        assert a.recv(1, 3, 6 * SOON)[2].nbytes == size  # a spawned child spends seconds on its imports
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
            stop.wait(3 * SOON)
            os._exit(0)
        ready.wait(SOON)
        os._exit(0)

    child = FORK.Process(target=fork_and_die)
    child.start()
    a.recv(1, timeout=SOON)
    ready.wait(SOON)
    eventually(lambda: 1 not in a.alive())
    stop.set()
    child.join(SOON)
    a.close()


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    made = Local.group(2)
    yield made
    for end in made:
        end.close()


def test_a_stream_without_frames_closes_that_connection_only(ends: list[Any]) -> None:
    a, b = ends
    eventually(lambda: a.alive() is not None)
    with socket.socket(socket.AF_UNIX) as rogue:
        rogue.connect(a.addresses()[0])
        rogue.sendall(struct.pack("<16sq", a.group_id, 1) + b"\xff" * 64)
        eventually(lambda: a.alive() is not None and a.malformed.get(1))
        assert rogue.recv(1) == b""
    b.send(0, 0, [b"fine"], SOON)
    assert bytes(a.recv(timeout=SOON)[2]) == b"fine"


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side has closed it, read or unread."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_another_group_or_rank_is_not_let_in(ends: list[Any]) -> None:
    a, _ = ends
    a.alive()
    for group, rank in ((bytes(16), 1), (a.group_id, 2), (a.group_id, -1)):
        with socket.socket(socket.AF_UNIX) as rogue:
            rogue.settimeout(SOON)
            rogue.connect(a.addresses()[0])
            rogue.sendall(struct.pack("<16sq", group, rank))
            assert is_closed(rogue)
    assert a.alive() == {0}


def _take_addresses(seen: set[str], pipe: Any) -> None:
    """As another user: listen wherever an end listened, and wherever the name of one tells that another would."""
    os.setgid(65534)
    os.setuid(65534)
    taken = []
    for name in sorted(seen | {re.sub(r"-\d+$", f"-{rank}", name) for name in seen for rank in range(3)}):
        with suppress(OSError):
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(b"\0" + name[1:].encode())
            sock.listen(1)
            taken.append(sock)
    pipe.send(len(taken))
    pipe.recv()


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@needs_linux
def test_another_user_cannot_keep_an_end_from_opening() -> None:
    """Neither one that was not open yet, nor one whose address was seen before its process was started again."""

    def names() -> set[str]:
        lines = Path("/proc/net/unix").read_text().splitlines()
        return {line.split()[-1] for line in lines if "@recollect-" in line} - before

    before: set[str] = set()
    before = names()
    a, b, c = LocalCarrier.group(3)
    a.send(1, 0, [b"early"], SOON)
    b.recv(timeout=SOON)
    seen = names()
    b.close()
    ours, theirs = FORK.Pipe()
    user = FORK.Process(target=_take_addresses, args=(seen, theirs))
    user.start()
    try:
        assert ours.recv() > 0
        for end in (LocalCarrier(*b.__reduce__()[1]), c):
            child = FORK.Process(target=echo, args=(end,))
            child.start()
            a.reconnect(end.rank, SOON)
            a.send(end.rank, 0, [b"to you"], SOON)
            assert bytes(a.recv(end.rank, timeout=SOON)[2]) == b"to you"
            a.send(end.rank, 0, [b""], SOON)
            child.join(SOON)
            assert child.exitcode == 0
            child.close()
    finally:
        ours.send(None)
        user.join(SOON)
        user.close()
        for one in (ours, theirs, a):
            one.close()


@needs_linux
def test_another_user_is_not_let_in_nor_spoken_to(ends: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes here are of this user; so this end is made to think that it is another's."""
    a, b = ends
    a.alive()
    b.alive()
    other = SimpleNamespace(**{**vars(os), "geteuid": lambda: os.getuid() + 1, "getpid": lambda: -1})
    monkeypatch.setattr(local, "os", other)
    monkeypatch.setattr(sockets, "os", other)
    with socket.socket(socket.AF_UNIX) as rogue:
        rogue.settimeout(SOON)
        rogue.connect(a.addresses()[0])
        with suppress(BrokenPipeError):
            rogue.sendall(struct.pack("<16sq", a.group_id, 1))
        assert is_closed(rogue)
    sent = a.isend(1, 0, [b"not to another user"])
    with pytest.raises(DeadlineError):
        sent.wait(0.05)
    assert a.alive() == {0}
    monkeypatch.undo()


def test_an_end_of_this_process_is_never_reached_by_a_socket(ends: list[Any]) -> None:
    a, b = ends
    a.alive()
    b.alive()
    n_open = len(os.listdir("/proc/self/fd"))
    for one, other in ((a, b), (b, a)):
        one.send(other.rank, 0, [b"x"], SOON)
        assert bytes(other.recv(timeout=SOON)[2]) == b"x"
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize("n", [0, -1, True, 2.0])
def test_a_group_has_ends(n: Any) -> None:
    with pytest.raises(ValueError, match="n:"):
        LocalCarrier.group(n)


@pytest.mark.parametrize("max_frame", [100, True, (1 << 30) + 1, 1e6])
def test_a_frame_has_a_size_that_may_be(max_frame: Any) -> None:
    with pytest.raises(ValueError, match="max_frame"):
        LocalCarrier.group(2, max_frame=max_frame)


def test_a_send_to_a_peer_that_has_not_come_does_not_wait(ends: list[Any]) -> None:
    a, b = ends
    handle = a.isend(1, 3, [b"later"])
    assert not handle.is_complete()
    with pytest.raises(DeadlineError, match="send to rank 1"):
        a.isend(1, 3, [b"given up"]).wait(0.01)
    assert bytes(b.recv(timeout=SOON)[2]) == b"later"
    eventually(handle.is_complete)


def test_a_peer_that_came_and_went_may_come_again(ends: list[Any]) -> None:
    a, b = ends
    a.alive()
    b.alive()
    b.close()
    a.send(1, 3, [b"later"], 0.0)
    with pickle.loads(pickle.dumps(b)) as again:
        assert bytes(again.recv(timeout=SOON)[2]) == b"later"


def test_between_threads_too_much_waits_at_its_sender(
    ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_IN_PROCESS_NBYTES", 2000)
    a, b = ends
    b.alive()
    blocks = [bytes([i]) * 600 for i in range(5)]
    handles = [a.isend(1, 0, [block]) for block in blocks]
    assert [handle.is_complete() for handle in handles] == [True, True, False, False, False]
    with pytest.raises(DeadlineError, match="send to rank 1"):
        a.send(1, 0, [b"given up"], 0.0)
    waits = threading.Thread(target=handles[-1].wait, args=(6 * SOON,), daemon=True)
    waits.start()
    eventually(a.is_led)
    got = [bytes(b.recv(0, timeout=SOON)[2])]
    small = a.isend(1, 0, [b"small"])
    got += [bytes(b.recv(0, timeout=SOON)[2]) for _ in range(5)]
    assert got == [*blocks, b"small"]  # in order, and without what was given up
    assert all(handle.is_complete() for handle in (*handles, small))
    waits.join(SOON)
    assert not waits.is_alive()
    with pytest.raises(DeadlineError):
        b.recv(0, timeout=0.0)


def test_a_pickled_end_keeps_its_place_and_its_frames() -> None:
    end = LocalCarrier.group(3, max_frame=5000)[2]
    again = pickle.loads(pickle.dumps(end))
    assert (again.rank, again.size, again.max_frame, again.group_id) == (2, 3, 5000, end.group_id)


@pytest.mark.parametrize("how", ["it speaks", "it is awaited", "it is looked for"])
def test_an_end_that_is_taken_again_in_this_process_is_alive_again(ends: list[Any], how: str) -> None:
    a, b = ends
    b.send(0, 0, [b"here"], SOON)
    a.recv(1, timeout=SOON)
    b.close()
    assert 1 not in a.alive()
    again = pickle.loads(pickle.dumps(b))
    again.alive()
    if how == "it speaks":
        again.send(0, 0, [b"back"], SOON)
    elif how == "it is awaited":
        with pytest.raises(DeadlineError):  # it is there, and has not spoken
            a.recv(1, timeout=0.0)
    else:
        a.reconnect(1, SOON)
    assert 1 in a.alive()
    again.send(0, 0, [b"last"], SOON)
    assert bytes(a.recv(1, timeout=SOON)[2]) == (b"back" if how == "it speaks" else b"last")
    again.close()


def test_a_lost_peer_is_looked_for_as_long_as_told(ends: list[Any]) -> None:
    a, b = ends
    b.send(0, 0, [b"here"], SOON)
    a.recv(1, timeout=SOON)
    b.close()
    watch = Stopwatch()
    with pytest.raises(PeerDiedError, match=r"rank 1.*within 0\.05 s"):
        a.reconnect(1, 0.05)
    assert watch.s < 1.0
    with pytest.raises(ValueError, match="timeout"):
        a.reconnect(1, float("inf"))


# -- torch, without torch


class Distributed:
    """torch.distributed of rank 0 of two nodes, or of one, as far as a carrier needs it."""

    def __init__(self, other_host: str) -> None:
        self.other_host = other_host
        self.gathered: list[Any] = []

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return 2

    def all_gather_object(self, out: list[Any], mine: Any, group: Any = None) -> None:
        out[:] = [mine, (self.other_host, b"") if isinstance(mine, tuple) else "127.0.0.1:1"]
        self.gathered.append(mine)

    def barrier(self, group: Any = None) -> None:
        pass


def use_torch(monkeypatch: pytest.MonkeyPatch, distributed: Any) -> None:
    """Let this be torch.distributed."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


def torch_carrier(monkeypatch: pytest.MonkeyPatch, other_host: str) -> tuple[Any, Distributed]:
    made = Distributed(other_host)
    use_torch(monkeypatch, made)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.0.2")
    return TorchCarrier(), made


def test_torch_binds_to_the_nodes_address_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for other, host in ((socket.gethostname(), "127.0.0.1"), ("elsewhere", "127.0.0.2")):
        carrier, made = torch_carrier(monkeypatch, other)
        assert carrier.address.rpartition(":")[0] == host and made.gathered[1] == carrier.address
        assert carrier.rank == 0 and carrier.token == made.gathered[0][1]
        carrier.close()


def test_torch_has_as_many_ranks_as_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier, _ = torch_carrier(monkeypatch, socket.gethostname())
    assert carrier.size == 2
    with pytest.raises(ValueError, match="dest"):
        carrier.isend(2, 0, [b""])
    carrier.close()
    with pytest.raises(ValueError, match="must be the 2 ranks there are, got 3"):
        launch(lambda ctx: None, lambda ctx: None, carrier="torch")
    carrier_of("torch").close()


def test_torch_makes_a_token_of_its_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = set()
    for _ in range(2):
        carrier, _ = torch_carrier(monkeypatch, socket.gethostname())
        tokens.add(carrier.token)
        carrier.close()
    assert len(tokens) == 2 and {len(token) for token in tokens} == {32}


def test_the_name_torch_is_one_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch(monkeypatch, Distributed(socket.gethostname()))
    first = carrier_of("torch")
    assert carrier_of("torch") is first
    first.close()
    second = carrier_of("torch")
    assert second is not first
    second.close()


def test_two_threads_that_ask_for_torch_at_once_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks gather once: a second time would wait for them in vain."""
    made, both = Distributed(socket.gethostname()), threading.Barrier(2)

    def slow(group: Any = None) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread, in vain

    monkeypatch.setattr(made, "barrier", slow)
    use_torch(monkeypatch, made)
    with ThreadPoolExecutor() as pool:
        a, b = pool.map(carrier_of, ["torch", "torch"])
    assert a is b
    a.close()


def test_a_torch_rank_whose_peers_died_keeps_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = Distributed(socket.gethostname()), set(threading.enumerate())
    monkeypatch.setattr(made, "barrier", lambda group: 1 / 0)
    use_torch(monkeypatch, made)
    with pytest.raises(ZeroDivisionError):
        TorchCarrier()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(made.gathered[1].rpartition(":")[2])), SOON)


def test_torch_must_be_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Distributed("elsewhere")
    made.is_initialized = lambda: False  # type: ignore[method-assign]
    use_torch(monkeypatch, made)
    with pytest.raises(RuntimeError, match="init_process_group"):
        TorchCarrier()


class Threads(Distributed):
    """torch.distributed of a group whose ranks are threads of this process."""

    def __init__(self, n: int) -> None:
        super().__init__(socket.gethostname())
        self.n, self.mine, self.round = n, threading.local(), threading.Barrier(n)
        self.said: list[Any] = [None] * n

    def get_rank(self, group: Any) -> int:
        return int(self.mine.rank)

    def get_world_size(self, group: Any) -> int:
        return self.n

    def all_gather_object(self, out: list[Any], mine: Any, group: Any = None) -> None:
        self.said[self.mine.rank] = mine
        self.round.wait(10)
        out[:] = self.said
        self.round.wait(10)

    def barrier(self, group: Any = None) -> None:
        self.round.wait(10)

    def carriers(self, has_made: Callable[[int], None] = lambda rank: None) -> list[Any]:
        """What each rank made, by rank; `has_made` hears of each at once."""

        def make(rank: int) -> Any:
            self.mine.rank = rank
            carrier = TorchCarrier()
            has_made(rank)
            return carrier

        with ThreadPoolExecutor(self.n) as pool:
            return list(pool.map(make, range(self.n)))


def test_every_rank_of_a_torch_group_can_send_to_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Threads(3)
    use_torch(monkeypatch, group)
    carriers = group.carriers()
    for a, b in permutations(carriers, 2):
        a.send(b.rank, 0, [bytes([a.rank])])
    for b in carriers:
        others = [rank for rank in range(3) if rank != b.rank]
        assert [b.recv(rank, timeout=10.0)[2][0] for rank in others] == others
        assert b.alive() == {0, 1, 2} and b.token == carriers[0].token
    for carrier in carriers:
        carrier.close()


def test_no_rank_of_a_torch_group_has_its_carrier_before_all_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, has_made = Threads(2), threading.Event()
    use_torch(monkeypatch, group)
    link, before = TcpCarrier.link, []

    def late(self: Any, addresses: Any) -> None:
        if self.rank == 1:
            before.append(has_made.wait(0.2))
        link(self, addresses)

    monkeypatch.setattr(TcpCarrier, "link", late)
    for carrier in group.carriers(lambda rank: has_made.set()):
        carrier.close()
    assert before == [False] and has_made.is_set()

"""The worker's side: windows, answers, deadlines, a manager that is gone, and what becomes of every item."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tests.remote.make import PLAIN, SAMPLE, assert_doors, samples

from recollect.errors import (
    ClosedError,
    DeadlineError,
    FrameError,
    MissingExtraError,
    PeerDiedError,
    SchemaError,
    ScoringError,
)
from recollect.remote import Limits, LocalCarrier, RemoteReplay, ReplayBufferManager, TcpCarrier
from recollect.remote.backends import carrier_of
from recollect.remote.items import item_space
from recollect.remote.messages import Data, Exit, Scores, Welcome
from recollect.remote.session import Session
from recollect.remote.wire import decode, encode
from recollect.testing.carrier_contract import eventually

TOKEN = b"a token of the tests"


@pytest.fixture
def ends() -> Iterator[list[LocalCarrier]]:
    made = LocalCarrier.group(2, max_frame=1 << 14)
    yield made
    for end in made:
        end.close()


@pytest.fixture
def manager(ends: list[LocalCarrier]) -> Iterator[ReplayBufferManager]:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        if (obj["id"] < 0).any():
            raise KeyError("below zero")
        return {"first": float(obj["id"][0])}

    with ReplayBufferManager(PLAIN, 1, None, score, communication_backend=ends[1]) as made:
        yield made.start()


def client(end: Any, env: Any = PLAIN, **kw: Any) -> RemoteReplay:
    return RemoteReplay(env, 1, end, **{"deadline": 10.0, "retry_s": 0.2, **kw})


class Silent:
    """A manager's end that welcomes and then answers only what it is told to."""

    def __init__(self, end: LocalCarrier) -> None:
        self.end, self.seen = end, []
        self.fake = ReplayBufferManager(PLAIN, 1, None)
        self.answers = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        from recollect.remote.serving import Received

        while not self.over.is_set():
            try:
                rank, _, frame = self.end.recv(timeout=0.02)
            except DeadlineError:
                continue
            except ClosedError:
                return
            message, _, body = decode(frame)
            self.seen.append(message)
            if isinstance(message, Data):
                if not self.answers:
                    continue
                self.answers -= 1
            for reply in self.fake._serving.handle(rank, Received(message, body, frame)):
                self.end.send(reply.dest, reply.tag, reply.parts)

    def close(self) -> None:
        self.over.set()
        self.thread.join(5)
        self.fake.close()


@pytest.fixture
def silent(ends: list[LocalCarrier]) -> Iterator[Silent]:
    made = Silent(ends[1])
    yield made
    made.close()


# -- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fast"}, {"window": 0}, {"window": True}, {"send_every": 0}, {"refresh_after": 1.5},
        {"deadline": -1.0}, {"retry_s": 0.0}, {"reconnect_s": float("inf")}, {"deadline": float("nan")},
        {"when_down": "cry"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RemoteReplay(PLAIN, 1, "local", **wrong)


def test_nothing_is_opened_before_the_first_use() -> None:
    RemoteReplay(PLAIN, 1, "mpi")
    ReplayBufferManager(PLAIN, 1, 1).add(samples([1]))  # mpi is its default
    with pytest.raises(ValueError, match="pigeon"):
        RemoteReplay(PLAIN, 1, "pigeon")


@pytest.mark.parametrize(("kind", "package"), [("mpi", "mpi4py"), ("torch", "torch"), ("ray", "ray")])
def test_a_missing_package_is_named_with_its_remedy(
    kind: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "recollect\[{kind}\]".*"local"'):
        if kind == "ray":
            from recollect.remote import RayCarrier

            RayCarrier.serve("job", 0)
        else:
            carrier_of(kind)


def test_one_client_per_end_and_manager(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    with client(ends[0]) as first:
        first.add(samples([1]))
        with pytest.raises(RuntimeError, match="close it first"):
            client(ends[0]).add(samples([2]))
    with client(ends[0]) as second:
        second.add(samples([3]))
    assert manager.buffer[:]["id"].tolist() == [1, 3]


# -- what is taken


def test_a_wrong_container_is_not_taken(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    with client(ends[0]) as replay:
        for wrong in ({"id": np.zeros(2, "float32")}, {"x": np.arange(2)}, {"id": np.zeros((2, 2), "int64")}):
            with pytest.raises(SchemaError, match="id|x"):
                replay.add(wrong)
        assert replay.add(samples([5])) == {"first": 5.0}
        assert replay.stats().offered == 1 and replay.stats().sent == 1


def test_what_add_takes_is_copied(ends: list[LocalCarrier], silent: Silent) -> None:
    ids = np.arange(3)
    replay = client(ends[0], mode="async_comm")
    replay.add({"id": ids})
    ids[:] = -1
    silent.answers = 9
    replay.close()
    assert silent.fake.buffer[:]["id"].tolist() == [0, 1, 2]


def test_too_large_a_container_is_refused_and_what_waits_stays(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with client(ends[0], send_every=2) as replay:
        assert replay.add(samples(range(1000))) is None
        with pytest.raises(FrameError, match=r"16384 bytes, got 2\d{4} "):
            replay.add(samples(range(1500)))
        stats = replay.stats()
        assert (stats.offered, stats.pending, stats.sent) == (1000, 1000, 0)
        assert replay.add(samples([7])) == {"first": 0.0}
        assert_doors(replay.stats())
    assert manager.stats().containers == 1 and manager.stats().offered == 1001


# -- windows and answers


@pytest.mark.parametrize("mode", ["async_score", "async_comm"])
def test_no_more_than_a_window_is_outstanding(ends: list[LocalCarrier], silent: Silent, mode: str) -> None:
    replay = client(ends[0], mode=mode, window=3, retry_s=5.0, deadline=0.3)
    assert [replay.add(samples([i])) for i in range(3)] == [None] * 3
    with pytest.raises(DeadlineError, match="an answer") as caught:
        replay.add(samples([3]))
    assert caught.value.accepted is False
    assert replay.stats().pending == replay.stats().offered == 3
    silent.answers = 99
    replay._line._next_retry = 0.0
    replay.deadline = replay._line.deadline = 10.0
    assert replay.add(samples([3])) == {"score": np.inf}
    assert len(replay.close()) == 3
    assert silent.fake.buffer[:]["id"].tolist() == [0, 1, 2, 3]


def test_an_add_that_is_given_back_leaves_those_before_it(ends: list[LocalCarrier], silent: Silent) -> None:
    replay = client(ends[0], mode="async_comm", window=1, send_every=2, retry_s=5.0, deadline=0.3)
    assert [replay.add(samples([i])) for i in range(3)] == [None] * 3
    with pytest.raises(DeadlineError) as caught:
        replay.add(samples([3]))
    assert caught.value.accepted is False and replay.stats().pending == 3
    assert_doors(replay.stats())
    silent.answers = 99
    replay._line._next_retry = 0.0
    replay.deadline = replay._line.deadline = 10.0
    assert (
        replay.add(samples([3])) is not None and replay.stats().sent == 2
    )  # it completes the container again
    replay.close()
    assert silent.fake.buffer[:]["id"].tolist() == [0, 1, 2, 3]


def test_a_sync_add_past_its_deadline_waits_here(ends: list[LocalCarrier], silent: Silent) -> None:
    replay = client(ends[0], deadline=0.3, retry_s=0.1)
    with pytest.raises(DeadlineError, match="rank 1.*its answer") as caught:
        replay.add(samples([1]))
    assert caught.value.accepted is True and replay.stats().pending == 1
    assert len([m for m in silent.seen if isinstance(m, Data)]) >= 2  # it was sent again
    silent.answers = 99
    assert replay.flush() == [{"score": np.inf}]
    assert replay.stats().kept == 1 and replay.stats().retried >= 1
    replay.close()


def test_a_scoring_error_names_its_container_and_the_rest_is_delivered(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    replay = client(ends[0], mode="async_comm", window=3)
    for ids in ([-1, 0], [1], [2]):
        replay.add(samples(ids))
    with pytest.raises(ScoringError, match="below zero") as caught:
        replay.add(samples([-3]))
    assert (caught.value.seq, caught.value.kept) == (1, 2)
    assert replay.add(samples([5])) == {"first": 1.0}
    with pytest.raises(ScoringError) as last:
        replay.close()
    assert last.value.seq == 4 and last.value.scores == [{"first": 2.0}, {"first": 5.0}]
    stats = replay.stats()
    assert_doors(stats)
    assert manager.buffer[:]["id"].tolist() == [-1, 0, 1, 2, -3, 5] and stats.pending == 0


def test_answers_to_nobody_are_dropped_and_counted(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with client(ends[0]) as replay:
        replay.add(samples([1]))
        ends[1].send(0, 0, encode(Scores(12345, {"score": 1.0}, 1, 0, {})))
        assert replay.add(samples([2])) == {"first": 2.0}
        assert replay.stats().stray == 1


def test_a_damaged_answer_is_asked_for_again(ends: list[LocalCarrier], silent: Silent) -> None:
    with client(ends[0], retry_s=0.1) as replay:
        replay.metadata()
        ends[1].send(0, 0, [b"not a frame"])
        silent.answers = 9
        assert replay.add(samples([1])) == {"score": np.inf}


# -- ending


def test_close_past_its_deadline_says_what_is_lost_and_exits(
    ends: list[LocalCarrier], silent: Silent
) -> None:
    replay = client(ends[0], mode="async_comm", send_every=2, deadline=0.3)
    for i in range(5):
        replay.add(samples([i, i]))
    with pytest.raises(DeadlineError) as caught:
        replay.close()
    assert caught.value.undelivered == 10
    assert replay.stats().lost == 10 and replay.stats().pending == 0
    assert_doors(replay.stats())
    eventually(lambda: any(isinstance(m, Exit) for m in silent.seen))
    (left,) = {(m.undelivered, m.writer) for m in silent.seen if isinstance(m, Exit)}
    writers = {m.writer for m in silent.seen if isinstance(m, Data)}
    assert left[0] == 10 and left[1] in writers
    assert replay.close() == []
    with pytest.raises(ClosedError):
        replay.add(samples([1]))


def test_leaving_with_an_error_delivers_and_shows_that_error(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with pytest.raises(KeyError, match="mine"), client(ends[0], mode="async_comm", send_every=3) as replay:
        replay.add(samples([1]))
        raise KeyError("mine")
    assert manager.buffer[:]["id"].tolist() == [1] and manager.exit_counter == 1


# -- a manager that is gone


def test_while_it_may_come_back_a_container_is_pending_then_dropped() -> None:
    server = TcpCarrier.serve(1, token=TOKEN)
    made = ReplayBufferManager(PLAIN, 1, None, communication_backend=server).start()
    carrier = TcpCarrier.join([server.address], token=TOKEN, rank=0)
    replay = client(carrier, mode="async_comm", when_down="drop", reconnect_s=0.4)
    replay.add(samples([0]))
    replay.flush()
    made.close()
    server.close()
    eventually(lambda: 1 not in carrier.alive())
    assert replay.add(samples([1, 2])) is None
    assert (replay.stats().pending, replay.stats().dropped) == (2, 0)
    eventually(lambda: replay.add(samples([])) is None and replay.stats().pending == 0)
    assert replay.stats().dropped == 2
    start = monotonic()
    for i in range(20):
        replay.add(samples([i]))
    assert monotonic() - start < 5.0  # it is not waited for again
    assert replay.stats().dropped == 22
    assert_doors(replay.stats())
    carrier.close()


def test_a_manager_that_comes_back_gets_what_waited(tmp_path: Any) -> None:
    from recollect.remote import Checkpoint

    def serve(address: str) -> tuple[TcpCarrier, ReplayBufferManager]:
        carrier = TcpCarrier.serve(1, address, token=TOKEN)
        save = Checkpoint(tmp_path, resume=True)
        made = ReplayBufferManager(PLAIN, 1, None, communication_backend=carrier, checkpoint=save)
        return carrier, made.start()

    server, made = serve("127.0.0.1:0")
    address = server.address
    carrier = TcpCarrier.join([address], token=TOKEN, rank=0)
    with client(carrier, reconnect_s=0.2) as replay:
        replay.add(samples([0]))
        made.close()
        server.close()
        eventually(lambda: 1 not in carrier.alive())
        with pytest.raises(PeerDiedError, match="rank 1.*manager is gone") as caught:
            replay.add(samples([1]))
        taken = [0] + [1] * caught.value.accepted
        server, made = serve(address)
        replay.add(samples([2]))
        replay.flush()
        assert made.buffer[:]["id"].tolist() == [*taken, 2]
        assert replay.stats().forgotten == 0
        assert_doors(replay.stats())
    made.close()
    server.close()
    carrier.close()


class Blind:
    """An end that cannot see a peer die, as under MPI."""

    sees_death = False

    def __init__(self, end: Any) -> None:
        self.end = end
        self.rank, self.size, self.max_frame = end.rank, end.size, end.max_frame

    def send(self, *args: Any) -> None:
        self.end.send(*args)

    def isend(self, *args: Any) -> Any:
        return self.end.isend(*args)

    def recv(self, source: int = -1, tag: int = -1, timeout: float = 30.0) -> Any:
        try:
            return self.end.recv(source, tag, timeout)
        except PeerDiedError:
            raise DeadlineError("nothing") from None

    def alive(self) -> frozenset[int]:
        return frozenset(range(self.size))

    def close(self) -> None:
        self.end.close()


@pytest.mark.process
def test_where_the_carrier_sees_no_death_processes_are_looked_at() -> None:
    import multiprocessing
    import os
    import signal

    def manage(end: Any, ready: Any) -> None:
        made = ReplayBufferManager(PLAIN, 1, None, communication_backend=Blind(end))
        ready.set()
        made.run()

    fork = multiprocessing.get_context("fork")
    ends, ready = LocalCarrier.group(2), fork.Event()
    child = fork.Process(target=manage, args=(ends[1], ready))
    child.start()
    assert ready.wait(20)
    replay = client(Blind(ends[0]), retry_s=5.0, deadline=20.0)
    replay.add(samples([1]))
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    start = monotonic()
    with pytest.raises(PeerDiedError, match="manager is gone"):
        replay.add(samples([2]))
    assert monotonic() - start < 5.0
    ends[0].close()
    child.close()


def test_answers_by_send_are_dropped_after_a_while_and_fetched_again() -> None:
    """With async_send=False a worker that does not read costs `send_s`, and its retry brings the answer."""
    server = TcpCarrier.serve(1, token=TOKEN)
    made = ReplayBufferManager(
        SAMPLE, 1, None, communication_backend=server, limits=Limits(send_s=0.2, rejoin_s=30.0)
    )
    made.add(samples(range(1000), np.zeros(1000)))
    made.start(async_send=False)
    slow = TcpCarrier.join([server.address], token=TOKEN, rank=0)
    fast = TcpCarrier.join([server.address], token=TOKEN, rank=2)
    from recollect.remote.messages import Sample

    for request in range(3):
        slow.send(1, 0, encode(Sample(request, 1_000_000, "uniform", True)), 10.0)  # 16 MB each, never read
    with client(fast, SAMPLE) as replay:
        assert "score" in replay.add(samples([5], [0.0]))
    eventually(lambda: made.stats().unsent >= 1)
    made.close()
    for carrier in (slow, fast, server):
        carrier.close()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_baseline_that_is_no_finite_number_filters_nothing(ends: list[LocalCarrier], odd: float) -> None:
    with ReplayBufferManager(SAMPLE, 1, None, communication_backend=ends[1]) as manager:
        manager.start()
        with client(ends[0], SAMPLE, baseline_filtering=True) as replay:
            replay.add(samples([1], [0.0]))
            replay._session.baseline = odd
            replay.add(samples([2, 3], [-5.0, 5.0]))
            assert replay.stats().filtered == 0 and replay.stats().kept == 3


def test_a_container_for_a_manager_that_never_came_is_not_taken(ends: list[LocalCarrier]) -> None:
    replay = client(ends[0], deadline=0.1)
    with pytest.raises(DeadlineError, match="welcome") as info:
        replay.add(samples([1]))
    assert info.value.accepted is False and replay.stats().offered == 0
    replay.close()


def test_what_a_manager_forgot_is_counted_whole_though_little_is_remembered() -> None:
    session = Session(item_space(PLAIN), 0)

    def welcome(last_seq: int) -> list[Any]:
        session.greet()
        text = session.items.text if session.items else ""
        message = Welcome(session._hello, bytes(16), last_seq, 8, None, text, 0, "host", 1)
        return session.hear(message, memoryview(b""))

    welcome(0)
    for i in range(3000):
        entry = session.put(session.items.encode(samples([i, i])))
        session.hear(Scores(entry.request, {}, 2, 0, {}), memoryview(b""))
        session.hand_out(entry)
    assert len(session._acked_items) <= 4 * 8 + 1024
    with pytest.warns(RuntimeWarning, match="6000 items"):
        welcome(0)
    assert session.forgotten == 6000

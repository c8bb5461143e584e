"""The worker's side: windows, answers, deadlines, a manager that is gone, and what becomes of every item."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.interruption import apart, interrupted
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, assert_doors, grid, manager_protocol, paths, samples

from recollect import _core
from recollect.errors import (
    AuthError,
    BudgetError,
    ClosedError,
    DeadlineError,
    EmptyError,
    FrameError,
    PeerDiedError,
    RemoteError,
    SchemaError,
    ScoringError,
)
from recollect.remote import Checkpoint, Limits, LocalCarrier, RemoteReplay, ReplayBufferManager, TcpCarrier
from recollect.remote.carriers.base import Done
from recollect.remote.client import client as client_module
from recollect.remote.client import connection as connection_module
from recollect.remote.client.connection import Connection, get_metadata
from recollect.remote.frame import decode, encode
from recollect.remote.items.space import item_space
from recollect.remote.messages import (
    DATA_TAG,
    METADATA_TAG,
    Data,
    Exit,
    Failed,
    GetMetadata,
    Hello,
    Items,
    Metadata,
    Sample,
    Scores,
    Welcome,
)
from recollect.remote.ranks import HOST
from recollect.testing.carrier_contract import eventually

TOKEN = b"a token of the tests"
NOBODY = _core.process_word(os.getpid()) + (1 << 40)  # a process that started at another time


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


def hurry(replay: RemoteReplay, deadline: float) -> RemoteReplay:
    """Let a client be welcomed first, and then wait no longer than that."""
    replay.metadata()
    replay.deadline = connection(replay).deadline = deadline
    return replay


def with_deadline(replay: RemoteReplay, deadline: float) -> RemoteReplay:
    replay.deadline = connection(replay).deadline = deadline
    connection(replay).next_retry = 0.0
    return replay


def connection(replay: RemoteReplay) -> Connection:
    return replay._connection


def test_a_draw_of_millions_is_refused_at_once_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = LocalCarrier.group(3, max_frame=1 << 14)
    with ReplayBufferManager(PLAIN, 1, None, communication_backend=ends[1]) as manager:
        manager.start()
        with client(ends[0]) as greedy, client(ends[2]) as other:
            other.add(samples([1, 2, 3]))
            with pytest.raises(BudgetError, match="draw several times"):
                greedy.sample(20_000_000)
            monkeypatch.setattr(
                "recollect.remote.client.client.check_drawn", lambda n, shapes: None
            )  # an older client
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(greedy.sample, 20_000_000)
                assert len(other.sample(3)["id"]) == 3
                with pytest.raises(BudgetError, match="at most .* items in one draw, got 20000000"):
                    asked.result()
            assert len(greedy.sample(4)["id"]) == 4
    for end in ends:
        end.close()


class Silent:
    """A manager's end that welcomes and then answers as many containers as it is told to.

    `refusal` is its answer to Hello, if there is one; of each kind of message in `loses` the next one is lost.
    """

    def __init__(self, end: LocalCarrier, **kw: Any) -> None:
        self.end, self.seen = end, []
        self.fake = manager_protocol(rank=1, **kw)
        self.answers = 0
        self.refusal: str | None = None
        self.loses: list[type] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self.over.is_set():
            try:
                rank, _, frame = self.end.recv(timeout=0.02)
            except DeadlineError:
                continue
            except ClosedError:
                return
            message, _, body = decode(frame)
            self.seen.append(message)
            for dest, tag, parts in self._answers(rank, message, body, frame):
                self.end.send(dest, tag, parts)

    def _answers(self, rank: int, message: Any, body: Any, frame: Any) -> list[tuple[int, int, Any]]:
        if type(message) in self.loses:
            self.loses.remove(type(message))
            return []
        if isinstance(message, Hello) and self.refusal is not None:
            return [(rank, DATA_TAG, encode(Failed(message.request, "RemoteError", self.refusal)))]
        if isinstance(message, Data):
            if not self.answers:
                return []
            self.answers -= 1
        return [
            (reply.dest, reply.tag, reply.parts) for reply in self.fake.handle(rank, message, body, frame)
        ]

    @property
    def held(self) -> list[int]:
        return self.fake.state.buffer[:]["id"].tolist()

    def close(self) -> None:
        self.over.set()
        self.thread.join(5)
        self.fake.close()


class Told:
    """An end that notes by which call frames leave."""

    def __init__(self, end: LocalCarrier) -> None:
        self.end, self.calls = end, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
        self.calls.append(("send", type(decode(b"".join(parts))[0])))
        self.end.send(dest, tag, parts, timeout)

    def isend(self, dest: int, tag: int, parts: Any) -> Any:
        self.calls.append(("isend", type(decode(b"".join(parts))[0])))
        return self.end.isend(dest, tag, parts)


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
        {"when_down": "cry"}, {"retry_s": -1.0}, {"reconnect_s": "30"},
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


MISSING = """
import sys

kinds = {"mpi": "mpi4py", "torch": "torch", "ray": "ray"}
sys.modules.update(dict.fromkeys(kinds.values()))  # as if they were not installed
from recollect.errors import MissingExtraError
from recollect.remote import RayCarrier
from recollect.remote.carriers.by_name import carrier_of

for kind in kinds:
    try:
        RayCarrier.serve("job", 0) if kind == "ray" else carrier_of(kind)
    except MissingExtraError as error:
        print(str(error).replace("\\n", " "))
"""


def test_a_missing_package_is_named_with_its_remedy() -> None:
    """In a process of its own: in this one another test may have made the one carrier of MPI."""
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    for kind, line in zip(("mpi", "torch", "ray"), said, strict=True):
        assert re.search(rf'pip install "recollect\[{kind}\]".*"local"', line)


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
    packed = item_space(PLAIN).encode(samples([3, 4])).rows
    replay = client(ends[0], mode="async_comm")
    replay.add({"id": ids})
    replay.add(packed)
    eventually(lambda: sum(isinstance(m, Data) for m in silent.seen) == 2)  # unheard: both are sent again
    ids[:] = packed[:] = 99
    silent.answers = 9
    replay.close()
    assert silent.held == [0, 1, 2, 3, 4]


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


def test_a_container_that_leaves_no_room_for_a_head_is_refused_before_it_is_taken(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with client(ends[0]) as replay:
        with pytest.raises(FrameError, match="16384 bytes, got"):
            replay.add(samples(range(16384 // 8)))
        stats = replay.stats()
        assert (stats.offered, stats.pending, stats.sent) == (0, 0, 0)
        assert replay.add(samples(range((16384 - 512) // 8))) == {"first": 0.0}
    assert manager.stats().containers == 1


def test_a_carrier_of_larger_frames_brings_larger_answers() -> None:
    line = Connection(item_space(PLAIN), 1, deadline=1.0, retry_s=1.0, reconnect_s=1.0, gives_up=False)
    n = (64 << 20) // 8 + 1
    answer = Items(5, item_space(PLAIN).id, n, n, 0, 1)
    frame = memoryview(b"".join(encode(answer, [np.zeros((n, 8), np.uint8)], max_frame=1 << 27)))
    line.carrier = SimpleNamespace(max_frame=1 << 27, recv=lambda *a: (1, 0, frame))  # type: ignore[assignment]
    line.protocol.expected[5] = []
    line.receive(0.0)
    assert [message for message, _ in line.protocol.expected[5]] == [answer]


def test_a_refused_client_raises_and_greets_again_at_the_next_call(
    ends: list[LocalCarrier], silent: Silent
) -> None:
    replay = client(ends[0])
    silent.refusal = "not yet"
    for _ in range(2):
        with pytest.raises(RemoteError, match="not yet"):
            replay.add(samples([1]))
    silent.refusal, silent.answers = None, 1
    assert replay.add(samples([1])) == {"score": np.inf}
    replay.close()


# -- windows and answers


@pytest.mark.parametrize("mode", ["async_score", "async_comm"])
def test_no_more_than_a_window_is_outstanding(ends: list[LocalCarrier], silent: Silent, mode: str) -> None:
    replay = hurry(client(ends[0], mode=mode, window=3, retry_s=20.0), 0.3)
    assert [replay.add(samples([i])) for i in range(3)] == [None] * 3
    with pytest.raises(DeadlineError, match="an answer") as caught:
        replay.add(samples([3]))
    assert caught.value.accepted is False
    assert replay.stats().pending == replay.stats().offered == 3
    silent.answers = 99
    with_deadline(replay, 10.0)
    assert replay.add(samples([3])) == {"score": np.inf}
    assert len(replay.close()) == 3
    assert silent.held == [0, 1, 2, 3]


@pytest.mark.parametrize("last", [[3], []])
def test_an_add_that_is_given_back_leaves_those_before_it(
    ends: list[LocalCarrier], silent: Silent, last: list[int]
) -> None:
    replay = hurry(client(ends[0], mode="async_comm", window=1, send_every=2, retry_s=20.0), 0.3)
    assert [replay.add(samples([i])) for i in range(3)] == [None] * 3
    with pytest.raises(DeadlineError) as caught:
        replay.add(samples(last))
    assert caught.value.accepted is False and replay.stats().pending == 3
    assert_doors(replay.stats())
    silent.answers = 99
    with_deadline(replay, 10.0)
    assert (
        replay.add(samples(last)) is not None and replay.stats().sent == 2
    )  # it completes the container again
    replay.close()
    assert silent.held == [0, 1, 2, *last]


def test_a_sync_add_past_its_deadline_waits_here(ends: list[LocalCarrier], silent: Silent) -> None:
    replay = hurry(client(ends[0], retry_s=0.05), 0.4)
    with pytest.raises(DeadlineError, match="rank 1.*its answer") as caught:
        replay.add(samples([1]))
    assert caught.value.accepted is True and replay.stats().pending == 1
    eventually(lambda: len([m for m in silent.seen if isinstance(m, Data)]) >= 2)  # it was sent again
    silent.answers = 99
    with_deadline(replay, 10.0)
    assert replay.flush() == [{"score": np.inf}]
    assert replay.stats().kept == 1 and replay.stats().retried >= 1
    replay.close()


def test_a_sync_add_is_never_given_anothers_answer(ends: list[LocalCarrier]) -> None:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        return {"first": float(obj["id"][0])}

    silent = Silent(ends[1], scoring_function=score)
    replay = hurry(client(ends[0], window=1, retry_s=0.1), 0.2)
    with pytest.raises(DeadlineError):
        replay.add(samples([1]))
    silent.answers = 99
    with_deadline(replay, 10.0)
    assert replay.add(samples([2])) == {"first": 2.0}
    assert replay.flush() == [{"first": 1.0}] and replay.close() == []
    silent.close()


def test_a_scoring_error_names_its_container_and_the_rest_is_delivered(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    told = Told(ends[0])
    replay = client(told, mode="async_comm", window=3)
    for ids in ([-1, 0], [1], [2]):
        replay.add(samples(ids))
    with pytest.raises(ScoringError, match="below zero") as caught:
        replay.add(samples([-3]))
    assert (caught.value.seq, caught.value.kept) == (1, 2)
    assert told.calls.count(("isend", Data)) == 4  # the one just given is on its way
    assert replay.add(samples([5])) == {"first": 1.0}
    with pytest.raises(ScoringError) as last:
        replay.close()
    assert last.value.seq == 4 and last.value.scores == [{"first": 2.0}, {"first": 5.0}]
    stats = replay.stats()
    assert_doors(stats)
    assert manager.buffer[:]["id"].tolist() == [-1, 0, 1, 2, -3, 5] and stats.pending == 0


def test_answers_to_no_request_are_dropped_and_counted(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with client(ends[0], retry_s=10.0) as replay:
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
        assert replay.stats().kept == 1 and silent.held == [1]


# -- ending


def test_close_past_its_deadline_says_what_is_lost_and_exits(
    ends: list[LocalCarrier], silent: Silent
) -> None:
    replay = hurry(client(ends[0], mode="async_comm", send_every=2), 0.3)
    for i in range(5):
        replay.add(samples([i, i]))
    with pytest.raises(DeadlineError) as caught:
        replay.close()
    assert caught.value.undelivered == 10
    assert replay.stats().lost == 10 and replay.stats().pending == 0
    assert_doors(replay.stats())
    eventually(lambda: any(isinstance(m, Exit) for m in silent.seen))
    (left,) = {(m.undelivered, m.writer, m.reason) for m in silent.seen if isinstance(m, Exit)}
    writers = {m.writer for m in silent.seen if isinstance(m, Data)}
    assert left[0] == 10 and left[1] in writers and left[2] == "deadline"
    assert replay.close() == []
    with pytest.raises(ClosedError):
        replay.add(samples([1]))


def test_what_was_not_kept_and_could_not_be_scored_leaves_by_a_door_too(ends: list[LocalCarrier]) -> None:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        raise KeyError("never")

    with ReplayBufferManager(SAMPLE, 1, None, score, capacity=1, communication_backend=ends[1]) as made:
        made.start()
        with client(ends[0], SAMPLE) as replay:
            for ids, rewards, kept in (([1], [5.0], 1), ([2, 3], [1.0, 2.0], 0)):
                with pytest.raises(ScoringError, match="never") as caught:
                    replay.add(samples(ids, rewards))
                assert caught.value.kept == kept
            stats = replay.stats()
            assert (stats.kept, stats.rejected, stats.reasons) == (1, 2, {"scoring": 2})
            assert_doors(stats)
        assert made.stats().scoring_errors == 2


def test_of_several_errors_close_raises_the_first(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    replay = client(ends[0], mode="async_score")
    for i in (-1, -2, 3):
        replay.add(samples([i]))
    with pytest.raises(ScoringError) as caught:
        replay.close()
    assert caught.value.seq == 1 and caught.value.scores == [{"first": 3.0}]


def test_leaving_without_an_error_raises_what_closing_does(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with pytest.raises(ScoringError, match="below zero"), client(ends[0], mode="async_score") as replay:
        replay.add(samples([-1]))


@pytest.mark.parametrize(("async_send", "call"), [(True, "isend"), (False, "send")])
def test_a_started_manager_answers_as_it_was_told(
    ends: list[LocalCarrier], async_send: bool, call: str
) -> None:
    told = Told(ends[1])
    with ReplayBufferManager(PLAIN, 1, None, communication_backend=told) as made:
        made.start(async_send)
        with client(ends[0]) as replay:
            replay.add(samples([1]))
    assert {name for name, _ in told.calls} == {call}


@pytest.mark.parametrize(
    "call",
    [
        lambda replay: replay.add(samples([1])),
        lambda replay: replay.flush(),
        lambda replay: replay.sample(1),
        lambda replay: replay.metadata(),
    ],
    ids=["add", "flush", "sample", "metadata"],
)
def test_a_closed_client_says_so(
    ends: list[LocalCarrier], manager: ReplayBufferManager, call: Callable[[RemoteReplay], Any]
) -> None:
    with client(ends[0]) as replay:
        replay.add(samples([1]))
    with pytest.raises(ClosedError, match="was closed"):
        call(replay)


def test_a_second_close_says_nothing(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    told = Told(ends[0])
    replay = client(told, mode="async_score")
    replay.add(samples([1]))
    assert replay.close() == [{"first": 1.0}]
    n = len(told.calls)
    assert replay.close() == [] and len(told.calls) == n


def test_leaving_with_an_error_delivers_and_shows_that_error(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with pytest.raises(KeyError, match="mine"), client(ends[0], mode="async_comm", send_every=3) as replay:
        replay.add(samples([1]))
        raise KeyError("mine")
    assert manager.buffer[:]["id"].tolist() == [1] and manager.exit_counter == 1


def test_leaving_with_an_error_shows_that_error_though_closing_fails(
    ends: list[LocalCarrier], silent: Silent
) -> None:
    with pytest.raises(KeyError, match="mine"), hurry(client(ends[0], mode="async_comm"), 0.2) as replay:
        replay.add(samples([1]))
        raise KeyError("mine")
    assert replay.stats().lost == 1


def test_what_waits_for_a_full_container_is_lost_with_the_rest(ends: list[LocalCarrier]) -> None:
    silent = Silent(ends[1])
    replay = hurry(client(ends[0], send_every=3), 0.2)
    replay.add(samples([1, 2]))
    silent.close()
    with pytest.raises(DeadlineError) as caught:
        replay.close()
    assert caught.value.undelivered == replay.stats().lost == 2
    assert_doors(replay.stats())


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


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_manager_that_comes_back_gets_what_waited(tmp_path: Any, elsewhere: bool) -> None:
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
        server, made = serve("127.0.0.1:0" if elsewhere else address)
        if elsewhere:
            carrier.link([server.address])
        connection(replay).reconnect_s = 10.0
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
        with suppress(PeerDiedError):
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
    with pytest.raises(PeerDiedError, match="manager is gone; 2 items wait here"):
        replay.add(samples([2, 3]))
    assert monotonic() - start < 5.0
    ends[0].close()
    child.close()


@pytest.mark.parametrize(
    ("manager", "is_gone"),
    [((HOST, NOBODY), True), (("elsewhere", NOBODY), False), ((HOST, 0), False), (None, False)],
)
def test_only_a_known_process_of_this_machine_is_looked_at(manager: Any, is_gone: bool) -> None:
    end = LocalCarrier.group(2)[0]
    line = Connection(None, 1, deadline=1.0, retry_s=1.0, reconnect_s=1.0, gives_up=False)
    line.open(Blind(end))
    line.protocol.manager = manager
    with pytest.raises(PeerDiedError, match="rank 1") if is_gone else nullcontext():
        line.receive(0.0)
    end.close()


@pytest.mark.parametrize("sees_death", [True, False])
def test_a_wait_is_cut_short_only_to_look_at_a_process(sees_death: bool) -> None:
    waits: list[float] = []

    def recv(source: int, tag: int, timeout: float) -> Any:
        waits.append(timeout)
        raise DeadlineError("nothing")

    line = Connection(None, 1, deadline=1.0, retry_s=1.0, reconnect_s=1.0, gives_up=False)
    line.open(SimpleNamespace(rank=0, max_frame=1 << 14, sees_death=sees_death, recv=recv))
    for timeout in (60.0, 0.01):
        line.receive(timeout)
    assert waits == [60.0, 0.01] if sees_death else (0.05 < waits[0] < 0.5 and waits[1] == 0.01)


def test_a_client_refused_as_it_reconnects_pauses_between_tries() -> None:
    tries: list[float] = []

    def refuse(dest: int, timeout: float) -> None:
        tries.append(timeout)
        raise AuthError("this rank was shut out")

    def gone(*args: Any) -> Any:
        raise PeerDiedError("rank 1: is gone")

    line = Connection(None, 1, deadline=10.0, retry_s=1.0, reconnect_s=0.2, gives_up=False)
    line.open(SimpleNamespace(rank=0, max_frame=1 << 14, send=gone, recv=gone, reconnect=refuse))
    with pytest.raises(PeerDiedError, match="the manager is gone"):
        line.greet()
    assert 1 <= len(tries) < 50 and max(tries) < 0.201  # no more than is left of `reconnect_s`


class Scripted:
    """A manager by a fake clock: `answer(message)` says what a frame brings; a wait in vain takes its time."""

    rank, size, max_frame = 0, None, 1 << 14

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], list[Any]] = lambda m: []
    ) -> None:
        self.now, self.answer = 0.0, answer
        self.sent: list[tuple[float, Any]] = []
        self.inbox: list[Any] = []
        for clock in ("monotonic", "perf_counter"):
            monkeypatch.setattr(connection_module, clock, lambda: self.now)

    def line(self, **kw: Any) -> Connection:
        kw = {"deadline": 35.0, "retry_s": 10.0, "reconnect_s": 60.0, "gives_up": False, **kw}
        made = Connection(item_space(PLAIN), 1, **kw)
        made.open(self)  # type: ignore[arg-type]
        return made

    def send(self, dest: int, tag: int, parts: Any, timeout: float) -> None:
        message = decode(b"".join(parts))[0]
        self.sent.append((self.now, message))
        self.inbox += self.answer(message)

    def recv(self, source: int, tag: int, timeout: float) -> Any:
        assert timeout > 0  # there is a pause between two looks
        if not self.inbox:
            self.now += timeout + 1e-6
            raise DeadlineError("nothing")
        self.now += 0.5
        message = self.inbox.pop(0)
        if isinstance(message, Exception):
            raise message
        return 1, tag, memoryview(b"".join(message))

    def reconnect(self, dest: int, timeout: float) -> None:
        self.now += 20.0

    def isend(self, dest: int, tag: int, parts: Any) -> Any:
        self.send(dest, tag, parts, 0.0)
        return Done()

    def alive(self) -> frozenset[int]:
        return frozenset({0, 1})

    def close(self) -> None:
        """Nothing to close."""

    def times_of(self, kind: type) -> list[float]:
        return [round(now, 3) for now, message in self.sent if isinstance(message, kind)]


def welcome(hello: Hello) -> list[Any]:
    return encode(Welcome(hello.request, bytes(16), 0, 8, None, hello.space, 0, HOST, 0))


def draw(request: int) -> list[Any]:
    return encode(Sample(request, 1, "uniform", True))


def drawn(request: int) -> list[Any]:
    return encode(Items(request, item_space(PLAIN).id, 1, 1, 0, 1), [np.zeros((1, 8), np.uint8)])


def test_a_client_that_has_reconnected_greets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(message: Any) -> list[Any]:
        return [welcome(message)] if len(carrier.sent) == 2 else [PeerDiedError("rank 1: is gone")]

    carrier = Scripted(monkeypatch, answer)
    line = carrier.line(retry_s=30.0)
    line.greet()
    assert carrier.times_of(Hello) == [0.0, 20.5] and line.protocol.is_ready


def test_a_draw_is_asked_for_every_retry_s_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = Scripted(monkeypatch)
    line = carrier.line()
    line.protocol.is_ready, line.next_retry = True, 5.0
    with pytest.raises(DeadlineError, match="drawn items"):
        line.ask(draw)
    assert carrier.times_of(Sample) == [0.0, 10.0, 20.0, 30.0]
    assert not line.protocol.expected
    carrier.answer = lambda message: [drawn(message.request)]
    assert [message.n for message, _ in line.ask(draw)] == [1] and not line.protocol.expected
    with pytest.raises(DeadlineError, match="the end"):
        line.until(lambda: None, "the end")


def test_a_draw_that_is_answered_late_is_not_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow line each answer takes longer than `retry_s`: the first that is whole is the one."""
    asked: list[int] = []

    def answer(message: Sample) -> list[Any]:
        asked.append(message.request)
        return [drawn(asked[-2])] if len(asked) > 1 else []

    line = Scripted(monkeypatch, answer).line()
    line.protocol.is_ready, line.next_retry = True, 5.0
    [(message, _)] = line.ask(draw)
    assert message.request == asked[0] and len(asked) == 2 and not line.protocol.expected


def test_a_draw_that_reconnects_greets_once_though_other_answers_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stray = encode(Scores(1, {}, 1, 0, {}))

    def answer(message: Any) -> list[Any]:
        if isinstance(message, Hello):
            return [stray, welcome(message)]
        is_first = len(carrier.times_of(Sample)) == 1
        return [PeerDiedError("rank 1: is gone")] if is_first else [drawn(message.request)]

    carrier = Scripted(monkeypatch, answer)
    line = carrier.line()
    line.protocol.is_ready = True
    assert [message.n for message, _ in line.ask(draw)] == [1]
    assert len(carrier.times_of(Hello)) == 1 and line.protocol.stray == 1


def test_what_was_sent_with_the_welcome_is_sent_again_after_retry_s(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = encode(Scores(1, {}, 1, 0, {}))
    carrier = Scripted(
        monkeypatch, lambda message: [stray] * 18 + [welcome(message)] if isinstance(message, Hello) else []
    )
    line = carrier.line()
    line.protocol.put(item_space(PLAIN).encode(samples([1])))
    with pytest.raises(DeadlineError, match="the end"):
        line.until(lambda: None, "the end")
    assert carrier.times_of(Hello) == [0.0] and carrier.times_of(Data) == [9.5, 19.5, 29.5]


def test_later_sends_do_not_put_off_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carrier = Scripted(monkeypatch)
    line = carrier.line(deadline=10.0)
    line.protocol.is_ready = True
    for carrier.now in (1.0, 7.0):
        line.send(line.protocol.put(item_space(PLAIN).encode(samples([1]))).parts)
    with pytest.raises(DeadlineError):
        line.until(lambda: None, "the end")
    assert carrier.times_of(Data) == [1.0, 7.0, 11.0, 11.0]


@pytest.mark.parametrize(
    ("deadline", "retry_s", "times"),
    [(0.1, 10.0, [0.0]), (2.5, 10.0, [0.0, 1.0, 2.0]), (60.0, 2.0, [0.0, 1.0, 2.0, 3.0, 4.0]), (1.0, 0.5, [0.0, 0.5])],
)  # fmt: skip
def test_exit_is_said_again_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, deadline: float, retry_s: float, times: list[float]
) -> None:
    carrier = Scripted(monkeypatch)
    line = carrier.line(deadline=deadline, retry_s=retry_s)
    line.protocol.manager = HOST, 0
    line.leave(0, line.protocol.writer, 5.0)
    assert carrier.times_of(Exit) == times and carrier.now == pytest.approx(
        min(5.0, max(deadline, 1.0)), abs=0.01
    )


def test_parts_of_a_draw_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(sample: Sample) -> list[Any]:
        rows = np.zeros((1, 8), np.uint8)
        return [
            encode(Items(sample.request, item_space(PLAIN).id, 1, 1, part, 3), [rows]) for part in (2, 0, 1)
        ]

    line = Scripted(monkeypatch, answer).line()
    line.protocol.is_ready, line.next_retry = True, 5.0
    assert [message.part for message, _ in line.ask(draw)] == [0, 1, 2]


def test_sends_that_are_complete_are_held_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        def __init__(self, is_done: bool) -> None:
            self.is_done = is_done

        def is_complete(self) -> bool:
            return self.is_done

    carrier = Scripted(monkeypatch)
    handles = [Handle(n != 1) for n in range(4)]
    carrier.isend = lambda *args: handles.pop(0)  # type: ignore[attr-defined]
    refs, line = [weakref.ref(handle) for handle in handles], carrier.line()
    for _ in range(4):
        line.send([b""], wait=False)
    gc.collect()
    assert [ref() is not None for ref in refs] == [False, True, False, True]


@pytest.mark.parametrize(
    "error",
    [PeerDiedError("gone"), DeadlineError("late"), ClosedError("closed"), OSError("cut"), ValueError("odd")],
)
def test_leaving_raises_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    carrier = Scripted(monkeypatch, lambda message: [error])
    line = carrier.line()
    line.leave(3, line.protocol.writer, 5.0)
    assert not carrier.sent  # there was no welcome
    line.protocol.manager = (HOST, 0)
    line.leave(3, line.protocol.writer, 5.0)
    assert [message.undelivered for _, message in carrier.sent][:1] == [3]


def test_metadata_is_asked_for_until_its_time_is_up_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = Scripted(monkeypatch)
    with pytest.raises(DeadlineError, match="12 s"):
        get_metadata(carrier, 1, 12.0, retry_s=5.0)  # type: ignore[arg-type]
    assert carrier.times_of(GetMetadata) == [0.0, 5.0, 10.0] and carrier.now == pytest.approx(12.0)


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
    class Odd(ReplayBufferManager):
        def _inject_baseline_log_reward(self, score_dict: dict[str, float], incoming: Any) -> None:
            score_dict["baseline_log_reward"] = odd

    with Odd(SAMPLE, 1, None, communication_backend=ends[1]) as manager:
        manager.start()
        with client(ends[0], SAMPLE, baseline_filtering=True) as replay:
            replay.add(samples([1], [-1.0]))
            replay.add(samples([2, 3], [-5.0, 5.0]))
            assert replay.stats().filtered == 0 and replay.stats().kept == 3


def test_a_container_for_a_manager_that_never_came_is_not_taken(ends: list[LocalCarrier]) -> None:
    replay = client(ends[0], deadline=0.1)
    with pytest.raises(DeadlineError, match="welcome") as info:
        replay.add(samples([1]))
    assert info.value.accepted is False and replay.stats().offered == 0
    replay.close()


# -- asking


@pytest.mark.parametrize(
    ("container", "n"),
    [
        (samples([1, 2, 3]), 3),
        ({"steps": {"inner": np.zeros((4, 2))}, "id": np.arange(4)}, 4),
        ({}, 0),
        (paths([1, 2], [0.0, 0.0], [3, 4]), 2),
        (object(), 1),
    ],
    ids=["block", "nested", "empty", "trajectories", "something"],
)
def test_what_is_dropped_before_any_space_is_known_is_counted(
    ends: list[LocalCarrier], container: Any, n: int
) -> None:
    with client(ends[0], None, when_down="drop", deadline=0.0) as replay:
        assert replay.add(container) is None
        assert (replay.stats().offered, replay.stats().dropped) == (n, n)


def test_a_wrong_container_is_refused_though_there_is_no_manager(ends: list[LocalCarrier]) -> None:
    with client(ends[0], when_down="drop", deadline=0.0) as replay:
        with pytest.raises(SchemaError):
            replay.add({"x": np.arange(2)})
        assert replay.stats().offered == 0
        assert replay.add(samples([1, 2])) is None and replay.stats().dropped == 2


def test_metadata_is_waited_for_and_asked_for_again_as_the_client_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    carrier = Scripted(monkeypatch, lambda m: [welcome(m)] if isinstance(m, Hello) else [])
    replay = client(carrier, deadline=7.0, retry_s=3.0)
    with pytest.raises(DeadlineError, match="7 s"):
        replay.metadata()
    assert carrier.times_of(GetMetadata) == [0.5, 3.5, 6.5]
    replay.close()


def test_metadata_leaves_scores_alone_and_old_answers_aside(ends: list[LocalCarrier], silent: Silent) -> None:
    silent.answers = 9
    with client(ends[0], mode="async_comm", retry_s=5.0) as replay:
        for i in range(2):
            replay.add(samples([i]))
        ends[1].send(0, METADATA_TAG, encode(Metadata(123, {"old": 1})))
        ends[1].send(0, METADATA_TAG, [b"not a frame"])
        got = replay.metadata()
        assert "old" not in got and got["length"] == 2 and replay.stats().stray == 1
        assert len(replay.flush()) == 2 and replay.stats().retried == 0


def test_metadata_waits_for_no_scores(ends: list[LocalCarrier], silent: Silent) -> None:
    replay = client(ends[0], mode="async_comm")
    replay.add(samples([1]))
    assert replay.metadata()["length"] == 0
    with pytest.raises(DeadlineError):
        with_deadline(replay, 0.2).close()


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_metadata_is_waited_for_a_finite_time(ends: list[LocalCarrier], timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        ReplayBufferManager.get_metadata(1, ends[0], timeout=timeout)


def test_metadata_is_asked_for_again_and_ends_in_time(ends: list[LocalCarrier]) -> None:
    with pytest.raises(DeadlineError, match=r"rank 1.*0\.05 s"):
        ReplayBufferManager.get_metadata(1, ends[0], timeout=0.05)
    with pytest.raises(ValueError, match="timeout"):
        ReplayBufferManager.get_metadata(1, ends[0], timeout=float("nan"))
    asked: list[int] = []

    def answer_the_second() -> None:
        while len(asked) < 2:
            message, _, _ = decode(ends[1].recv(0, timeout=10.0)[2])
            assert isinstance(message, GetMetadata)
            asked.append(message.request)
        ends[1].send(0, METADATA_TAG, encode(Metadata(message.request, {"x": 1}), tag=METADATA_TAG))

    ends[1].recv(0, timeout=10.0)  # of the first call
    thread = threading.Thread(target=answer_the_second, daemon=True)
    thread.start()
    assert get_metadata(ends[0], 1, 10.0, retry_s=0.05) == {"x": 1} and asked[0] == asked[1]
    thread.join(10.0)


def test_a_draw_waits_for_no_adds_and_is_asked_for_again(ends: list[LocalCarrier], silent: Silent) -> None:
    silent.fake.add_local(samples([5]), -1)
    silent.loses = [Sample]
    replay = client(ends[0], mode="async_comm", retry_s=0.1)
    replay.add(samples([1]))
    assert replay.sample(3)["id"].tolist() == [5, 5, 5] and silent.loses == []
    assert replay.stats().pending == 1
    silent.answers = 9
    replay.close()


def test_nothing_to_draw_is_told_as_such(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    with client(ends[0]) as replay, pytest.raises(EmptyError, match="nothing can be drawn"):
        replay.sample(1)


def test_a_number_of_items_may_be_one_of_numpy(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with client(ends[0]) as replay:
        replay.add(samples([1]))
        assert replay.sample(np.int64(3))["id"].tolist() == [1, 1, 1]


def test_drawn_items_of_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(message: Any) -> list[Any]:
        if isinstance(message, Hello):
            return [welcome(message)]
        items = Items(message.request, layout, 1, 1, 0, 1)
        return [encode(items, [np.full((1, 8), 7, np.uint8)])] if isinstance(message, Sample) else []

    replay = client(Scripted(monkeypatch, answer))
    layout = item_space(PLAIN).id
    assert len(replay.sample(1)["id"]) == 1
    layout = bytes(16)
    with pytest.raises(FrameError, match="layout of this client"):
        replay.sample(1)
    replay.close()


def test_how_to_draw_travels(ends: list[LocalCarrier]) -> None:
    with ReplayBufferManager(SAMPLE, 1, None, communication_backend=ends[1]) as manager:
        manager.add(samples(range(20), [-np.inf] * 19 + [0.0]))
        manager.start()
        with client(ends[0], SAMPLE) as replay:
            assert set(replay.sample(50, by="log_reward")["id"].tolist()) == {19}
            assert sorted(replay.sample(20, replace=False)["id"].tolist()) == list(range(20))
            with pytest.raises(ValueError, match="by"):
                replay.sample(1, by="luck")
            with pytest.raises(ValueError, match="n:"):
                replay.sample(-1)


# -- what is told


def test_sends_bytes_and_seconds_are_counted(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    with client(ends[0], retry_s=10.0) as replay:
        replay.add(samples([1]))
        replay.add(samples([2, 3]))
        stats = replay.stats()
    assert stats.nbytes == manager.stats().senders[0].nbytes - len(
        b"".join(encode(Exit(2**60, bytes(16), 0, "")))
    )
    assert stats.encode_s > 0 and stats.send_s > 0 and stats.wait_s > 0
    assert (stats.sent, stats.retried, stats.pending) == (2, 0, 0)


def test_a_trajectory_is_one_item_however_many_steps_it_has(ends: list[LocalCarrier]) -> None:
    with ReplayBufferManager(grid(), 1, None, communication_backend=ends[1], max_length=MAX_LENGTH) as made:
        made.start()
        with client(ends[0], grid()) as replay:
            replay.add(paths([1, 2], [0.0, 1.0], [3, 4]))
            assert replay.stats().offered == replay.stats().kept == 2
            assert_doors(replay.stats())


def test_seconds_to_encode_are_those_of_packing_and_of_framing(
    ends: list[LocalCarrier], manager: ReplayBufferManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second at each look at it."""
    monkeypatch.setattr("recollect.remote.client.client.perf_counter", count(0.0).__next__)
    with client(ends[0], send_every=2) as replay:
        replay.add(samples([1]))
        assert replay.stats().encode_s == 1.0
        replay.add(samples([2]))
        assert replay.stats().encode_s == 3.0


def test_stats_wait_for_a_thread_that_adds(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    """What is taken and not counted yet would be missing."""
    sends, goes_on = threading.Event(), threading.Event()

    class Slow(Told):
        def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
            sends.set()
            assert goes_on.wait(10.0)
            super().send(dest, tag, parts, timeout)

    replay = client(Slow(ends[0]))
    with ThreadPoolExecutor(2) as beside:
        adding = beside.submit(replay.add, samples([1]))
        assert sends.wait(10.0)
        waiting = beside.submit(replay.stats)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        goes_on.set()
        adding.result(10.0)
        assert waiting.result(10.0).offered == 1
    replay.close()


def test_reasons_of_the_manager_reach_the_worker(ends: list[LocalCarrier]) -> None:
    with ReplayBufferManager(SAMPLE, 1, None, capacity=1, communication_backend=ends[1]) as manager:
        manager.start()
        with client(ends[0], SAMPLE) as replay:
            replay.add(samples([1, 2], [1.0, 0.0]))
            assert replay.stats().reasons == {"too_low": 1} and replay.stats().kept == 1


def test_a_container_that_was_refused_says_which_and_is_lost(
    ends: list[LocalCarrier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    save = Checkpoint(tmp_path)
    with ReplayBufferManager(PLAIN, 1, None, communication_backend=ends[1], checkpoint=save) as manager:
        manager.start()
        with client(ends[0]) as replay:
            replay.add(samples([1]))
            with monkeypatch.context() as disk:
                disk.setattr("recollect.remote.manager.checkpoint.os.writev", full)
                with pytest.raises(RemoteError, match="No space") as caught:
                    replay.add(samples([2]))
            assert (caught.value.seq, caught.value.kept) == (2, 0)
            assert replay.add(samples([3])) == {"score": np.inf}
            assert replay.stats().lost == 1
            assert_doors(replay.stats())
        assert manager.buffer[:]["id"].tolist() == [1, 3]


def test_a_client_that_became_another_writer_while_closing_leaves_as_that_one(
    ends: list[LocalCarrier], silent: Silent
) -> None:
    silent.answers = 99
    replay = client(ends[0], send_every=2)
    assert [replay.add(samples([i])) is None for i in range(3)] == [True, False, True]
    forgetful, silent.fake = silent.fake, manager_protocol(rank=1)
    with pytest.warns(RuntimeWarning, match="came back without 2 items"):
        assert len(replay.close()) == 1
    forgetful.close()
    said = {type(message): message for message in silent.seen}
    assert said[Exit].writer == said[Hello].writer != silent.seen[0].writer
    assert silent.held == [2]


# -- windows that the manager sets


def test_a_window_is_never_beyond_the_managers(ends: list[LocalCarrier]) -> None:
    silent = Silent(ends[1], limits=Limits(max_window=2))
    replay = hurry(client(ends[0], mode="async_comm", window=9, retry_s=20.0), 0.2)
    assert [replay.add(samples([i])) for i in range(2)] == [None, None]
    with pytest.raises(DeadlineError, match="an answer"):
        replay.add(samples([2]))
    with pytest.raises(DeadlineError):
        replay.close()
    silent.close()


def test_nor_is_it_when_what_waits_is_flushed(ends: list[LocalCarrier]) -> None:
    silent = Silent(ends[1], limits=Limits(max_window=1))
    replay = hurry(client(ends[0], mode="async_comm", send_every=2, retry_s=20.0), 0.2)
    assert [replay.add(samples([i])) for i in range(3)] == [None] * 3
    with pytest.raises(DeadlineError, match="room"):
        replay.flush()
    assert [message.seq for message in silent.seen if isinstance(message, Data)] in ([], [1])
    silent.answers = 99
    with_deadline(replay, 10.0)
    assert len(replay.flush()) == 2 and silent.held == [0, 1, 2]
    replay.close()
    silent.close()


def test_unanswered_adds_of_a_sync_client_are_bounded_too(ends: list[LocalCarrier]) -> None:
    silent = Silent(ends[1], limits=Limits(max_window=1))
    replay = hurry(client(ends[0], retry_s=20.0), 0.2)
    for accepted, what in ((True, "its answer"), (False, "room in its window")):
        with pytest.raises(DeadlineError, match=what) as caught:
            replay.add(samples([1]))
        assert caught.value.accepted is accepted
    with pytest.raises(DeadlineError) as caught:
        replay.close()
    assert caught.value.undelivered == 1
    silent.close()


@pytest.mark.parametrize(
    ("mode", "call"), [("sync", "send"), ("async_score", "send"), ("async_comm", "isend")]
)
def test_only_async_comm_does_not_wait_for_the_carrier(
    ends: list[LocalCarrier], manager: ReplayBufferManager, mode: str, call: str
) -> None:
    told = Told(ends[0])
    with client(told, mode=mode, retry_s=10.0) as replay:
        replay.add(samples([1]))
        assert [name for name, kind in told.calls if kind is Data] == [call]


# -- filtering


def test_a_baseline_known_from_the_welcome_filters_the_first_container(ends: list[LocalCarrier]) -> None:
    with ReplayBufferManager(SAMPLE, 1, None, capacity=2, communication_backend=ends[1]) as manager:
        manager.add(samples([1, 2], [3.0, 4.0]))
        manager.start()
        with client(ends[0], SAMPLE, baseline_filtering=True, refresh_after=2) as replay:
            assert replay.baseline is None
            assert (
                replay.add(samples([5, 6], [3.0, 2.9])) is not None
            )  # as good as the baseline is good enough
            assert (replay.stats().filtered, replay.stats().kept, replay.baseline) == (1, 1, 3.0)
            for _ in range(3):  # one that passes ends the row
                assert replay.add(samples([7], [0.0])) is None
                assert replay.add(samples([8], [3.5])) is not None
            assert (replay.stats().skipped, replay.stats().forced) == (3, 0)
            for i in range(6):
                assert (replay.add(samples([9], [0.0])) is None) == (i % 2 == 0)
            assert (replay.stats().skipped, replay.stats().forced) == (6, 3)
            assert_doors(replay.stats())


def test_a_container_of_bad_values_alone_is_not_sent(ends: list[LocalCarrier]) -> None:
    with ReplayBufferManager(SAMPLE, 1, None, capacity=1, communication_backend=ends[1]) as manager:
        manager.add(samples([1], [3.0]))
        manager.start()
        with client(ends[0], SAMPLE, baseline_filtering=True, refresh_after=2) as replay:
            assert replay.add(samples([2], [0.0])) is None
            assert replay.add(samples([3, 4], [np.nan, np.inf])) is None  # nothing of it could be sent
            assert replay.add(samples([5], [0.0])) == {"score": np.inf, "baseline_log_reward": 3.0}
            stats = replay.stats()
            assert (stats.skipped, stats.forced, stats.filtered) == (1, 1, 1)
            assert stats.reasons == {"bad_value": 2, "too_low": 1}
            replay.add(samples([6, 7], [np.inf, 4.0]))  # the first is above the baseline, and none to send
            stats = replay.stats()
            assert (stats.reasons["bad_value"], stats.kept) == (3, 1)
            assert_doors(stats)


def test_filtering_needs_rewards_of_the_managers_space_too(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    with (
        client(ends[0], None, baseline_filtering=True) as replay,
        pytest.raises(ValueError, match="log_reward"),
    ):
        replay.add(samples([1]))


def test_samples_may_be_scored_only_too(ends: list[LocalCarrier], manager: ReplayBufferManager) -> None:
    with client(ends[0], scoring_only=True) as replay:
        assert replay.add(samples([4])) == {"first": 4.0}
        assert replay.stats().passed == 1 and len(manager.buffer) == 0


def test_what_waits_for_a_full_container_is_dropped_with_the_rest() -> None:
    server = TcpCarrier.serve(1, token=TOKEN)
    made = ReplayBufferManager(PLAIN, 1, None, communication_backend=server).start()
    carrier = TcpCarrier.join([server.address], token=TOKEN, rank=0)
    replay = client(carrier, when_down="drop", reconnect_s=0.1, send_every=3)
    for i in range(4):
        replay.add(samples([i]))
    made.close()
    server.close()
    with pytest.raises(PeerDiedError):
        replay.sample(1)
    assert replay.stats().pending == 1 and replay.add(samples([7])) is None
    assert (replay.stats().kept, replay.stats().dropped, replay.stats().pending) == (3, 2, 0)
    assert_doors(replay.stats())
    carrier.close()


@pytest.mark.parametrize("weak", [True, False])
def test_a_carrier_with_the_id_of_one_that_is_gone_was_not_used(weak: bool) -> None:
    class Used:
        __slots__ = ("__weakref__",) if weak else ("rank",)

    client: Any = SimpleNamespace(manager_rank=7)
    carrier: Any = Used()
    address = id(carrier)
    client_module.register_open(client, carrier, list)
    client_module.forget_open(client)
    assert client_module.was_used(carrier, 7) and not client_module.was_used(carrier, 8)
    del carrier
    others: list[Any] = []
    while len(others) < 100 and (not others or id(others[-1]) != address):
        others.append(Used())
    assert not any(client_module.was_used(other, 7) for other in others)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of a weak reference's callback
def test_a_client_that_was_interrupted_as_it_opened_gives_its_place_back(
    ends: list[LocalCarrier], manager: ReplayBufferManager
) -> None:
    for n in range(60):
        cut = client(ends[0])
        interrupted(cut.metadata, n, "line")
        apart(cut.close)
        with client(ends[0]) as replay:
            assert apart(replay.metadata)

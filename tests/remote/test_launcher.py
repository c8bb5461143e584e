"""launch: what each rank is told, which ranks are started again, and what is said of one that ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.remote.make import PLAIN, SAMPLE, samples

from recollect.errors import WorkerError
from recollect.remote import LocalCarrier, ReplayBufferManager, launch, rank_layout
from recollect.remote import launcher as launching
from recollect.remote.launcher import Context, _Launch, _RankProcess, most_restarts, run_rank
from recollect.testing.carrier_contract import SOON, eventually

FORK = multiprocessing.get_context("fork")


class Idle:
    """A manager that has nothing to do."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def run(self) -> str:
        return f"stats of {self.ctx.rank}"

    def close(self) -> None:
        pass


class Waiting(Idle):
    """A manager that stays until its worker is done."""

    def run(self) -> str:
        self.ctx.carrier.recv(timeout=SOON)
        return super().run()


def look(ctx: Context) -> Any:
    """A worker that sees which ranks are there, and says when it is done."""
    seen = sorted(ctx.carrier.alive()), ctx.carrier.token
    ctx.carrier.send(ctx.manager_rank, 0, [b"done"])
    return seen


def family(kind: str = "local", n_workers: int = 1) -> _Launch:
    return _Launch(lambda ctx: None, Idle, rank_layout(n_workers + 1), kind, 0, 0)


# -- what a rank is told


def test_every_rank_is_told_its_rank_and_its_manager() -> None:
    ends, layout = LocalCarrier.group(5), rank_layout(5, 2)
    told: list[Context] = []

    def note(ctx: Context) -> Any:
        told.append(ctx)
        return Idle(ctx)

    for end in ends:
        run_rank(note, note, layout, end, 3)
    assert [(ctx.rank, ctx.manager_rank) for ctx in told] == [(0, 3), (1, 4), (2, 3), (3, 3), (4, 4)]
    assert all(ctx.layout is layout and ctx.carrier is ends[ctx.rank] for ctx in told)
    assert len({ctx.seed for ctx in told}) == 5


def test_a_client_of_a_rank_is_made_as_told() -> None:
    (end, _), layout = LocalCarrier.group(2), rank_layout(2)
    replay = Context(0, 1, layout, end, 0).replay(SAMPLE, mode="async_comm", window=7)
    assert (replay.manager_rank, replay.mode, replay.window) == (1, "async_comm", 7)
    assert replay.communication_backend is end


@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_where_every_rank_calls_it_each_has_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for end in LocalCarrier.group(3):
        monkeypatch.setattr(launching, "carrier_of", {kind: end}.__getitem__)
        out = launch(lambda ctx: ctx.rank * 10, Idle, carrier=kind)
        want = ({end.rank: end.rank * 10}, {}) if end.rank < 2 else ({}, {2: "stats of 2"})
        end.close()
        assert (out.results, out.stats) == want


@pytest.mark.parametrize("n_workers", [1, 3])
def test_the_world_must_have_neither_fewer_ranks_nor_more(
    monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    end = LocalCarrier.group(3)[0]
    monkeypatch.setattr(launching, "carrier_of", lambda name: end)
    with pytest.raises(ValueError, match=f"must be the 3 ranks there are, got {n_workers + 1}"):
        launch(lambda ctx: None, Idle, n_workers=n_workers, carrier="mpi")


def test_a_world_whose_peers_come_and_go_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    end = LocalCarrier.group(3)[1]
    end.size = None
    monkeypatch.setattr(launching, "carrier_of", lambda name: end)
    assert launch(lambda ctx: "done", Idle, carrier="torch").results == {1: "done"}
    end.close()


@pytest.mark.parametrize(("n_workers", "n_managers"), [(0, 1), (-1, 3), (1, 0), (2, -1)])
def test_a_launch_needs_a_worker_and_a_manager(n_workers: int, n_managers: int) -> None:
    with pytest.raises(ValueError, match="n_managers"):
        launch(lambda ctx: None, Idle, n_workers=n_workers, n_managers=n_managers)


@pytest.mark.process
def test_every_launch_over_tcp_has_a_token_of_its_own() -> None:
    tokens = [launch(look, Waiting, n_workers=1, carrier="tcp").results[0][1] for _ in range(2)]
    assert tokens[0] != tokens[1] and {len(token) for token in tokens} == {32}


@pytest.mark.process
def test_workers_over_tcp_are_connected_to_all_managers(tmp_path: Path) -> None:
    def together(ctx: Context) -> Any:
        seen = sorted(ctx.carrier.alive())
        (tmp_path / f"{ctx.rank}").touch()
        eventually((tmp_path / f"{1 - ctx.rank}").exists)  # no manager ends before both have looked
        look(ctx)
        return seen

    out = launch(together, Waiting, n_managers=2, carrier="tcp")
    assert out.results == {0: [0, 2, 3], 1: [1, 2, 3]}


# -- one that ended


def test_a_manager_may_die_once_and_all_may_die_as_often_as_told() -> None:
    layout = rank_layout(3)
    assert [most_restarts(0, layout, n) for n in (0, 1, 3)] == [0, 1, 3]
    assert [most_restarts(2, layout, n) for n in (0, 1, 3)] == [1, 1, 3]


@pytest.mark.process
@pytest.mark.parametrize(("rank", "max_restarts", "lives"), [(0, 0, 1), (0, 2, 3), (1, 0, 2), (1, 2, 3)])
def test_a_rank_that_dies_too_often_is_an_error_with_its_exit_code(
    tmp_path: Path, rank: int, max_restarts: int, lives: int
) -> None:
    def die(ctx: Context) -> Any:
        if ctx.rank != rank:
            return Idle(ctx) if ctx.rank else None
        with open(tmp_path / "lives", "a") as file:
            file.write("x")
        os._exit(3)

    with pytest.raises(
        WorkerError, match=f"^launch: rank {rank}: its process ended with code 3 without a result$"
    ):
        launch(die, die, n_workers=1, max_restarts=max_restarts)
    assert (tmp_path / "lives").read_text() == "x" * lives


@pytest.mark.process
def test_ranks_that_raise_or_exit_are_not_started_again_and_all_are_named(tmp_path: Path) -> None:
    def fail(ctx: Context) -> None:
        with open(tmp_path / f"{ctx.rank}", "a") as file:
            file.write("x")
        if ctx.rank == 1:
            sys.exit("there is nothing to do")
        raise KeyError(f"of {ctx.rank}")

    with pytest.raises(
        WorkerError,
        match="(?s)^launch: rank 0: .*of 0.*rank 1: .*SystemExit: there is nothing.*rank 2: .*of 2",
    ):
        launch(fail, fail, max_restarts=3)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["x"] * 3


@pytest.mark.process
def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(WorkerError, match="(?s)rank 0: .*pickle"):
        launch(lambda ctx: threading.Lock(), Idle, n_workers=1)


class Told:
    """The pipe of a child that ended just now: at the first look there was nothing in it."""

    def __init__(self, *words: tuple[str, Any]) -> None:
        self.words, self.n_looks, self.closed = list(words), 0, False

    def poll(self, timeout: float) -> bool:
        self.n_looks += 1
        return self.n_looks > 1 and not self.closed

    def recv(self) -> tuple[str, Any]:
        if not self.words:
            raise EOFError
        return self.words.pop(0)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ([("result", 7)], ("result", 7)),
        ([("address", "here:1"), ("stats", 8)], ("stats", 8)),
        ([("error", "it says why")], ("error", "it says why")),
        ([("address", "here:1")], ("error", "rank 0: its process ended with code -9 without a result")),
        ([], ("error", "rank 0: its process ended with code -9 without a result")),
    ],
)
def test_what_a_child_sent_before_it_ended_counts(
    monkeypatch: pytest.MonkeyPatch, words: list[Any], outcome: tuple[str, Any]
) -> None:
    made, pipe = family(), Told(*words)
    ended = SimpleNamespace(sentinel=0, exitcode=-9, is_alive=lambda: False, join=lambda: None)
    made.children[0] = child = _RankProcess(0, ended, pipe)  # type: ignore[arg-type]
    monkeypatch.setattr(launching, "wait", lambda *args, **kw: None)
    made._watch()
    assert child.outcome == outcome
    assert pipe.closed == ("without a result" in str(outcome))


# -- managers that do not listen yet


def instead(monkeypatch: pytest.MonkeyPatch, first: Callable[[int], None]) -> None:
    """Let children do something before they have a carrier."""
    tcp_end = launching._tcp_end

    def begin(layout: Any, rank: int, *args: Any) -> Any:
        first(rank)
        return tcp_end(layout, rank, *args)

    monkeypatch.setattr(launching, "_tcp_end", begin)


@pytest.mark.process
def test_a_manager_that_dies_before_it_listens_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def die_once(rank: int) -> None:
        if rank == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(3)

    instead(monkeypatch, die_once)
    out = launch(look, Waiting, n_workers=1, carrier="tcp")
    assert out.results[0][0] == [0, 1] and (tmp_path / "died").exists()


@pytest.mark.process
def test_a_manager_that_cannot_listen_is_an_error_before_any_worker_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cannot(rank: int) -> None:
        (tmp_path / f"{rank}").touch()
        if rank == 2:
            raise OSError("no such place")

    instead(monkeypatch, cannot)
    with pytest.raises(WorkerError, match="(?s)^launch: rank 2: .*no such place") as caught:
        launch(lambda ctx: None, Waiting, n_workers=1, n_managers=2, carrier="tcp")
    assert "rank 0" not in str(caught.value) and not (tmp_path / "0").exists()


@pytest.mark.process
def test_managers_have_a_while_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launching._LISTEN_S == 60.0
    instead(monkeypatch, lambda rank: threading.Event().wait(100))
    monkeypatch.setattr(launching, "_LISTEN_S", 0.0)
    with pytest.raises(WorkerError, match="rank 1: did not begin to listen within 0 s"):
        launch(lambda ctx: None, Idle, n_workers=1, carrier="tcp")


# -- the end


def interrupt_when(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Interrupt a launch once a child has made a file."""

    def interrupted(*args: Any, **kw: Any) -> None:
        eventually(path.exists)
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "wait", interrupted)


@pytest.mark.process
def test_a_child_that_is_not_done_is_told_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def leave(number: int, frame: Any) -> None:
        (tmp_path / "told").touch()
        os._exit(0)

    def work(ctx: Context) -> None:
        signal.signal(signal.SIGTERM, leave)
        (tmp_path / "ready").touch()
        threading.Event().wait(100)

    interrupt_when(monkeypatch, tmp_path / "ready")
    with pytest.raises(KeyboardInterrupt):
        launch(work, Idle, n_workers=1)
    assert (tmp_path / "told").exists()


@pytest.mark.process
def test_a_child_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(ctx: Context) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "ready").touch()
        threading.Event().wait(100)

    monkeypatch.setattr(launching, "_END_S", 0.05)
    interrupt_when(monkeypatch, tmp_path / "ready")
    with pytest.raises(KeyboardInterrupt):
        launch(work, Idle, n_workers=1)
    assert not [child for child in multiprocessing.active_children() if "recollect-rank" in child.name]


@pytest.mark.process
def test_a_child_that_gave_its_result_may_end_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its carrier is closed by then."""
    gathered = _Launch._outcomes

    def let_end(self: _Launch) -> Any:
        (tmp_path / "go").touch()
        return gathered(self)

    def work(ctx: Context) -> int:
        def at_exit() -> None:
            eventually((tmp_path / "go").exists)
            (tmp_path / "left").write_text(str(ctx.carrier.is_closed))

        Finalize(None, at_exit, exitpriority=0)
        return 7

    monkeypatch.setattr(_Launch, "_outcomes", let_end)
    assert launch(work, Idle, n_workers=1).results == {0: 7}
    assert (tmp_path / "left").read_text() == "True"


@pytest.mark.process
def test_a_child_ends_though_its_result_is_not_read(capfd: pytest.CaptureFixture[str]) -> None:
    """As when the process that launched it was killed: it does not wait for a reader that is itself."""
    (end, _), (ours, theirs) = LocalCarrier.group(2), FORK.Pipe()
    args = (lambda ctx: bytes(8 << 20), Idle, rank_layout(2), "local", 0, end, b"", {}, 0, theirs, ours)
    child = FORK.Process(target=launching._child, args=args, daemon=True)
    child.start()
    del args
    ours.close()
    theirs.close()
    child.join(SOON)
    assert child.exitcode == 1 and "BrokenPipeError" in capfd.readouterr().err
    child.close()


def raises_first(ctx: Context) -> Any:
    raise ArithmeticError("before the first word")


def manage_two(ctx: Context) -> ReplayBufferManager:
    return ReplayBufferManager(PLAIN, ctx.rank, 2, communication_backend=ctx.carrier)


@pytest.mark.parametrize("kind", ["local", "tcp"])
@pytest.mark.parametrize("ends", ["raises", "dies", "returns"])
def test_a_worker_that_ends_before_its_first_message_is_not_waited_for(kind: str, ends: str) -> None:
    """Its manager would wait for it for `join_s`, far beyond the time that this test has."""

    def work(ctx: Context) -> Any:
        if ctx.rank == 0:
            with ctx.replay(PLAIN) as replay:
                return replay.add(samples([1]))
        if ends == "raises":
            raises_first(ctx)
        if ends == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(launch, work, manage_two, n_workers=2, carrier=kind)
        if ends == "returns":
            assert set(found.result(30.0).results) == {0, 1}
        else:
            with pytest.raises(WorkerError, match="before the first word" if ends == "raises" else "code -9"):
                found.result(30.0)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_late_or_restarted_manager_is_told_which_workers_left_before(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long it takes: a worker that leaves sends Exit until the manager answers."""
    monkeypatch.setattr(launching, "_LEAVE_S", 0.05)

    def manage(ctx: Context) -> ReplayBufferManager:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            ctx.carrier.recv(timeout=SOON)  # a worker has sent Exit, and this manager dies with it
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(0.5)  # it takes a while to open, longer than a word needs to leave
        return manage_two(ctx)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(launch, raises_first, manage, n_workers=2, carrier=kind)
        with pytest.raises(WorkerError, match="before the first word"):
            found.result(30.0)


@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_where_every_rank_calls_launch_a_manager_is_told_which_workers_left_before(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The worker's error is raised at once; the manager ends when it has begun, and waits for no worker."""
    ends = LocalCarrier.group(3)
    for end in ends[:2]:
        monkeypatch.setattr(launching, "carrier_of", lambda name, end=end: end)
        with pytest.raises(ArithmeticError, match="before the first word"):
            launch(raises_first, manage_two, carrier=kind)
    monkeypatch.setattr(launching, "carrier_of", lambda name: ends[2])
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(launch, raises_first, manage_two, carrier=kind).result(30.0)
    assert out.stats[2].exit_counter == 2
    for end in ends:
        end.close()

"""Real processes: killed workers, killed managers, slow readers, faulty networks, and launch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from tests.remote.make import SAMPLE, assert_doors, samples
from tests.timing import Stopwatch

from recollect.errors import PeerDiedError, WorkerError
from recollect.remote import (
    Checkpoint,
    Limits,
    LocalCarrier,
    RemoteReplay,
    ReplayBufferManager,
    TcpCarrier,
    launch,
    rank_layout,
)
from recollect.remote import launcher as launching
from recollect.testing import FaultyCarrier
from recollect.testing.carrier_contract import eventually

FORK = multiprocessing.get_context("fork")
TOKEN = b"a token of the tests"
pytestmark = pytest.mark.process


def serve(address: str, path: str, ready: Any, n: int | None) -> None:
    """A manager with a checkpoint, in a process of its own."""
    carrier = TcpCarrier.serve(9, address, token=TOKEN)
    save = Checkpoint(path, every_s=0.05, resume=True)
    limits = Limits(rejoin_s=5.0)
    made = ReplayBufferManager(SAMPLE, 9, n, capacity=100_000, communication_backend=carrier, checkpoint=save,
                               limits=limits)  # fmt: skip
    ready.send(carrier.address)
    made.run()
    made.close()
    carrier.close()


def started(address: str, path: Path, n: int | None = None) -> tuple[Any, str]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(address, str(path), theirs, n))
    process.start()
    theirs.close()
    assert ours.poll(20)
    address = ours.recv()
    ours.close()
    return process, address


def test_a_killed_manager_comes_back_with_all_it_acknowledged(tmp_path: Path) -> None:
    """Killed at random moments while it dumps, logs and answers; every container is stored once, in order."""
    process, address = started("127.0.0.1:0", tmp_path)
    rng = np.random.default_rng(0)
    carrier = TcpCarrier.join([address], token=TOKEN, rank=0)
    n_kills = 0
    with RemoteReplay(
        SAMPLE, 9, carrier, mode="async_score", retry_s=0.3, deadline=20.0, reconnect_s=20.0
    ) as replay:
        for i in range(300):
            if i % 60 == 30:
                kill = threading.Timer(float(rng.uniform(0, 0.02)), os.kill, (process.pid, signal.SIGKILL))
                # By itself: if the manager dies before it has made room, this waits for the next one.
                with ThreadPoolExecutor(1) as beside:
                    kill.start()
                    added = beside.submit(replay.add, samples([2 * i, 2 * i + 1], [0.0, 1.0]))
                    process.join(20)
                    kill.join()
                    n_kills += 1
                    process.close()
                    process, _ = started(address, tmp_path)
                    added.result(30)
            else:
                replay.add(samples([2 * i, 2 * i + 1], [0.0, 1.0]))
        replay.flush()
        drawn = replay.sample(600, replace=False)
        assert sorted(drawn["id"].tolist()) == list(range(600))
        stats = replay.stats()
        assert (stats.kept, stats.forgotten, stats.pending) == (600, 0, 0)
        assert_doors(stats)
    assert n_kills == 5
    carrier.close()
    process.terminate()
    process.join(10)
    process.close()


def work_until_killed(end: Any, ready: Any) -> None:
    replay = RemoteReplay(SAMPLE, 2, end)
    for i in range(10_000_000):
        replay.add(samples([i], [0.0]))
        if i == 20:
            ready.set()


def test_a_killed_worker_costs_its_unfinished_frame_and_no_more() -> None:
    ends = LocalCarrier.group(3)
    made = ReplayBufferManager(SAMPLE, 2, 2, capacity=1_000_000, communication_backend=ends[2]).start()
    ready = FORK.Event()
    victim = FORK.Process(target=work_until_killed, args=(ends[0], ready))
    victim.start()
    with RemoteReplay(SAMPLE, 2, ends[1], deadline=10.0) as replay:
        assert ready.wait(20)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        start = Stopwatch()
        eventually(lambda: made.exit_counter == 1)
        assert start.s < 1.0
        replay.add(samples([-1], [0.0]))
    eventually(lambda: not made.is_running)
    assert made.exit_counter == 2
    ids = made.buffer[:]["id"]
    theirs = sorted(ids[ids >= 0].tolist())
    assert theirs == list(range(len(theirs))) and len(theirs) > 20
    assert_doors(made.stats())
    made.close()
    victim.close()
    for end in ends:
        end.close()


def never_read(end: Any, ready: Any, stop: Any) -> None:
    """Ask for much and take nothing: 60 draws of 1 MB that are never received."""
    from recollect.remote.frame import encode
    from recollect.remote.messages import Sample

    for request in range(60):
        end.send(2, 0, encode(Sample(request, 60_000, "uniform", True)))
    ready.set()
    stop.wait(60)


def test_a_worker_that_does_not_read_delays_no_other() -> None:
    ends = LocalCarrier.group(3)
    made = ReplayBufferManager(SAMPLE, 2, None, communication_backend=ends[2]).start()
    made.add(samples(range(100), np.zeros(100)))
    ready, stop = FORK.Event(), FORK.Event()
    slow = FORK.Process(target=never_read, args=(ends[0], ready, stop))
    with RemoteReplay(SAMPLE, 2, ends[1], deadline=10.0) as replay:

        def usual(n: int = 60) -> float:
            times = []
            for i in range(n):
                start = monotonic()
                replay.add(samples([i], [0.0]))
                times.append(monotonic() - start)
            return float(np.median(times))

        slow.start()
        assert ready.wait(20)
        eventually(lambda: made.stats().senders.get(0) is not None and made.stats().senders[0].requests == 60)
        worst = usual()
        assert worst < 1.0  # an answer that is not taken is waited for for `send_s`
        stats = made.stats()
        assert stats.pending_sends <= made.limits.max_window + 1
    stop.set()
    slow.join(10)
    slow.close()
    made.close()
    for end in ends:
        end.close()


def leave_open(end: Any) -> None:
    replay = RemoteReplay(SAMPLE, 1, end, mode="async_comm", send_every=5)
    for i in range(3):
        replay.add(samples([i], [0.0]))  # never sent: less than send_every


def test_a_client_never_closed_says_exit_with_its_undelivered_items() -> None:
    ends = LocalCarrier.group(2)
    made = ReplayBufferManager(SAMPLE, 1, 1, communication_backend=ends[1]).start()
    child = FORK.Process(target=leave_open, args=(ends[0],))
    child.start()
    child.join(20)
    eventually(lambda: not made.is_running)
    assert made.exit_counter == 1
    assert made.stats().senders[0].undelivered == 3
    made.close()
    child.close()
    for end in ends:
        end.close()


def close_the_carrier(end: Any) -> None:
    replay = RemoteReplay(SAMPLE, 1, end, mode="async_comm")
    replay.add(samples([1], [0.0]))
    end.close()


def test_a_process_may_end_with_its_carrier_closed() -> None:
    ends = LocalCarrier.group(2)
    with ReplayBufferManager(SAMPLE, 1, None, communication_backend=ends[1]) as made:
        made.start()
        child = FORK.Process(target=close_the_carrier, args=(ends[0],))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        child.close()
    for end in ends:
        end.close()


def test_a_child_that_ends_says_nothing_for_its_parents_clients() -> None:
    ends = LocalCarrier.group(2)
    made = ReplayBufferManager(SAMPLE, 1, 1, communication_backend=ends[1]).start()
    with RemoteReplay(SAMPLE, 1, ends[0]) as replay:
        replay.add(samples([0], [0.0]))
        child = FORK.Process(target=lambda: None)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        replay.add(samples([1], [0.0]))
        assert made.exit_counter == 0
    made.close()
    child.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("seed", range(3))
def test_exactly_once_over_a_faulty_carrier(seed: int) -> None:
    """Both sides drop, repeat, delay, cut and corrupt a fifth of their frames."""
    ends = LocalCarrier.group(3)
    manager_end = FaultyCarrier(ends[2], seed)
    made = ReplayBufferManager(
        SAMPLE, 2, 2, capacity=10_000, communication_backend=manager_end, limits=Limits(rejoin_s=30.0)
    ).start()
    clients: list[Any] = []

    def work(rank: int) -> None:
        faulty = FaultyCarrier(ends[rank], seed * 10 + rank, rate=0.15)
        mode = ("sync", "async_comm")[rank]
        replay = RemoteReplay(SAMPLE, 2, faulty, mode=mode, retry_s=0.02, deadline=20.0)
        with replay:
            for i in range(60):
                replay.add(samples([1000 * rank + i], [0.0]))
        clients.append(replay.stats())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(clients) == 2
    ids = made.buffer[:]["id"].tolist()
    for rank in (0, 1):
        assert [i for i in ids if i // 1000 == rank] == [1000 * rank + i for i in range(60)]
    for stats in clients:
        assert stats.kept == 60 and stats.forgotten == 0
        assert_doors(stats)
    assert_doors(made.stats())
    made.close()
    for end in ends:
        end.close()


def test_a_peer_that_sends_only_malformed_frames_is_shut_out() -> None:
    ends = LocalCarrier.group(2)
    made = ReplayBufferManager(SAMPLE, 1, None, communication_backend=ends[1]).start()
    for _ in range(20):
        ends[0].send(1, 0, [os.urandom(50)])
    eventually(lambda: made.stats().malformed == 16)
    assert made.is_running
    made.close()
    for end in ends:
        end.close()


def test_training_goes_on_without_a_manager() -> None:
    server = TcpCarrier.serve(9, token=TOKEN)
    made = ReplayBufferManager(SAMPLE, 9, None, communication_backend=server).start()
    carrier = TcpCarrier.join([server.address], token=TOKEN, rank=0)
    raising = RemoteReplay(SAMPLE, 9, carrier, reconnect_s=0.2, deadline=5.0)
    raising.add(samples([0], [0.0]))
    made.close()
    server.close()
    with pytest.raises(PeerDiedError, match="manager is gone") as caught:
        raising.add(samples([1], [0.0]))
    assert caught.value.accepted in (True, False)
    assert_doors(raising.stats())
    with pytest.raises(PeerDiedError):
        raising.close()
    assert raising.stats().lost + raising.stats().kept == raising.stats().offered
    dropping = RemoteReplay(SAMPLE, 9, carrier, reconnect_s=0.2, deadline=5.0, when_down="drop")
    start = monotonic()
    assert [dropping.add(samples([i], [0.0])) for i in range(20)] == [None] * 20
    assert monotonic() - start < 4.0
    assert dropping.stats().dropped == 20
    assert_doors(dropping.stats())
    carrier.close()


def count(ctx: Any) -> int:
    with ctx.replay(SAMPLE) as replay:
        for i in range(20):
            replay.add(samples([100 * ctx.rank + i], [0.0]))
        return replay.metadata()["length"] > 0


def plain_manager(ctx: Any) -> ReplayBufferManager:
    mine = ctx.layout.workers_of(ctx.rank)
    return ReplayBufferManager(
        SAMPLE, ctx.rank, len(mine), communication_backend=ctx.carrier, worker_ranks=mine
    )


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_launch_brings_back_results_and_stats(carrier: str) -> None:
    out = launch(count, plain_manager, n_workers=3, n_managers=2, carrier=carrier)
    assert out.results == {0: True, 1: True, 2: True}
    assert {rank: stats.offered for rank, stats in out.stats.items()} == {3: 40, 4: 20}


def test_a_worker_may_come_when_the_managers_of_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    join = launching._tcp_end

    def is_listening(address: str) -> bool:
        host, _, port = address.rpartition(":")
        with socket.socket() as sock:
            return sock.connect_ex((host, int(port))) == 0

    def late(layout: Any, rank: int, token: bytes, addresses: dict[int, str], pipe: Any) -> TcpCarrier:
        if rank == 2:
            eventually(lambda: not is_listening(addresses[4]))
        return join(layout, rank, token, addresses, pipe)

    monkeypatch.setattr(launching, "_tcp_end", late)
    out = launch(count, plain_manager, n_workers=3, n_managers=2, carrier="tcp")
    assert out.results == {0: True, 1: True, 2: True}


def test_a_worker_that_raises_is_a_worker_error_after_the_others_finished(tmp_path: Path) -> None:
    def raise_in_one(ctx: Any) -> None:
        with ctx.replay(SAMPLE) as replay:
            replay.add(samples([1], [0.0]))
            if ctx.rank == 0:
                raise KeyError("this one fails")
            eventually(lambda: replay.metadata()["n_left"] == 1)
            replay.add(samples([2], [0.0]))
            (tmp_path / "finished").touch()

    with pytest.raises(WorkerError, match="(?s)rank 0:.*this one fails") as caught:
        launch(raise_in_one, plain_manager, n_workers=2)
    assert (tmp_path / "finished").exists() and "rank 1" not in str(caught.value)


def test_a_dead_worker_is_started_again_as_often_as_told(tmp_path: Path) -> None:
    def die_once(ctx: Any) -> int:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with ctx.replay(SAMPLE) as replay:
            replay.add(samples([1], [0.0]))
            return os.getpid()

    out = launch(die_once, plain_manager, n_workers=1, max_restarts=1)
    assert out.results.keys() == {0} and out.stats[1].offered == 1


def test_a_dead_worker_is_named_with_how_it_ended(tmp_path: Path) -> None:
    def die(ctx: Any) -> None:
        with open(tmp_path / "lives", "a") as f:
            f.write("x")
        replay = ctx.replay(SAMPLE)
        replay.add(samples([1], [0.0]))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="rank 0: its process ended with code -9"):
        launch(die, plain_manager, n_workers=1)
    assert (tmp_path / "lives").read_text() == "x"


def test_every_rank_has_a_seed_of_its_own_and_names_find_the_launched_carrier() -> None:
    def look(ctx: Any) -> Any:
        with RemoteReplay(SAMPLE, ctx.manager_rank, "local") as replay:
            replay.add(samples([1], [0.0]))
        return ctx.seed, type(ctx.carrier).__name__

    first, again, other = (launch(look, plain_manager, seed=seed).results for seed in (0, 0, 1))
    assert (
        first == again and first.keys() == {0, 1} and {kind for _, kind in first.values()} == {"LocalCarrier"}
    )
    assert len({seed for seed, _ in [*first.values(), *other.values()]}) == 4


def test_a_launch_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_ever(ctx: Any) -> None:
        with ctx.replay(SAMPLE) as replay:
            replay.add(samples([1], [0.0]))
            threading.Event().wait(100)

    def interrupted(*args: Any, **kw: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(wait_for_ever, plain_manager, n_workers=1)
    assert not [child for child in multiprocessing.active_children() if "recollect-rank" in child.name]


def test_launch_needs_a_carrier_it_knows_and_a_world_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="carrier"):
        launch(count, plain_manager, carrier="pigeon")
    (end,) = LocalCarrier.group(1)
    monkeypatch.setattr("recollect.remote.launcher.carrier_of", lambda name: end)
    with pytest.raises(ValueError, match="must be the 1 ranks there are, got 3"):
        launch(count, plain_manager, carrier="mpi")


@pytest.mark.parametrize("fails", [False, True])
def test_a_manager_is_closed_when_its_rank_has_done_its_work(fails: bool) -> None:
    said: list[str] = []

    class Manager:
        def run(self) -> str:
            said.append("run")
            if fails:
                raise KeyError("it fails")
            return "its stats"

        def close(self) -> None:
            said.append("close")

    (_, end), layout = LocalCarrier.group(2), rank_layout(2)
    with pytest.raises(KeyError) if fails else nullcontext():
        assert launching.run_rank(count, lambda ctx: Manager(), layout, end, 0) == ("stats", "its stats")
    assert said == ["run", "close"]


def draw_elsewhere(buffer: Any, stop: Any, out: Any) -> None:
    import recollect as rc

    sampler, n = rc.StepSampler(buffer, 8, seed=0), 0
    while not stop.is_set():
        drawn = sampler.sample()
        assert (drawn["log_reward"] == drawn["id"] * 0.5).all()
        n += 1
    out.send(n)


def test_a_shared_buffer_is_read_by_others_while_the_manager_works() -> None:
    ends = LocalCarrier.group(2)
    made = ReplayBufferManager(
        SAMPLE, 1, 1, capacity=64, communication_backend=ends[1], storage="shared"
    ).start()
    stop, (ours, theirs) = FORK.Event(), FORK.Pipe()
    with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
        replay.add(samples(range(64), np.arange(64) * 0.5))
        reader = FORK.Process(target=draw_elsewhere, args=(made.buffer, stop, theirs))
        reader.start()
        for i in range(100):
            ids = np.arange(64 + 16 * i, 80 + 16 * i)
            replay.add(samples(ids, ids * 0.5))
        drawn = replay.sample(64, replace=False)  # what was acknowledged as kept can be drawn at once
        assert sorted(drawn["id"].tolist()) == list(range(1600, 1664))
        stop.set()
        assert ours.poll(20) and ours.recv() >= 0
        reader.join(10)
        assert reader.exitcode == 0
    reader.close()
    ours.close()
    theirs.close()
    made.close()
    for end in ends:
        end.close()


EXAMPLE = Path(__file__).parents[2] / "examples" / "gflownet_hypergrid.py"


@pytest.mark.parametrize("budget", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_the_example_learns(budget: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Its own assertions are the test: true trajectories, nothing lost, and with 1,000 updates L1 < 0.05."""
    import runpy

    module = runpy.run_path(str(EXAMPLE))
    for filtering in (False, True)[: 1 + (budget >= 1000)]:
        results = module["run"]("local", budget, filtering)
        for curve, stats in results.values():
            assert curve[-1][1] < 1.3 and curve[-1][2] >= 1
            assert (stats.filtered > 0) == filtering
        assert capfd.readouterr().out.count("L1 distance 1.40 before") == 2


@pytest.mark.parametrize("carrier", ["local", "tcp"])
def test_a_dead_manager_with_a_checkpoint_is_restarted(tmp_path: Path, carrier: str) -> None:
    flag = tmp_path / "killed"

    def die_once(obj: Any, sender_rank: int) -> dict[str, float]:
        if 10 in obj["id"] and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"score": 0.0}

    def manager(ctx: Any) -> ReplayBufferManager:
        save = Checkpoint(tmp_path / "m", resume=True)
        return ReplayBufferManager(
            SAMPLE, ctx.rank, 1, scoring_function=die_once, communication_backend=ctx.carrier, checkpoint=save
        )

    def worker(ctx: Any) -> list[int]:
        with ctx.replay(SAMPLE, retry_s=0.3) as replay:
            for i in range(20):
                replay.add(samples([i], [0.0]))
            return sorted(replay.sample(20, replace=False)["id"].tolist())

    out = launch(worker, manager, n_workers=1, carrier=carrier)
    assert out.results[0] == list(range(20))
    assert out.stats[1].offered == 20 and flag.exists()

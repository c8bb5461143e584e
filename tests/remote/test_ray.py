"""The carrier ray: managers and workers are actors; frames go by tcp."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from recollect.errors import DeadlineError, PeerDiedError, WorkerError
from recollect.remote import RayCarrier, TcpCarrier, launch
from recollect.remote.carriers.ray import Registry

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


def count(ctx: Any) -> float:
    import numpy as np

    with ctx.replay({"id": ((), "int64")}) as replay:
        for i in range(20):
            replay.add({"id": np.arange(5) + 100 * ctx.rank + i})
        if ctx.seed < 0:
            raise KeyError("asked to fail")
        return float(replay.sample(50)["id"].mean())


def manager(ctx: Any) -> Any:
    from recollect.remote import ReplayBufferManager

    return ReplayBufferManager({"id": ((), "int64")}, ctx.rank, 2, communication_backend="ray")


def test_actors_share_a_manager(ray_cluster: Any) -> None:
    out = launch(count, manager, n_workers=2, carrier="ray")
    assert set(out.results) == {0, 1} and out.stats[2].offered == 200


@pytest.mark.soak
def test_an_actor_that_raises_is_a_worker_error(ray_cluster: Any) -> None:
    with pytest.raises(WorkerError, match="asked to fail"):
        launch(count, manager, n_workers=2, carrier="ray", seed=-1)


@pytest.mark.soak
def test_a_driver_joins_a_job(ray_cluster: Any) -> None:
    server = RayCarrier.serve("test-job", 3)
    worker = RayCarrier.join("test-job")
    worker.send(3, 0, [b"hello"])
    assert bytes(server.recv(timeout=10.0)[2]) == b"hello"
    worker.close()
    server.close()
    RayCarrier.forget("test-job")


def test_a_late_worker_joins_though_another_manager_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster: the registry says where the managers of a job listened."""
    registry = ray_that(monkeypatch, None).registry("job")
    own, ended = (TcpCarrier.serve(rank, token=registry.token()) for rank in (3, 2))
    ended.close()
    for carrier in (own, ended):
        registry.enter(carrier.rank, carrier.address)
    worker = RayCarrier.join("job", 1, n_managers=2, own=3, timeout=20.0)
    worker.send(3, 0, [b"hello"])
    assert bytes(own.recv(timeout=10.0)[2]) == b"hello"
    with pytest.raises(PeerDiedError, match="2"):
        worker.send(2, 0, [b"hello"])
    worker.close()
    own.close()


def test_a_carrier_that_cannot_be_registered_or_connected_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ray_that(monkeypatch, None)
    closed: list[TcpCarrier] = []
    close = TcpCarrier.close

    def noted(carrier: TcpCarrier) -> None:
        closed.append(carrier)
        close(carrier)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise DeadlineError("no answer")

    server = RayCarrier.serve("job", 2)
    monkeypatch.setattr(TcpCarrier, "close", noted)
    monkeypatch.setattr(TcpCarrier, "link_others", fails)
    with pytest.raises(DeadlineError, match="no answer"):
        RayCarrier.join("job", 1)
    assert [carrier.rank for carrier in closed] == [1]
    answers = [bytes(32), {}]  # the token and the addresses; then there is no answer
    monkeypatch.setattr(made, "get", lambda found, timeout: answers.pop(0) if answers else fails())
    with pytest.raises(DeadlineError, match="no answer"):
        RayCarrier.serve("job", 3)
    assert [carrier.rank for carrier in closed] == [1, 3] and all(carrier.is_closed for carrier in closed)
    server.close()


class Died(Exception):
    """What Ray says of an actor whose process ended."""


class Ray:
    """As much of Ray as `launch` needs, in one process; what an actor does is done when it is asked for."""

    exceptions = SimpleNamespace(RayActorError=Died)

    def __init__(self, work: Any) -> None:
        self.work, self.killed, self.started = work, 0, []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2")
        self.n_nodes = 1
        self.registries: dict[str, Registry] = {}

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}] * self.n_nodes + [{"Alive": False}]

    def registry(self, job: str) -> Registry:
        """The registry of a job, made at the first use."""
        return self.registries.setdefault(f"recollect-{job}", Registry())

    def remote(self, **options: Any) -> Any:
        def named(name: str, get_if_exists: bool) -> Any:
            found = self.registry(name.removeprefix("recollect-"))
            calls = {n: SimpleNamespace(remote=getattr(found, n)) for n in ("token", "enter", "addresses")}
            return SimpleNamespace(remote=lambda: SimpleNamespace(**calls))

        def run(worker: Any, manager: Any, layout: Any, job: str, rank: int, seed: int) -> Any:
            self.started.append(rank)
            return len(self.started), rank

        actor = SimpleNamespace(run=SimpleNamespace(remote=run))
        return lambda cls: SimpleNamespace(remote=lambda: actor, options=named)

    def wait(self, futures: list[Any], num_returns: int) -> Any:
        return futures[:1], futures[1:]

    def get(self, future: Any, timeout: float | None = None) -> Any:
        return self.work(future[1], self.started.count(future[1])) if isinstance(future, tuple) else future

    def kill(self, actor: Any) -> None:
        self.killed += 1


def ray_that(monkeypatch: pytest.MonkeyPatch, work: Any) -> Ray:
    made: Any = Ray(work)
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def test_a_manager_that_died_is_started_again_and_a_worker_as_often_as_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int, life: int) -> Any:
        if life == 1 and rank in (1, 2):
            raise Died("its process is gone")
        return ("stats" if rank == 2 else "result"), f"{rank} in life {life}"

    ray = ray_that(monkeypatch, work)
    out = launch(count, manager, carrier="ray", max_restarts=1)
    assert out.results == {0: "0 in life 1", 1: "1 in life 2"} and out.stats == {2: "2 in life 2"}
    assert ray.killed == 4  # three actors and the registry
    ray = ray_that(monkeypatch, work)
    with pytest.raises(WorkerError, match="rank 1: its process is gone"):
        launch(count, manager, carrier="ray")
    assert (
        sorted(ray.started) == [0, 1, 1, 2, 2] and ray.killed == 5
    )  # one more tells the manager of the dead worker


def test_ray_is_begun_unless_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, began = ray_that(monkeypatch, lambda rank, life: ("result", rank)), []
    ray.init = lambda **kw: began.append(True)  # type: ignore[attr-defined]
    launch(count, manager, carrier="ray")
    assert not began
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    launch(count, manager, carrier="ray")
    assert began == [True]


def test_a_manager_that_dies_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, life: int) -> Any:
        if rank == 2:
            raise Died("its process is gone") if life < 5 else KeyError("started too often")
        return "result", rank

    ray = ray_that(monkeypatch, work)
    with pytest.raises(WorkerError, match="rank 2: its process is gone"):
        launch(count, manager, carrier="ray")
    assert ray.started.count(2) == 2


def test_what_raises_in_an_actor_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, life: int) -> Any:
        if rank < 2:
            raise KeyError(f"mine {rank}")
        return "stats", None

    ray = ray_that(monkeypatch, work)
    with pytest.raises(WorkerError, match="(?s)rank 0: 'mine 0'.*rank 1: 'mine 1'"):
        launch(count, manager, carrier="ray", max_restarts=5)
    assert sorted(ray.started) == [0, 1, 2]


def test_ray_binds_to_the_nodes_address_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ray_that(monkeypatch, None)
    for n_nodes, host in ((1, "127.0.0.1"), (2, "127.0.0.2")):
        ray.n_nodes = n_nodes
        server = RayCarrier.serve("job", 3)
        assert server.address.rpartition(":")[0] == host
        worker = RayCarrier.join("job", 1, timeout=20.0)
        worker.send(3, 0, [b"hello"])
        assert bytes(server.recv(timeout=10.0)[2]) == b"hello"
        worker.close()
        server.close()


def test_a_manager_started_again_on_its_node_listens_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_that(monkeypatch, None)
    first = RayCarrier.serve("job", 3)
    first.close()
    with RayCarrier.serve("job", 3) as again, RayCarrier.serve("job", 4) as other:
        assert again.address == first.address != other.address and again.token == other.token == first.token
    assert Registry().token() != Registry().token()


def test_a_peer_that_joins_is_connected_to_all_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_that(monkeypatch, None)
    own, other = (RayCarrier.serve("job", rank) for rank in (3, 4))
    with own, other, RayCarrier.join("job", 1, n_managers=2, own=3, timeout=20.0) as worker:
        for server in (own, other):
            worker.send(server.rank, 0, [b"hello"])
            assert bytes(server.recv(timeout=10.0)[2]) == b"hello"


def test_a_manager_whose_place_is_taken_listens_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_that(monkeypatch, None)
    with RayCarrier.serve("job", 3) as first, RayCarrier.serve("job", 3) as again:
        assert again.address != first.address
        with RayCarrier.join("job", 1, timeout=20.0) as worker:
            worker.send(3, 0, [b"hello"])
            assert bytes(again.recv(timeout=10.0)[2]) == b"hello"


def test_a_job_is_forgotten_once_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    named, killed = {"recollect-job": "its registry"}, []

    def get_actor(name: str) -> str:
        if name not in named:
            raise ValueError("no actor of that name")
        return named.pop(name)

    ray = SimpleNamespace(get_actor=get_actor, kill=killed.append)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for _ in range(2):
        RayCarrier.forget("job")
    assert killed == ["its registry"]


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
def test_managers_are_waited_for_a_finite_time(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    ray_that(monkeypatch, None)
    with pytest.raises(ValueError, match="timeout"):
        RayCarrier.join("job", timeout=timeout)
    with pytest.raises(DeadlineError, match="must have 1 managers, got 0"):
        RayCarrier.join("job", timeout=0.0)


def test_a_manager_that_comes_back_at_another_address_is_found(ray_cluster: Any) -> None:
    """Its old place is taken meanwhile, so it listens elsewhere; the registry knows where."""
    server = RayCarrier.serve("moving-job", 3)
    worker = RayCarrier.join("moving-job", 1)
    host, _, port = server.address.rpartition(":")
    server.close()
    with socket.create_server((host, int(port))):
        again = RayCarrier.serve("moving-job", 3)
        assert again.address != server.address
        with pytest.raises(PeerDiedError):
            worker.recv(3, timeout=10.0)
        worker.reconnect(3, 20.0)
        worker.send(3, 0, [b"found"])
        assert bytes(again.recv(timeout=10.0)[2]) == b"found"
    worker.close()
    again.close()
    RayCarrier.forget("moving-job")

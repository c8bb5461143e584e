"""The carrier ray: managers and workers are actors; frames go by tcp."""

from __future__ import annotations

from typing import Any

import pytest

from recollect.errors import PeerDiedError, WorkerError

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
    from recollect.remote import launch

    out = launch(count, manager, n_workers=2, carrier="ray")
    assert set(out.results) == {0, 1} and out.stats[2].offered == 200


@pytest.mark.soak
def test_an_actor_that_raises_is_a_worker_error(ray_cluster: Any) -> None:
    from recollect.remote import launch

    with pytest.raises(WorkerError, match="asked to fail"):
        launch(count, manager, n_workers=2, carrier="ray", seed=-1)


@pytest.mark.soak
def test_a_driver_joins_a_job(ray_cluster: Any) -> None:
    from recollect.remote import RayCarrier

    server = RayCarrier.serve("test-job", 3)
    worker = RayCarrier.join("test-job")
    worker.send(3, 0, [b"hello"])
    assert bytes(server.recv(timeout=10.0)[2]) == b"hello"
    worker.close()
    server.close()
    RayCarrier.forget("test-job")


def test_a_late_worker_joins_though_another_manager_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster: the registry says where the managers of a job listened."""
    from types import SimpleNamespace

    from recollect.remote import RayCarrier, TcpCarrier

    token = bytes(32)
    own, ended = (TcpCarrier.serve(rank, token=token) for rank in (3, 2))
    ended.close()

    def told(value: Any) -> Any:
        return SimpleNamespace(remote=lambda: value)

    registry = SimpleNamespace(token=told(token), addresses=told({2: ended.address, 3: own.address}))
    monkeypatch.setattr("recollect.remote.carriers.ray._registry", lambda job: registry)
    ray = SimpleNamespace(get=lambda value, timeout: value)
    monkeypatch.setattr("recollect.remote.carriers.ray._ray", lambda: ray)
    worker = RayCarrier.join("job", 1, n_managers=2, own=3, timeout=20.0)
    worker.send(3, 0, [b"hello"])
    assert bytes(own.recv(timeout=10.0)[2]) == b"hello"
    with pytest.raises(PeerDiedError, match="2"):
        worker.send(2, 0, [b"hello"])
    worker.close()
    own.close()

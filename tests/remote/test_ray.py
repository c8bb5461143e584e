"""The carrier ray: managers and workers are actors; frames go by tcp."""

from __future__ import annotations

from typing import Any

import pytest

from recollect.errors import WorkerError

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

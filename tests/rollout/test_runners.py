"""All kinds of runners pass one suite."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.rollout.make import run

import recollect.rollout as rr
from recollect.errors import WorkerDiedError
from recollect.testing import RunnerContract
from recollect.testing.leftovers import leaves_nothing
from recollect.testing.rollout_workflows import PREFIX
from recollect.testing.runner_contract import Rig


class TestLocal(RunnerContract):
    kind = "local"


class TestProcess(RunnerContract):
    kind = "process"
    can_kill = True

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[Rig]:
        with leaves_nothing():
            made = Rig(cls.config(), cls.seconds)
            yield made
            made.close()

    def test_an_idle_runner_that_dies_is_seen_and_replaced(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            stream = rig.c.events()
            runners = rig.c._desk.scheduler.pool.runners
            while not any(runner.is_ready for runner in runners.values()):
                await asyncio.sleep(0.01)
            victim = next(r for r in runners.values() if r.is_ready)
            os.kill(victim.process.pid, signal.SIGKILL)
            async with asyncio.timeout(10.0):  # it takes milliseconds where there is a core free
                assert (await anext(stream)).kind == "runner_died"
            await stream.aclose()
            assert (await rig.train(rr.Task(PREFIX + "good")))["ok_task_count"] == 1
            await rig.c.sink.get(1)

        rig.run(work)

    def test_a_workflow_without_a_name_is_refused(self, rig: Rig) -> None:
        async def nameless(task: Any, models: Any) -> Any:
            return None

        async def work(rig: Rig) -> None:
            with pytest.raises(TypeError, match="import path"):
                await rig.submit(rr.Task(nameless))

        rig.run(work)


@pytest.mark.process
def test_runners_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.rollout.runners.remote.PAUSE_S", 0.0)
    monkeypatch.setattr("recollect.rollout.runners.remote.FAILED_STARTS", 2)

    async def main() -> None:
        fields = {"runner": "process", "runners": 1, "workflow_modules": ("no_such_module",)}
        with pytest.raises(WorkerDiedError, match="no_such_module"):
            await rr.RolloutCoordinator(rr.Config(**fields), []).prepare()

    run(main(), 50)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("ray_cluster")
class TestRay(RunnerContract):
    kind = "ray"
    can_kill = True

    @classmethod
    def config(cls, **fields: Any) -> rr.Config:
        return super().config(**{"ray_options": {"num_cpus": 0.5}} | fields)

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, ray_cluster: Any) -> Iterator[Rig]:
        made = Rig(cls.config(), cls.seconds)
        yield made
        made.close()


@pytest.mark.filterwarnings("ignore")
def test_the_actor_of_a_name_is_found_again(ray_cluster: Any) -> None:
    made = RunnerContract.config(name="actor-test")
    models = [lambda: rr.ScriptedModel({"2+3=": "5"})]
    judges = [[lambda: rr.ScriptedModel({"5": "1"})]]
    actor = rr.RolloutCoordinator.get_actor(made, models, judges)
    again = rr.RolloutCoordinator.get_actor(made, models, judges)
    assert again._actor_id == actor._actor_id
    with pytest.raises(ValueError, match="max_retries"):
        rr.RolloutCoordinator.get_actor(made.replace(max_retries=5), models, judges)
    with pytest.raises(TypeError, match="factories"):
        rr.RolloutCoordinator.get_actor(made, [rr.ScriptedModel(["x"])], [])

    async def main() -> None:
        import recollect.testing.rollout_workflows  # noqa: F401

        await actor.prepare.remote()
        given = [rr.Task("recollect.testing.rollout_workflows:asks", repeat_times=2)]
        await actor.submit_batch.remote(batch_id=7, tasks=given, batch_type="train")
        result = await actor.finalize_train_batch.remote(7, timeout=20)
        assert result["experience_count"] == 2 and result["metrics"]["rollout/reward/mean"] == 1.0
        with pytest.raises(KeyError):
            await actor.finalize_train_batch.remote(8, timeout=0)
        assert (await actor.stats.remote()).runs.delivered == 2
        await actor.shutdown.remote()

    run(main(), 50)
    ray_cluster.kill(actor)

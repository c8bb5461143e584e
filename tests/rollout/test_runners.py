"""All kinds of runners pass one suite."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rollout.make import run

import recollect.rollout as rr
from recollect.errors import BatchFailed, WorkerDiedError
from recollect.rollout.runners.child import LENGTH, Link
from recollect.rollout.runners.process import ProcessRunner
from recollect.testing import RunnerContract
from recollect.testing.leftovers import leaves_nothing
from recollect.testing.rollout_workflows import PREFIX
from recollect.testing.runner_contract import Rig

WORKFLOWS = "tests.rollout.workflows:"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


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

    @pytest.mark.parametrize("dies", [False, True])
    def test_what_a_runner_started_ends_with_it(self, rig: Rig, tmp_path: Path, dies: bool) -> None:
        """Killed after the grace, or dead by itself: its whole process group goes."""
        path = tmp_path / "pid"

        async def work(rig: Rig) -> None:
            data = {"path": str(path), "dies": dies}
            limit = 20.0 if dies else 2.0
            ident = await rig.submit(rr.Task(WORKFLOWS + "leaves_a_child", data, timeout_s=limit))
            with pytest.raises(BatchFailed, match="WorkerDiedError" if dies else "limit of 2 s"):
                await rig.c.finalize_train_batch(ident, timeout=30)
            await rig.c.abort_batch(ident, reason="seen")
            async with asyncio.timeout(10.0):
                while _is_running(int(path.read_text())):
                    await asyncio.sleep(0.01)

        rig.run(work)

    def test_what_a_runner_sent_before_it_died_is_not_lost(self, rig: Rig, tmp_path: Path) -> None:
        """The loop is held up until the runner is dead: its death and its last words are there at once."""

        async def work(rig: Rig) -> None:
            task = rr.Task(WORKFLOWS + "dies_in_its_third_run", {"path": str(tmp_path)}, repeat_times=3)
            ident = await rig.submit(task)
            while not (tmp_path / "runs").exists() or not (tmp_path / "runs").read_text().endswith("\n"):
                await asyncio.sleep(0.01)
            pid = int((tmp_path / "runs").read_text().split()[1])
            (tmp_path / "go").touch()
            while _is_running(pid):
                pass
            result = await rig.c.finalize_train_batch(ident, timeout=30)
            assert result["experience_count"] == 3 and result["metrics"]["rollout/requeue_count"] == 1
            runs = [line.split()[0] for line in (tmp_path / "runs").read_text().splitlines()]
            assert runs == ["0", "1", "2", "1", "2"]  # the first had arrived
            await rig.c.sink.get(3)

        rig.run(work)

    def test_a_workflow_without_a_name_is_refused(self, rig: Rig) -> None:
        async def nameless(task: Any, models: Any) -> Any:
            return None

        async def work(rig: Rig) -> None:
            with pytest.raises(TypeError, match="import path"):
                await rig.submit(rr.Task(nameless))

        rig.run(work)


def test_what_is_in_the_socket_is_read_before_a_runner_is_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop learns of the death first, in the same turn as of the last words."""
    heard: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pool = SimpleNamespace(died=lambda runner, why: heard.append("died"))
        runner = ProcessRunner(pool, 0)  # type: ignore[arg-type]
        monkeypatch.setattr(runner, "kill", lambda: None)
        runner.process = SimpleNamespace(pid=0, wait=lambda: 0)  # type: ignore[assignment]
        runner._end, dies = os.pipe()
        loop.add_reader(runner._end, runner._died)
        ours, theirs = socket.socketpair()
        made: Any = await loop.create_connection(lambda: Link(heard.append, loop.create_future()), sock=ours)
        runner.transport = made[0]
        await asyncio.sleep(0)
        os.write(dies, b"!")
        theirs.sendall(LENGTH.pack(5) + b"words")
        await runner.closed()
        os.close(dies)
        theirs.close()

    with leaves_nothing():
        run(main())
    assert heard == [b"words", "died"]


@pytest.mark.process
def test_a_process_that_was_started_in_vain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the coordinator is shut down while it starts."""
    made: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(popen(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)

    async def main() -> None:
        async def refused(*args: Any, **kwargs: Any) -> Any:
            raise asyncio.CancelledError

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "create_connection", refused)
        with pytest.raises(asyncio.CancelledError):
            await ProcessRunner(None, 0).start()  # type: ignore[arg-type]
        [process] = made
        assert process.returncode == -signal.SIGKILL

    with leaves_nothing():
        run(main())


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

    def test_an_idle_actor_that_is_killed_is_seen_and_replaced(self, rig: Rig, ray_cluster: Any) -> None:
        async def work(rig: Rig) -> None:
            stream = rig.c.events()
            runners = rig.c._desk.scheduler.pool.runners
            while not any(runner.is_ready for runner in runners.values()):
                await asyncio.sleep(0.01)
            ray_cluster.kill(next(r for r in runners.values() if r.is_ready).actor)
            async with asyncio.timeout(10.0):
                assert (await anext(stream)).kind == "runner_died"
            await stream.aclose()
            assert (await rig.train(rr.Task(PREFIX + "good")))["ok_task_count"] == 1
            await rig.c.sink.get(1)

        rig.run(work)


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
        await actor.prepare.remote()
        given = [rr.Task(PREFIX + "asks", repeat_times=2)]  # which workflow_modules register over there
        await actor.submit_batch.remote(batch_id=7, tasks=given, batch_type="train")
        result = await actor.finalize_train_batch.remote(7, timeout=20)
        assert result["experience_count"] == 2 and result["metrics"]["rollout/reward/mean"] == 1.0
        with pytest.raises(KeyError):
            await actor.finalize_train_batch.remote(8, timeout=0)
        assert (await actor.stats.remote()).runs.delivered == 2
        await actor.shutdown.remote()

    run(main(), 50)
    ray_cluster.kill(actor)

"""The public suite of runners: what a coordinator promises whatever kind of runner works for it.

Inherit it and give `config(**fields)`; `can_kill` says whether a runner that does not obey is killed (or fenced).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import recollect.rollout as rr
from recollect.errors import BatchAborted, BatchFailed
from recollect.testing.rollout_workflows import PREFIX

MODULE = "recollect.testing.rollout_workflows"


class Rig:
    """One coordinator for a whole suite: runners elsewhere take seconds to start.

    Ownership: owns the loop and the coordinator; `close` ends both.
    """

    def __init__(self, config: rr.Config, seconds: float) -> None:
        self.policy = rr.ScriptedModel(["5", "6"], version=4)
        self.judge = rr.ScriptedModel({"5": "1", "6": "0"})
        self.seconds, self.n_batches = seconds, 0
        self.loop = asyncio.new_event_loop()
        self.c = rr.RolloutCoordinator(config, [self.policy], [[self.judge]])
        self._do(self.c.prepare())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, self.seconds))

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Run `work(rig)`; check that every run and attempt is accounted for."""

        async def main() -> Any:
            result = await work(self)
            check_doors(self.c)
            return result

        return self._do(main())

    async def submit(self, *tasks: rr.Task) -> int:
        """Submit a train batch under an id of its own."""
        self.n_batches += 1
        await self.c.submit_batch(batch_id=self.n_batches, tasks=list(tasks), batch_type="train")
        return self.n_batches

    async def train(self, *tasks: rr.Task) -> Any:
        """Submit one train batch and finalize it."""
        return await self.c.finalize_train_batch(await self.submit(*tasks), timeout=30)

    def close(self) -> None:
        """Shut down; no task is left in the loop."""
        self._do(self.c.shutdown())
        left = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not left, left


class RunnerContract:
    """Subclass it as `TestMine(RunnerContract)` with a `kind` of its own, or another `config`."""

    kind = "local"
    can_kill = False
    seconds = 45.0

    @classmethod
    def config(cls, **fields: Any) -> rr.Config:
        """A config of this kind of runner."""
        given: dict[str, Any] = {
            "runner": cls.kind,
            "runners": 2,
            "workflow_modules": (MODULE,),
            "retry_backoff_s": 0.01,
            "auxiliary_names": ("judge",),
            "repeats_per_attempt": 4,
        }
        return rr.Config(**given | {"cancel_grace_s": 0.2, "max_retries": 0, "seed": 9} | fields)

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Iterator[Rig]:
        """The coordinator that all tests of the class share."""
        made = Rig(cls.config(), cls.seconds)
        yield made
        made.close()

    def test_all_kinds_of_workflows_deliver_in_order(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            names = ("good", "good_sync", "group")
            result = await rig.train(*(rr.Task(PREFIX + name, {"x": 2}, repeat_times=3) for name in names))
            assert result["ok_task_count"] == 3 and result["experience_count"] == 9
            x = await rig.c.sink.get(9)
            assert x.reward.tolist() == [0.0, 1.0, 2.0] * 3 and len(set(x.uids.tolist())) == 9
            assert result["metrics"]["rollout/data/mean"] == 2.0

        rig.run(work)

    def test_calls_reach_the_models_wherever_they_are(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            before = rig.policy.n_calls, rig.judge.n_calls
            result = await rig.train(
                *(rr.Task(PREFIX + name, repeat_times=2) for name in ("asks", "asks_sync"))
            )
            assert result["ok_task_count"] == 2
            assert (rig.policy.n_calls - before[0], rig.judge.n_calls - before[1]) == (4, 4)
            x = await rig.c.sink.get(4)
            assert sorted(x.reward.tolist()) == [0.0, 0.0, 1.0, 1.0] and set(x.model_version.tolist()) == {4}

        rig.run(work)

    def test_only_failed_runs_are_tried_again(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            result = await rig.train(rr.Task(PREFIX + "flaky", repeat_times=4, max_retries=1))
            assert result["ok_task_count"] == 1 and result["metrics"]["rollout/retry_count"] == 1
            assert (await rig.c.sink.get(4)).reward.tolist() == [1.0, 2.0, 1.0, 2.0]

        rig.run(work)

    def test_errors_come_back_as_text(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            names = ("bad", "gives_up", "off_space", "good")
            result = await rig.train(*(rr.Task(PREFIX + name, max_retries=1) for name in names))
            assert result["failed_task_count"] == 3 and result["ok_task_count"] == 1
            errors = result["errors"]
            assert "broken task 0" in errors[0] and "Traceback" in errors[0]
            assert "no use" in errors[1] and "tokens" in errors[2]
            statuses = rig.c.batch_state(result["batch_id"]).statuses
            assert [statuses[i].attempts for i in range(4)] == [
                2,
                1,
                1,
                1,
            ]  # GiveUp and SchemaError are final
            await rig.c.sink.get(1)

        rig.run(work)

    def test_text_cut_inside_a_character_travels_as_its_escape(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            result = await rig.train(rr.Task(PREFIX + "cut_error"), rr.Task(PREFIX + "cut_names"))
            assert result["failed_task_count"] == 1 and r"the model said \ud83d" in result["errors"][0]
            assert result["metrics"][r"rollout/run \ud83d/mean"] == 2.0
            x = await rig.c.sink.get(1)
            assert x.info[0] == {"said": r"half \ud83d"} and x.row_metrics[0] == {r"step \ud83d": 1.0}
            with pytest.raises(ValueError, match=r"task_id: must be text that UTF-8 can hold"):
                await rig.submit(rr.Task(PREFIX + "good", task_id="cut \ud83d"))
            assert (await rig.train(*(rr.Task(PREFIX + "good") for _ in range(4))))["ok_task_count"] == 4
            assert len(await rig.c.sink.get(4)) == 4  # no runner was lost

        rig.run(work)

    def test_all_failing_is_a_failed_batch(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            ident = await rig.submit(rr.Task(PREFIX + "bad"))
            with pytest.raises(BatchFailed, match="broken task 0"):
                await rig.c.finalize_train_batch(ident, timeout=30)
            await rig.c.abort_batch(ident, reason="seen")

        rig.run(work)

    @pytest.mark.parametrize("name", ["hangs", "ignores_cancel", "blocks"])
    def test_an_attempt_over_its_limit_ends_and_the_work_goes_on(self, rig: Rig, name: str) -> None:
        async def work(rig: Rig) -> None:
            before = rig.c.stats().attempts.timed_out
            given = [rr.Task(PREFIX + name, timeout_s=0.1)]
            result = await rig.train(*given, *(rr.Task(PREFIX + "good") for _ in range(4)))
            assert result["ok_task_count"] == 4 and result["failed_task_count"] == 1
            assert result["metrics"]["rollout/timeout_count"] == 1 and "limit" in result["errors"][0]
            assert len(await rig.c.sink.get(4)) == 4 and len(rig.c.sink) == 0
            assert rig.c.stats().attempts.timed_out == before + 1

        rig.run(work)

    def test_abort_stops_what_runs(self, rig: Rig) -> None:
        async def work(rig: Rig) -> None:
            ident = await rig.submit(*(rr.Task(PREFIX + name) for name in ("hangs", "hangs", "good")))
            waiting = asyncio.ensure_future(rig.c.finalize_train_batch(ident, timeout=30))
            await asyncio.sleep(0)
            await rig.c.abort_batch(ident, reason="enough")
            with pytest.raises(BatchAborted, match="enough"):
                await waiting
            assert rig.c.stats().attempts.running == 0
            assert (await rig.train(rr.Task(PREFIX + "good")))["ok_task_count"] == 1
            await rig.c.sink.get(1)

        rig.run(work)

    def test_seeds_are_those_of_the_run_wherever_it_runs(self, rig: Rig) -> None:
        from recollect.rollout.tasks import run_seed, task_key

        async def work(rig: Rig) -> None:
            result = await rig.train(rr.Task(PREFIX + "good", task_id="t"))
            await rig.c.sink.get(1)
            key = task_key(rig.c.config.seed, result["batch_id"], "t")
            assert result["metrics"]["rollout/seed/mean"] == run_seed(key, 0) % 2**40

        rig.run(work)

    def test_a_runner_that_dies_is_replaced(self, rig: Rig, tmp_path: Any) -> None:
        """Its unit goes to the front once, without cost; a unit that loses a second runner fails."""
        if not self.can_kill:
            pytest.skip("a runner in this process cannot die alone")

        async def work(rig: Rig) -> None:
            before = rig.c.stats().attempts.lost
            once = rr.Task(PREFIX + "dies_once", {"path": str(tmp_path / "died")})
            result = await rig.train(once, rr.Task(PREFIX + "dies"), rr.Task(PREFIX + "good"))
            assert result["ok_task_count"] == 2 and result["metrics"]["rollout/requeue_count"] == 2
            assert "WorkerDiedError" in result["errors"][1]
            assert rig.c.stats().attempts.lost == before + 3
            await rig.c.sink.get(2)

        rig.run(work)


def check_doors(c: Any) -> None:
    """Every run and every attempt left by exactly one door."""
    stats = c.stats()
    runs, attempts = stats.runs, stats.attempts
    assert runs.submitted == runs.live + sum(
        (runs.delivered, runs.filtered, runs.unused, runs.failed, runs.cancelled)
    ), runs
    ended = (attempts.good, attempts.failed, attempts.timed_out, attempts.cancelled, attempts.lost)
    assert attempts.started == attempts.running + sum(ended), attempts

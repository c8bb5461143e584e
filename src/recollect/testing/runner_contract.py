"""The public suite of runners: what a coordinator promises whatever kind of runner works for it.

Inherit it and give `config(**fields)`; `can_kill` says whether a runner that does not obey is killed (or fenced).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import recollect.rollout as rr
from recollect.errors import BatchAborted, BatchFailed
from recollect.testing.rollout_workflows import PREFIX

MODULE = "recollect.testing.rollout_workflows"


class RunnerContract:
    """Subclass it as `TestMine(RunnerContract)` with a `kind` of its own, or another `config`."""

    kind = "local"
    can_kill = False
    seconds = 45.0

    def config(self, **fields: Any) -> rr.Config:
        """A config of this kind of runner."""
        given: dict[str, Any] = {
            "runner": self.kind,
            "runners": 2,
            "workflow_modules": (MODULE,),
            "retry_backoff_s": 0.01,
        }
        return rr.Config(**given | {"cancel_grace_s": 0.2, "max_retries": 0} | fields)

    def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]], models: Any = (), auxiliary: Any = None,
            **fields: Any) -> Any:  # fmt: skip
        """Run `work(c)` with a coordinator; check that every run and attempt is accounted for."""

        async def main() -> Any:
            async with asyncio.timeout(self.seconds):
                async with rr.RolloutCoordinator(self.config(**fields), models, auxiliary) as c:
                    result = await work(c)
                    check_doors(c)
                    return result

        return asyncio.run(main())

    async def train(self, c: Any, *tasks: rr.Task, **fields: Any) -> Any:
        """Submit one train batch and finalize it."""
        await c.submit_batch(batch_id=1, tasks=list(tasks), batch_type="train")
        return await c.finalize_train_batch(1, timeout=30, **fields)

    def test_all_kinds_of_workflows_deliver_in_order(self) -> None:
        async def work(c: Any) -> None:
            names = ("good", "good_sync", "group")
            result = await self.train(
                c, *(rr.Task(PREFIX + name, {"x": 2}, repeat_times=3) for name in names)
            )
            assert result["ok_task_count"] == 3 and result["experience_count"] == 9
            x = await c.sink.get(9)
            assert x.reward.tolist() == [0.0, 1.0, 2.0] * 3 and len(set(x.uids.tolist())) == 9
            assert result["metrics"]["rollout/data/mean"] == 2.0

        self.run(work)

    def test_calls_reach_the_models_wherever_they_are(self) -> None:
        policy, judge = rr.ScriptedModel(["5", "6"], version=4), rr.ScriptedModel({"5": "1", "6": "0"})

        async def work(c: Any) -> None:
            names = ("asks", "asks_sync")
            result = await self.train(c, *(rr.Task(PREFIX + name, repeat_times=2) for name in names))
            assert result["ok_task_count"] == 2 and policy.n_calls == judge.n_calls == 4
            x = await c.sink.get(4)
            assert sorted(x.reward.tolist()) == [0.0, 0.0, 1.0, 1.0] and set(x.model_version.tolist()) == {4}

        self.run(work, [policy], [[judge]], auxiliary_names=("judge",))

    def test_only_failed_runs_are_tried_again(self) -> None:
        async def work(c: Any) -> None:
            result = await self.train(c, rr.Task(PREFIX + "flaky", repeat_times=4))
            assert result["ok_task_count"] == 1 and result["metrics"]["rollout/retry_count"] == 1
            assert (await c.sink.get(4)).reward.tolist() == [1.0, 2.0, 1.0, 2.0]

        self.run(work, max_retries=1, repeats_per_attempt=4)

    def test_errors_come_back_as_text(self) -> None:
        async def work(c: Any) -> None:
            given = [rr.Task(PREFIX + name) for name in ("bad", "gives_up", "off_space", "good")]
            result = await self.train(c, *given)
            assert result["failed_task_count"] == 3 and result["ok_task_count"] == 1
            errors = result["errors"]
            assert "broken task 0" in errors[0] and "Traceback" in errors[0]
            assert "no use" in errors[1] and "tokens" in errors[2]
            assert c.batch_state(1).statuses[0].attempts == 2  # tried again
            assert (
                c.batch_state(1).statuses[1].attempts == c.batch_state(1).statuses[2].attempts == 1
            )  # final

        self.run(work, max_retries=1)

    def test_all_failing_is_a_failed_batch(self) -> None:
        async def work(c: Any) -> None:
            with pytest.raises(BatchFailed, match="broken task 0"):
                await self.train(c, rr.Task(PREFIX + "bad"))

        self.run(work)

    @pytest.mark.parametrize("name", ["hangs", "ignores_cancel", "blocks"])
    def test_an_attempt_over_its_limit_ends_and_the_work_goes_on(self, name: str) -> None:
        async def work(c: Any) -> None:
            given = [rr.Task(PREFIX + name, timeout_s=0.1)]
            result = await self.train(c, *given, *(rr.Task(PREFIX + "good") for _ in range(4)))
            assert result["ok_task_count"] == 4 and result["failed_task_count"] == 1
            assert result["metrics"]["rollout/timeout_count"] == 1 and "limit" in result["errors"][0]
            assert (await c.sink.get(4)) is not None and len(c.sink) == 0
            assert c.stats().attempts.timed_out == 1

        self.run(work)

    def test_abort_stops_what_runs(self) -> None:
        async def work(c: Any) -> None:
            given = [rr.Task(PREFIX + name) for name in ("hangs", "hangs", "good")]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            waiting = asyncio.ensure_future(c.finalize_train_batch(1, timeout=30))
            await asyncio.sleep(0)
            await c.abort_batch(1, reason="enough")
            with pytest.raises(BatchAborted, match="enough"):
                await waiting
            assert c.stats().attempts.running == 0
            await c.submit_batch(batch_id=2, tasks=[rr.Task(PREFIX + "good")], batch_type="train")
            assert (await c.finalize_train_batch(2, timeout=30))["ok_task_count"] == 1

        self.run(work)

    def test_seeds_are_those_of_the_run_wherever_it_runs(self) -> None:
        async def work(c: Any) -> Any:
            result = await self.train(c, rr.Task(PREFIX + "good", task_id="t"))
            return result["metrics"]["rollout/seed/mean"]

        from recollect.rollout.tasks import run_seed, task_key

        assert self.run(work, seed=9) == run_seed(task_key(9, 1, "t"), 0) % 2**40

    def test_a_runner_that_dies_is_replaced(self, tmp_path: Any) -> None:
        """Its unit goes to the front once, without cost; a unit that loses a second runner fails."""
        if not self.can_kill:
            pytest.skip("a runner in this process cannot die alone")

        async def work(c: Any) -> None:
            once = rr.Task(PREFIX + "dies_once", {"path": str(tmp_path / "died")})
            result = await self.train(c, once, rr.Task(PREFIX + "dies"), rr.Task(PREFIX + "good"))
            assert result["ok_task_count"] == 2 and result["metrics"]["rollout/requeue_count"] == 2
            assert "WorkerDiedError" in result["errors"][1]
            assert c.stats().attempts.lost == 3

        self.run(work)


def check_doors(c: Any) -> None:
    """Every run and every attempt left by exactly one door."""
    stats = c.stats()
    runs, attempts = stats.runs, stats.attempts
    assert runs.submitted == runs.live + sum(
        (runs.delivered, runs.filtered, runs.unused, runs.failed, runs.cancelled)
    ), runs
    ended = (attempts.good, attempts.failed, attempts.timed_out, attempts.cancelled, attempts.lost)
    assert attempts.started == attempts.running + sum(ended), attempts

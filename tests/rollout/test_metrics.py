"""What a batch's result says: counts, and numbers over its good tasks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rollout.make import bad, check_doors, coordinator, experience, good, run, settle

import recollect.rollout as rr
from recollect.errors import BatchAborted


def test_metrics_are_over_good_tasks_each_by_the_mean_of_its_good_runs() -> None:
    async def scored(task: Any, models: Any) -> Any:
        x = float(task.data["base"] + task.run_id)
        if task.data.get("fails") and task.run_id == 1:
            raise rr.GiveUp("no")
        if task.data.get("again") and task.attempt == 1:
            raise OSError("once")
        row = experience(reward=x, n=int(x) + 1, metrics={"own": 2 * x})
        return rr.Result([row, row], {"x": x, "text": "no number", "much": float("inf")})

    async def main() -> None:
        async with coordinator(max_retries=1, models=[rr.ScriptedModel(["x"], version=2)]) as c:
            given = [
                rr.Task(scored, {"base": 0}, repeat_times=2),
                rr.Task(scored, {"base": 4, "again": True}, repeat_times=2),
                rr.Task(scored, {"base": 100, "fails": True}, repeat_times=2),
                rr.Task(bad, max_retries=0),
            ]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            await settle(c)
            await c.sync_weights(5)
            result = await c.finalize_train_batch(1, timeout=0)
            m = result["metrics"]
            for name, low, high in (("x", 0.5, 4.5), ("own", 1.0, 9.0), ("reward", 0.5, 4.5)):
                found = [m[f"rollout/{name}/{what}"] for what in ("min", "max", "mean", "std")]
                assert found == [low, high, (low + high) / 2, (high - low) / 2], name
            assert (m["rollout/response_length/min"], m["rollout/response_length/max"]) == (3.0, 11.0)
            assert (m["rollout/attempts/min"], m["rollout/attempts/max"]) == (2.0, 4.0)
            assert m["rollout/staleness/mean"] == 3.0 and m["rollout/run_s/min"] > 0
            assert m["rollout/bad_metric_count"] == 10 and m["rollout/retry_count"] == 2
            assert not any("text" in name or "much" in name for name in m)
            counts = {
                "finished": 4,
                "expected": 4,
                "ok": 2,
                "partial": 1,
                "failed": 1,
                "cancelled": 0,
                "carried": 0,
            }
            for name, n in counts.items():
                assert result[f"{name}_task_count"] == m[f"rollout/{name}_task_count"] == n, name
            assert result["experience_count"] == m["rollout/experience_count"] == 8
            assert (result["batch_id"], result["batch_type"]) == (1, "train")
            assert list(result["errors"]) == [2, 3] and "broken 3" in result["errors"][3]
            statuses = c.batch_state(1).statuses
            status = statuses[2]
            assert (status.state, status.completed_runs, status.total_runs) == ("partial", 1, 2)
            assert status.metrics["x"] == 100.0 and "no" in status.error
            assert (statuses[3].state, statuses[3].completed_runs) == ("failed", 0)
            assert (statuses[0].state, statuses[0].attempts, statuses[0].error) == ("ok", 2, None)
            check_doors(c)

    run(main())


def test_a_time_out_and_a_straggler_are_counted() -> None:
    async def main() -> None:
        async with coordinator(attempt_timeout_s=5.0) as c:
            given = [rr.Task(c.gates), rr.Task(c.gates, timeout_s=50.0), rr.Task(good)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train", min_wait_num=1)
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            result = await c.finalize_train_batch(1, timeout=0)
            assert result["metrics"]["rollout/timeout_count"] == 1
            assert result["cancelled_task_count"] == result["metrics"]["rollout/cancelled_task_count"] == 1
            assert (result["finished_task_count"], result["expected_task_count"]) == (2, 3)

    run(main())


def test_only_the_first_errors_are_shown() -> None:
    async def main() -> None:
        async with coordinator(
            below_min="accept"
        ) as c:  # the config's: nothing is good, and that is accepted
            await c.submit_batch(batch_id=1, tasks=[rr.Task(bad) for _ in range(10)], batch_type="train")
            result = await c.finalize_train_batch(1)
            assert list(result["errors"]) == list(range(8)) and result["failed_task_count"] == 10

    run(main())


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    async def loud(task: Any, models: Any) -> Any:
        raise ValueError("begin" + "x" * 20_000 + "end")

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(loud)], batch_type="train")
            await settle(c)
            error = c.batch_state(1).statuses[0].error
            assert len(error) < 8_100 and error.startswith("Traceback") and error.rstrip().endswith("end")

    run(main())


@pytest.mark.parametrize(("ident", "name"), [("12/copy/hard", "copy/hard"), ("copy", "copy"), (5, "5")])
def test_an_eval_result_is_named_by_its_id_and_has_best_of_powers_of_two(ident: Any, name: str) -> None:
    async def scored(task: Any, models: Any) -> Any:
        return rr.Result(metrics={"score": float(task.run_id)})

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=ident, tasks=[rr.Task(scored, repeat_times=5)], batch_type="eval")
            result = await c.finalize_eval_batch(ident)
            m = result["metrics"]
            assert result["batch_type"] == "eval" and m[f"eval/{name}/finished_task_count"] == 1
            assert m[f"eval/{name}/score/max"] == 2.0  # of tasks, by the mean of their runs
            best = {key.rpartition("@")[2] for key in m if "score/best@" in key}
            assert best == {"2", "4"} == {key.rpartition("@")[2] for key in m if "score/worst@" in key}
            assert m[f"eval/{name}/score/best@4"] == pytest.approx((4 * 4 + 3) / 5)
            assert m[f"eval/{name}/score/worst@4"] == pytest.approx((0 * 4 + 1) / 5)
            assert not any(key.startswith("rollout/") for key in m)

    run(main())


def test_eval_runs_are_staged_without_payloads_and_pass_no_operator() -> None:
    def never(x: Any) -> Any:
        raise AssertionError("an operator was called")

    async def both(task: Any, models: Any) -> Any:
        return rr.Result(experience(), {"x": 1.0})

    async def main() -> None:
        async with coordinator(operators=(never,)) as c:
            await c.submit_batch(batch_id="e", tasks=[rr.Task(both)], batch_type="eval")
            await settle(c)
            assert c.batch_state("e").completed_task_count == 1 and c.stats().staged_nbytes == 0
            result = await c.finalize_eval_batch("e")
            assert (result["experience_count"], c.list_sink.parts) == (0, {})
            assert result["metrics"]["eval/e/reward/mean"] == 1.0  # of what it returned, as a number

    run(main())


def test_a_result_is_the_callers_own_copy() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await settle(c)
            live = c.batch_state(1)
            live.statuses[0].metrics["reward"] = 99.0
            live.statuses.clear()
            first = await c.finalize_train_batch(1)
            assert (
                first["metrics"]["rollout/reward/mean"] == 0.0 and c.batch_state(1).statuses[0].state == "ok"
            )
            for spoilt in (first, await c.finalize_train_batch(1), c.batch_state(1).final_result):
                spoilt["metrics"].clear()
                spoilt["ok_task_count"] = 99
            again = await c.finalize_train_batch(1)
            assert again["ok_task_count"] == 1 and again["metrics"]["rollout/reward/mean"] == 0.0
            stats = c.stats()
            stats.runs.delivered = stats.attempts.good = 99
            assert (c.stats().runs.delivered, c.stats().attempts.good) == (1, 1)
            with pytest.raises(AttributeError):
                stats.staged_nbytes = 5

    run(main())


def test_the_result_of_an_aborted_batch_is_the_callers_own_copy() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await settle(c)
            await c.abort_batch(1, reason="enough", keep_partial_results=True)
            for _ in range(2):
                with pytest.raises(BatchAborted, match="enough") as caught:
                    await c.finalize_train_batch(1)
                assert caught.value.reason == "enough" and caught.value.result["ok_task_count"] == 1
                caught.value.result.clear()

    run(main())

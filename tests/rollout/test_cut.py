"""The cut: which results count, what is cancelled, and stragglers that are carried into a later batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.rollout.make import (
    check_doors,
    coordinator,
    end,
    good,
    run,
    settle,
    tasks,
)

import recollect.rollout as rr
from recollect.errors import (
    PipelineError,
)


def test_carried_tasks_join_the_next_batch() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry") as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train", min_wait_num=2)
            await settle(c)
            c.gates.end((1, 0, 0))
            c.gates.end((1, 1, 0))
            await settle(c)
            result = await c.finalize_train_batch(1, timeout=0)
            assert result["carried_task_count"] == 1 and result["cancelled_task_count"] == 0
            assert c.stats().runs.live == 1
            await c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.gates.end((1, 2, 0))
            c.gates.end((2, 0, 0))
            await settle(c)
            second = await c.finalize_train_batch(2, timeout=0)
            assert second["experience_count"] == 2 and second["metrics"]["rollout/carried_in_count"] == 1
            x = list(c.list_sink.parts.values())[1]
            assert x.task_of(x.group_id[1]) == (1, 2)
            check_doors(c)

    run(main())


def test_a_carried_task_in_the_buffer_is_no_sign_that_its_first_batch_was_written() -> None:
    """The write of batch 1 failed; batch 2 took a task of it along; batch 1 is written when it is finalized again."""
    buffer = rr.experience_buffer("memory", capacity=100, max_tokens=16)

    class FailsOnce(rr.ReplaySink):
        fails = True

        def write(self, x: Any, commit_id: str) -> None:
            if self.fails:
                self.fails = False
                raise OSError("not now")
            super().write(x, commit_id)

    async def main() -> None:
        async with coordinator(stragglers="carry", sink=FailsOnce(buffer), space=buffer.single_space) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train", min_wait_num=1)
            await c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.gates.end((1, 0, 0))
            await settle(c)
            with pytest.raises(PipelineError, match="not now"):
                await c.finalize_train_batch(1, timeout=0)
            for key in ((1, 1, 0), (2, 0, 0)):
                c.gates.end(key)
            await settle(c)
            assert (await c.finalize_train_batch(2, timeout=0))["experience_count"] == 2
            assert (await c.finalize_train_batch(1, timeout=0))["experience_count"] == 1
            assert len(buffer) == 3
            check_doors(c)

    run(main())


def test_after_a_failed_pass_the_cut_stands() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            await settle(c)
            c.gates.end((1, 0, 0))
            await settle(c)
            c.list_sink.fail = "before"
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(1, timeout=0, below_min="accept")
            c.list_sink.fail = None
            result = await c.finalize_train_batch(1, timeout=0)  # straight to the pass, no deadline
            assert result["ok_task_count"] == 1 and result["cancelled_task_count"] == 1
            check_doors(c)

    run(main())


@pytest.mark.parametrize("how", ["cut", "abort", "deadline", "carry"])
def test_good_runs_of_a_task_that_is_unfinished_at_the_cut_are_kept(how: str) -> None:
    async def main() -> None:
        carry = "carry" if how == "carry" else "cancel"
        async with coordinator(
            partial_results="keep", stragglers=carry, runners=9, wait_after_min_s=5.0
        ) as c:
            given = [rr.Task(good), *tasks(c, 3, repeat_times=3)]
            least = {"cut": 1, "deadline": 2, "carry": 1}.get(how)
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train", min_wait_num=least)
            await settle(c)
            for run_id in (0, 2):
                c.gates.end((1, 1, run_id))  # two good runs of three
            c.gates.end((1, 2, 0))  # one is too few
            await settle(c)
            if how == "abort":
                await c.abort_batch(1, reason="enough", keep_partial_results=True)
                result = c.batch_state(1).final_result
            else:
                waits = asyncio.create_task(c.finalize_train_batch(1, timeout=20.0))
                await settle(c)
                c.clock.advance(5.0)
                await settle(c)
                if how == "deadline":  # before it the minimum is of ended tasks
                    assert not waits.done()
                    c.clock.advance(15.0)
                result = await waits
            kept = how != "carry"
            assert result["experience_count"] == (3 if kept else 1)
            assert result["partial_task_count"] == kept
            assert result["cancelled_task_count"] == (2 if kept else 0)
            assert result["carried_task_count"] == (0 if kept else 3)
            if kept:
                status = c.batch_state(1).statuses[1]
                assert (status.state, status.completed_runs, status.total_runs) == ("partial", 2, 3)
                runs = c.stats().runs
                assert (runs.delivered, runs.unused, runs.cancelled, runs.live) == (3, 1, 6, 0)
            check_doors(c)

    run(main())


def test_runs_of_carried_tasks_are_counted_when_the_coordinator_ends() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry") as c:
            tasks = [rr.Task(c.gates, repeat_times=2) for _ in range(2)]
            await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train", min_wait_num=1)
            await settle(c)
            for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0)):
                c.gates.end(key)
                await settle(c)
            result = await c.finalize_train_batch(1, timeout=0)
            assert result["carried_task_count"] == 1
            await c.shutdown()
            await c.prepare()
            runs = c.stats().runs
            assert (runs.delivered, runs.unused, runs.cancelled, runs.live) == (2, 1, 1, 0)
            check_doors(c)

    run(main())


def test_work_that_the_cut_cancelled_is_not_started_again() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_retries=1, retry_backoff_s=9.0) as c:
            given = [rr.Task(good), *tasks(c, 4)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train", min_wait_num=1)
            await settle(c)
            await end(c, (1, 1, 0), outcome=OSError("rests"))
            c.list_sink.fail = "before"
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(1, timeout=0)
            await settle(c)
            c.clock.advance(20.0)
            await settle(c)
            assert not c.gates.waiting and c.stats().queue.queued_runs == 0 and c.clock.n_timers == 0
            check_doors(c)

    run(main())


def test_only_tasks_that_have_begun_are_carried_and_they_join_train_batches_alone() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry", runners=2) as c:
            await c.submit_batch(
                batch_id=1, tasks=tasks(c, 4, repeat_times=2), batch_type="train", min_wait_num=1
            )
            await settle(c)
            await end(c, (1, 0, 0), (1, 0, 1))
            assert sorted(c.gates.waiting) == [(1, 1, 0), (1, 1, 1)]
            result = await c.finalize_train_batch(1, timeout=0)
            assert (result["carried_task_count"], result["cancelled_task_count"]) == (1, 2)
            assert result["expected_task_count"] == 4
            assert c.stats().queue.queued_runs == 0 and c.stats().runs.live == 2
            await end(c, (1, 1, 0), (1, 1, 1))
            held = c.stats().staged_nbytes
            assert held > 0
            await c.submit_batch(batch_id="e", tasks=tasks(c, 1), batch_type="eval", min_wait_num=1)
            await settle(c)
            await end(c, ("e", 0, 0), outcome=rr.Result(metrics={"x": 1.0}))
            evaluated = await c.finalize_eval_batch("e")
            assert "rollout/carried_in_count" not in evaluated["metrics"] and c.stats().runs.live == 2
            c.list_sink.fail = "before"
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            for _ in range(2):  # the cut stands: what has joined stays
                with pytest.raises(PipelineError):
                    await c.finalize_train_batch(2)
                assert c.stats().staged_nbytes > held
            c.list_sink.fail = None
            second = await c.finalize_train_batch(2)
            assert (second["experience_count"], second["metrics"]["rollout/carried_in_count"]) == (3, 1)
            assert second["metrics"]["rollout/reward/mean"] == 0.0  # of its own tasks
            assert (second["finished_task_count"], second["expected_task_count"]) == (1, 1)
            stats = c.stats()
            assert (stats.staged_nbytes, stats.queue.queued_runs, stats.runs.live) == (0, 0, 0)
            assert stats.runs.delivered == 2 + 1 + 3 and stats.runs.cancelled == 4
            check_doors(c)

    run(main())


def test_the_stragglers_of_an_eval_batch_are_cancelled() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry") as c:
            await c.submit_batch(batch_id="e", tasks=tasks(c, 2), batch_type="eval", min_wait_num=1)
            await settle(c)
            await end(c, ("e", 0, 0), outcome=rr.Result(metrics={"x": 1.0}))
            result = await c.finalize_eval_batch("e", timeout=0)
            assert (result["carried_task_count"], result["cancelled_task_count"]) == (0, 1)
            await settle(c)
            assert not c.gates.waiting and c.stats().runs.live == 0

    run(main())


def test_the_runs_left_of_a_carried_task_go_on() -> None:
    """One run runs, one rests after a failure, one waits again, and one was never begun."""

    async def main() -> None:
        async with coordinator(stragglers="carry", runners=3, max_retries=1, retry_backoff_s=10.0) as c:
            given = [rr.Task(good), *tasks(c, 1, repeat_times=5)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train", min_wait_num=1)
            await settle(c)
            await end(c, (1, 1, 0), outcome=OSError("rests"))
            assert sorted(c.gates.waiting) == [(1, 1, 1), (1, 1, 2), (1, 1, 3)]
            await end(c, (1, 1, 1))
            assert (1, 1, 4) in c.gates.waiting
            staged = c.stats().staged_nbytes
            result = await c.finalize_train_batch(1, timeout=0)
            assert result["carried_task_count"] == 1 and c.stats().queue.queued_runs == 1
            assert (
                c.stats().staged_nbytes == staged // 2 > 0
            )  # of the run that is carried, as large as the other
            check_doors(c)
            c.clock.advance(20.0)
            await settle(c)
            await end(c, (1, 1, 2))
            assert (1, 1, 0) in c.gates.waiting and c.stats().queue.queued_runs == 0
            await end(c, (1, 1, 3), (1, 1, 4), (1, 1, 0))
            await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            second = await c.finalize_train_batch(2)
            assert second["experience_count"] == 5
            [x] = [x for x in c.list_sink.parts.values() if len(x) == 5]
            assert x.run_id.tolist() == [0, 1, 2, 3, 4] and len(set(x.group_id.tolist())) == 1
            assert x.task_of(x.group_id[0]) == (1, 1) and c.stats().staged_nbytes == 0
            check_doors(c)

    run(main())


def test_a_carried_task_that_fails_joins_nothing_and_is_counted() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry") as c:
            given = [rr.Task(good), *tasks(c, 1, repeat_times=2)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train", min_wait_num=1)
            await settle(c)
            await c.finalize_train_batch(1, timeout=0)
            await end(c, (1, 1, 0))
            await end(c, (1, 1, 1), outcome=ValueError("no"))
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            second = await c.finalize_train_batch(2)
            assert second["experience_count"] == 1 and "rollout/carried_in_count" not in second["metrics"]
            runs = c.stats().runs
            assert (runs.delivered, runs.unused, runs.failed, runs.live) == (2, 1, 1, 0)
            assert c.stats().staged_nbytes == 0
            check_doors(c)

    run(main())

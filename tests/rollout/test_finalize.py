"""Finalizing: when a batch is ready, deadlines, minimums, and why_waiting."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from tests.rollout.make import (
    bad,
    check_doors,
    coordinator,
    end,
    experience,
    good,
    run,
    settle,
    tasks,
)

import recollect.rollout as rr
from recollect.errors import (
    BatchFailed,
    DeadlineError,
)

S = rr.BatchLifecycleState


def test_finalize_waits_for_all_and_says_what_it_delivered() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=2), batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            other = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            for key in sorted(c.gates.waiting, reverse=True):  # in another order than the result has
                c.gates.end(key, experience(reward=key[1] + key[2] / 10))
            result, again = await waiting, await other
            assert result == again and result is not again and result["metrics"] is not again["metrics"]
            assert result["finished_task_count"] == result["expected_task_count"] == 2
            assert result["experience_count"] == 4
            assert result["metrics"]["rollout/reward/mean"] == pytest.approx(0.55)
            assert result["metrics"]["rollout/reward/std"] == pytest.approx(0.5)
            [x] = c.list_sink.parts.values()
            assert x.reward.tolist() == pytest.approx([0.0, 0.1, 1.0, 1.1])
            assert x.task_of(x.group_id[2]) == (1, 1)
            assert (await c.finalize_train_batch(1)) == result
            check_doors(c)

    run(main())


def test_a_deadline_loses_nothing_and_says_why() -> None:
    async def main() -> None:
        async with coordinator(models=[rr.ScriptedModel(["x"], failures={0: "hang"})]) as c:

            async def asks(task: Any, models: Any) -> Any:
                [g] = await models.rollout.chat([{"role": "user", "content": "?"}])
                return g.experience(reward=1.0)

            await c.submit_batch(batch_id=7, tasks=[rr.Task(asks), rr.Task(good)], batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(7, timeout=61.0))
            await settle(c)
            c.clock.advance(61.0)
            with pytest.raises(DeadlineError) as caught:
                await waiting
            text = str(caught.value)
            assert "1 of 2 good" in text and "task 0 run 0: attempt 1 of 1" in text
            assert "61 s" in text and "in chat at rollout[0]" in text
            assert (caught.value.finished, caught.value.expected) == (1, 2)
            assert c.batch_state(7).state is S.RUNNING
            result = await c.finalize_train_batch(7, timeout=0, below_min="accept")
            assert result["ok_task_count"] == 1 and result["cancelled_task_count"] == 1
            check_doors(c)

    run(main())


def test_timeout_zero_looks_once() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            with pytest.raises(DeadlineError):
                await c.finalize_train_batch(1, timeout=0)
            with pytest.raises(DeadlineError):  # nothing is good: there is nothing to accept
                await c.finalize_train_batch(1, timeout=0, below_min="accept")
            for wrong in (-1, float("nan"), float("inf")):
                with pytest.raises(ValueError):
                    await c.finalize_train_batch(1, timeout=wrong)
            with pytest.raises(KeyError):
                await c.finalize_train_batch(2, timeout=0)
            with pytest.raises(ValueError, match="finalize_train_batch"):
                await c.finalize_eval_batch(1, timeout=0)

    run(main())


def test_the_minimum_and_the_wait_after_it() -> None:
    async def main() -> None:
        async with coordinator(wait_after_min_s=30.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 4), batch_type="train", min_wait_num=2)
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            c.gates.end((1, 0, 0))
            c.gates.end((1, 1, 0))
            await settle(c)
            c.clock.advance(29.0)
            await settle(c)
            assert not waiting.done() and "after the minimum" in str(c.why_waiting(1))
            c.gates.end((1, 2, 0))
            await settle(c)
            c.clock.advance(1.0)
            result = await waiting
            assert result["ok_task_count"] == 3 and result["cancelled_task_count"] == 1
            assert c.stats().runners.fenced == 0
            check_doors(c)

    run(main())


def test_over_rollout_sets_the_minimum() -> None:
    async def main() -> None:
        async with coordinator(over_rollout=0.25) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 4), batch_type="train")
            assert c.batch_state(1).min_wait_num == 3
            await c.submit_batch(batch_id="1/e", tasks=tasks(c, 4), batch_type="eval")
            assert c.batch_state("1/e").min_wait_num is None

    run(main())


def test_too_few_good_tasks_fail_with_the_first_traceback() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(
                batch_id=1, tasks=[rr.Task(bad), rr.Task(good)], batch_type="train", min_wait_num=2
            )
            with pytest.raises(BatchFailed, match="broken 0") as caught:
                await c.finalize_train_batch(1, timeout=10)
            assert list(caught.value.errors) == [0] and "Traceback" in caught.value.errors[0]
            assert c.why_waiting(1).reasons == (
                "1 of 2 good",
                "too few good tasks, so finalize fails: abort it, or finalize it with below_min='accept'",
            )
            result = await c.finalize_train_batch(1, timeout=10, below_min="accept")
            assert (result["ok_task_count"], result["failed_task_count"]) == (1, 1)
            assert "broken 0" in result["errors"][0]
            check_doors(c)

    run(main())


@pytest.mark.parametrize("partial", ["drop", "keep", "raise"])
def test_partial_groups(partial: str) -> None:
    async def sometimes(task: Any, models: Any) -> Any:
        if task.run_id == 1:
            raise rr.GiveUp("not this one")
        return experience()

    async def main() -> None:
        async with coordinator(partial_results=partial, min_group_size=2, max_retries=3) as c:
            given = [rr.Task(sometimes, repeat_times=3), rr.Task(good)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            if partial == "raise":
                with pytest.raises(BatchFailed, match="not this one"):
                    await c.finalize_train_batch(1, timeout=10)
                await c.abort_batch(1, reason="as told")
                assert c.stats().runs.unused == 3
            else:
                result = await c.finalize_train_batch(1, timeout=10)
                assert result["partial_task_count"] == 1
                assert result["experience_count"] == (3 if partial == "keep" else 1)
                assert result["metrics"]["rollout/retry_count"] == 0  # GiveUp is final
            check_doors(c)

    run(main())


def test_eval_sends_metrics_only() -> None:
    async def main() -> None:
        async with coordinator() as c:

            async def scored(task: Any, models: Any) -> Any:
                return rr.Result(experience(), {"score": float(task.run_id), "odd": float("nan")})

            given = [rr.Task(scored, repeat_times=4), rr.Task(scored, repeat_times=4)]
            await c.submit_batch(batch_id="12/copy", tasks=given, batch_type="eval")
            result = await c.finalize_eval_batch("12/copy", timeout=10)
            m = result["metrics"]
            assert m["eval/copy/score/mean"] == 1.5 and m["eval/copy/score/best@4"] == 3.0
            assert m["eval/copy/score/best@2"] == pytest.approx((1 + 2 + 2 + 3 + 3 + 3) / 6)
            assert m["eval/copy/score/worst@2"] == pytest.approx((0 * 3 + 1 * 2 + 2) / 6)
            assert m["eval/copy/bad_metric_count"] == 8 and "eval/copy/odd/mean" not in m
            assert not c.list_sink.parts and c.stats().runs.delivered == 8

    run(main())


def test_train_without_experience_fails() -> None:
    async def nothing(task: Any, models: Any) -> Any:
        return rr.Result(metrics={"x": 1.0})

    async def main() -> None:
        async with coordinator(max_retries=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(nothing)], batch_type="train")
            with pytest.raises(BatchFailed, match="got nothing"):
                await c.finalize_train_batch(1, timeout=10)
            assert c.stats().attempts.failed == 2  # retried like one that raised

    run(main())


def test_empty_batch() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            assert c.batch_state(1).state is S.PENDING
            result = await c.finalize_train_batch(1, timeout=0)
            assert result["finished_task_count"] == 0 and c.batch_state(1).state is S.FINALIZED

    run(main())


def test_after_a_deadline_the_work_goes_on_and_a_later_finalize_succeeds() -> None:
    async def main() -> None:
        async with coordinator(runners=1, batch_timeout_s=7.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))  # as long as the config says
            await settle(c)
            c.clock.advance(6.9)
            await settle(c)
            assert not waits.done()
            c.clock.advance(0.1)
            with pytest.raises(DeadlineError):
                await waits
            for task in (0, 1):
                await settle(c)
                c.gates.end((1, task, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 2

    run(main())


def test_with_the_minimum_reached_the_deadline_cuts_before_the_wait_is_over() -> None:
    async def main() -> None:
        async with coordinator(wait_after_min_s=30.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train", min_wait_num=1)
            await settle(c)
            c.gates.end((1, 0, 0))
            await settle(c)
            c.clock.advance(10.0)
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=5.0))
            await settle(c)
            assert "waiting 20.0 s for more after the minimum" in str(c.why_waiting(1))
            assert c.why_waiting(1).reasons[0] == "1 of 1 good"  # of the minimum, not of all three
            c.clock.advance(5.0)
            assert (await waits)["ok_task_count"] == 1

    run(main())


def test_the_wait_after_the_minimum_begins_when_it_is_reached() -> None:
    async def main() -> None:
        async with coordinator(wait_after_min_s=30.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train", min_wait_num=1)
            await settle(c)
            c.gates.end((1, 0, 0))
            await settle(c)
            c.clock.advance(29.0)
            c.gates.end((1, 1, 0))
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100.0))
            await settle(c)
            assert not waits.done()
            c.clock.advance(1.0)
            assert (await waits)["ok_task_count"] == 2

    run(main())


def test_a_timeout_is_a_number_and_below_min_one_of_two_words() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            for wrong in ("5", True, [1]):
                with pytest.raises(TypeError, match="timeout"):
                    await c.finalize_train_batch(1, timeout=wrong)
            with pytest.raises(ValueError, match="below_min"):
                await c.finalize_train_batch(1, below_min="take")
            with pytest.raises(TypeError, match="batch_id"):
                await c.finalize_train_batch(1.0)

    run(main())


def test_accept_takes_the_runs_that_are_good_now_though_no_task_has_ended() -> None:
    async def main() -> None:
        async with coordinator(partial_results="keep") as c:
            await c.submit_batch(batch_id="1/x", tasks=tasks(c, 1, repeat_times=3), batch_type="eval")
            await settle(c)
            c.gates.end(("1/x", 0, 1))
            await settle(c)
            with pytest.raises(DeadlineError):  # one run is too few
                await c.finalize_eval_batch("1/x", timeout=0, below_min="accept")
            c.gates.end(("1/x", 0, 2))
            await settle(c)
            with pytest.raises(DeadlineError):
                await c.finalize_eval_batch("1/x", timeout=0)
            result = await c.finalize_eval_batch("1/x", timeout=0, below_min="accept")
            assert (result["partial_task_count"], result["metrics"]["eval/x/reward/best@2"]) == (1, 1.0)
            check_doors(c)

    run(main())


@pytest.mark.parametrize("how", ["failed", "partial"])
def test_under_raise_a_bad_run_ends_the_wait_at_once(how: str) -> None:
    async def main() -> None:
        async with coordinator(partial_results="raise") as c:
            n = 1 if how == "failed" else 2
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=n), batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            for run_id in range(n):
                c.gates.end((1, 0, run_id), ValueError("bad") if run_id == 0 else None)
            with pytest.raises(BatchFailed, match="every run of every task must be good") as caught:
                await waits
            assert list(caught.value.errors) == [0] and c.batch_state(1).state is S.RUNNING

    run(main())


@pytest.mark.parametrize(("n_good", "used"), [(1, 0), (2, 2)])
def test_part_of_a_group_is_kept_only_if_it_is_large_enough(n_good: int, used: int) -> None:
    async def some(task: Any, models: Any) -> Any:
        if task.run_id >= n_good:
            raise rr.GiveUp("no")
        return experience()

    async def main() -> None:
        async with coordinator(partial_results="keep", min_group_size=2) as c:
            await c.submit_batch(
                batch_id=1, tasks=[rr.Task(some, repeat_times=3), rr.Task(good)], batch_type="train"
            )
            result = await c.finalize_train_batch(1)
            assert result["experience_count"] == used + 1
            runs = c.stats().runs
            assert (runs.delivered, runs.unused, runs.failed) == (used + 1, n_good - used, 3 - n_good)

    run(main())


def test_cancelling_a_finalize_changes_nothing_and_never_stops_a_pass() -> None:
    inside, gate = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        inside.set()
        gate.wait(20)
        return x

    async def main() -> None:
        async with coordinator(operators=(slow,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(c.gates)], batch_type="train")
            early = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            early.cancel()
            await settle(c)
            assert c.batch_state(1).state is S.RUNNING and list(c.gates.waiting) == [(1, 0, 0)]
            c.gates.end((1, 0, 0))
            late = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            while not inside.is_set():
                await asyncio.sleep(0)
            late.cancel()
            await asyncio.sleep(0)
            assert c.batch_state(1).state is S.FINALIZING
            gate.set()
            assert (await c.finalize_train_batch(1))["experience_count"] == 1 == len(c.list_sink.uids)

    run(main())


def test_nothing_good_is_not_accepted_at_the_deadline() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(c.gates) for _ in range(2)], batch_type="train")
            await settle(c)
            with pytest.raises(DeadlineError):
                await c.finalize_train_batch(1, timeout=0, below_min="accept")
            c.gates.end((1, 1, 0))
            await settle(c)
            result = await c.finalize_train_batch(1, timeout=0, below_min="accept")
            assert (result["ok_task_count"], result["cancelled_task_count"]) == (1, 1)

    run(main())


def test_why_waiting_says_what_work_is_behind() -> None:
    async def main() -> None:
        async with coordinator(runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            await c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train", min_wait_num=1)
            await settle(c)
            c.clock.advance(3.0)
            first, second = c.why_waiting(1), c.why_waiting(2)
            assert first.reasons == (
                "0 of 2 good", "task 0 run 0: attempt 1 of 1 on runner 0, 3 s", "1 runs queued: all 1 runners are busy",
            )  # fmt: skip
            assert str(first) == "; ".join(first.reasons) and first.batch_id == 1
            assert second.reasons == ("0 of 1 good", "1 runs queued behind [1]")
            await end(c, (1, 0, 0))
            await end(c, (1, 1, 0))
            assert c.why_waiting(1).reasons[-1] == "it was not finalized yet"

    run(main())


def test_why_waiting_names_an_attempt_that_is_being_stopped() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_retries=3, attempt_timeout_s=9.0, cancel_grace_s=5.0) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.clock.advance(4.0)
            given = [rr.Task(c.gates), rr.Task(c.gates, task_id="b", max_retries=0)]
            await c.submit_batch(batch_id=2, tasks=given, batch_type="train")
            await settle(c)
            c.clock.advance(6.0)
            [said] = [reason for reason in c.why_waiting(1).reasons if "task" in reason]
            assert said == "task 0 run 0: attempt 1 of 4 on runner 0, 10 s, being stopped"
            c.gates.ignores_cancel = False
            c.clock.advance(4.0)
            await settle(c)

    run(main())


def test_why_waiting_names_the_longest_running_attempt_first_and_pauses() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_retries=1, retry_backoff_s=10.0) as c:
            stream = c.events()
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train")
            await settle(c)
            c.clock.advance(2.0)
            await end(c, (1, 0, 0), outcome=OSError("lost it"))
            c.clock.advance(3.0)
            running = [reason for reason in c.why_waiting(1).reasons if "attempt 1 of 2" in reason]
            assert [reason.partition(":")[0] for reason in running] == ["task 1 run 0", "task 2 run 0"]
            [resting] = [reason for reason in c.why_waiting(1).reasons if "backing off" in reason]
            await c.shutdown()
            [pause] = [float(e.detail.split()[1]) async for e in stream if e.kind == "retried"]
            said, left, rest = re.split(r"for ([\d.]+) s", resting)
            assert (said, rest) == ("task 0 run 0: backing off ", " after attempt 1, OSError: lost it")
            assert float(left) == pytest.approx(pause - 3.0, abs=0.06)

    run(main())


def test_a_finalize_or_submit_that_waits_no_longer_leaves_no_timer() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1, attempt_timeout_s=1e6) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=[], batch_type="train"))
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            assert c.clock.n_timers == 3
            await end(c, (1, 0, 0))
            await waits
            await second
            assert c.clock.n_timers <= 1  # that of the attempts, which looks once more at most
            c.clock.advance(1e7)
            assert c.clock.n_timers == 0

    run(main())

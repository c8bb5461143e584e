"""Batches from submit to their end: readiness, deadlines, cuts, aborts, retries, limits, and what is said meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from time import perf_counter
from typing import Any

import pytest
from tests.rollout.make import ListSink, check_doors, config, coordinator, experience, run, settle

import recollect as rc
import recollect.rollout as rr
from recollect.errors import (
    BatchAborted,
    BatchFailed,
    ClosedError,
    DeadlineError,
    PipelineError,
    SchemaError,
)
from recollect.rollout.batch.state import MOVES, move
from recollect.testing import FakeClock

S = rr.BatchLifecycleState


def tasks(c: Any, n: int, **fields: Any) -> list[rr.Task]:
    return [rr.Task(c.gates, **fields) for _ in range(n)]


async def good(task: Any, models: Any) -> Any:
    return experience(reward=float(task.run_id))


async def bad(task: Any, models: Any) -> Any:
    raise ValueError(f"broken {task.task_id}")


# -- the page's own names


def test_states_and_fields_are_those_of_the_page() -> None:
    assert [s.value for s in S] == ["pending", "running", "finalizing", "finalized", "aborted"]
    assert isinstance(S.PENDING, str)
    state = rr.BatchState(1, "train", 3)
    assert list(vars(state))[:7] == [
        "batch_id", "batch_type", "expected_task_count", "statuses", "min_wait_num", "state", "final_result",
    ]  # fmt: skip
    assert isinstance(state.finalize_lock, asyncio.Lock) and state.completed_task_count == 0


@pytest.mark.parametrize("start", list(S))
@pytest.mark.parametrize("to", list(S))
def test_no_move_but_those_of_the_table(start: Any, to: Any) -> None:
    state = rr.BatchState(1, "train", 0, state=start)
    if to in MOVES[start]:
        move(state, to)
        assert state.state is to
    else:
        with pytest.raises(RuntimeError, match="no move"):
            move(state, to)
        assert state.state is start


# -- submitting


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"batch_id": True}, TypeError),
        ({"batch_id": 1.5}, TypeError),
        ({"batch_id": ""}, ValueError),
        ({"batch_id": "cut \ud83d"}, ValueError),
        ({"tasks": [rr.Task(good, task_id="cut \ud83d")]}, ValueError),
        ({"tasks": (rr.Task(good),)}, TypeError),
        ({"tasks": ["x"]}, TypeError),
        ({"tasks": [rr.Task("no such workflow")]}, ValueError),
        ({"tasks": [rr.Task(good, task_id=1), rr.Task(good, task_id=1)]}, ValueError),
        ({"tasks": [rr.Task(good, {"x": object()})]}, TypeError),
        ({"batch_type": "test"}, ValueError),
        ({"min_wait_num": 0}, ValueError),
        ({"min_wait_num": 2}, ValueError),
        ({"min_wait_num": True}, TypeError),
        ({"priority": "high"}, TypeError),
    ],
)
def test_a_refused_batch_leaves_no_trace(fields: dict[str, Any], error: type[Exception]) -> None:
    async def main() -> None:
        async with coordinator() as c:
            given = {"batch_id": 1, "tasks": [rr.Task(good)], "batch_type": "train"} | fields
            with pytest.raises(error):
                await c.submit_batch(**given)
            assert c.batches() == [] and c.stats().runs.submitted == 0
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)

    run(main())


def test_submit_waits_for_room_and_refuses_after_its_time() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1, submit_timeout_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            assert c.batch_state(2).state is S.PENDING
            assert "max_batches" in str(c.why_waiting(2))
            with pytest.raises(ValueError, match="live"):
                await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            c.clock.advance(10.0)
            with pytest.raises(DeadlineError, match="max_batches"):
                await second
            assert c.batches() == [1]
            third = asyncio.create_task(c.submit_batch(batch_id=3, tasks=tasks(c, 1), batch_type="train"))
            waits = asyncio.create_task(c.finalize_train_batch(3, timeout=5.0))
            await settle(c)
            await c.abort_batch(1, reason="make room")
            await third
            await settle(c)
            c.gates.end((3, 0, 0))
            assert (await waits)["ok_task_count"] == 1
            check_doors(c)

    run(main())


def test_aborting_a_batch_that_is_not_admitted_raises_in_its_submit() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            await c.abort_batch(2, reason="changed my mind")
            with pytest.raises(BatchAborted, match="changed my mind"):
                await second
            assert c.batch_state(2).state is S.ABORTED

    run(main())


# -- readiness


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


# -- passes that fail


@pytest.mark.parametrize("fail", ["before", "after"])
def test_a_failed_pass_keeps_everything_and_delivers_once(fail: str) -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good, repeat_times=3)], batch_type="train")
            c.list_sink.fail = fail
            with pytest.raises(PipelineError, match="the sink"):
                await c.finalize_train_batch(1, timeout=10)
            assert c.batch_state(1).state is S.RUNNING
            why = {"before": "disk full", "after": "lost the answer"}[fail]
            assert re.match(f"the last pass failed: .*the sink.*{why}", str(c.why_waiting(1)))
            c.list_sink.fail = None
            assert (await c.finalize_train_batch(1, timeout=0))["experience_count"] == 3
            assert len(c.list_sink.uids) == 3
            check_doors(c)

    run(main())


def test_an_operator_that_overruns_is_waited_for_and_not_run_beside_itself() -> None:
    gate, running, most = threading.Event(), [0], [0]

    def slow(x: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        gate.wait(20)
        running[0] -= 1
        return x

    async def main() -> None:
        async with coordinator(operators=(slow,), pipeline_timeout_s=5.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=10))
            while not running[0]:
                await asyncio.sleep(0)
            assert "in operator slow" in str(c.why_waiting(1))
            c.clock.advance(5.0)
            with pytest.raises(PipelineError, match="operator slow"):
                await waiting
            again = asyncio.create_task(c.finalize_train_batch(1, timeout=10))
            for _ in range(5):
                await asyncio.sleep(0)
            assert "overran" in str(c.why_waiting(1))
            gate.set()
            assert (await again)["experience_count"] == 1
            assert most == [1] and len(c.list_sink.uids) == 1

    run(main())


def test_operators_may_not_invent_rows() -> None:
    def doubles(x: Any) -> Any:
        return rr.Experiences.concat([x, x])

    async def main() -> None:
        async with coordinator(operators=(doubles,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            with pytest.raises(PipelineError, match="doubles"):
                await c.finalize_train_batch(1, timeout=10)

    run(main())


# -- aborting


def test_abort_wakes_finalizers_and_returns_when_attempts_have_stopped() -> None:
    async def main() -> None:
        async with coordinator(cancel_grace_s=2.0, runners=2) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            aborting = asyncio.create_task(c.abort_batch(1, reason="enough"))
            await settle(c)
            with pytest.raises(BatchAborted, match="enough") as caught:
                await waiting
            assert caught.value.reason == "enough" and not aborting.done()
            c.clock.advance(2.0)
            await aborting
            assert c.stats().runners.fenced == 1 and c.stats().runs.cancelled == 1
            c.gates.ignores_cancel = False
            c.gates.end((1, 0, 0))  # the fenced one ends: its result is refused
            await settle(c)
            assert c.stats().runners.fenced == 0 and not c.list_sink.parts
            await c.abort_batch(1, reason="again")  # ended: nothing happens
            await c.abort_batch(99, reason="unknown")
            with pytest.raises(ValueError, match="reason"):
                await c.abort_batch(1, reason="")
            check_doors(c)

    run(main())


def test_abort_keeping_delivers_what_is_good() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            c.gates.end((1, 1, 0))
            await settle(c)
            await c.abort_batch(1, reason="late", keep_partial_results=True)
            with pytest.raises(BatchAborted) as caught:
                await waiting
            assert caught.value.result is None
            state = c.batch_state(1)
            assert state.state is S.ABORTED and state.final_result["experience_count"] == 1
            assert len(c.list_sink.uids) == 1
            with pytest.raises(BatchAborted) as caught:
                await c.finalize_train_batch(1)
            assert caught.value.result["experience_count"] == 1
            check_doors(c)

    run(main())


def test_abort_during_operators_stops_the_pass_and_during_the_commit_does_nothing() -> None:
    gate, inside = threading.Event(), threading.Event()

    class Slow(ListSink):
        def write(self, x: Any, commit_id: str) -> None:
            inside.set()
            gate.wait(20)
            super().write(x, commit_id)

    def holds_up(x: Any) -> Any:
        inside.set()
        gate.wait(20)
        return x

    async def main(**fields: Any) -> Any:
        gate.clear()
        inside.clear()
        async with coordinator(**fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=10))
            while not inside.is_set():
                await asyncio.sleep(0)
            aborting = asyncio.create_task(c.abort_batch(1, reason="stop"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.set()
            await aborting
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            check_doors(c)
            return outcome, c.batch_state(1).state, len(c.list_sink.uids)

    outcome, state, n = run(main(operators=(holds_up,)))
    assert isinstance(outcome, BatchAborted) and state is S.ABORTED and n == 0
    outcome, state, n = run(main(sink=Slow()))
    assert outcome["experience_count"] == 1 and state is S.FINALIZED and n == 1


# -- retries and limits


def test_only_bad_runs_are_tried_again_after_a_pause_with_the_same_seed() -> None:
    seeds: dict[int, set[int]] = {}

    async def flaky(task: Any, models: Any) -> Any:
        seeds.setdefault(task.run_id, set()).add(task.seed)
        if task.run_id == 1 and task.attempt == 1:
            raise OSError("once")
        return experience()

    async def main() -> None:
        async with coordinator(max_retries=2, retry_backoff_s=1.0, repeats_per_attempt=3) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(flaky, repeat_times=3)], batch_type="train")
            await settle(c)
            assert "backing off" in str(c.why_waiting(1)) and "once" in str(c.why_waiting(1))
            assert c.stats().runners.free == 4  # a pause holds no runner
            c.clock.advance(1.3)
            result = await c.finalize_train_batch(1, timeout=10)
            assert result["metrics"]["rollout/retry_count"] == 1 and result["experience_count"] == 3
            assert c.stats().attempts.started == 2
            assert [len(s) for s in seeds.values()] == [1, 1, 1] and len(set.union(*seeds.values())) == 3
            check_doors(c)

    run(main())


def test_an_attempt_at_its_limit_is_cancelled_and_tried_again() -> None:
    async def main() -> None:
        async with coordinator(max_retries=1, attempt_timeout_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.clock.advance(10.0)
            await settle(c)
            assert c.gates.started == [(1, 0, 0, 1), (1, 0, 0, 2)]
            c.clock.advance(10.0)
            await settle(c)
            with pytest.raises(BatchFailed, match="limit of 10 s"):
                await c.finalize_train_batch(1, timeout=0)
            assert c.stats().attempts.timed_out == 2 and c.stats().runners.fenced == 0
            check_doors(c)

    run(main())


def test_a_result_that_comes_after_the_limit_is_refused() -> None:
    async def main() -> None:
        async with coordinator(attempt_timeout_s=5.0, cancel_grace_s=3.0) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.gates.end((1, 0, 0))  # within the grace, but too late
            await settle(c)
            status = c.batch_state(1).statuses[0]
            assert status.state == "failed" and c.stats().staged_nbytes == 0
            result = await c.finalize_train_batch(1, timeout=0, below_min="accept")
            assert result["metrics"]["rollout/late_count"] == 1 and not c.list_sink.parts
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


def test_shutdown_finishes_a_commit_that_has_begun() -> None:
    gate, inside = threading.Event(), threading.Event()

    class Slow(ListSink):
        def write(self, x: Any, commit_id: str) -> None:
            inside.set()
            gate.wait(20)
            super().write(x, commit_id)

    async def main() -> None:
        async with coordinator(sink=Slow()) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=10))
            while not inside.is_set():
                await asyncio.sleep(0)
            closing = asyncio.create_task(c.shutdown())
            for _ in range(5):
                await asyncio.sleep(0)
            gate.set()
            await closing
            assert c.batch_state(1).state is S.FINALIZED and len(c.list_sink.uids) == 1
            assert (await waiting)["experience_count"] == 1

    run(main())


def test_fenced_runners_stop_the_work_and_are_named() -> None:
    release = threading.Event()

    def stuck(task: Any, models: Any) -> Any:
        release.wait(20)
        return experience()

    async def main() -> None:
        async with coordinator(runners=1, attempt_timeout_s=5.0, cancel_grace_s=1.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(stuck), rr.Task(good)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.0)
            await settle(c)
            assert 'runner="process"' in str(c.why_waiting(1)) and c.stats().runners.free == 0
            release.set()
            result = await c.finalize_train_batch(1, timeout=20)
            assert (result["ok_task_count"], result["failed_task_count"]) == (1, 1)
            check_doors(c)

    run(main())


def test_a_fenced_attempts_next_model_call_raises() -> None:
    caught: list[BaseException] = []

    async def stubborn(task: Any, models: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        held.append(future)
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(future)
        try:
            await models.rollout.generate("x")
        except BaseException as error:
            caught.append(error)
            raise

    held: list[Any] = []

    async def main() -> None:
        model = rr.ScriptedModel(["y"])
        async with coordinator(models=[model], attempt_timeout_s=5.0, cancel_grace_s=1.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(stubborn)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.0)
            held[0].set_result(None)
            await settle(c)
            assert isinstance(caught[0], ClosedError) and model.n_calls == 0

    run(main())


def test_the_dynamic_limit_follows_the_seconds_that_delivered_runs_took() -> None:
    def slow(task: Any, models: Any) -> Any:
        end = perf_counter() + 0.002
        while perf_counter() < end:
            pass
        return experience()

    async def main() -> None:
        fields = {"dynamic_timeout": 1000.0, "dynamic_timeout_warmup": 1, "attempt_timeout_s": 1e7}
        async with coordinator(**fields) as c:
            await c.submit_batch(batch_id=0, tasks=[rr.Task(slow)], batch_type="train")
            await c.finalize_train_batch(0)
            stream = c.events(1)
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.clock.advance(1.9)
            await settle(c)
            assert c.stats().attempts.running == 1  # 1,000 times the 2 ms or more of the first
            c.clock.advance(1e6)
            await settle(c)
            await c.finalize_train_batch(1, timeout=0, below_min="accept")
            await c.shutdown()
            [said] = [event.detail async for event in stream if event.kind == "timed_out"]
            assert 2.0 <= float(said.split()[1]) < 1e6, said

    run(main())


# -- order


def test_order_is_by_step_then_train_before_eval() -> None:
    async def main() -> None:
        async with coordinator(runners=1, eval_share=1.0) as c:
            for ident, kind in (
                ("9", "eval"),
                (3, "train"),
                ("2/x", "eval"),
                (2, "train"),
                ("none", "train"),
            ):
                await c.submit_batch(batch_id=ident, tasks=tasks(c, 1), batch_type=kind)
            seen = []
            for _ in range(5):
                await settle(c)
                [key] = c.gates.waiting
                seen.append(key[0])
                c.gates.end(key)
            assert seen == ["9", 2, "2/x", 3, "none"]  # the first had started already

    run(main())


def test_eval_holds_only_its_share_while_train_waits() -> None:
    async def main() -> None:
        async with coordinator(runners=4, eval_share=0.3) as c:
            await c.submit_batch(batch_id="0/e", tasks=tasks(c, 8), batch_type="eval")
            await settle(c)
            assert len(c.gates.waiting) == 4  # nobody else wants them
            await c.submit_batch(batch_id=1, tasks=tasks(c, 8), batch_type="train")
            for _ in range(3):
                c.gates.end(next(k for k in c.gates.waiting if k[0] == "0/e"), rr.Result(metrics={"x": 1.0}))
                await settle(c)
            kinds = [key[0] for key in c.gates.waiting]
            assert kinds.count("0/e") == 2 and kinds.count(1) == 2

    run(main())


def test_a_retry_goes_to_another_runner() -> None:
    async def main() -> None:
        async with coordinator(max_retries=1, runners=2) as c:
            stream = c.events()
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.gates.end((1, 0, 0), ValueError("x"))
            await settle(c)
            await c.shutdown()
            first, second = [event.detail async for event in stream if event.kind == "started"]
            assert first.startswith("attempt 1 on runner ") and second.startswith("attempt 2 on runner ")
            assert first.split()[-1] != second.split()[-1]

    run(main())


def test_above_the_staging_bound_only_the_oldest_starts_work() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_staged_nbytes=0) as c:
            await c.submit_batch(batch_id=5, tasks=tasks(c, 2), batch_type="train")
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            c.gates.end((5, 0, 0))
            await settle(c)
            assert list(c.gates.waiting) == [(5, 1, 0)]  # though 1 comes before 5
            assert "max_staged_nbytes" in str(c.why_waiting(1))
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=10))
            await settle(c)
            c.gates.end((5, 1, 0))
            await settle(c)
            c.gates.end((1, 0, 0))
            assert (await waiting)["ok_task_count"] == 1

    run(main())


# -- stragglers, weights


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


def test_staleness_admits_one_batch_ahead_and_drops_what_is_too_old() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"])

        async def asks(task: Any, models: Any) -> Any:
            [g] = await models.rollout.generate("?")
            return g.experience(reward=1.0)

        async with coordinator(models=[model], max_staleness=1, submit_timeout_s=5.0) as c:
            given = {"tasks": [rr.Task(asks)], "batch_type": "train"}
            await c.submit_batch(batch_id=0, **given)
            await c.submit_batch(batch_id=1, **given)  # one ahead
            third = asyncio.create_task(c.submit_batch(batch_id=2, **given))
            await settle(c)
            assert "needs version 1" in str(c.why_waiting(2))
            await c.finalize_train_batch(0)
            assert await c.sync_weights(1) == 1 == c.model_version
            await third
            with pytest.raises(ValueError, match="back"):
                await c.sync_weights(0)
            await settle(c)
            await c.sync_weights(5)
            result = await c.finalize_train_batch(1)
            assert result["metrics"]["pipeline/staleness/dropped"] == 1 and result["experience_count"] == 0
            assert c.stats().runs.filtered == 1
            check_doors(c)

    run(main())


def test_versions_come_from_generations_and_drift_is_their_spread() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"], version=3)

        async def two(task: Any, models: Any) -> Any:
            await models.rollout.generate("a")
            await c.sync_weights(7)
            await models.rollout.generate("b")
            return experience()

        async with coordinator(models=[model]) as c:
            await c.submit_batch(batch_id=0, tasks=[rr.Task(two)], batch_type="train")
            await c.finalize_train_batch(0)
            [x] = c.list_sink.parts.values()
            assert (x.model_version.tolist(), x.version_drift.tolist()) == ([3], [4])

    run(main())


# -- life


def test_shutdown_wakes_everybody_and_aborts_what_lives() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            waiting = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            await c.shutdown()
            with pytest.raises(ClosedError):
                await waiting
            await c.shutdown()
            with pytest.raises(ClosedError):
                await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            assert c.batch_state(1).state is S.ABORTED
            await c.prepare()
            with pytest.raises(BatchAborted, match="shutdown"):
                await c.finalize_train_batch(1)
            check_doors(c)
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []

    run(main())


def test_another_thread_is_sent_to_get_local() -> None:
    async def main() -> None:
        async with coordinator() as c:

            def elsewhere() -> None:
                with pytest.raises(RuntimeError, match="get_local"):
                    asyncio.run(c.submit_batch(batch_id=1, tasks=[], batch_type="train"))
                with pytest.raises(RuntimeError, match="get_local"):
                    c.stats()

            await asyncio.to_thread(elsewhere)

    run(main())


def test_an_idle_coordinator_does_not_wake() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good) for _ in range(200)], batch_type="train")
            await c.finalize_train_batch(1)
            c.clock.advance(10_000.0)
            assert c.clock.n_timers == 0

    run(main())


def test_a_blocking_workflow_is_named() -> None:
    import time

    async def blocks(task: Any, models: Any) -> Any:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        return experience()

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(blocks)], batch_type="train")
            await c.finalize_train_batch(1)
            assert c.stats().loop_lag_s >= 0.05 and "blocks" in c.stats().loop_lag_in

    run(main())


def test_events_reach_listeners_and_a_slow_one_loses_the_oldest() -> None:
    async def main() -> None:
        async with coordinator() as c:
            stream = c.events(1)
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)
            kinds = [(await anext(stream)).kind for _ in range(7)]
            assert kinds == ["submitted", "admitted", "started", "finished", "cut", "delivered", "finalized"]
            every = c.events()
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good) for _ in range(1000)], batch_type="train")
            await c.finalize_train_batch(2)
            assert (await anext(every)).missed > 0
            await stream.aclose()
            await every.aclose()

    run(main())


def test_history_is_bounded_and_memory_returns() -> None:
    async def main() -> None:
        async with coordinator(history=2) as c:
            for ident in range(4):
                await c.submit_batch(batch_id=ident, tasks=[rr.Task(good)], batch_type="train")
                await c.finalize_train_batch(ident)
            with pytest.raises(KeyError):
                await c.finalize_train_batch(1)
            assert (await c.finalize_train_batch(2))["batch_id"] == 2
            stats = c.stats()
            assert stats.staged_nbytes == stats.attempts.running == stats.runs.live == 0 and c.batches() == []

    run(main())


def test_process_experiences_checks_all_before_any() -> None:
    async def main() -> None:
        async with coordinator() as c:
            payload = rr.encode([experience()], group_id=5, run_id=0)
            assert await c.process_experiences([]) == {}
            with pytest.raises(rc.FormatError, match=r"payloads\[1\]"):
                await c.process_experiences([payload, payload[:-1]])
            assert not c.list_sink.parts and c.stats().payloads_refused == 1
            metrics = await c.process_experiences([payload])
            assert metrics["pipeline/out_count"] == 1 and len(c.list_sink.uids) == 1

    run(main())


def test_a_model_that_fails_rests_and_the_least_busy_answers() -> None:
    async def main() -> None:
        broken = rr.ScriptedModel(["a"], failures=dict.fromkeys(range(100), OSError("down")))
        works = rr.ScriptedModel(["b"])

        async def asks(task: Any, models: Any) -> Any:
            [g] = await models["judge"].chat([{"role": "user", "content": "?"}])
            return rr.Result(metrics={"ok": float(g.text == "b")})

        async with coordinator(
            auxiliary=[[broken, works]], auxiliary_names=("judge",), max_retries=20, runners=1
        ) as c:
            await c.submit_batch(batch_id="e", tasks=[rr.Task(asks) for _ in range(40)], batch_type="eval")
            result = await c.finalize_eval_batch("e")
            assert result["ok_task_count"] == 40 and broken.n_calls == 5

    run(main())


def test_config_errors_name_their_place() -> None:
    for fields, text in [
        ({"runers": 3}, "did you mean 'runners'"),
        ({"runner": "lokal"}, "did you mean 'local'"),
        ({"operators": ("grpo", {"name": "grpo", "epz": 1})}, r"operators\[1\].epz.*'eps'"),
        ({"max_retries": -1}, "max_retries"),
        ({"cancel_grace_s": float("inf")}, "cancel_grace_s"),
        ({"runners": "many"}, "runners"),
        ({"sink": 5}, "sink"),
    ]:
        with pytest.raises(SchemaError, match=text):
            rr.Config(**fields)


def test_config_from_toml(tmp_path: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'runners = 3\noperators = ["grpo", {name = "length", high = 9}]\n[sink]\nkind = "queue"\ncapacity = 8\n'
    )
    made = rr.Config.from_toml(path, seed=4)
    assert (made.runners, made.seed, made.operators[1]["high"]) == (3, 4, 9)
    with pytest.raises(SchemaError, match="runner"):
        made.replace(runner="x")


def test_the_local_handle_blocks_or_is_awaited() -> None:
    with rr.RolloutCoordinator.get_local(config(sink="queue"), [rr.ScriptedModel(["5"])]) as h:
        h.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
        assert h.finalize_train_batch(1, timeout=10)["ok_task_count"] == 1

        async def other() -> Any:
            await h.submit_batch.remote(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            return await h.finalize_train_batch.remote(2, timeout=10)

        assert run(other())["ok_task_count"] == 1
        assert h.stats().runs.delivered == 2 and h.config.runners == 4
        assert len(run(h.sink.get(2))) == 2
    with pytest.raises(ClosedError):
        h.stats()


@pytest.mark.parametrize(
    ("models", "auxiliary", "message"),
    [
        (None, None, r"^rollout_model: must be a list of models, got NoneType; pass \[model\]"),
        (
            rr.ScriptedModel([]),
            None,
            r"^rollout_model: must be a list of models, got recollect\..*ScriptedModel",
        ),
        ([], rr.ScriptedModel([]), "^auxiliary_models: must be a list of lists of models, got recollect"),
        ([], [rr.ScriptedModel([])], r"^auxiliary_models\[0\]: must be a list of models, got recollect"),
    ],
)
def test_models_are_given_in_lists(models: Any, auxiliary: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rr.RolloutCoordinator(config(), models, auxiliary)


def test_a_failed_start_undoes_everything() -> None:
    async def main() -> None:
        c = rr.RolloutCoordinator(
            config(sink="/proc/nowhere/x", journal="/nonexistent/dir/j"), [], clock=FakeClock()
        )
        with pytest.raises(FileNotFoundError, match="journal"):
            await c.prepare()
        with pytest.raises(ClosedError):
            c.stats()

    run(main())


def test_a_trace_has_every_kind_of_slice(tmp_path: Any) -> None:
    path = tmp_path / "trace.json"

    async def asks(task: Any, models: Any) -> Any:
        await models.rollout.generate("?")
        if task.attempt == 1:
            await asyncio.get_running_loop().create_future()
        return experience()

    async def main() -> None:
        fields = {"max_retries": 1, "retry_backoff_s": 1.0, "attempt_timeout_s": 5.0, "trace": str(path)}
        async with coordinator([rr.ScriptedModel(["x"])], **fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.3)
            await c.finalize_train_batch(1, timeout=10)
            many = [
                rr.Task(good, repeat_times=600)
            ]  # more slices than are kept in memory: they are written in parts
            await c.submit_batch(batch_id=2, tasks=many, batch_type="train")
            await c.finalize_train_batch(2, timeout=10)

    run(main())
    slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    kinds = ("admission", "queue", "attempt", "model_call", "backoff", "grace", "pass", "sink")
    assert {e["name"] for e in slices} == {f"rollout/{kind}" for kind in kinds}
    assert next(e["dur"] for e in slices if e["name"] == "rollout/attempt") == 5e6
    assert all(e["dur"] >= 0 for e in slices) and len(slices) > 1200

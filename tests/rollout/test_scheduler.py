"""Which unit starts next, how long it may take, and what becomes of it when its runner or its batch ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from tests.rollout.make import check_doors, coordinator, experience, run, settle

import recollect.rollout as rr
from recollect.errors import BatchAborted, ClosedError, DeadlineError, PipelineError, WorkerDiedError
from recollect.rollout.event_loop import Deadlines
from recollect.rollout.scheduler import LAST_RUNS
from recollect.rollout.tasks import RunOutcome
from recollect.testing import FakeClock

S = rr.BatchLifecycleState


async def good(task: Any, models: Any) -> Any:
    return experience(reward=float(task.run_id))


def tasks(c: Any, n: int, **fields: Any) -> list[rr.Task]:
    return [rr.Task(c.gates, **fields) for _ in range(n)]


async def end(c: Any, *keys: Any, outcome: Any = None) -> None:
    for key in keys:
        c.gates.end(key, outcome)
        await settle(c)


async def order_of(c: Any) -> list[Any]:
    """End what runs, one by one, and say in which order it ran."""
    seen = []
    await settle(c)
    while c.gates.waiting:
        seen.append(next(iter(c.gates.waiting)))
        await end(c, seen[-1], outcome=rr.Result(experience(), {"x": 1.0}))
    return seen


# -- deadlines


def test_deadlines_come_in_their_order_and_none_is_woken_for_what_was_taken_back() -> None:
    clock, seen = FakeClock(), []
    deadlines = Deadlines(clock)
    later = deadlines.put(30.0, seen.append, "thirty")
    for when in (20.0, 10.0):
        deadlines.put(when, seen.append, when)
    clock.advance(10.0)
    assert seen == [10.0]
    clock.advance(10.0)
    assert seen == [10.0, 20.0]
    deadlines.take_back(later)
    deadlines.take_back(later)
    clock.advance(100.0)
    assert seen == [10.0, 20.0] and clock.n_timers == 0
    entries = [deadlines.put(500.0, seen.append, "no") for _ in range(65)]
    assert clock.n_timers == 1
    for entry in entries:
        deadlines.take_back(entry)
    assert clock.n_timers == 0 and not deadlines._heap  # memory and the wake-up are with what is alive
    deadlines.put(600.0, seen.append, "after")
    clock.advance(1000.0)
    assert seen[2:] == ["after"]


def test_who_no_longer_waits_leaves_no_timer_behind() -> None:
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


# -- order


def test_equal_steps_go_by_submission_and_a_priority_is_the_step() -> None:
    async def main() -> None:
        async with coordinator(runners=1, eval_share=1.0) as c:
            await c.submit_batch(batch_id=0, tasks=tasks(c, 1), batch_type="train")
            for ident, priority in (("5/b", None), ("5/a", None), ("first", 1), (99, 2), ("-3/x", None)):
                await c.submit_batch(batch_id=ident, tasks=tasks(c, 1), batch_type="eval", priority=priority)
            assert [key[0] for key in await order_of(c)] == [0, "-3/x", "first", 99, "5/b", "5/a"]

    run(main())


def test_the_runs_of_a_task_stay_together_and_a_retry_goes_before_fresh_work() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_retries=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=2), batch_type="train")
            await settle(c)
            await end(c, (1, 0, 0), outcome=ValueError("no"))
            assert [key[1:] for key in await order_of(c)] == [(0, 0), (0, 1), (1, 0), (1, 1)]

    run(main())


def test_eval_has_all_runners_while_no_train_work_waits() -> None:
    async def main() -> None:
        async with coordinator(runners=4, eval_share=0.25) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await c.submit_batch(batch_id="1/e", tasks=tasks(c, 5), batch_type="eval")
            await settle(c)
            assert [key[0] for key in c.gates.waiting] == [
                1,
                "1/e",
                "1/e",
                "1/e",
            ]  # train runs, none of it waits
            assert "2 runs queued" in str(c.why_waiting("1/e"))
            await c.submit_batch(batch_id=2, tasks=tasks(c, 5), batch_type="train")
            for _ in range(2):
                await end(
                    c,
                    next(key for key in c.gates.waiting if key[0] == "1/e"),
                    outcome=rr.Result(metrics={"x": 1}),
                )
            assert [key[0] for key in c.gates.waiting].count("1/e") == 1
            assert "eval holds its share" in str(c.why_waiting("1/e"))
            assert "runs queued: all 4 runners are busy" in str(c.why_waiting(2)) or "behind" in str(
                c.why_waiting(2)
            )

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
            assert c.why_waiting(1).reasons[-1] == "nobody has finalized it"

    run(main())


def test_why_waiting_names_the_longest_running_first_and_what_is_being_stopped() -> None:
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


def test_the_longest_running_comes_first() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_retries=1, retry_backoff_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 3), batch_type="train")
            await settle(c)
            c.clock.advance(2.0)
            await end(c, (1, 0, 0), outcome=OSError("lost it"))
            c.clock.advance(3.0)
            running = [reason for reason in c.why_waiting(1).reasons if "attempt 1 of 2" in reason]
            assert [reason.partition(":")[0] for reason in running] == ["task 1 run 0", "task 2 run 0"]
            [resting] = [reason for reason in c.why_waiting(1).reasons if "backing off" in reason]
            [unit] = c._context.batches[1].backing_off
            left = unit.backs_off_until - c.clock.now
            assert resting == f"task 0 run 0: backing off for {left:.1f} s after attempt 1, OSError: lost it"

    run(main())


# -- bounds


def test_above_the_staging_bound_a_finalize_lets_its_batch_start() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_staged_nbytes=0) as c:
            await c.submit_batch(batch_id=1, tasks=[*tasks(c, 1), rr.Task(good)], batch_type="train")
            await settle(c)
            await c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            assert list(c.gates.waiting) == [(1, 0, 0)] and c.stats().runners.free == 1
            early = asyncio.create_task(c.finalize_train_batch(2, timeout=5.0))
            await settle(c)
            assert (2, 0, 0) in c.gates.waiting
            await end(c, (2, 0, 0))
            assert (await early)["ok_task_count"] == 1

    run(main())


def test_who_gave_up_waiting_no_longer_lifts_the_staging_bound() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_staged_nbytes=0) as c:
            await c.submit_batch(batch_id=1, tasks=[*tasks(c, 1), rr.Task(good)], batch_type="train")
            await c.submit_batch(batch_id=2, tasks=tasks(c, 2), batch_type="train")
            await settle(c)
            waits = asyncio.create_task(c.finalize_train_batch(2, timeout=5.0))
            await settle(c)
            c.clock.advance(5.0)
            with pytest.raises(DeadlineError):
                await waits
            await end(c, (2, 0, 0))
            assert list(c.gates.waiting) == [(1, 0, 0)]

    run(main())


def test_a_batch_that_does_not_fit_holds_up_those_behind_it_and_weights_hold_up_nobody() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_queued_runs=2, max_staleness=0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="eval")
            large = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 2), batch_type="eval"))
            small = asyncio.create_task(c.submit_batch(batch_id=3, tasks=tasks(c, 1), batch_type="eval"))
            await settle(c)
            assert not large.done() and not small.done()  # first come, first served
            assert "1 runs wait, with 2 more they are 1 over max_queued_runs" in str(c.why_waiting(2))
            await c.abort_batch(1, reason="room")
            await settle(c)
            assert large.done() and small.done()
            for ident in (2, 3):
                await c.abort_batch(ident, reason="room")
            await c.submit_batch(batch_id=4, tasks=tasks(c, 1), batch_type="train")
            early = asyncio.create_task(c.submit_batch(batch_id=5, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            await c.submit_batch(batch_id=6, tasks=tasks(c, 1), batch_type="eval")  # is not trained on
            assert not early.done()
            await c.sync_weights()
            await early

    run(main())


def test_what_was_cancelled_at_the_cut_is_no_work_any_more() -> None:
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
            assert not c._context.batches[1].has_work() and not c._context.batches[1].backing_off
            c.clock.advance(20.0)
            await settle(c)
            assert not c.gates.waiting and c.stats().queue.queued_runs == 0 and c.clock.n_timers == 0
            check_doors(c)

    run(main())


def test_all_who_can_be_admitted_at_once_are() -> None:
    """The first one's work starts, which makes room, which lets the next in: each enters once."""

    async def main() -> None:
        async with coordinator(max_staleness=0) as c:
            submits = [
                asyncio.create_task(c.submit_batch(batch_id=n, tasks=tasks(c, 1), batch_type="train"))
                for n in range(4)
            ]
            await settle(c)
            assert [submit.done() for submit in submits] == [True, False, False, False]
            assert await c.sync_weights(9) == 9
            await settle(c)
            assert all(submit.done() for submit in submits) and c.batches() == [0, 1, 2, 3]
            assert len(c.gates.waiting) == 4 and c.stats().runs.submitted == 4
            check_doors(c)

    run(main())


# -- limits


def limits(c: Any) -> dict[Any, float]:
    return {a.unit.task.batch.id: a.limit for a in c._context.scheduler.attempts.values()}


def test_the_dynamic_limit_is_a_ratio_of_the_longest_runs_but_never_above_the_fixed_one() -> None:
    async def main() -> None:
        fields = {
            "dynamic_timeout": 2.0,
            "dynamic_timeout_warmup": 2,
            "attempt_timeout_s": 100.0,
            "runners": 8,
        }
        async with coordinator(repeats_per_attempt=2, **fields) as c:
            seconds = c._context.scheduler._seconds
            assert seconds.maxlen == 1024 == LAST_RUNS
            for ident in ("e", 0):
                kind = "eval" if ident == "e" else "train"
                await c.submit_batch(batch_id=ident, tasks=tasks(c, 1), batch_type=kind)
                await settle(c)
                assert limits(c)[ident] == 100.0
                await end(c, (ident, 0, 0))
                await (c.finalize_eval_batch if ident == "e" else c.finalize_train_batch)(ident)
                assert len(seconds) == (ident == 0)  # the time of eval runs does not count
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            assert limits(c)[1] == 100.0  # one batch is complete, two are the warm-up
            await end(c, (1, 0, 0))
            await c.finalize_train_batch(1)
            assert len(seconds) == 2 and all(0 < s < 5 for s in seconds)
            seconds.clear()
            seconds.extend([1.0] * 90 + [10.0] * 10)
            given = tasks(c, 1, repeat_times=2) + tasks(c, 1) + tasks(c, 1, timeout_s=15.0)
            await c.submit_batch(batch_id=2, tasks=given, batch_type="train")
            await c.submit_batch(batch_id="f", tasks=tasks(c, 1), batch_type="eval")
            await settle(c)
            found = [(a.unit.task.task_id, a.limit) for a in c._context.scheduler.attempts.values()]
            assert found == [(0, 40.0), (1, 20.0), (2, 15.0), (0, 100.0)]
            await c.abort_batch(2, reason="no")
            assert len(seconds) == 100
            seconds.extend([100.0] * 100)
            c._context.scheduler._limit = None
            await c.submit_batch(batch_id=3, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            assert limits(c)[3] == 100.0

    run(main())


def test_the_dynamic_limit_learns_from_batches_that_were_delivered_and_from_what_it_cut() -> None:
    async def main() -> None:
        fields = {"dynamic_timeout": 2.0, "dynamic_timeout_warmup": 0, "attempt_timeout_s": 100.0}
        async with coordinator(repeats_per_attempt=2, below_min="accept", **fields) as c:
            seconds = c._context.scheduler._seconds
            for ident in (1, 2, 3):
                await c.submit_batch(batch_id=ident, tasks=tasks(c, 1, repeat_times=2), batch_type="train")
                await settle(c)
                if ident == 1:  # at the fixed limit: that is no time of a long answer
                    assert limits(c) == {1: 100.0}
                    c.clock.advance(100.0)
                    await settle(c)
                    await c.finalize_train_batch(1)
                    assert list(seconds) == []
                    seconds.extend([5.0] * 10)
                elif ident == 2:
                    assert limits(c) == {2: 20.0}
                    c.clock.advance(20.0)
                    await settle(c)
                    await c.finalize_train_batch(2)
                    assert list(seconds) == [5.0] * 10 + [10.0]
                else:
                    assert limits(c)[3] == pytest.approx(2 * 2 * 7.5)  # the limit rises
                    c.clock.advance(30.0)
                    await settle(c)
                    await c.abort_batch(3, reason="no")
                    assert len(seconds) == 11

    run(main())


def test_a_limit_counts_from_the_start_on_a_runner() -> None:
    async def main() -> None:
        async with coordinator(runners=1, attempt_timeout_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            await settle(c)
            c.clock.advance(9.0)
            await end(c, (1, 0, 0))
            c.clock.advance(9.0)
            await settle(c)
            await end(c, (1, 1, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 2

    run(main())


@pytest.mark.parametrize("knows", [True, False])
def test_a_sync_workflow_in_a_model_call_ends_at_its_limit_and_is_not_fenced(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its thread has yet said which call is in flight."""
    begin, told = asyncio.run_coroutine_threadsafe, threading.Event()

    def slow(call: Any, loop: Any) -> Any:
        future = begin(call, loop)
        told.wait(20)
        return future

    if not knows:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slow)

    async def main() -> None:
        inside, errors = threading.Event(), []

        def asks(task: Any, models: Any) -> Any:
            for _ in range(2):
                try:
                    inside.set()
                    models.rollout.generate("?")
                except ClosedError as error:
                    errors.append(str(error))
            return experience()

        model = rr.ScriptedModel(["x"], failures={0: "hang"})
        async with coordinator([model], attempt_timeout_s=5.0, runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks), rr.Task(good)], batch_type="train")
            [place] = c._context.scheduler.pool.places.values()
            while not model.n_calls or (knows and place.models.in_flight is None):
                await asyncio.sleep(0)
            c.clock.advance(5.0)
            told.set()
            while c.stats().attempts.timed_out < 1:
                await asyncio.sleep(0)
            await settle(c)
            assert len(errors) == 2 and "cancelled during the call" in errors[0] and "given up" in errors[1]
            assert model.n_calls == 1 and c.stats().runners.fenced == 0
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1

    run(main())


def test_only_the_runs_that_are_not_good_are_tried_again() -> None:
    async def main() -> None:
        async with coordinator(repeats_per_attempt=3, max_retries=2, attempt_timeout_s=5.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, repeat_times=3), batch_type="train")
            await settle(c)
            await end(c, (1, 0, 0))
            await end(c, (1, 0, 1), outcome=ValueError("no"))
            await end(c, (1, 0, 2))
            await end(c, (1, 0, 1), outcome=ValueError("no"))
            c.clock.advance(5.0)
            await settle(c)
            assert [key[2:] for key in c.gates.started] == [(0, 1), (1, 1), (2, 1), (1, 2), (1, 3)]
            assert c.batch_state(1).statuses[0].completed_runs == 2

    run(main())


# -- what runners may say, and when they die


def test_a_result_is_taken_once_and_only_of_a_run_of_its_attempt() -> None:
    async def main() -> None:
        async with coordinator(repeats_per_attempt=2) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, repeat_times=3), batch_type="train")
            await settle(c)
            scheduler = c._context.scheduler
            first, second = scheduler.attempts.values()
            assert (first.unit.run_ids, second.unit.run_ids) == ((0, 1), (2,))
            payload = rr.encode([experience()], group_id=1, run_id=0)
            for attempt, run_id in ((first, 0), (first, 0), (first, 2), (first, 7), (second, 0)):
                scheduler.run_ended(attempt.id, RunOutcome(run_id, True, 0.1, payload=payload))
            assert c.stats().staged_nbytes == len(payload) and c._context.batches[1].late_count == 4
            scheduler.run_ended(first.id, RunOutcome(1, False, 0.1, error="gave up", final=True))
            scheduler.run_ended(first.id, RunOutcome(1, True, 0.1, payload=payload))
            assert c.stats().staged_nbytes == len(payload)
            scheduler.run_ended(99, RunOutcome(1, True, 0.1, payload=payload))

    run(main())


def test_a_lost_runner_puts_its_unit_in_front_with_what_is_left_of_it() -> None:
    async def main() -> None:
        async with coordinator(runners=3, repeats_per_attempt=3, max_retries=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=3), batch_type="train")
            stream = c.events()
            await settle(c)
            await end(c, (1, 0, 0))
            await end(c, (1, 0, 1), outcome=rr.GiveUp("no use"))
            scheduler, batch = c._context.scheduler, c._context.batches[1]
            lost, _ = scheduler.attempts.values()
            scheduler.is_paused = True
            for run_id in range(3):
                await end(c, (1, 1, run_id), outcome=ValueError("no"))
            scheduler.runner_lost(lost.runner, lost.id, "killed")
            scheduler.runner_lost(lost.runner, None, "killed")  # idle: there is nothing to do again
            assert [unit.run_ids for unit in batch.retries] == [(2,), (0, 1, 2)] and batch.requeue_count == 1
            assert c.stats().queue.queued_runs == 4
            scheduler.pool.kill(lost.id)  # in this process nobody can die alone
            scheduler.is_paused = False
            scheduler.dispatch()
            await settle(c)
            assert (c.stats().attempts.lost, c.stats().attempts.started) == (1, 4)
            check_doors(c)
            second = next(a for a in scheduler.attempts.values() if a.unit.task.task_id == 0)
            assert second.unit.run_ids == (2,) and second.number == 1
            scheduler.runner_lost(second.runner, second.id, "killed again")
            assert c.batch_state(1).statuses[0].state == "partial" and c.stats().attempts.lost == 2
            assert "WorkerDiedError: runner" in batch.tasks[0].failed[2]
            await c.shutdown()
            kinds = [event.kind async for event in stream]
            assert kinds.count("runner_died") == 3 and kinds.count("requeued") == 1

    run(main())


def test_a_runner_that_dies_after_the_limit_costs_the_retry_of_a_time_out() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_retries=1, attempt_timeout_s=5.0) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            scheduler = c._context.scheduler
            c.clock.advance(5.0)
            [late] = scheduler.attempts.values()
            scheduler.runner_lost(late.runner, late.id, "killed")
            assert c._context.batches[1].retry_count == 1 and c._context.batches[1].requeue_count == 0
            assert "killed after its limit" in c._context.batches[1].retries[0].error
            c.gates.ignores_cancel = False
            c.clock.advance(2.0)
            await settle(c)

    run(main())


def test_runners_that_cannot_be_started_any_more_are_told_to_who_waits() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            c._context.scheduler.runners_broken("no memory")
            with pytest.raises(WorkerDiedError, match="no memory"):
                await waits
            assert "no runner can be started: no memory" in str(c.why_waiting(1))
            c._context.scheduler.runners_changed()
            assert "no runner" not in str(c.why_waiting(1))

    run(main())


def test_an_attempt_that_was_stopped_before_it_began_never_runs() -> None:
    async def main() -> None:
        async with coordinator(runners=2) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            await c.abort_batch(1, reason="at once")
            await settle(c)
            assert c.gates.started == [] and c.stats().attempts.cancelled == 2
            check_doors(c)

    run(main())


# -- stragglers that are carried


def test_only_what_has_begun_is_carried_and_joins_train_batches_alone() -> None:
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


def test_what_is_left_of_a_carried_task_runs_on_wherever_it_was() -> None:
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


# -- weights


def test_weights_are_as_old_as_the_oldest_replica_and_never_go_back() -> None:
    class Stubborn(rr.ScriptedModel):
        async def sync(self, version: int | None = None) -> int:
            return self.version

    async def main() -> None:
        slow, quick = Stubborn(["x"], version=3), rr.ScriptedModel(["x"], version=8)
        async with coordinator([quick, slow]) as c:
            assert c.model_version == 3 == c.stats().model_version
            assert await c.sync_weights(9) == 3 and quick.version == 9
            slow.version = 5
            assert await c.sync_weights() == 5 == c.model_version
            slow.version = 2
            with pytest.raises(ValueError, match="must not go back from 5, got 2 from a model's sync"):
                await c.sync_weights()
            with pytest.raises(TypeError, match="version"):
                await c.sync_weights(True)
            with pytest.raises(ValueError, match="must not go back from 5, got 4"):
                await c.sync_weights(4)
            assert c.model_version == 5

    run(main())


def test_admission_counts_train_batches_from_the_first_version() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"], version=10)
        fields = {"max_staleness": 1, "versions_per_batch": 2.0, "submit_timeout_s": 5.0}
        async with coordinator([model], **fields) as c:
            given = {"tasks": [], "batch_type": "train"}
            await c.submit_batch(batch_id=0, **given)  # will be trained on at 10
            for ident in ("a", "b"):
                await c.submit_batch(batch_id=ident, tasks=[], batch_type="eval")
            await c.abort_batch("a", reason="eval batches do not count")
            second = asyncio.create_task(c.submit_batch(batch_id=1, **given))  # at 12: needs 11
            await settle(c)
            c.clock.advance(4.9)
            await settle(c)
            assert not second.done()
            c.clock.advance(0.1)
            with pytest.raises(
                DeadlineError, match="max_staleness = 1 needs version 11, got 10; call sync_weights"
            ):
                await second
            await c.sync_weights(11)
            await c.submit_batch(batch_id=1, **given)
            await c.shutdown()
            await c.prepare()  # both were aborted with it; the first version stays that of the first prepare
            await c.submit_batch(batch_id=2, **given)
            third = asyncio.create_task(c.submit_batch(batch_id=3, **given))
            await settle(c)
            assert third.done()  # 10 + 1 * 2 - 1 = 11
            await third

    run(main())


def test_what_is_just_fresh_enough_is_delivered_and_what_is_dropped_is_counted() -> None:
    async def made(task: Any, models: Any) -> Any:
        return experience(model_version=task.data["version"])

    async def main() -> None:
        async with coordinator(max_staleness=2) as c:
            given = [rr.Task(made, {"version": version}) for version in (0, 1, 2)]
            await c.submit_batch(batch_id=0, tasks=given, batch_type="train")
            await c.sync_weights(3)
            result = await c.finalize_train_batch(0)
            assert result["metrics"]["pipeline/staleness/dropped"] == 1 and result["experience_count"] == 2
            assert c.stats().stale_dropped == 1 and c.stats().runs.filtered == 1
            assert result["metrics"]["rollout/staleness/max"] == 3.0

    run(main())


def test_the_staleness_operator_has_a_bound_of_its_own() -> None:
    async def made(task: Any, models: Any) -> Any:
        return experience(model_version=task.data["version"])

    async def main() -> None:
        async with coordinator(operators=({"name": "staleness", "max_staleness": 1},)) as c:
            given = [rr.Task(made, {"version": version}) for version in (3, 4, 5)]
            await c.submit_batch(batch_id=0, tasks=given, batch_type="train")
            await c.sync_weights(5)
            result = await c.finalize_train_batch(0)
            assert result["metrics"]["pipeline/staleness/dropped"] == 1
            [x] = c.list_sink.parts.values()
            assert x.model_version.tolist() == [4, 5]

    run(main())


def test_experience_without_generations_has_the_version_of_the_attempts_start() -> None:
    async def main() -> None:
        model, judge = rr.ScriptedModel(["x"], version=6), rr.ScriptedModel(["y"], version=1)

        async def judged(task: Any, models: Any) -> Any:
            if task.run_id == 0:
                await models.rollout.generate("?")
            await models["judge"].generate("?")
            return experience()

        async with coordinator([model], [[judge]], auxiliary_names=("judge",), repeats_per_attempt=2) as c:
            await c.submit_batch(batch_id=0, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            await c.sync_weights(9)
            await end(c, (0, 0, 0))
            await c.submit_batch(batch_id=1, tasks=[rr.Task(judged, repeat_times=2)], batch_type="train")
            for ident in (0, 1):
                await c.finalize_train_batch(ident)
            first, second = c.list_sink.parts.values()
            assert first.model_version.tolist() == [6] and second.model_version.tolist() == [9, 9]
            assert second.version_drift.tolist() == [0, 0]  # neither the judge's nor another run's

    run(main())


def test_each_run_of_an_attempt_has_the_versions_of_its_own_generations() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"], version=6)
        async with coordinator([model], repeats_per_attempt=2) as c:

            async def asks(task: Any, models: Any) -> Any:
                await models.rollout.generate("?")
                await c.sync_weights(7)
                return experience()

            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks, repeat_times=2)], batch_type="train")
            await c.finalize_train_batch(1)
            [x] = c.list_sink.parts.values()
            assert x.model_version.tolist() == [6, 7] and x.version_drift.tolist() == [0, 0]

    run(main())


# -- events


def test_events_say_what_when_and_of_which_run() -> None:
    async def main() -> None:
        async with coordinator(max_retries=1, retry_backoff_s=0.0) as c:
            stream, other = c.events(1), c.events()
            c.clock.advance(3.0)
            await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, task_id="t"), batch_type="train")
            await settle(c)
            c.clock.advance(4.0)
            await end(c, (1, "t", 0), outcome=ValueError("why"))
            await end(c, (1, "t", 0))
            await c.finalize_train_batch(1)
            await c.abort_batch(2, reason="no more")
            await c.shutdown()
            found = [event async for event in stream]
            kinds = ["submitted", "admitted", "started", "failed", "retried", "started", "finished", "cut"]
            assert [event.kind for event in found] == [*kinds, "delivered", "finalized"]
            assert {event.batch_id for event in found} == {1}
            assert [event.time_s for event in found] == [3.0] * 3 + [7.0] * 7
            assert [(e.task_id, e.run_id) for e in found[:4]] == [(None, None)] * 2 + [("t", 0)] * 2
            details = {event.kind: event.detail for event in found}
            assert "ValueError: why" in details["failed"] and details["retried"] == "in 0.00 s"
            assert details["started"].startswith("attempt 2 on runner") and details["cut"] == "1 tasks"
            assert details["delivered"] == "1 experiences"
            everything = [event async for event in other]
            assert [e.batch_id for e in everything[:4]] == [2, 2, 1, 1]
            assert everything[-1].kind == "aborted" and everything[-1].detail == "no more"

    run(main())


def test_who_listens_is_let_go_by_shutdown() -> None:
    async def main() -> None:
        async with coordinator() as c:
            streams = [c.events(), c.events(1)]
            waiting = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
            await asyncio.sleep(0)
            assert not any(waits.done() for waits in waiting)
            await c.shutdown()
            async with asyncio.timeout(5.0):
                assert await asyncio.gather(*waiting) == [None, None]

    run(main())


def test_a_slow_listener_has_the_newest_and_is_told_once_how_many_it_missed() -> None:
    async def main() -> None:
        async with coordinator() as c:
            stream = c.events()
            waits = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            assert not waits.done()
            await c.sync_weights(1)
            assert (await waits).detail == "version 1"
            for version in range(2, 1030):
                await c.sync_weights(version)
            first, second = await anext(stream), await anext(stream)
            assert (first.detail, first.missed) == ("version 6", 4) and (second.detail, second.missed) == (
                "version 7",
                0,
            )
            await stream.aclose()
            assert not c._context.hub.listeners

    run(main())


def test_an_attempt_whose_end_cannot_be_handled_takes_no_place_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attempt that was given its place is made all the same, and shutdown is clean."""
    heard: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, about: heard.append(str(about["exception"]))
        )
        async with coordinator(runners=1) as c:
            scheduler = c._context.scheduler
            real = scheduler.attempt_ended

            def once(*args: Any) -> None:
                monkeypatch.undo()
                real(*args)
                raise OSError("no space left")

            monkeypatch.setattr(scheduler, "attempt_ended", once)
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good) for _ in range(3)], batch_type="train")
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 3
            check_doors(c)

    run(main())
    gc.collect()
    assert heard == ["no space left"]


@pytest.mark.parametrize("leaves", ["cancelled", "refused", "aborted"])
def test_a_submission_that_waits_no_longer_holds_up_nobody_behind_it(leaves: str) -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_queued_runs=4, submit_timeout_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, repeat_times=3), batch_type="train")
            large = asyncio.ensure_future(
                c.submit_batch(batch_id=2, tasks=tasks(c, 1, repeat_times=4), batch_type="train")
            )
            await settle(c)
            c.clock.advance(5.0)
            small = asyncio.ensure_future(c.submit_batch(batch_id=3, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            assert not small.done() and not large.done()
            if leaves == "cancelled":
                large.cancel()
            elif leaves == "refused":
                c.clock.advance(5.0)
            else:
                await c.abort_batch(2, reason="not wanted")
            await settle(c)
            assert small.done() and c.batches() == [1, 3]
            await asyncio.gather(large, return_exceptions=True)
            check_doors(c)

    run(main())


def test_an_abort_does_not_let_in_the_batch_that_it_ends() -> None:
    """The one that held it up is cancelled in the same turn, so that nothing but the abort keeps it out."""

    async def main() -> None:
        async with coordinator(runners=1, max_queued_runs=4) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, repeat_times=3), batch_type="train")
            large, small = (
                asyncio.ensure_future(
                    c.submit_batch(batch_id=n, tasks=tasks(c, 1, repeat_times=runs), batch_type="train")
                )
                for n, runs in ((2, 4), (3, 1))
            )
            await settle(c)
            large.cancel()
            await c.abort_batch(3, reason="not wanted")
            found = await asyncio.gather(large, small, return_exceptions=True)
            assert [type(error) for error in found] == [asyncio.CancelledError, BatchAborted]
            assert c.batches() == [1] and c.batch_state(3).state is S.ABORTED
            check_doors(c)

    run(main())


def test_what_a_cut_takes_back_makes_room_though_its_pass_fails() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_queued_runs=3) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 4), batch_type="train", min_wait_num=1)
            await settle(c)
            await end(c, (1, 0, 0))
            next_one = asyncio.ensure_future(
                c.submit_batch(batch_id=2, tasks=tasks(c, 2), batch_type="train")
            )
            await settle(c)
            assert not next_one.done()
            c.list_sink.fail = "before"
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(1, timeout=0)
            await settle(c)
            assert next_one.done() and c.batches() == [1, 2]
            check_doors(c)

    run(main())

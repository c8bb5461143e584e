"""Which unit starts next, how long it may take, and what becomes of it when its runner or its batch ends."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from tests.rollout.make import check_doors, config, coordinator, experience, run, settle

import recollect.rollout as rr
from recollect.errors import BatchAborted, ClosedError, DeadlineError, PipelineError
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.submit import make_batch
from recollect.rollout.event_loop import Deadlines
from recollect.rollout.events import EventHub, Observer
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.tasks import AttemptSpec, RunOutcome
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
    assert clock.n_timers == 0  # none is needed for what was taken back
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


def test_a_sync_workflow_in_a_model_call_ends_at_its_limit_and_is_not_fenced() -> None:
    async def main() -> None:
        errors = []

        def asks(task: Any, models: Any) -> Any:
            for _ in range(2):
                try:
                    models.rollout.generate("?")
                except ClosedError as error:
                    errors.append(str(error))
            return experience()

        model = rr.ScriptedModel(["x"], failures={0: "hang"})
        async with coordinator([model], attempt_timeout_s=5.0, runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks), rr.Task(good)], batch_type="train")
            while not model.n_calls:
                await asyncio.sleep(0)
            c.clock.advance(5.0)
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


# -- one scheduler alone: what runners report, and when they die


class Runners:
    """A pool that only notes what it is told."""

    def __init__(self, size: int) -> None:
        self.size, self.n_fenced = size, 0
        self.launched: list[AttemptSpec] = []
        self.avoided: list[int] = []
        self.cancelled: list[int] = []
        self.killed: list[int] = []
        self.busy: set[int] = set()

    def n_free(self) -> int:
        return self.size - len(self.busy)

    def launch(self, spec: AttemptSpec, workflow: Any, avoid: int) -> int:
        self.launched.append(spec)
        self.avoided.append(avoid)
        self.busy.add(spec.attempt_id)
        return len(self.launched)

    def cancel(self, attempt_id: int) -> None:
        self.cancelled.append(attempt_id)

    def kill(self, attempt_id: int) -> None:
        self.killed.append(attempt_id)


class Alone:
    """A scheduler on a fake clock with runners that do what the test says."""

    def __init__(self, runners: int = 8, **fields: Any) -> None:
        self.config = config(runners=runners, **fields)
        self.clock, self.hub = FakeClock(), EventHub()
        self.n_ended: list[Any] = []
        self.broken: list[str] = []
        self.scheduler = Scheduler(
            self.config, self.clock, Observer(self.clock, self.hub, None), None, version=lambda: 0,
            task_ended=self.n_ended.append, room_made=lambda: None, runners_broken=self.broken.append,
        )  # fmt: skip
        self.runners: Any = Runners(runners)
        self.scheduler.pool = self.runners
        self.scheduler.is_paused = False
        self.n_batches = 0

    def submit(self, *given: rr.Task, kind: Any = "train") -> tuple[BatchRecord, list[AttemptSpec]]:
        """Add a batch; return it and the attempts that began at once."""
        self.n_batches += 1
        before = len(self.runners.launched)
        made = make_batch(
            self.n_batches, list(given), kind, None, None, self.n_batches, self.config, 10 * self.n_batches
        )
        made.admitted = True
        self.scheduler.add(made)
        return made, self.runners.launched[before:]

    def report(self, spec: AttemptSpec, run_id: int, **about: Any) -> None:
        good = {"ok": True, "seconds": 0.1, "payload": b"12345"}
        self.scheduler.run_ended(spec.attempt_id, RunOutcome(run_id, **good | about))

    def end(self, spec: AttemptSpec, error: str = "") -> None:
        self.runners.busy.discard(spec.attempt_id)
        self.scheduler.attempt_ended(spec.attempt_id, error)

    def lose(self, spec: AttemptSpec, why: str = "killed") -> None:
        self.runners.busy.discard(spec.attempt_id)
        self.scheduler.runner_lost(0, spec.attempt_id, why)

    def deliver(self, seconds: list[float]) -> None:
        """A train batch of single runs that took so long, delivered."""
        made, specs = self.submit(*[rr.Task(good) for _ in seconds])
        for spec, took in zip(specs, seconds, strict=True):
            self.report(spec, 0, seconds=took)
            self.end(spec)
        self.scheduler.remove(made)
        self.scheduler.complete(made)

    def limit_of(self, spec: AttemptSpec) -> float:
        return self.scheduler.attempts[spec.attempt_id].limit


def test_the_dynamic_limit_is_a_ratio_of_the_longest_runs_but_never_above_the_fixed_one() -> None:
    fields = {"dynamic_timeout": 2.0, "dynamic_timeout_warmup": 2, "attempt_timeout_s": 100.0}
    s = Alone(runners=2000, repeats_per_attempt=2, **fields)
    s.deliver([1.0] * 90)
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == 100.0  # one batch is complete, two are the warm-up
    s.deliver([10.0] * 10)
    given = [rr.Task(good, repeat_times=2), rr.Task(good), rr.Task(good, timeout_s=15.0)]
    aborted, specs = s.submit(*given)
    assert [s.limit_of(spec) for spec in specs] == [40.0, 20.0, 15.0]
    _, [spec] = s.submit(rr.Task(good), kind="eval")
    assert s.limit_of(spec) == 100.0
    for spec in specs:
        s.report(spec, 0, seconds=99.0)
    s.scheduler.drop_work(aborted)  # what was not delivered does not count
    s.scheduler.remove(aborted)
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == 20.0
    s.deliver([100.0] * 100)
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == 100.0
    s.deliver([1.0] * 1024)  # the last 1,024 runs count
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == 2.0


def test_the_dynamic_limit_rises_when_it_has_cut_runs_off() -> None:
    s = Alone(dynamic_timeout=2.0, dynamic_timeout_warmup=1, attempt_timeout_s=100.0, runners=16)
    s.deliver([5.0] * 10)
    cut, [spec] = s.submit(rr.Task(good))
    s.clock.advance(9.9)
    assert s.runners.cancelled == []
    s.clock.advance(0.1)
    assert s.runners.cancelled == [spec.attempt_id]
    s.end(spec)
    s.scheduler.remove(cut)
    s.scheduler.complete(cut)
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == pytest.approx(2 * 7.5)  # what it cut off counts with the time that it had


def test_a_run_that_was_stopped_at_the_fixed_limit_teaches_the_dynamic_one_nothing() -> None:
    s = Alone(dynamic_timeout=2.0, dynamic_timeout_warmup=0, attempt_timeout_s=100.0)
    made, [spec] = s.submit(rr.Task(good))
    s.clock.advance(100.0)
    s.end(spec)
    s.scheduler.remove(made)
    s.scheduler.complete(made)
    s.deliver([5.0])
    _, [spec] = s.submit(rr.Task(good))
    assert s.limit_of(spec) == 10.0


def test_a_result_is_taken_once_and_only_of_a_run_of_its_live_attempt() -> None:
    s = Alone(repeats_per_attempt=2)
    made, [first, second] = s.submit(rr.Task(good, repeat_times=3))
    assert (first.run_ids, second.run_ids) == ((0, 1), (2,))
    for spec, run_id in ((first, 0), (first, 0), (first, 2), (first, 7), (second, 0)):
        s.report(spec, run_id)
    assert s.scheduler.staged_nbytes == 5 and made.late_count == 4
    s.report(first, 1, ok=False, error="gave up", final=True, payload=None)
    s.report(first, 1)  # it has failed for good
    assert s.scheduler.staged_nbytes == 5
    s.scheduler.run_ended(99, RunOutcome(1, True, 0.1, payload=b"12345"))
    assert s.scheduler.staged_nbytes == 5
    s.scheduler.stop(s.scheduler.attempts[second.attempt_id])
    s.report(second, 2)  # its attempt is no longer alive
    assert s.scheduler.staged_nbytes == 5 and made.late_count == 5


def test_a_lost_runner_puts_its_unit_in_front_with_what_is_left_of_it() -> None:
    s = Alone(runners=2, repeats_per_attempt=3, max_retries=1)
    made, [lost, other] = s.submit(rr.Task(good, repeat_times=3), rr.Task(good, repeat_times=3))
    s.report(lost, 0)
    s.report(lost, 1, ok=False, error="no use", final=True, payload=None)
    s.scheduler.is_paused = True
    s.end(other, "no")
    s.lose(lost)
    s.scheduler.runner_lost(0, None, "killed")  # an idle one: there is nothing to do again
    assert made.requeue_count == 1 and s.scheduler.n_queued == 4
    s.scheduler.is_paused = False
    s.scheduler.dispatch()
    again, retried = s.runners.launched[-2:]
    assert (again.task_id, again.run_ids, again.number) == (0, (2,), 1)  # it cost no retry
    assert (retried.task_id, retried.run_ids, retried.number) == (1, (0, 1, 2), 2)
    s.lose(again, "killed again")  # the second one ends it
    status = made.state.statuses[0]
    assert status.state == "partial" and s.scheduler.doors.lost == 2
    assert made.tasks[0].failed[2].startswith("WorkerDiedError: runner")


def test_a_lost_runner_costs_no_retry_and_a_failure_after_it_does() -> None:
    s = Alone(runners=1, max_retries=1)
    made, [lost] = s.submit(rr.Task(good))
    s.lose(lost)
    s.end(s.runners.launched[1], "no")
    last = s.runners.launched[2]
    s.report(last, 0)
    s.end(last)
    assert (made.requeue_count, made.retry_count) == (1, 1)
    assert [spec.number for spec in s.runners.launched] == [1, 1, 2]
    assert made.state.statuses[0].state == "ok" and s.n_ended == made.tasks


def test_a_runner_that_dies_after_the_limit_costs_the_retry_of_a_time_out() -> None:
    s = Alone(runners=1, max_retries=1, attempt_timeout_s=5.0)
    made, [late] = s.submit(rr.Task(good))
    s.clock.advance(5.0)
    s.lose(late)
    assert (made.retry_count, made.requeue_count) == (1, 0)
    s.lose(s.runners.launched[1])
    s.clock.advance(5.0)
    s.lose(s.runners.launched[2])
    assert "killed after its limit of 5 s" in made.state.statuses[0].error


def test_a_retry_avoids_the_runner_of_the_attempt_before() -> None:
    s = Alone(runners=2, max_retries=1)
    s.submit(rr.Task(good))
    s.end(s.runners.launched[0], "no")
    assert s.runners.avoided == [-1, 1]


def test_an_attempt_that_does_not_stop_is_killed_after_the_grace() -> None:
    s = Alone(runners=1, attempt_timeout_s=5.0, cancel_grace_s=2.0)
    _, [spec] = s.submit(rr.Task(good))
    s.clock.advance(5.0)
    assert (s.runners.cancelled, s.runners.killed) == ([spec.attempt_id], [])
    s.clock.advance(1.9)
    assert s.runners.killed == []
    s.clock.advance(0.1)
    assert s.runners.killed == [spec.attempt_id]


def test_that_no_runner_can_be_started_is_passed_on_and_forgotten_when_one_is_there() -> None:
    s = Alone()
    s.scheduler.runners_broken("no memory")
    assert s.broken == [s.scheduler.broken] == ["no memory"]
    s.scheduler.runners_changed()
    assert s.scheduler.broken is None


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

    run(main())


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


def test_a_listener_that_is_closed_is_forgotten() -> None:
    async def main() -> None:
        hub = EventHub()
        stream: Any = hub.listen(None)
        hub.emit("kind", 1.0)
        assert (await anext(stream)).kind == "kind" and len(hub.listeners) == 1
        await stream.aclose()
        assert not hub.listeners

    run(main())

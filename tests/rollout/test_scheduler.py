"""Which unit starts next, how long it may take, and what becomes of it when its runner or its batch ends."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import pytest
from tests.rollout.make import (
    check_doors,
    config,
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
from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.submit import make_batch
from recollect.rollout.events import EventHub, Observer
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.tasks import AttemptSpec, RunOutcome
from recollect.testing import FakeClock


async def order_of(c: Any) -> list[Any]:
    """End what runs, one by one, and say in which order it ran."""
    seen = []
    await settle(c)
    while c.gates.waiting:
        seen.append(next(iter(c.gates.waiting)))
        await end(c, seen[-1], outcome=rr.Result(experience(), {"x": 1.0}))
    return seen


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


def test_equal_steps_go_by_submission_and_a_priority_is_the_step() -> None:
    async def main() -> None:
        async with coordinator(runners=1, eval_share=1.0) as c:
            await c.submit_batch(batch_id=0, tasks=tasks(c, 1), batch_type="train")
            for ident, priority in (("5/b", None), ("5/a", None), ("first", 1), (99, 2), ("-3/x", None)):
                await c.submit_batch(batch_id=ident, tasks=tasks(c, 1), batch_type="eval", priority=priority)
            assert [key[0] for key in await order_of(c)] == [0, "-3/x", "first", 99, "5/b", "5/a"]

    run(main())


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


def test_the_runs_of_a_task_stay_together_and_a_retry_goes_before_fresh_work() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_retries=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=2), batch_type="train")
            await settle(c)
            await end(c, (1, 0, 0), outcome=ValueError("no"))
            assert [key[1:] for key in await order_of(c)] == [(0, 0), (0, 1), (1, 0), (1, 1)]

    run(main())


def test_eval_holds_only_its_share_while_train_waits() -> None:
    async def main() -> None:
        async with coordinator(runners=4, eval_share=0.3) as c:
            await c.submit_batch(batch_id="0/e", tasks=tasks(c, 8), batch_type="eval")
            await settle(c)
            assert len(c.gates.waiting) == 4  # no other batch waits for them
            await c.submit_batch(batch_id=1, tasks=tasks(c, 8), batch_type="train")
            for _ in range(3):
                c.gates.end(next(k for k in c.gates.waiting if k[0] == "0/e"), rr.Result(metrics={"x": 1.0}))
                await settle(c)
            kinds = [key[0] for key in c.gates.waiting]
            assert kinds.count("0/e") == 2 and kinds.count(1) == 2

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


def test_a_finalize_that_has_ended_no_longer_lifts_the_staging_bound() -> None:
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


def test_pauses_double_to_their_most_and_vary_by_a_fifth_with_the_seed() -> None:
    async def pauses(seed: int) -> list[float]:
        async with coordinator(max_retries=5, retry_backoff_s=10.0, retry_backoff_max_s=50.0, seed=seed) as c:
            stream = c.events()
            await c.submit_batch(batch_id=1, tasks=[rr.Task(c.gates)], batch_type="train")
            for _ in range(5):
                await settle(c)
                c.gates.end((1, 0, 0), ValueError("no"))
                await settle(c)
                c.clock.advance(60.0)
            await c.shutdown()
            return [float(event.detail.split()[1]) async for event in stream if event.kind == "retried"]

    first, again, other = (run(pauses(seed)) for seed in (1, 1, 2))
    assert first == again != other
    for pause, wanted in zip(first, (10.0, 20.0, 40.0, 50.0, 50.0), strict=True):
        assert 0.8 * wanted <= pause <= 1.2 * wanted and pause != wanted


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

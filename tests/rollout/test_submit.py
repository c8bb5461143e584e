"""Submitting: what is refused, how long a submission waits, and what its end leaves behind."""

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
    BatchAborted,
    DeadlineError,
    PipelineError,
)

S = rr.BatchLifecycleState


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


@pytest.mark.parametrize(
    ("n", "share", "given", "least"), [(5, 0.5, None, 3), (4, 1.0, None, 1), (4, 0.5, 4, 4)]
)
def test_over_rollout_rounds_up_and_leaves_at_least_one(n: int, share: float, given: Any, least: int) -> None:
    async def main() -> None:
        async with coordinator(over_rollout=share) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, n), batch_type="train", min_wait_num=given)
            assert c.batch_state(1).min_wait_num == least
            await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            assert c.batch_state(2).min_wait_num is None
            assert (await c.finalize_train_batch(2))["expected_task_count"] == 0

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


def test_a_finalize_of_a_batch_that_is_not_admitted_waits_or_hears_of_its_end() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1, submit_timeout_s=10.0) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=[], batch_type="train"))
            await settle(c)
            early = asyncio.create_task(c.finalize_train_batch(2, timeout=4.0))
            late = asyncio.create_task(c.finalize_train_batch(2, timeout=100.0))
            await settle(c)
            c.clock.advance(3.0)
            await settle(c)
            assert not early.done()
            c.clock.advance(1.0)
            with pytest.raises(
                DeadlineError, match="not admitted: 1 batches are live, max_batches is 1"
            ) as caught:
                await early
            assert (caught.value.finished, caught.value.expected) == (0, 0)
            c.clock.advance(6.0)
            for waits in (second, late):
                with pytest.raises(DeadlineError, match="max_batches"):
                    await waits
            with pytest.raises(KeyError):
                c.batch_state(2)
            check_doors(c)

    run(main())


def test_an_empty_batch_that_is_admitted_late_is_delivered_to_its_finalizers() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=[], batch_type="train"))
            waits = asyncio.create_task(c.finalize_train_batch(2, timeout=10))
            await settle(c)
            assert c.stats().runs.live == 1 and c.stats().queue.waiting_batches == 1
            await c.abort_batch(1, reason="make room")
            await second
            assert (await waits)["expected_task_count"] == 0
            assert c.stats().queue.waiting_batches == 0

    run(main())


def test_aborting_a_batch_that_is_not_admitted_ends_its_finalizers_too() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1, attempt_timeout_s=1e6) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            n_timers = c.clock.n_timers
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            waits = asyncio.create_task(c.finalize_train_batch(2, timeout=10))
            await settle(c)
            await c.abort_batch(2, reason="not now", keep_partial_results=True)
            for waiter in (second, waits):
                with pytest.raises(BatchAborted, match="not now"):
                    await waiter
            await settle(c)
            assert c.clock.n_timers == n_timers and c.stats().queue.waiting_batches == 0
            await c.abort_batch(1, reason="room")
            await settle(c)
            assert c.batch_state(2).state is S.ABORTED and c.batches() == []
            check_doors(c)

    run(main())


def test_a_cancelled_submit_leaves_nothing() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            waits = asyncio.create_task(c.finalize_train_batch(2, timeout=10))
            await settle(c)
            second.cancel()
            with pytest.raises(KeyError, match="withdrawn"):
                await waits
            assert c.batches() == [1] and c.stats().queue.waiting_batches == 0
            check_doors(c)

    run(main())


def test_a_refused_submit_leaves_the_old_result_of_its_id() -> None:
    async def main() -> None:
        async with coordinator(max_batches=1, submit_timeout_s=0.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)
            await c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train")
            with pytest.raises(DeadlineError):
                await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1
            await c.abort_batch(2, reason="room")
            await c.submit_batch(batch_id=1, tasks=[], batch_type="eval")  # admitted: the old result goes
            with pytest.raises(ValueError, match="finalize_eval_batch"):
                await c.finalize_train_batch(1)
            await c.finalize_eval_batch(1)
            with pytest.raises(ValueError, match="finalize_eval_batch"):  # of an ended batch as of a live one
                await c.finalize_train_batch(1)

    run(main())


def test_the_old_result_of_an_id_that_is_used_again_takes_no_place_in_the_history() -> None:
    async def main() -> None:
        async with coordinator(history=2) as c:
            for ident in (2, 1):
                await c.submit_batch(batch_id=ident, tasks=[], batch_type="train")
                await c.finalize_train_batch(ident)
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await c.submit_batch(batch_id=3, tasks=[], batch_type="train")
            await c.finalize_train_batch(3)
            for ident in (2, 3):
                assert (await c.finalize_train_batch(ident))["batch_id"] == ident

    run(main())


@pytest.mark.parametrize("then", ["abort", "submit", "admit"])
def test_a_submit_that_is_cancelled_waits_no_longer_in_the_same_turn(then: str) -> None:
    async def main() -> None:
        async with coordinator(max_batches=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            await settle(c)
            waits = asyncio.create_task(c.finalize_train_batch(2))
            await settle(c)
            second.cancel()
            if then == "abort":
                await c.abort_batch(2, reason="in the same turn")
            elif then == "admit":
                await c.abort_batch(1, reason="make room in the same turn")
            else:
                again = asyncio.create_task(c.submit_batch(batch_id=2, tasks=[], batch_type="train"))
                await settle(c)
                assert not again.done()
                await c.abort_batch(1, reason="make room")
                await again
            with pytest.raises(KeyError, match="withdrawn"):
                await waits
            with pytest.raises(asyncio.CancelledError):
                await second
            assert c.batches() == {"abort": [1], "admit": [], "submit": [2]}[then]
            check_doors(c)

    run(main())


def test_many_batches_may_be_submitted_before_the_first_is_finalized() -> None:
    async def main() -> None:
        async with coordinator() as c:
            for step in range(100):
                await c.submit_batch(batch_id=step, tasks=[rr.Task(good)], batch_type="train")
            for step in range(100):
                assert (await c.finalize_train_batch(step))["experience_count"] == 1

    run(main())


def test_live_batches_are_listed_in_the_order_of_submission() -> None:
    async def main() -> None:
        async with coordinator() as c:
            for ident in (9, "a", 1):
                await c.submit_batch(batch_id=ident, tasks=[], batch_type="train")
            assert c.batches() == [9, "a", 1]
            assert c.why_waiting("none") is None

    run(main())


def test_an_ended_id_can_be_used_again_and_the_old_result_goes() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good), rr.Task(good)], batch_type="train")
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 2
            assert len(set(c.list_sink.uids)) == 3

    run(main())


def test_queued_runs_are_bounded_unless_nothing_is_live() -> None:
    async def main() -> None:
        async with coordinator(runners=1, max_queued_runs=3, submit_timeout_s=0.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(c.gates, repeat_times=5)], batch_type="train")
            with pytest.raises(DeadlineError, match="2 over max_queued_runs"):
                await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            assert c.batches() == [1] and c.stats().runs.submitted == 5
            for run_id in range(2):
                await settle(c)
                c.gates.end((1, 0, run_id))
            await settle(c)
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            check_doors(c)

    run(main())


def test_an_aborted_batch_is_taken_out_of_the_count_for_admission() -> None:
    async def main() -> None:
        async with coordinator(max_staleness=0, submit_timeout_s=0.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(c.gates)], batch_type="train")
            with pytest.raises(DeadlineError, match="needs version 1"):
                await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            await c.abort_batch(1, reason="not wanted")
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            assert (await c.finalize_train_batch(2))["ok_task_count"] == 1

    run(main())


def test_a_batch_that_does_not_fit_delays_later_ones_and_one_that_needs_weights_does_not() -> None:
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


def test_all_batches_that_can_be_admitted_at_once_are() -> None:
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


@pytest.mark.parametrize("leaves", ["cancelled", "refused", "aborted"])
def test_a_submission_that_waits_no_longer_does_not_delay_later_ones(leaves: str) -> None:
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


def test_an_abort_does_not_admit_the_batch_that_it_ends() -> None:
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


def test_a_cut_makes_room_for_waiting_batches_though_its_pass_fails() -> None:
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


@pytest.mark.parametrize("modules", [(), ("tests.rollout.workflows",)], ids=["no modules", "modules"])
def test_a_workflow_of_the_program_itself_is_refused_where_runners_cannot_import_it(
    modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would say so only after they were asked to run it."""
    import __main__

    async def of_program(task: Any, models: Any) -> Any:
        return None

    of_program.__module__, of_program.__qualname__ = "__main__", "of_program"
    monkeypatch.setattr(__main__, "of_program", of_program, raising=False)

    async def main() -> None:
        async with coordinator(runner="process", runners=1, workflow_modules=modules) as c:
            with pytest.raises(TypeError, match=r"got '__main__:of_program' of the program itself"):
                await c.submit_batch(batch_id=1, tasks=[rr.Task(of_program)], batch_type="train")
            assert c.batches() == []

    run(main())

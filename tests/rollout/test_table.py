"""The table of batch states, event by event, and a coordinator's own life: prepare, shutdown, handle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import ListSink, check_doors, config, coordinator, experience, is_open, run, settle

import recollect.rollout as rr
from recollect.errors import (
    BatchAborted,
    BatchFailed,
    ClosedError,
    DeadlineError,
    FormatError,
    PipelineError,
)
from recollect.rollout.stats import QueueStats, RunnerPoolStats

S = rr.BatchLifecycleState


async def good(task: Any, models: Any) -> Any:
    return experience(reward=float(task.run_id))


def tasks(c: Any, n: int, **fields: Any) -> list[rr.Task]:
    return [rr.Task(c.gates, **fields) for _ in range(n)]


GATED: list[Any] = [None]


@rr.workflow("tests.table.gated")
async def gated(task: Any, models: Any) -> Any:
    return await GATED[0](task, models)


class Held(ListSink):
    """A sink whose write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = threading.Event(), threading.Event()

    def write(self, x: Any, commit_id: str) -> None:
        self.inside.set()
        self.gate.wait(20)
        super().write(x, commit_id)


class HeldOperator:
    """An operator that waits until it is let go, and is not afraid of nothing."""

    def __init__(self) -> None:
        self.inside, self.gate, self.fails = threading.Event(), threading.Event(), False
        self.n_calls = 0

    def __call__(self, x: Any) -> Any:
        self.n_calls += 1
        self.inside.set()
        self.gate.wait(20)
        if self.fails:
            raise OSError("as told")
        return x


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0)


# -- PENDING


def test_a_new_state_is_that_of_the_page() -> None:
    state = rr.BatchState(7, "train", 2)
    assert (state.statuses, state.min_wait_num, state.state, state.final_result) == (
        {},
        None,
        S.PENDING,
        None,
    )


def test_a_finalize_of_a_waiting_batch_waits_to_its_deadline_or_is_told_what_became_of_it() -> None:
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


def test_an_empty_batch_that_is_admitted_late_is_delivered_to_who_waits_for_it() -> None:
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


def test_a_batch_that_waits_is_aborted_with_all_who_wait_for_it_and_forgotten() -> None:
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


# -- RUNNING


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


def test_an_abort_keeping_returns_when_attempts_have_stopped_and_carries_nothing() -> None:
    async def main() -> None:
        async with coordinator(stragglers="carry", cancel_grace_s=2.0) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2), batch_type="train")
            stream = c.events(1)
            await settle(c)
            c.gates.end((1, 0, 0))
            await settle(c)
            aborting = asyncio.create_task(c.abort_batch(1, reason="late", keep_partial_results=True))
            await settle(c)
            await settle(c)
            assert c.batch_state(1).state is S.ABORTED and not aborting.done()
            c.clock.advance(2.0)
            await aborting
            result = c.batch_state(1).final_result
            assert (
                result["ok_task_count"],
                result["cancelled_task_count"],
                result["carried_task_count"],
            ) == (1, 1, 0)
            runs = c.stats().runs
            assert (runs.delivered, runs.cancelled, runs.live) == (1, 1, 0)
            c.gates.ignores_cancel = False
            c.gates.end((1, 1, 0))
            await settle(c)
            await c.shutdown()
            [told] = [event async for event in stream if event.kind == "aborted"]
            assert told.detail == "late"

    run(main())


@pytest.mark.parametrize("kept", [False, True])
def test_an_abort_of_an_empty_batch(kept: bool) -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            await c.abort_batch(1, reason="no", keep_partial_results=kept)
            assert c.batch_state(1).state is S.ABORTED and c.batch_state(1).final_result is None

    run(main())


def test_a_kept_part_that_cannot_be_delivered_stays() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good), *tasks(c, 1)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await settle(c)
            c.list_sink.fail = "before"
            with pytest.raises(PipelineError, match="disk full"):
                await c.abort_batch(1, reason="enough", keep_partial_results=True)
            with pytest.raises(BatchAborted):
                await waits
            assert c.batch_state(1).state is S.RUNNING
            c.list_sink.fail = None
            assert (await c.finalize_train_batch(1, timeout=0))["ok_task_count"] == 1
            check_doors(c)

    run(main())


def test_a_failed_pass_that_is_aborted_leaves_by_the_door_of_the_unused() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good, repeat_times=2)], batch_type="train")
            c.list_sink.fail = "before"
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(1)
            await c.abort_batch(1, reason="enough")
            assert (c.stats().runs.unused, c.stats().runs.delivered) == (2, 0)
            assert c.stats().staged_nbytes == 0 and c.batch_state(1).final_result is None
            check_doors(c)

    run(main())


@pytest.mark.parametrize("kept", [False, True])
def test_an_abort_of_an_ended_batch_does_nothing(kept: bool) -> None:
    async def main() -> None:
        async with coordinator() as c:
            for ident in (1, 2):
                await c.submit_batch(batch_id=ident, tasks=[rr.Task(good)], batch_type="train")
            result = await c.finalize_train_batch(1)
            await c.abort_batch(2, reason="first")
            stats = c.stats()
            for ident in (1, 2):
                await c.abort_batch(ident, reason="second", keep_partial_results=kept)
            assert c.batch_state(1).state is S.FINALIZED and c.batch_state(2).state is S.ABORTED
            assert await c.finalize_train_batch(1) == result
            with pytest.raises(BatchAborted, match="first"):
                await c.finalize_train_batch(2)
            assert c.stats().runs == stats.runs

    run(main())


@pytest.mark.parametrize("reason", ["", 5, None])
def test_a_reason_is_a_text(reason: Any) -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            with pytest.raises(ValueError, match="reason"):
                await c.abort_batch(1, reason=reason)
            with pytest.raises(TypeError, match="batch_id"):
                await c.abort_batch(None, reason="x")
            assert c.batches() == [1]

    run(main())


# -- FINALIZING


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_keeping_joins_the_pass_under_way(fails: bool) -> None:
    async def main() -> None:
        held = HeldOperator()
        held.fails = fails
        async with coordinator(operators=(held,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await until(held.inside)
            aborting = asyncio.create_task(c.abort_batch(1, reason="x", keep_partial_results=True))
            await asyncio.sleep(0)
            held.gate.set()
            [outcome, said] = await asyncio.gather(waits, aborting, return_exceptions=True)
            if fails:
                assert isinstance(outcome, PipelineError) and isinstance(said, PipelineError)
                assert c.batch_state(1).state is S.RUNNING
            else:
                assert outcome["ok_task_count"] == 1 and said is None
                assert c.batch_state(1).state is S.FINALIZED

    run(main())


@pytest.mark.parametrize("kept", [False, True])
def test_an_abort_during_a_commit_that_fails_ends_the_batch_unless_it_keeps(kept: bool) -> None:
    async def main() -> None:
        sink = Held()
        async with coordinator(sink=sink) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await until(sink.inside)
            aborting = asyncio.create_task(c.abort_batch(1, reason="x", keep_partial_results=kept))
            await asyncio.sleep(0)
            sink.fail = "before"
            sink.gate.set()
            [outcome, said] = await asyncio.gather(waits, aborting, return_exceptions=True)
            assert isinstance(outcome, PipelineError) and isinstance(said, PipelineError) is kept
            assert c.batch_state(1).state is (S.RUNNING if kept else S.ABORTED)
            sink.fail = None
            if kept:
                assert (await c.finalize_train_batch(1))["experience_count"] == 1
            assert (c.stats().runs.delivered, c.stats().runs.unused) == ((1, 0) if kept else (0, 1))
            check_doors(c)

    run(main())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inside", ["operator", "sink"])
def test_an_abort_that_is_cancelled_or_repeated_decides_as_if_it_were_not(inside: str, fails: bool) -> None:
    async def main() -> None:
        sink, operator = Held(), HeldOperator()
        held: Any = sink if inside == "sink" else operator
        (operator if inside == "sink" else sink).gate.set()
        operator.fails, sink.fail = fails and inside == "operator", "before" if fails else None
        async with coordinator(sink=sink, operators=(operator,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await until(held.inside)
            first = asyncio.create_task(c.abort_batch(1, reason="first"))
            second = asyncio.create_task(c.abort_batch(1, reason="second", keep_partial_results=True))
            await asyncio.sleep(0)
            first.cancel()
            held.gate.set()
            outcome, _, said = await asyncio.gather(waits, first, second, return_exceptions=True)
            if inside == "operator":  # the abort stopped the pass, which is no failure
                assert isinstance(outcome, BatchAborted) and outcome.reason == "first" and said is None
            elif fails:
                assert isinstance(outcome, PipelineError) and isinstance(said, PipelineError)
            else:
                assert outcome["experience_count"] == 1 and said is None
            delivered = inside == "sink" and not fails
            assert c.batch_state(1).state is (S.FINALIZED if delivered else S.ABORTED)
            assert len(sink.uids) == delivered and c.batches() == []
            check_doors(c)

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


def test_what_is_finished_now_is_taken_though_no_task_has_ended() -> None:
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


@pytest.mark.parametrize("inside", ["operator", "sink"])
@pytest.mark.parametrize("stopped_by", ["shutdown", "cancel"])
def test_payloads_in_a_commit_are_written_and_others_are_not(stopped_by: str, inside: str) -> None:
    async def main() -> None:
        sink, operator = Held(), HeldOperator()
        held: Any = sink if inside == "sink" else operator
        (operator if inside == "sink" else sink).gate.set()
        async with coordinator(sink=sink, operators=(operator,)) as c:
            processing = asyncio.create_task(c.process_experiences([rr.encode([experience()])]))
            await until(held.inside)
            if stopped_by == "cancel":
                processing.cancel()
            else:
                closing = asyncio.create_task(c.shutdown())
            await settle(c)
            held.gate.set()
            [said] = await asyncio.gather(processing, return_exceptions=True)
            await (closing if stopped_by == "shutdown" else c.shutdown())
            assert len(sink.uids) == (inside == "sink")
            if stopped_by == "cancel":
                assert isinstance(said, asyncio.CancelledError)
            elif inside == "sink":
                assert said["pipeline/out_count"] == 1
            else:
                assert isinstance(said, ClosedError)

    run(main())


def test_an_explorer_may_submit_many_batches_before_it_finalizes_the_first() -> None:
    async def main() -> None:
        async with coordinator() as c:
            for step in range(100):
                await c.submit_batch(batch_id=step, tasks=[rr.Task(good)], batch_type="train")
            for step in range(100):
                assert (await c.finalize_train_batch(step))["experience_count"] == 1

    run(main())


def test_an_empty_batch_whose_pass_fails_is_pending_again() -> None:
    async def main() -> None:
        held = HeldOperator()
        held.gate.set()
        held.fails = True
        async with coordinator(operators=(held,)) as c:
            await c.submit_batch(batch_id=1, tasks=[], batch_type="train")
            with pytest.raises(PipelineError, match="as told"):
                await c.finalize_train_batch(1)
            assert c.batch_state(1).state is S.PENDING
            held.fails = False
            assert (await c.finalize_train_batch(1))["experience_count"] == 0

    run(main())


def test_a_second_batch_waits_for_the_pass_of_the_first() -> None:
    async def main() -> None:
        held = HeldOperator()
        async with coordinator(operators=(held,)) as c:
            for ident in (1, 2):
                await c.submit_batch(batch_id=ident, tasks=[rr.Task(good)], batch_type="train")
            first = asyncio.create_task(c.finalize_train_batch(1))
            await until(held.inside)
            second = asyncio.create_task(c.finalize_train_batch(2))
            await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert str(c.why_waiting(1)) == "in operator HeldOperator"
            assert str(c.why_waiting(2)) == "waiting for another pass" and held.n_calls == 1
            held.gate.set()
            assert [r["ok_task_count"] for r in await asyncio.gather(first, second)] == [1, 1]

    run(main())


def test_shutdown_stops_a_pass_that_has_not_begun_to_commit() -> None:
    async def main() -> None:
        held = HeldOperator()
        async with coordinator(operators=(held,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await until(held.inside)
            closing = asyncio.create_task(c.shutdown())
            for _ in range(5):
                await asyncio.sleep(0)
            held.gate.set()  # the pass could go on to its commit
            await closing
            with pytest.raises(ClosedError):
                await waits
            assert c.batch_state(1).state is S.ABORTED and not c.list_sink.parts

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


# -- a coordinator's life


def test_prepare_again_and_at_the_same_time_is_one_start(tmp_path: Path) -> None:
    async def main() -> None:
        c = with_journal(tmp_path)
        await asyncio.gather(c.prepare(), c.prepare(), c.prepare())
        await c.prepare()
        await asyncio.gather(c.shutdown(), c.shutdown())
        starting = asyncio.create_task(c.prepare())
        await asyncio.sleep(0)
        await c.shutdown()  # a start under way is waited for
        assert starting.done()
        with pytest.raises(ClosedError):
            c.stats()

    run(main())


def with_journal(path: Path) -> rr.RolloutCoordinator:
    """A coordinator whose start takes several turns of the loop, and of which a second start is an error."""
    return rr.RolloutCoordinator(config(sink="queue", journal=str(path / "j.sqlite")), [])


def test_a_prepare_that_was_cancelled_is_no_start_for_ever(tmp_path: Path) -> None:
    """The start goes on, as others may wait for it; an `async with` that is cancelled leaves nothing."""

    async def main() -> None:
        c = with_journal(tmp_path)
        starting = asyncio.create_task(c.prepare())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        while not is_open(c):
            await asyncio.sleep(0)
        await c.prepare()
        assert c.batches() == []
        await c.shutdown()
        await c.prepare()
        assert c.batches() == []
        await c.shutdown()

        async def enters() -> None:
            async with c:
                raise AssertionError("it was cancelled")

        entering = asyncio.create_task(enters())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        with pytest.raises(ClosedError):
            c.batches()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_prepare_during_a_shutdown_comes_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with coordinator(cancel_grace_s=2.0, journal=str(tmp_path / "j.sqlite"), drain_s=0.0) as c:
            gates = GATED[0] = c.gates
            gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=[rr.Task("tests.table.gated")], batch_type="train")
            await settle(c)
            closing = asyncio.create_task(c.shutdown())
            await asyncio.sleep(0)
            again = asyncio.create_task(c.prepare())  # before its end the journal is held
            await asyncio.sleep(0)
            assert not again.done()
            gates.ignores_cancel = False
            c.clock.advance(2.0)
            await closing
            await again
            assert c.batches() == [1]

    run(main())


@pytest.mark.process
def test_a_prepare_in_another_loop_meanwhile_is_sent_to_get_local() -> None:
    async def main() -> None:
        c = rr.RolloutCoordinator(config(sink="queue", runner="process", runners=1), [])
        starting = asyncio.create_task(c.prepare())
        await asyncio.sleep(0)

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="get_local"):
                asyncio.run(c.prepare())

        await asyncio.to_thread(elsewhere)
        await starting
        await c.shutdown()

    run(main())


def test_a_start_that_fails_lets_go_of_journal_and_sink_and_can_be_tried_again(tmp_path: Path) -> None:
    """Once because of the sink, once because of work in the journal after the runners have been started."""
    made = config(journal=str(tmp_path / "j.sqlite"), drain_s=0.0)
    buffer = {"kind": "replay", "storage": "memmap", "path": str(tmp_path / "b"), "max_tokens": 8}

    async def main() -> None:
        c = rr.RolloutCoordinator(made.replace(sink={"kind": "replay"}), [])
        with pytest.raises(TypeError, match="capacity"):
            await c.prepare()
        with pytest.raises(ClosedError):
            c.batches()
        task = rr.Task("tests.rollout.workflows:waits_for_ever")
        async with rr.RolloutCoordinator(made, []) as other:  # the journal was let go
            await other.submit_batch(batch_id=1, tasks=[task], batch_type="train")
        module = sys.modules.pop("tests.rollout.workflows")
        c = rr.RolloutCoordinator(made.replace(sink=buffer | {"capacity": 8}), [])
        with pytest.raises(ValueError, match="must be of a module that this program imports"):
            await c.prepare()
        with pytest.raises(ClosedError):
            c.batches()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        sys.modules["tests.rollout.workflows"] = module
        async with c:  # journal and buffer were let go, too
            assert c.batches() == [1]

    run(main())


def test_shutdown_wakes_who_waits_to_submit_and_closes_only_what_is_its_own() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"])
        async with coordinator([model], [[model]], max_batches=1) as c:
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            second = asyncio.create_task(c.submit_batch(batch_id=2, tasks=tasks(c, 1), batch_type="train"))
            waits = asyncio.create_task(c.finalize_train_batch(2))
            await settle(c)
            await c.shutdown()
            for waiter in (second, waits):
                with pytest.raises(ClosedError):
                    await waiter
            with pytest.raises(KeyError):
                c.batch_state(2)
            assert not c.list_sink.closed and not model.closed

    run(main())


def test_a_queue_of_the_config_can_be_emptied_after_shutdown_and_goes_on_after_prepare() -> None:
    async def main() -> None:
        async with coordinator(sink="queue") as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good, repeat_times=3)], batch_type="train")
            await c.finalize_train_batch(1)
            await c.shutdown()
            assert (await c.sink.get(2)).run_id.tolist() == [0, 1]
            with pytest.raises(ClosedError):
                await c.sink.get(2, timeout=5)
            await c.prepare()
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(2)
            assert (await c.sink.get(2)).run_id.tolist() == [2, 0]

    run(main())


def test_models_are_checked_and_a_workflow_without_one_is_told() -> None:
    async def asks(task: Any, models: Any) -> Any:
        return await models.rollout.generate("?")

    for wrong in (
        lambda: rr.RolloutCoordinator({}, []),
        lambda: rr.RolloutCoordinator(config(), [], [[]]),
        lambda: rr.RolloutCoordinator(config(auxiliary_names=("judge",)), []),
    ):
        with pytest.raises((TypeError, ValueError)):
            wrong()

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks)], batch_type="train")
            with pytest.raises(BatchFailed, match="there is no rollout model"):
                await c.finalize_train_batch(1)

    run(main())


def test_process_experiences_takes_bytes_and_each_call_is_a_commit_of_its_own() -> None:
    async def main() -> None:
        async with coordinator() as c:
            for group in (1, 2):
                await c.process_experiences([rr.encode([experience()], group_id=group, run_id=0)])
            assert len(c.list_sink.parts) == 2
            for wrong in (5, "text"):
                with pytest.raises(FormatError, match=r"^payloads\[0\]: "):
                    await c.process_experiences([wrong])
            assert c.stats().payloads_refused == 2 and len(c.list_sink.parts) == 2

    run(main())


def test_a_handle_is_awaited_without_holding_up_its_caller_and_closed_once() -> None:
    h = rr.RolloutCoordinator.get_local(config(sink="queue", max_batches=1, name="awaited"), [])
    h.prepare()
    h.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")

    async def other() -> Any:
        second = h.submit_batch.remote(batch_id=2, tasks=[rr.Task(good)], batch_type="train")

        async def awaited() -> None:
            await second

        waits = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        assert not waits.done()
        await h.finalize_train_batch.remote(1, timeout=10)
        await waits
        return await h.finalize_train_batch.remote(2, timeout=10)

    assert run(other())["ok_task_count"] == 1
    assert h.model_version == 0 and h.batches() == [] and h.sync_weights(3) == 3 == h.model_version
    for missing in ("no_such_call", "_check", "__len__"):
        with pytest.raises(AttributeError, match=f"^coordinator has no '{missing}'"):
            getattr(h, missing)
    h.close()
    h.close()
    assert "awaited-coordinator" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        h.stats()


def test_a_handle_whose_prepare_fails_is_closed() -> None:
    made = config(sink="queue", journal="/nonexistent/dir/j", name="fails")
    h = rr.RolloutCoordinator.get_local(made, [])
    with pytest.raises(FileNotFoundError, match="journal"), h:
        raise AssertionError("it was entered")
    assert "fails-coordinator" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        h.stats()


def test_a_call_that_outlives_its_coordinator_is_cancelled() -> None:
    asked = threading.Event()

    class Hangs(rr.ScriptedModel):
        async def sync(self, version: int | None = None) -> int:
            asked.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    h = rr.RolloutCoordinator.get_local(config(sink="queue", name="outlived"), [Hangs(["x"])])
    h.prepare()
    left = h.sync_weights.remote()
    assert asked.wait(20)
    h.close()
    with pytest.raises(concurrent.futures.CancelledError):
        left.result(20.0)
    assert "outlived-coordinator" not in {thread.name for thread in threading.enumerate()}


def test_a_handle_that_cannot_be_made_leaves_no_loop(recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()
    recwarn.clear()  # what tests before this one left
    with pytest.raises(TypeError, match="config"):
        rr.RolloutCoordinator.get_local({}, [])
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_stats_say_what_runs_and_what_waits() -> None:
    async def main() -> None:
        async with coordinator(runners=3, max_batches=1) as c:
            assert c.stats().runners == RunnerPoolStats("local", size=3, alive=3, free=3, fenced=0)
            await c.submit_batch(batch_id=1, tasks=tasks(c, 2, repeat_times=2), batch_type="train")
            waits = asyncio.create_task(
                c.submit_batch(batch_id=2, tasks=tasks(c, 1, repeat_times=5), batch_type="train")
            )
            await settle(c)
            stats = c.stats()
            assert stats.runners == RunnerPoolStats("local", size=3, alive=3, free=0, fenced=0)
            assert stats.queue == QueueStats(waiting_batches=1, live_batches=2, queued_runs=1)
            assert (stats.runs.submitted, stats.runs.live) == (4, 4)  # of what was admitted
            await c.abort_batch(2, reason="enough")
            with pytest.raises(BatchAborted):
                await waits

    run(main())


def test_shutdowns_at_the_same_time_are_one() -> None:
    async def main() -> None:
        async with coordinator(cancel_grace_s=2.0) as c:
            c.gates.ignores_cancel = True
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1), batch_type="train")
            await settle(c)
            closing = [asyncio.create_task(c.shutdown()) for _ in range(2)]
            await settle(c)
            closing.append(asyncio.create_task(c.shutdown()))
            await asyncio.sleep(0)
            assert not any(task.done() for task in closing)  # all wait for the one attempt
            c.gates.let_go()
            await asyncio.gather(*closing)
            assert not is_open(c)

    run(main())


def test_live_batches_are_listed_in_the_order_of_submission() -> None:
    async def main() -> None:
        async with coordinator() as c:
            for ident in (9, "a", 1):
                await c.submit_batch(batch_id=ident, tasks=[], batch_type="train")
            assert c.batches() == [9, "a", 1]
            assert c.why_waiting("none") is None

    run(main())

"""Aborting a batch at any moment of its life, with and without its good part."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.rollout.make import (
    Held,
    HeldOperator,
    ListSink,
    begun,
    check_doors,
    coordinator,
    good,
    rows_of,
    run,
    settle,
    tasks,
    until_set,
)

import recollect.rollout as rr
from recollect.errors import (
    BatchAborted,
    PipelineError,
)

S = rr.BatchLifecycleState


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


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_keeping_joins_the_pass_under_way(fails: bool) -> None:
    async def main() -> None:
        held = HeldOperator()
        held.fails = fails
        async with coordinator(operators=(held,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await until_set(held.inside)
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
            await until_set(sink.inside)
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
            await until_set(held.inside)
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


def test_a_workflow_that_aborts_its_own_batch_ends_like_any_other() -> None:
    async def main() -> None:
        async with coordinator(runners=1) as c:

            async def gives_up(task: Any, models: Any) -> Any:
                await c.abort_batch(1, reason="from within")

            await c.submit_batch(batch_id=1, tasks=[rr.Task(gives_up), rr.Task(good)], batch_type="train")
            with pytest.raises(BatchAborted, match="from within"):
                await c.finalize_train_batch(1, timeout=10)
            await settle(c)
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            assert (await c.finalize_train_batch(2, timeout=10))["ok_task_count"] == 1
            check_doors(c)

    run(main())


@pytest.mark.parametrize("keeps", [False, True])
def test_an_abort_after_any_number_of_turns_ends_as_the_table_says(keeps: bool) -> None:
    async def main() -> None:
        ends, n_turns = [], 0
        async with coordinator(max_retries=1, runners=2, operators=(lambda x: x, lambda x: x)) as c:
            while ends[-1:] != [S.FINALIZED]:
                ident = len(ends)
                waits = await begun(c, ident, n_turns)
                await c.abort_batch(ident, reason="now", keep_partial_results=keeps)
                [outcome] = await asyncio.gather(waits, return_exceptions=True)
                state = c.batch_state(ident)
                ends.append(state.state)
                if state.state is S.FINALIZED:
                    assert outcome["experience_count"] == 3 == rows_of(c, ident)
                else:
                    assert state.state is S.ABORTED and isinstance(outcome, BatchAborted), (n_turns, outcome)
                    kept = state.final_result["experience_count"] if keeps else 0
                    assert rows_of(c, ident) == kept, n_turns
                check_doors(c)
                assert c.stats().staged_nbytes == c.stats().runs.live == c.stats().queue.queued_runs == 0
                n_turns += 1 + n_turns // 8
            assert len(ends) > 3 and len(c.list_sink.uids) == len(set(c.list_sink.uids))

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

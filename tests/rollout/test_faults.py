"""Faults of every part: each ends in bounded time, and nothing finished is lost or used twice."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import check_doors, config, coordinator, experience, run, settle

import recollect.rollout as rr
from recollect.errors import BatchAborted, ClosedError, DeadlineError, PipelineError

S = rr.BatchLifecycleState
WHO: contextvars.ContextVar[Any] = contextvars.ContextVar("WHO", default=None)


async def good(task: Any, models: Any) -> Any:
    return experience(reward=float(task.run_id))


# -- the pass


def test_an_operator_that_raises_is_named_and_everything_stays_staged() -> None:
    broken = [True]

    def picky(x: Any) -> Any:
        if broken[0]:
            raise ZeroDivisionError("no")
        return x

    async def main() -> None:
        async with coordinator(operators=(picky,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good, repeat_times=3)], batch_type="train")
            for _ in range(2):
                with pytest.raises(PipelineError, match="operator picky.*ZeroDivisionError") as caught:
                    await c.finalize_train_batch(1, timeout=10)
                assert isinstance(caught.value.__cause__, ZeroDivisionError)
                assert c.batch_state(1).state is S.RUNNING and c.stats().staged_nbytes > 0
            broken[0] = False
            assert (await c.finalize_train_batch(1))["experience_count"] == 3 == len(c.list_sink.uids)
            check_doors(c)

    run(main())


def test_a_full_queue_holds_the_pass_up_for_its_limit_and_then_delivers_once() -> None:
    async def main() -> None:
        queue = rr.QueueSink(4)
        async with coordinator(sink=queue, pipeline_timeout_s=5.0) as c:
            for ident in (1, 2):
                tasks = [rr.Task(good, repeat_times=3)]
                await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")
            await c.finalize_train_batch(1)
            waiting = asyncio.create_task(c.finalize_train_batch(2))
            while "in the sink" not in str(c.why_waiting(2)):
                await asyncio.sleep(0)
            c.clock.advance(5.0)
            with pytest.raises(PipelineError, match="the sink"):
                await waiting
            again = asyncio.create_task(c.finalize_train_batch(2))
            await asyncio.sleep(0)
            first = await queue.get(3)
            assert (await again)["experience_count"] == 3
            second = await queue.get(3)
            assert len({*first.uids.tolist(), *second.uids.tolist()}) == 6 and len(queue) == 0
            check_doors(c)

    run(main())


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_what_a_full_queue_did_not_take_in_time_does_not_enter_it_later(how: str) -> None:
    """The batch was aborted, and its runs are counted as unused: so it must be."""

    async def main() -> None:
        began, ended = threading.Event(), threading.Event()

        class Watched(rr.QueueSink):
            def write(self, x: Any, commit_id: str) -> None:
                began.set()
                try:
                    super().write(x, commit_id)
                finally:
                    ended.set()

        queue = Watched(4)
        async with coordinator(sink=queue, pipeline_timeout_s=5.0) as c:
            for ident in (1, 2):
                await c.submit_batch(
                    batch_id=ident, tasks=[rr.Task(good, repeat_times=3)], batch_type="train"
                )
            await c.finalize_train_batch(1)
            began.clear()
            ended.clear()
            waiting = asyncio.create_task(c.finalize_train_batch(2))
            await asyncio.to_thread(began.wait, 20)
            c.clock.advance(5.0)
            with pytest.raises(PipelineError, match="the sink"):
                await waiting
            await (c.abort_batch(2, reason="enough") if how == "abort" else c.shutdown())
            assert c.batch_state(2).state is S.ABORTED
            assert len(await queue.get(3)) == 3
            assert await asyncio.to_thread(ended.wait, 20)
            assert len(queue) == 0
            if how == "abort":
                assert c.stats().runs.unused == 3
                check_doors(c)

    run(main(), 10)


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


def test_payloads_of_other_code_never_overwrite_those_of_an_earlier_process(tmp_path: Path) -> None:
    async def main(group: int) -> None:
        c = rr.RolloutCoordinator(config(sink=str(tmp_path)), [])
        async with c:
            await c.process_experiences([rr.encode([experience()], group_id=group, run_id=0)])

    run(main(1))
    run(main(2))
    assert len(list(tmp_path.glob("*.parquet"))) == 2


# -- runners


def test_each_attempt_has_its_own_context_and_leaves_no_cancel_behind() -> None:
    seen: list[Any] = []

    async def marks(task: Any, models: Any) -> Any:
        seen.append(WHO.get())
        WHO.set(task.task_id)
        if task.task_id == 1:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(0)
        return experience()

    async def main() -> None:
        async with coordinator(runners=1, attempt_timeout_s=5.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(marks) for _ in range(4)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)  # task 1 swallows its cancel and returns: too late, and nobody else's matter
            result = await c.finalize_train_batch(1, timeout=10)
            assert (result["ok_task_count"], result["failed_task_count"]) == (3, 1)
            assert seen == [None] * 4
            check_doors(c)

    run(main())


def test_much_small_work_lets_others_have_their_turn() -> None:
    async def main() -> None:
        async with coordinator(runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good) for _ in range(1000)], batch_type="train")
            turns = 0
            while c.stats().attempts.good < 1000:
                turns += 1
                await asyncio.sleep(0)
            assert turns > 5

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


def test_shutdown_does_not_wait_for_a_thread_that_never_ends() -> None:
    release = threading.Event()

    def stuck(task: Any, models: Any) -> Any:
        release.wait(30)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        c = rr.RolloutCoordinator(config(sink="queue", cancel_grace_s=0.1), [])
        await c.prepare()
        await c.submit_batch(batch_id=1, tasks=[rr.Task(stuck)], batch_type="train")
        await asyncio.sleep(0)
        start = loop.time()
        await c.shutdown()
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []
        return loop.time() - start

    try:
        assert run(main()) < 0.1 + 5
    finally:
        release.set()


def test_what_was_carried_is_counted_when_all_ends() -> None:
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


# -- at every moment


def rows_of(c: Any, ident: int) -> int:
    """How many rows of a batch are in the sink."""
    return sum(
        x.task_of(group)[0] == ident for x in c.list_sink.parts.values() for group in x.group_id.tolist()
    )


async def begun(c: Any, ident: int, n_turns: int) -> asyncio.Task[Any]:
    """Submit a batch that takes some turns of the loop, wait for it, and let it come so far."""
    given = [rr.Task(takes_turns, repeat_times=2), rr.Task(takes_turns)]
    await c.submit_batch(batch_id=ident, tasks=given, batch_type="train")
    waits = asyncio.create_task(c.finalize_train_batch(ident, timeout=100))
    for _ in range(n_turns):
        await asyncio.sleep(0)
    return waits


async def takes_turns(task: Any, models: Any) -> Any:
    if task.run_id == 0 and task.attempt == 1:
        raise OSError("once")
    await asyncio.sleep(0)
    return experience()


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


def test_a_shutdown_after_any_number_of_turns_loses_nothing_and_delivers_nothing_twice() -> None:
    async def main() -> None:
        ends, n_turns = [], 0
        async with coordinator(max_retries=1, runners=2, operators=(lambda x: x, lambda x: x)) as c:
            while ends[-1:] != [S.FINALIZED]:
                ident = len(ends)
                waits = await begun(c, ident, n_turns)
                await c.shutdown()
                [outcome] = await asyncio.gather(waits, return_exceptions=True)
                ends.append(c.batch_state(ident).state)
                if ends[-1] is S.FINALIZED:
                    assert outcome["experience_count"] == 3 == rows_of(c, ident)
                else:
                    assert ends[-1] is S.ABORTED and isinstance(outcome, ClosedError), (n_turns, outcome)
                    assert rows_of(c, ident) == 0, n_turns
                await c.prepare()
                check_doors(c)
                assert c.batches() == [] and c.stats().staged_nbytes == c.stats().runs.live == 0
                n_turns += 1 + n_turns // 8
            assert len(ends) > 3 and len(c.list_sink.uids) == len(set(c.list_sink.uids))

    run(main())


# -- bounds and events


def test_runs_that_wait_are_bounded_unless_nothing_is_live() -> None:
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


def test_an_ended_id_can_be_used_again_and_the_old_result_goes() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good), rr.Task(good)], batch_type="train")
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 2
            assert len(set(c.list_sink.uids)) == 3

    run(main())


def test_retries_limits_and_syncs_are_events() -> None:
    async def slow_then_bad(task: Any, models: Any) -> Any:
        if task.attempt == 1:
            await asyncio.get_running_loop().create_future()
        raise ValueError("bad")

    async def main() -> None:
        async with coordinator(max_retries=1, attempt_timeout_s=5.0) as c:
            stream = c.events()
            await c.submit_batch(batch_id=1, tasks=[rr.Task(slow_then_bad)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            await c.sync_weights()
            await c.abort_batch(1, reason="enough")
            await c.shutdown()
            kinds = [event.kind async for event in stream]
            wanted = [
                "submitted",
                "admitted",
                "started",
                "timed_out",
                "retried",
                "started",
                "failed",
                "synced",
            ]
            assert kinds == [*wanted, "aborted"]
            with pytest.raises(ClosedError):
                c.events()

    run(main())

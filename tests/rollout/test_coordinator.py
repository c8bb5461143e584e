"""A coordinator's own life: prepare, shutdown, its event loop, weights, history and stats."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import (
    begun,
    check_doors,
    config,
    coordinator,
    experience,
    good,
    is_open,
    rows_of,
    run,
    settle,
    tasks,
)

import recollect.rollout as rr
from recollect.errors import (
    BatchAborted,
    BatchFailed,
    ClosedError,
)
from recollect.rollout.stats import QueueStats, RunnerPoolStats
from recollect.testing import FakeClock
from recollect.testing.leftovers import leaves_nothing

GATED: list[Any] = [None]


@rr.workflow("tests.table.gated")
async def gated(task: Any, models: Any) -> Any:
    return await GATED[0](task, models)


def with_journal(path: Path) -> rr.RolloutCoordinator:
    """A coordinator whose start takes several turns of the loop, and of which a second start is an error."""
    return rr.RolloutCoordinator(config(sink=str(path / "out"), journal=str(path / "j.sqlite")), [])


S = rr.BatchLifecycleState


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
    made = config(journal=str(tmp_path / "j.sqlite"), sink=str(tmp_path / "out"), drain_s=0.0)
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
        with (
            leaves_nothing(),
            pytest.raises(ValueError, match="must be of a module that this program imports"),
        ):
            await c.prepare()
        with pytest.raises(ClosedError):
            c.batches()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        sys.modules["tests.rollout.workflows"] = module
        async with c:  # journal and buffer were let go, too
            assert c.batches() == [1]

    run(main())


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


def test_shutdown_wakes_every_waiter_and_aborts_live_batches() -> None:
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


def test_shutdown_wakes_submissions_and_closes_only_what_the_config_made() -> None:
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

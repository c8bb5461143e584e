"""Delivering: a pass through the operators into the sink, how it fails, and payloads of other code."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import (
    Held,
    HeldOperator,
    ListSink,
    check_doors,
    config,
    coordinator,
    end,
    experience,
    good,
    run,
    settle,
    tasks,
    until_set,
)

import recollect as rc
import recollect.rollout as rr
from recollect.errors import (
    ClosedError,
    FormatError,
    PipelineError,
)

S = rr.BatchLifecycleState


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


@pytest.mark.parametrize("inside", ["operator", "sink"])
@pytest.mark.parametrize("stopped_by", ["shutdown", "cancel"])
def test_payloads_in_a_commit_are_written_and_others_are_not(stopped_by: str, inside: str) -> None:
    async def main() -> None:
        sink, operator = Held(), HeldOperator()
        held: Any = sink if inside == "sink" else operator
        (operator if inside == "sink" else sink).gate.set()
        async with coordinator(sink=sink, operators=(operator,)) as c:
            processing = asyncio.create_task(c.process_experiences([rr.encode([experience()])]))
            await until_set(held.inside)
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
            await until_set(held.inside)
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
            await until_set(held.inside)
            closing = asyncio.create_task(c.shutdown())
            for _ in range(5):
                await asyncio.sleep(0)
            held.gate.set()  # the pass could go on to its commit
            await closing
            with pytest.raises(ClosedError):
                await waits
            assert c.batch_state(1).state is S.ABORTED and not c.list_sink.parts

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
def test_rows_that_a_full_queue_did_not_take_in_time_do_not_enter_it_later(how: str) -> None:
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


def test_payloads_of_other_code_never_overwrite_those_of_an_earlier_process(tmp_path: Path) -> None:
    async def main(group: int) -> None:
        c = rr.RolloutCoordinator(config(sink=str(tmp_path)), [])
        async with c:
            await c.process_experiences([rr.encode([experience()], group_id=group, run_id=0)])

    run(main(1))
    run(main(2))
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def test_rows_just_fresh_enough_are_delivered_and_stale_ones_counted() -> None:
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


def test_a_pass_takes_operators_in_order_and_commits_them_after_the_sink() -> None:
    said: list[str] = []

    class Remembers:
        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __call__(self, x: Any) -> Any:
            said.append(self.__name__)
            return x

        def commit(self) -> None:
            said.append(f"commit {self.__name__}")

    class Says(ListSink):
        def write(self, x: Any, commit_id: str) -> None:
            said.append("write")
            super().write(x, commit_id)

    async def main() -> None:
        operators = (Remembers("a"), Remembers("b"), lambda x: (x, {}), rr.LengthFilter(high=9))
        async with coordinator(sink=Says(), operators=operators) as c:
            c.list_sink.fail = "before"
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(1)
            assert said == ["a", "b", "write"]
            c.list_sink.fail = None
            await c.finalize_train_batch(1)
            assert said[3:] == ["a", "b", "write", "commit a", "commit b"]

    run(main())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda x: None, "must return Experiences, got NoneType"),
        (lambda x: [x], "must return Experiences, got list"),
        (lambda x: x.replace(run_id=x.run_id + 1), "may drop and change rows"),
        (lambda x: x.where([0, 0]), "may drop and change rows"),
    ],
)
def test_an_operator_returns_rows_that_it_was_given(made: Any, text: str) -> None:
    async def main() -> None:
        async with coordinator(operators=(made,)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            with pytest.raises(PipelineError, match=text):
                await c.finalize_train_batch(1)
            assert c.stats().staged_nbytes > 0

    run(main())


def test_rows_that_operators_of_one_name_drop_are_counted_together() -> None:
    async def sized(task: Any, models: Any) -> Any:
        return experience(n=task.run_id, model_version=task.run_id)

    async def main() -> None:
        operators = (rr.LengthFilter(low=1), rr.LengthFilter(high=4), rr.StalenessFilter(3))
        async with coordinator(operators=operators, max_staleness=4) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(sized, repeat_times=6)], batch_type="train")
            await c.sync_weights(5)
            m = (await c.finalize_train_batch(1))["metrics"]
            assert m["pipeline/staleness/dropped"] == 2.0  # run 0 as the pass begins, run 1 by the operator
            assert m["pipeline/length/dropped"] == 1.0 and m["pipeline/out_count"] == 3.0

    run(main())


def test_a_pass_says_what_went_in_out_and_how_long_each_part_took() -> None:
    def half(x: Any) -> Any:
        c_box[0].clock.now += 2.0
        return x.where(x.run_id < 2), {"seen": len(x)}

    c_box: list[Any] = []

    async def main() -> None:
        async with coordinator(operators=(half,)) as c:
            c_box.append(c)
            write = c.list_sink.write

            def slow(x: Any, commit_id: str) -> None:
                c.clock.now += 3.0
                write(x, commit_id)

            c.list_sink.write = slow
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good, repeat_times=5)], batch_type="train")
            result = await c.finalize_train_batch(1)
            found = {key: value for key, value in result["metrics"].items() if key.startswith("pipeline/")}
            assert found == {
                "pipeline/in_count": 5.0, "pipeline/out_count": 2.0, "pipeline/s": 5.0, "pipeline/half/dropped": 3.0,
                "pipeline/half/s": 2.0, "pipeline/half/seen": 5.0, "pipeline/sink/s": 3.0,
            }  # fmt: skip
            assert (c.stats().runs.delivered, c.stats().runs.filtered) == (2, 3)

    run(main())


def test_each_finalizer_of_a_failed_pass_gets_an_error_of_its_own() -> None:
    async def main() -> None:
        async with coordinator() as c:
            c.list_sink.fail = "before"
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            calls = [c.finalize_train_batch(1) for _ in range(2)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(error) for error in errors] == [PipelineError] * 2 and errors[0] is not errors[1]
            assert all(isinstance(error.__cause__, OSError) for error in errors)

    run(main())


def test_the_space_of_a_given_buffer_is_that_of_the_coordinator() -> None:
    buffer = rr.experience_buffer(
        "memory", capacity=9, space=rr.experience_space(extra={"note": ((), "int64")})
    )

    async def noted(task: Any, models: Any) -> Any:
        return experience(note=7)

    async def main() -> None:
        async with coordinator(sink=buffer) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(noted)], batch_type="train")
            await c.finalize_train_batch(1)
            assert c.sink is buffer and c.config.sink is buffer
        assert buffer[:]["note"].tolist() == [7]

    run(main())


def test_rows_without_a_reward_are_counted_and_a_pass_that_loses_all_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def forgets(task: Any, models: Any) -> Any:
        return experience(float("nan") if task.run_id or task.batch_id == 1 else 1.0)

    async def main() -> None:
        async with coordinator(operators=("grpo",)) as c:
            for ident, missing in ((1, 4.0), (2, 3.0)):
                await c.submit_batch(
                    batch_id=ident, tasks=[rr.Task(forgets, repeat_times=4)], batch_type="train"
                )
                result = await c.finalize_train_batch(ident)
                assert result["metrics"]["rollout/reward/missing"] == missing
                assert result["experience_count"] == 0

    run(main())
    [told] = caplog.messages
    assert told.startswith("operator grpo: dropped all 4 rows of rollout-1-") and "reward=" in told


@pytest.mark.parametrize("how", ["max_staleness", "operator"])
def test_a_pass_that_loses_all_rows_as_stale_says_so(how: str, caplog: pytest.LogCaptureFixture) -> None:
    given = {"max_staleness": 0} if how == "max_staleness" else {"operators": (rr.StalenessFilter(0),)}

    async def main() -> None:
        async with coordinator(**given) as c:
            for version in (0, 1):
                await c.sync_weights(version)
                await c.submit_batch(batch_id=version, tasks=tasks(c, 1), batch_type="train")
                await settle(c)
                c.gates.end((version, 0, 0), experience(model_version=0))
                assert (await c.finalize_train_batch(version))["experience_count"] == 1 - version

    run(main())
    [told] = caplog.messages
    assert told.startswith("staleness: dropped all 1 rows of rollout-1-")
    assert "versions up to 0 while the newest is 1" in told

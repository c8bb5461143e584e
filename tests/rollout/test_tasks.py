"""Tasks, the workflows that turn them into experience, and the models that a workflow sees."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import check_doors, config, coordinator, experience, run, settle

import recollect.rollout as rr
from recollect.errors import BatchFailed, ClosedError
from recollect.rollout.models.replicas import ModelPool, Models


async def good(task: Any, models: Any) -> Any:
    return experience(reward=float(task.run_id))


# -- names


MODULE = """
import recollect.rollout as rr

@rr.workflow("{name}")
async def flow(task, models):
    return rr.Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=1.0)

@rr.operator("{name}")
def half(x):
    return x.replace(reward=x.reward / 2)
"""


def test_names_of_workflow_modules_are_known_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tests_names_flow", "tests_names_operator"):
        (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))

    async def main() -> None:
        modules = ("tests_names_flow", "tests_names_operator")
        fields = {"operators": ("tests_names_operator",), "workflow_modules": modules}
        async with rr.RolloutCoordinator(rr.Config(**fields), []) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task("tests_names_flow")], batch_type="train")
            await c.finalize_train_batch(1)
            assert (await c.sink.get(1)).reward.tolist() == [0.5]
            with pytest.raises(ValueError, match="no_such_workflow"):
                await c.submit_batch(batch_id=2, tasks=[rr.Task("no_such_workflow")], batch_type="train")
        async with rr.RolloutCoordinator(rr.Config(workflow_modules=("no_such_module",)), []) as c:
            with pytest.raises(ValueError, match="workflow_modules: .*no_such_module"):
                await c.submit_batch(batch_id=1, tasks=[rr.Task("no_such_workflow")], batch_type="train")
            assert c.batches() == []

    run(main())


# -- tasks


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"repeat_times": 0}, "repeat_times"),
        ({"repeat_times": 1.0}, "repeat_times"),
        ({"repeat_times": True}, "repeat_times"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_a_task_is_checked_when_it_is_made(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}: "):
        rr.Task("x", **fields)


def test_a_task_is_frozen_and_has_the_defaults_of_the_contract() -> None:
    task = rr.Task("x")
    assert (task.data, task.args, task.repeat_times) == ({}, {}, 1)
    assert (task.task_id, task.timeout_s, task.max_retries) == (None, None, None)
    with pytest.raises(AttributeError):
        task.repeat_times = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        rr.Task("x", {}, {})  # type: ignore[misc]


@pytest.mark.parametrize("task_id", [True, 1.5, b"t"])
def test_a_task_id_is_an_int_or_str(task_id: Any) -> None:
    async def main() -> None:
        async with coordinator() as c:
            with pytest.raises(TypeError, match="task_id"):
                await c.submit_batch(batch_id=1, tasks=[rr.Task(good, task_id=task_id)], batch_type="train")

    run(main())


def test_the_workflows_copy_of_a_task_says_what_this_run_is() -> None:
    seen: list[Any] = []

    async def looks(task: Any, models: Any) -> Any:
        fields = (
            task.batch_id,
            task.task_id,
            task.is_eval,
            task.run_id,
            task.run_ids,
            task.attempt,
            task.repeat_times,
        )
        seen.append((*fields, dict(task.data), task.args))
        task.data["seen"] = True  # its own
        if task.attempt == 1:
            raise OSError("once")
        return rr.Result(experience(), {"x": 1.0})

    async def main() -> None:
        async with coordinator(max_retries=1, repeats_per_attempt=2) as c:
            task = rr.Task(looks, {"a": 1}, args={"b": 2}, repeat_times=2, task_id="t")
            await c.submit_batch(batch_id="3/e", tasks=[task], batch_type="eval")
            await c.finalize_eval_batch("3/e")
            assert list(c.batch_state("3/e").statuses) == ["t"] and task.data == {"a": 1}

    run(main())
    rest = (2, {"a": 1}, {"b": 2})
    wanted = [("3/e", "t", True, run, (run,), attempt, *rest) for attempt in (1, 2) for run in (0, 1)]
    assert seen == wanted


def test_seeds_differ_by_run_task_batch_and_config_and_are_the_same_again() -> None:
    async def seeds(seed: int) -> list[int]:
        found: list[int] = []

        async def looks(task: Any, models: Any) -> Any:
            found.append(task.seed)
            return experience()

        async with coordinator(seed=seed) as c:
            for ident in (1, "1", 2):
                tasks = [rr.Task(looks, repeat_times=2), rr.Task(looks)]
                await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")
                await c.finalize_train_batch(ident)
        return found

    first, again, other = (run(seeds(seed)) for seed in (1, 1, 2))
    assert first == again and len({*first, *other}) == 18
    assert all(0 <= seed < 2**63 for seed in first)


# -- workflows


def test_a_workflow_is_found_by_name_by_import_path_or_as_itself() -> None:
    async def main() -> None:
        async with coordinator() as c:
            names = ["tests.rollout.test_tasks:good", good, "tests.tasks.named"]
            await c.submit_batch(batch_id=1, tasks=[rr.Task(name) for name in names], batch_type="train")
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 3
            for wrong in ("tests.rollout.test_tasks:no_such", "no_such_module:f", "unheard of"):
                with pytest.raises(ValueError, match="must be registered or an import path"):
                    await c.submit_batch(batch_id=2, tasks=[rr.Task(wrong)], batch_type="train")
            with pytest.raises(TypeError, match="must be a function or a name, got int"):
                await c.submit_batch(batch_id=2, tasks=[rr.Task(5)], batch_type="train")

    rr.workflow("tests.tasks.named")(good)
    run(main())


def test_a_name_is_taken_once() -> None:
    async def other(task: Any, models: Any) -> Any:
        return None

    rr.workflow("tests.tasks.taken")(good)
    rr.workflow("tests.tasks.taken")(good)  # a module that is imported again says the same
    with pytest.raises(ValueError, match="is taken by"):
        rr.workflow("tests.tasks.taken")(other)
    for wrong in ("", 5, None):
        with pytest.raises(TypeError, match="non-empty str"):
            rr.workflow(wrong)  # type: ignore[arg-type]


def test_with_a_journal_a_workflow_needs_a_name(tmp_path: Any) -> None:
    async def nameless(task: Any, models: Any) -> Any:
        return None

    async def main() -> None:
        about = config(journal=str(tmp_path / "j.sqlite"), sink=str(tmp_path / "out"))
        async with rr.RolloutCoordinator(about, []) as c:
            with pytest.raises(TypeError, match="must have a name or an import path"):
                await c.submit_batch(batch_id=1, tasks=[rr.Task(nameless)], batch_type="train")
            await c.submit_batch(
                batch_id=1, tasks=[rr.Task(good)], batch_type="train"
            )  # is found by its path
            await c.finalize_train_batch(1)

    run(main())


def test_steps_keep_their_order_in_whatever_they_come() -> None:
    async def many(task: Any, models: Any) -> Any:
        steps = [experience(reward=float(i)) for i in range(3)]
        return (steps, tuple(steps), rr.Result(steps), rr.Result(tuple(steps)))[task.run_id]

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(many, repeat_times=4)], batch_type="train")
            assert (await c.finalize_train_batch(1))["metrics"][
                "rollout/reward/mean"
            ] == 2.0  # the last one's
            [x] = c.list_sink.parts.values()
            assert x.reward.tolist() == [0.0, 1.0, 2.0] * 4 and x.step.tolist() == [0, 1, 2] * 4

    run(main())


@pytest.mark.parametrize("returned", [None, [], rr.Result()])
def test_an_eval_run_that_returns_nothing_has_failed(returned: Any) -> None:
    async def nothing(task: Any, models: Any) -> Any:
        return returned

    async def main() -> None:
        async with coordinator() as c:
            await c.submit_batch(batch_id="e", tasks=[rr.Task(nothing)], batch_type="eval")
            with pytest.raises(BatchFailed, match="got nothing"):
                await c.finalize_eval_batch("e")

    run(main())


def test_an_exit_or_a_cancel_of_the_workflows_own_is_a_failure() -> None:
    async def leaves(task: Any, models: Any) -> Any:
        raise (SystemExit(3), asyncio.CancelledError("own"))[task.data["how"]]

    @rr.workflow("tests.tasks.leaves_together", grouped=True)
    async def together(task: Any, models: Any) -> Any:
        return await leaves(task, models)

    async def main() -> None:
        async with coordinator(max_retries=1) as c:
            given = [rr.Task(flow, {"how": how}) for flow in (leaves, together) for how in (0, 1)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            await settle(c)
            statuses = c.batch_state(1).statuses
            assert [statuses[task].attempts for task in range(4)] == [2] * 4
            for task, said in enumerate(["SystemExit: 3", "CancelledError: own"] * 2):
                assert statuses[task].state == "failed" and said in statuses[task].error
            check_doors(c)

    run(main())


def test_a_grouped_workflow_makes_all_runs_of_an_attempt_and_each_counts_for_itself() -> None:
    calls: list[Any] = []

    @rr.workflow("tests.tasks.group", grouped=True)
    async def group(task: Any, models: Any) -> Any:
        calls.append((task.run_ids, len(set(task.seeds)), task.attempt))
        how = task.data["how"]
        if how == "raises":
            raise ValueError("all of them")
        if how == "cancelled":
            raise asyncio.CancelledError("own")
        if how == "short":
            return [experience()]
        return [5 if run == 1 and task.attempt == 1 else experience(float(run)) for run in task.run_ids]

    async def main() -> None:
        async with coordinator(repeats_per_attempt=3) as c:
            hows = ("one off", "raises", "short", "cancelled")
            given = [rr.Task("tests.tasks.group", {"how": how}, repeat_times=3) for how in hows]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            await settle(c)
            statuses = c.batch_state(1).statuses
            assert [(s.state, s.completed_runs) for s in statuses.values()] == [
                ("partial", 2), ("failed", 0), ("failed", 0), ("failed", 0),
            ]  # fmt: skip
            assert "must return one result per run, 3, got 1" in statuses[2].error
            assert calls == [((0, 1, 2), 3, 1)] * 4
            check_doors(c)

    run(main())


def test_a_sync_grouped_workflow_runs_in_a_thread() -> None:
    @rr.workflow("tests.tasks.group_sync", grouped=True)
    def group(task: Any, models: Any) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return [experience(float(run)) for run in task.run_ids]

    async def main() -> None:
        async with coordinator(repeats_per_attempt=4) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(group, repeat_times=4)], batch_type="train")
            assert (await c.finalize_train_batch(1))["experience_count"] == 4

    run(main())


# -- models


class Plain:
    """A model that answers when it is told to."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.n_calls = name, 0, 0
        self.gate: asyncio.Future[Any] | None = None

    async def generate(self, prompt: Any, **sampling: Any) -> Any:
        self.n_calls += 1
        if self.gate is not None:
            await self.gate
        return [rr.Generation(self.name)]


def pool_of(*roles: Any, rest_s: float = 30.0, clock: Any = lambda: 0.0) -> ModelPool:
    return ModelPool(roles[0], roles[1:], ["judge"][: len(roles) - 1], clock, rest_s)


async def said(model: Any) -> str:
    return str((await model.generate("?"))[0].text)


def test_an_attempt_has_the_rollout_model_with_the_fewest_attempts_throughout() -> None:
    async def main() -> None:
        pool = pool_of([Plain("a"), Plain("b")])
        first, second, third = (Models(pool) for _ in range(3))
        assert [await said(models.rollout) for models in (first, second, first, second)] == [
            "a",
            "b",
            "a",
            "b",
        ]
        first.release()
        assert await said(third.rollout) == "a" and [s.attempts for s in pool.stats()] == [1, 1]
        third.release()
        second.release()
        second.release()
        assert [s.attempts for s in pool.stats()] == [0, 0] and [s.served for s in pool.stats()] == [3, 2]
        assert await said(first["rollout"]) == "a"

    run(main())


def test_an_auxiliary_call_goes_to_the_least_busy_replica_of_its_role() -> None:
    async def main() -> None:
        a, b, other = Plain("a"), Plain("b"), Plain("other")
        pool = pool_of([], [a, b], [other])
        models = Models(pool)
        a.gate = asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(models["judge"].generate("?"))
        await asyncio.sleep(0)
        assert [await said(models["judge"]) for _ in range(3)] == ["b"] * 3
        assert [s.calls for s in pool.stats()] == [1, 0, 0]
        assert models.doing is None and await said(models.auxiliary[1]) == "other"
        assert [await said(model) for model in models.auxiliary] == ["b", "other"]
        a.gate.set_result(None)
        await waits
        assert [s.calls for s in pool.stats()] == [0, 0, 0] and await said(models["judge"]) == "a"
        with pytest.raises(KeyError, match="must be one of.*auxiliary1.*judge.*got 'none'"):
            models["none"]

    run(main())


def test_a_model_that_rests_is_awake_again_after_the_longest_pause() -> None:
    async def main() -> None:
        now = [0.0]
        broken, works = rr.ScriptedModel(["a"], failures=dict.fromkeys(range(10), OSError())), Plain("b")
        pool = pool_of([], [broken, works], rest_s=30.0, clock=lambda: now[0])
        models = Models(pool)
        for n in range(5):
            assert not pool.stats()[0].resting, n
            with suppress(OSError):
                await models.auxiliary[0].generate("?")  # the broken one, which has served the fewest calls
        stats = pool.stats()[0]
        assert stats.resting and (stats.served, stats.failed, stats.calls) == (0, 5, 0)
        now[0] = 29.9
        assert pool.auxiliary[0].for_call().model is works
        now[0] = 30.0
        assert not pool.stats()[0].resting and pool.auxiliary[0].for_call().model is broken
        for replica in pool.auxiliary[0].replicas:
            replica.rests_until = 99.0
        assert pool.auxiliary[0].for_call().model is broken  # all rest: better one of them than none

    run(main())


def test_the_pause_of_a_model_is_that_of_the_config() -> None:
    async def main() -> None:
        broken = rr.ScriptedModel(["a"], failures=dict.fromkeys(range(5), OSError("down")))

        async def asks(task: Any, models: Any) -> Any:
            [g] = await models.rollout.generate("?")
            return g.experience(reward=1.0)

        fields = {"retry_backoff_max_s": 40.0, "runners": 1, "max_retries": 9}
        async with coordinator([broken, rr.ScriptedModel(["b"])], **fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks)], batch_type="train")
            await c.finalize_train_batch(1)
            assert broken.n_calls == 5 and c.stats().models[0].resting
            c.clock.advance(39.9)
            assert c.stats().models[0].resting
            c.clock.advance(0.1)
            assert not c.stats().models[0].resting

    run(main())


def test_a_call_that_is_cancelled_is_no_failure_and_one_of_a_given_up_attempt_is_refused() -> None:
    async def main() -> None:
        model = Plain("a")
        pool = pool_of([model, Plain("b")])
        models = Models(pool)
        model.gate = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(models.rollout.generate("?"))
        await asyncio.sleep(0)
        assert models.doing == "generate at rollout[0]"
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert pool.stats()[0].failed == 0 and models.doing is None
        model.gate = asyncio.get_running_loop().create_future()
        late = asyncio.create_task(models.rollout.generate("?"))
        await asyncio.sleep(0)
        models.fenced = True
        model.gate.set_result(None)
        for refused in (late, models.rollout.generate("?")):
            with pytest.raises(ClosedError, match="given up"):
                await refused
        assert model.n_calls == 2

    run(main())


# -- generations and the scripted model


def test_an_experience_of_a_generation_takes_any_leaf() -> None:
    g = rr.Generation("x", tokens=[1, 2], prompt_length=1, logprobs=[-0.5], version=4)
    row = g.experience(reward=1.0, advantage=0.5, truncated=True, model_version=9)
    assert (row.advantage, row.truncated, row.model_version, row.prompt_length) == (0.5, True, 9, 1)
    plain = g.experience()
    assert plain.reward != plain.reward and not plain.truncated and plain.model_version == 4
    assert (g.finish_reason, rr.Generation("x").version, rr.Generation("x").prompt_length) == ("stop", 0, 0)


def test_a_scripted_model_answers_from_a_list_a_mapping_or_a_function() -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["a", "b"], version=5)
        assert [g.text for g in await model.generate("?", n=3)] == ["a", "b", "a"]
        assert [g.version for g in await model.chat([{"content": "?"}])] == [5] and model.n_calls == 2
        assert await said(rr.ScriptedModel({"?": "mapped"})) == "mapped"
        assert await said(rr.ScriptedModel(lambda prompt: prompt * 2)) == "??"
        assert (await model.sync(), await model.sync(9), model.version) == (6, 9, 9)
        fails = rr.ScriptedModel(["a"], failures={0: OSError("first"), 2: "hang"})
        with pytest.raises(OSError, match="first"):
            await fails.generate("?")
        assert await said(fails) == "a"
        hangs = asyncio.create_task(fails.generate("?"))
        slow = asyncio.create_task(rr.ScriptedModel(["a"], latency_s=1e-9).generate("?"))
        await asyncio.sleep(0)
        assert not slow.done()
        await slow
        assert not hangs.done()
        hangs.cancel()

    run(main())

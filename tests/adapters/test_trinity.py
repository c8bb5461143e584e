"""Trinity's own Workflow classes, and ones that users write, run on our coordinator; experience goes both ways."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import numpy as np
import pytest

import recollect as rc
import recollect.rollout as rr

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # packages that Trinity imports warn of each other
    pytest.importorskip("trinity.common.workflows")
    from trinity.common.config import Config as TrinityConfig
    from trinity.common.config import FormatConfig, GenerationConfig
    from trinity.common.experience import Experience
    from trinity.common.rewards.reward_fn import RewardFn
    from trinity.common.workflows import WORKFLOWS, Task, Workflow
    from trinity.common.workflows.workflow import AsyncSimpleWorkflow, SimpleWorkflow

from recollect.adapters.trinity import from_trinity, to_trinity, trinity_config, trinity_task  # noqa: E402


class ExactReward(RewardFn):
    """1 where the answer is the truth."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, response: str, truth: str, **kwargs: Any) -> dict[str, float]:
        return {"accuracy": self.scale * float(response == truth)}


@WORKFLOWS.register_module("count_to")
class CountTo(Workflow):
    """Steps by an OpenAI client, whose experience is taken from the history, with a reward a step."""

    def run(self) -> list[Any]:
        found, client = [], self.model.get_openai_client()
        for step in range(self.task.workflow_args["steps"]):
            said = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "next?"}])
            assert said.choices[0].message.content == "go"
            for experience in self.model.extract_experience_from_history():
                experience.reward, experience.eid.step = float(step), step
                found.append(experience)
        return found


class Judged(Workflow):
    """Async steps, with one reward for all of them, given by an auxiliary model."""

    is_async = True

    async def run_async(self) -> list[Any]:
        for _ in range(3):
            await self.model.chat_async([{"role": "user", "content": "next?"}], temperature=None, top_k=-1)
        judged = await self.auxiliary_models[0].chat.completions.create(messages=[{"content": "how good?"}])
        found = self.model.extract_experience_from_history()
        for experience in found:
            experience.reward = float(judged.choices[0].message.content)
        return found  # type: ignore[no-any-return]


class Blocks(Workflow):
    is_async = True

    async def run_async(self) -> list[Any]:
        return self.model.chat([{"role": "user", "content": "x"}])  # type: ignore[no-any-return]


def math_task(workflow: Any, **more: Any) -> Any:
    return Task(
        workflow=workflow, repeat_times=4, raw_task={"q": "2+3", "a": "5"}, reward_fn=ExactReward,
        format_args=FormatConfig(prompt_key="q", response_key="a", system_prompt="Count."),
        rollout_args=GenerationConfig(temperature=0.5), **more,
    )  # fmt: skip


def run(tasks: list[Any], script: Any = ("5", "6"), kind: str = "train", **config: Any) -> tuple[Any, Any]:
    """The result of a batch, and its experience."""

    async def main() -> tuple[Any, Any]:
        models, judges = [rr.ScriptedModel(script, version=3)], [[rr.ScriptedModel(["0.75"])]]
        cfg = trinity_config(TrinityConfig(), **{"max_retries": 0, "operators": ("grpo",)} | config)
        async with rc.RolloutCoordinator(cfg, models, judges) as c:
            batch = 1 if kind == "train" else "1/math"
            await c.submit_batch(batch_id=batch, tasks=list(map(trinity_task, tasks)), batch_type=kind)
            finalize = c.finalize_train_batch if kind == "train" else c.finalize_eval_batch
            result = await finalize(batch, timeout=60)
            n = result["experience_count"]
            return result, await c.sink.get(n) if n else None

    return asyncio.run(main())


@pytest.mark.parametrize("workflow", [SimpleWorkflow, AsyncSimpleWorkflow])
def test_their_simple_workflows_make_a_group(workflow: Any) -> None:
    result, x = run([math_task(workflow, reward_fn_args={"scale": 2.0})])
    assert sorted(x.reward.tolist()) == ([0, 0, 2, 2]) and sorted(x.run_id.tolist()) == [0, 1, 2, 3]
    assert result["metrics"]["rollout/accuracy/mean"] == 1.0
    assert set(np.sign(x.advantage).tolist()) == {-1, 1} and set(x.model_version.tolist()) == {3}


def test_steps_keep_their_order_and_rewards() -> None:
    _, x = run([Task(workflow=CountTo, repeat_times=2, raw_task={}, workflow_args={"steps": 3})], ["go"])
    assert x.reward.tolist() == [0, 1, 2, 0, 1, 2] and x.step.tolist() == [0, 1, 2, 0, 1, 2]
    result, x = run([Task(workflow=Judged, repeat_times=2, raw_task={})], ["go"], operators=())
    assert x.reward.tolist() == [0.75] * 6 and result["experience_count"] == 6


def test_eval_counts_metrics() -> None:
    result, x = run([math_task(SimpleWorkflow)], kind="eval")
    assert x is None and result["metrics"]["eval/math/accuracy/mean"] == 0.5


@pytest.mark.process
def test_in_other_processes_names_are_found_again() -> None:
    _, x = run([math_task(SimpleWorkflow), math_task(AsyncSimpleWorkflow)], runner="process", runners=1,
               workflow_modules=("recollect.adapters.trinity", __name__))  # fmt: skip
    assert len(x) == 8 and sorted(x.reward.tolist()) == [0] * 4 + [1] * 4


def test_experience_goes_to_trinity_and_back() -> None:
    _, x = run([math_task(SimpleWorkflow)])
    theirs = to_trinity(x)
    assert [e.eid.rid for e in theirs] == [f"1/0/{run}" for run in x.run_id]
    assert [e.reward for e in theirs] == x.reward.tolist() and theirs[0].response_text in ("5", "6")
    assert theirs[0].advantages.tolist() == pytest.approx(x.advantage[:1].tolist())
    for e in Experience.deserialize_many(Experience.serialize_many(theirs)):
        e.advantages = None
        ours = from_trinity(e)
        assert ours.tokens.tolist() == e.tokens.tolist() and ours.leaves["model_version"] == 3
    sft = from_trinity(Experience(tokens=[1, 2, 3], prompt_length=1))
    assert np.isnan(sft.logprobs).all() and len(sft.logprobs) == 2 and np.isnan(sft.reward)


def test_what_has_no_place_here_is_refused_with_the_way_out() -> None:
    with pytest.raises(rc.SchemaError, match="teacher_logprobs: must be None"):
        from_trinity(Experience(tokens=[1, 2], prompt_length=1, teacher_logprobs=[0.5]))

    class Local(Workflow):
        pass

    with pytest.raises(TypeError, match="at the top of a module, got .*Local; other processes"):
        trinity_task(Task(workflow=Local))
    with pytest.raises(rc.BatchFailed, match="await chat_async"):
        run([Task(workflow=Blocks, raw_task={})])


def test_config_of_trinity() -> None:
    theirs = TrinityConfig()
    theirs.explorer.over_rollout.ratio, theirs.explorer.max_timeout = 0.25, 60
    theirs.explorer.dynamic_timeout.enable = theirs.explorer.over_rollout.return_partial_tasks = True
    ours = trinity_config(theirs, runners=3)
    assert (ours.runners, ours.over_rollout, ours.attempt_timeout_s, ours.max_retries) == (3, 0.25, 60.0, 2)
    assert (ours.dynamic_timeout, ours.partial_results, ours.min_group_size) == (3.0, "keep", 1)

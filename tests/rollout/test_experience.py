"""Experience: its spaces, one row as an object, and many as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.rollout.make import batch, experience, rows, run

import recollect as rc
import recollect.rollout as rr
from recollect.errors import SchemaError


def dtypes(space: Any) -> dict[str, Any]:
    """By leaf, the dtype; of a Sequence in brackets."""
    found: dict[str, Any] = {}
    for name, leaf in space.spaces.items():
        inner = getattr(leaf, "feature_space", None)
        found[name] = str(leaf.dtype) if inner is None else [str(inner.dtype)]
    return found


TAIL = {
    "reward": "float32", "advantage": "float32", "truncated": "bool", "group_id": "int64", "run_id": "int32",
    "step": "int32", "model_version": "int64", "version_drift": "int32",
}  # fmt: skip


def mixed() -> Any:
    """Three rows of different lengths, the second without a metric."""
    made = [
        experience(float(i), n=i + 1, info={"i": i}, metrics={} if i == 1 else {"m": float(i)})
        for i in range(3)
    ]
    return rr.decode(rr.encode(made, batch_id=1, task_id="t", group_id=4, run_id=0))


def test_step_experience_with_extra_leaves() -> None:
    space = rr.experience_space(
        "step", obs=((3,), "float32"), action=((), "int64"), extra={"note": ((2,), "uint8")}
    )
    steps = [
        rr.Experience(obs=np.full(3, i, np.float32), action=i, reward=1.0, note=np.array([i, 7], np.uint8))
        for i in range(3)
    ]
    x = rr.decode(rr.encode(steps, space=space, group_id=1, run_id=0))
    assert x.obs[2].tolist() == [2.0] * 3 and x.action.tolist() == [0, 1, 2] and x.note[1].tolist() == [1, 7]
    assert x.step.tolist() == [0, 1, 2] and x.get_segments() == [(0, 3)]


def test_views_and_columns() -> None:
    x = batch((1.0, 2.0), (3.0,))
    part = x.where(x.reward > 1.5)
    assert part.reward.tolist() == [2.0, 3.0] and part.tokens.offsets.tolist() == [0, 4, 8]
    assert part.padded("tokens").shape == (2, 4) and len(x) == 3
    changed = x.replace(reward=np.zeros(3, np.float32))
    assert changed.reward.tolist() == [0.0] * 3 and x.reward.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError):
        x.reward[0] = 5.0
    ids, index = x.groups()
    assert ids.tolist() == [0, 1] and index.tolist() == [0, 0, 1]
    with pytest.raises(rc.ReadOnlyError):
        x.append({})


def test_leaves_and_dtypes_are_those_of_the_contract() -> None:
    token = {"tokens": ["int32"], "prompt_length": "int32", "logprobs": ["float32"], "action_mask": ["bool"]}
    assert dtypes(rr.experience_space()) == token | TAIL
    more = rr.experience_space(leaves=("token_versions", "advantages"), extra={"note": ((2,), "uint8")})
    optional = {"token_versions": ["int64"], "advantages": ["float32"]}
    assert dtypes(more) == token | optional | TAIL | {"note": "uint8"}
    step = rr.experience_space("step", obs=((3,), "float32"), action=((), "int64"))
    assert dtypes(step) == {"obs": "float32", "action": "int64", "terminated": "bool"} | TAIL
    assert rr.experience_space().max_tokens == 4096


@pytest.mark.parametrize(
    ("given_fields", "said"),
    [
        ({"kind": "tokens"}, "^kind: "),
        ({"kind": "step"}, "^obs, action: "),
        ({"kind": "step", "obs": ((), "float32")}, "^obs, action: "),
        ({"leaves": ("logprobs",)}, "^leaves: "),
        (
            {"kind": "step", "obs": ((), "float32"), "action": ((), "int64"), "leaves": ("advantages",)},
            "^leaves",
        ),
        ({"extra": {"reward": ((), "float32")}}, "^extra: .*'reward'"),
        ({"max_tokens": 0}, "^max_tokens: "),
        ({"max_tokens": 1.5}, "^max_tokens: "),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(given_fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rr.experience_space(**given_fields)


def test_a_space_that_cannot_hold_experience_is_refused() -> None:
    from gymnasium import spaces

    for wrong in (spaces.Discrete(3), spaces.Dict({"reward": spaces.Box(0, 1)})):
        with pytest.raises(TypeError, match="^space: must"):
            rr.encode([experience()], space=wrong)


def test_an_experience_is_pickled_whole() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(experience(info={"a": 1}, metrics={"m": 2.0})))
    assert (again.info, again.metrics, again.reward) == ({"a": 1}, {"m": 2.0}, 1.0)
    with pytest.raises(AttributeError, match="has no leaf 'colour'"):
        again.colour


def test_part_of_a_batch_keeps_what_belongs_to_its_rows() -> None:
    x = mixed()
    part = x.where([2, 0])
    assert part.info == ({"i": 2}, {"i": 0}) and part.metrics["m"].tolist() == [2.0, 0.0]
    assert part.tokens.values.tolist() == [0, 1, 2, 3, 0, 1] and part.response_length.tolist() == [3, 1]
    assert part.padded("tokens", fill=-1).tolist() == [[0, 1, 2, 3], [0, 1, -1, -1]]
    assert part.task_of(4) == (1, "t") and x.reward.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(KeyError, match="must be a Sequence leaf"):
        x.padded("reward")
    with pytest.raises(AttributeError, match="has no leaf 'colour'"):
        x.colour


def test_values_that_replace_others_are_checked_and_the_batch_stays() -> None:
    x = mixed()
    other = x.replace(reward=5.0, logprobs=x.logprobs.values * 2)
    assert other.reward.tolist() == [5.0] * 3 and x.reward.tolist() == [0.0, 1.0, 2.0]
    assert set(other.logprobs.values.tolist()) == {-1.0} and set(x.logprobs.values.tolist()) == {-0.5}
    assert other.logprobs.offsets.tolist() == x.logprobs.offsets.tolist()
    for leaves, text in (
        ({"reward": np.zeros(2)}, "^reward: shape must be"),
        ({"run_id": np.zeros(3)}, "^run_id: dtype must be int32"),
        ({"logprobs": np.zeros(2, np.float32)}, "^logprobs: must keep its shape"),
        ({"colour": 1}, "^colour: must be a leaf"),
    ):
        with pytest.raises(SchemaError, match=text):
            x.replace(**leaves)


def test_samples_are_copies_and_columns_are_views() -> None:
    payload = rr.encode([experience()])
    x = rr.decode(payload)
    x[0]["tokens"][0] = 99
    x[:]["tokens"][0][0] = 99
    assert x.tokens.values[0] == 0
    for column in (x.rows, x.tokens.values):
        assert not column.flags.owndata and not column.flags.writeable  # views of the bytes they came in


def test_groups_and_runs_are_told_apart() -> None:
    x = batch((1.0, 2.0), (3.0, 4.0))
    assert x.ends.tolist() == [True] * 4 and x.get_segments() == [(0, 1), (1, 2), (2, 3), (3, 4)]
    same_run = rr.Experiences.concat([rows(1.0, group=1)[0], rows(1.0, group=2)[0]])
    assert same_run.ends.tolist() == [True, True]
    ids, index = x.groups()
    assert ids.tolist() == [0, 1] and index.tolist() == [0, 0, 1, 1]


def test_one_run_is_one_segment_of_the_buffer() -> None:
    async def two_steps(task: Any, models: Any) -> Any:
        return [experience(0.0), experience(1.0)]

    async def main() -> None:
        buf = rr.experience_buffer("memory", capacity=50, max_tokens=16)
        made = rr.Config(space=buf.single_space, sink=buf, operators=("grpo",))
        async with rr.RolloutCoordinator(made, []) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(two_steps, repeat_times=2)], batch_type="train")
            assert (await c.finalize_train_batch(1))["experience_count"] == 4
            assert c.sink is buf
        assert (
            buf.get_segments() == [(0, 2), (2, 4)]
            and len(rc.StepSampler(buf, 3, seed=0).sample()["reward"]) == 3
        )
        buf.close()

    run(main())

"""Operators, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rollout.make import batch, coordinator, experience, good, rows, run

import recollect.rollout as rr
from recollect.errors import (
    PipelineError,
    SchemaError,
)
from recollect.rollout.experience.operators import make_operator


def two_steps(last: float, run_id: int) -> Any:
    return rr.decode(rr.encode([experience(9.0), experience(last)], group_id=1, run_id=run_id))


def with_metrics(*given: dict[str, float], reward: float = 1.0) -> Any:
    made = [
        rr.decode(rr.encode([experience(reward, metrics=m)], group_id=1, run_id=i))
        for i, m in enumerate(given)
    ]
    return rr.Experiences.concat(made)


def test_a_shaped_reward_is_the_reward_and_weighted_metrics() -> None:
    x = with_metrics({"a": 2.0, "b": 1.0}, {"a": 4.0})
    shaped, counts = rr.ShapeReward({"a": 0.5, "b": -3.0})(x)
    assert shaped.reward.tolist() == [-1.0, 3.0] and counts == {"missing": 1.0}
    assert rr.ShapeReward({"a": 1.0}, clip=(0.0, 4.0))(x)[0].reward.tolist() == [3.0, 4.0]
    unknown, counts = rr.ShapeReward({"a": 1.0})(with_metrics({"a": 2.0}, reward=float("nan")))
    assert len(unknown) == 0 and counts == {"no_reward": 1.0}


def test_a_metric_that_no_row_has_is_an_error_unless_it_may_be_missing() -> None:
    x = with_metrics({"a": 2.0}, {"a": 4.0})
    with pytest.raises(SchemaError, match=r"got 'b', which no row has; there are \['a'\]"):
        rr.ShapeReward({"a": 1.0, "b": -3.0})(x)
    shaped, counts = rr.ShapeReward({"a": 1.0, "b": -3.0}, missing="zero")(x)
    assert shaped.reward.tolist() == [3.0, 5.0] and counts == {"missing": 2.0}
    with pytest.raises(SchemaError, match=r"^operators\[0\].missing: "):
        rr.Config(operators=({"name": "shape_reward", "missing": "drop"},))

    async def main() -> None:
        async with coordinator(operators=(rr.ShapeReward({"b": 1.0}),)) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            with pytest.raises(PipelineError, match="operator shape_reward: .* which no row has"):
                await c.finalize_train_batch(1)

    run(main())


def test_an_advantage_is_divided_by_the_deviation_and_a_little_more() -> None:
    x, _ = rr.GroupAdvantage(eps=1.0)(batch((0.0, 2.0), (7.0, 7.0)))
    root = 2**0.5
    assert x.advantage.tolist() == pytest.approx([-1 / (root + 1), 1 / (root + 1), 0.0, 0.0])
    assert rr.GroupAdvantage().eps == 1e-6 and rr.GroupAdvantage().min_size == 2
    same, _ = rr.GroupAdvantage()(batch((7.0, 7.0)))
    assert same.advantage.tolist() == [0.0, 0.0]
    for size, kept in ((1, 3), (2, 2), (3, 0)):
        assert len(rr.GroupAdvantage(min_size=size)(batch((1.0, 2.0), (5.0,)))[0]) == kept


def test_the_last_reward_is_that_of_the_last_step_wherever_it_lies() -> None:
    runs = [two_steps(0.0, 0), two_steps(2.0, 1)]
    x = rr.Experiences.concat(runs).where([3, 1, 0, 2])
    found, _ = rr.GroupAdvantage(scale=False)(x)
    assert found.advantage.tolist() == [1.0, -1.0, -1.0, 1.0]
    assert len(rr.DropUniformGroups(1.5)(x)[0]) == 4 and len(rr.DropUniformGroups(2.0)(x)[0]) == 0


def test_groups_that_differ_by_more_than_a_tolerance_are_kept_whole() -> None:
    x = batch((1.0, 1.25), (1.0, 1.5), (float("nan"), 3.0))
    kept, counts = rr.DropUniformGroups(0.25)(x)
    assert kept.reward.tolist() == [1.0, 1.5] and counts == {"no_reward": 1.0, "uniform_group": 2.0}
    assert rr.DropUniformGroups()(batch((1.0, 1.25), (2.0, 2.0)))[0].reward.tolist() == [1.0, 1.25]


def test_bounds_of_filters_are_kept() -> None:
    made = [rr.decode(rr.encode([experience(float(n), n)], group_id=1, run_id=n)) for n in range(4)]
    x = rr.Experiences.concat(made)
    assert rr.LengthFilter()(x).run_id.tolist() == [1, 2, 3]
    assert rr.LengthFilter(2, 3)(x).run_id.tolist() == [2, 3] and rr.LengthFilter(0, 1)(
        x
    ).run_id.tolist() == [0, 1]
    assert rr.RewardFilter(1.0, 2.0)(x)[0].run_id.tolist() == [1, 2]
    assert rr.RewardFilter()(batch((float("nan"), 1.0)))[1] == {"no_reward": 1.0}
    assert len(rr.StalenessFilter(1).at(1)(x)) == 4 and len(rr.StalenessFilter(1).at(2)(x)) == 0


def test_dedupe_keeps_the_first_by_any_key_and_forgets_the_oldest() -> None:
    x = rr.Experiences.concat([*rows(1.0, n=1), *rows(2.0, n=2), *rows(3.0, n=1)])
    assert rr.Dedupe()(x).reward.tolist() == [1.0, 2.0]
    assert rr.Dedupe("prompt_length")(x).reward.tolist() == [1.0] and len(rr.Dedupe("reward")(x)) == 3
    short = rr.Dedupe(remember=1)
    short(x)
    short.commit()
    assert short(x).reward.tolist() == [1.0]  # the one of two tokens is the newest
    assert rr.Dedupe().remember == 100_000


def test_an_operator_has_one_name_and_may_be_a_function() -> None:
    @rr.operator("tests.halves")
    def halves(x: Any) -> Any:
        return x.where(x.run_id % 2 == 0)

    assert make_operator("tests.halves") == ("tests.halves", halves)
    with pytest.raises(ValueError, match="is taken"):
        rr.operator("grpo")(halves)
    assert make_operator(rr.Dedupe("uid"))[0] == "dedupe" and make_operator(halves)[0] == "halves"


def test_grpo_is_the_sample_deviation_of_runs_and_drops_small_groups() -> None:
    x, counts = rr.GroupAdvantage()(batch((1.0, 2.0, 3.0), (5.0,), (float("nan"), 1.0, 0.0)))
    assert x.advantage[:3].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-4)
    assert counts == {"no_reward": 1.0, "small_group": 1.0} and len(x) == 5
    raw, _ = rr.GroupAdvantage(scale=False)(batch((1.0, 2.0, 3.0)))
    assert raw.advantage.tolist() == [-1.0, 0.0, 1.0]


def test_all_steps_of_a_run_get_its_last_rewards_advantage() -> None:
    runs = [
        rr.decode(rr.encode([experience(9.0), experience(last)], group_id=1, run_id=i))
        for i, last in enumerate((0.0, 2.0))
    ]
    x, _ = rr.GroupAdvantage(scale=False)(rr.Experiences.concat(runs))
    assert x.advantage.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_filters() -> None:
    x = batch((1.0, 1.0), (1.0, 2.0))
    assert len(rr.DropUniformGroups()(x)[0]) == 2
    assert rr.RewardFilter(low=1.5)(x)[0].reward.tolist() == [2.0]
    assert len(rr.LengthFilter(high=2)(x)) == 0 and len(rr.LengthFilter(high=3)(x)) == 4
    assert len(rr.StalenessFilter(1).at(2)(x)) == 0
    shaped, _ = rr.ShapeReward(fn=lambda x: x.reward * 2, clip=(0, 3))(x)
    assert shaped.reward.tolist() == [2.0, 2.0, 2.0, 3.0]


def test_dedupe_remembers_only_what_was_committed() -> None:
    x, once = batch((1.0, 1.0)), rr.Dedupe()
    assert len(once(x)) == 1 and len(once(x)) == 1  # tried again, nothing was delivered
    once.commit()
    assert len(once(x)) == 0
    assert len(rr.Dedupe("uid")(x)) == 2

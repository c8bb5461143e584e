"""HindsightSampler: shares, rewards, resuming and refusals. Which goals are allowed: tests/boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.boundaries.checks import SPACE, block

import recollect as rc


def buffer(lengths: list[int]) -> rc.ReplayBuffer:
    data = rc.ReplayBuffer.create(
        rc.MemoryStorage, SPACE, capacity=sum(lengths), maintain_segment_metadata=True
    )
    ends = np.zeros(sum(lengths), np.bool_)
    ends[np.cumsum(lengths) - 1] = True
    data.extend(block(list(range(1, len(ends) + 1)), set()), ends=ends)
    return data


def zero(achieved: Any, desired: Any, info: Any) -> Any:
    return np.zeros(len(achieved))


def test_future_goals_are_uniform_over_what_is_left_of_the_episode() -> None:
    sampler = rc.HindsightSampler(buffer([6]), 600, zero, ratio=1.0, seed=0)
    counts = np.zeros((6, 6))
    for _ in range(20):
        batch, _ = sampler.sample_with_metadata()
        np.add.at(counts, (batch["x"] - 1, batch["obs"]["desired_goal"][:, 0].astype(int) - 1), 1)
    assert (np.tril(counts, -1) == 0).all()
    for step in range(5):
        row = counts[step, step:]
        assert ((row - row.mean()) ** 2 / row.mean()).sum() < 40


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_share_is_exact_on_average(ratio: float) -> None:
    sampler = rc.HindsightSampler(buffer([9]), 5, zero, ratio=ratio, seed=0)
    shares = [sampler.sample_with_metadata()[1]["relabelled"].sum() for _ in range(400)]  # type: ignore[index]
    assert set(shares) <= {int(5 * ratio), int(np.ceil(5 * ratio))}
    assert abs(np.mean(shares) - 5 * ratio) < 0.15


def test_goals_need_the_samples_own_segment_after_the_head_is_gone() -> None:
    data = buffer([4, 4])
    for value in (101, 102):  # the first episode loses its head
        data.append(_one(value))
    sampler = rc.HindsightSampler(data, 64, zero, strategy="episode", ratio=1.0, seed=0)
    batch, meta = sampler.sample_with_metadata()
    goals = batch["obs"]["desired_goal"][:, 0]
    assert set(goals[batch["x"] <= 4].tolist()) == {3.0, 4.0}
    assert set(goals[batch["x"] == 4].tolist()) == {3.0, 4.0}  # earlier steps too
    assert set(goals[batch["x"] > 100].tolist()) == {101.0, 102.0}
    assert meta is not None and set(meta["goal_step"][batch["x"] <= 4].tolist()) == {2, 3}


def _one(value: int) -> dict[str, Any]:
    def first(part: Any) -> Any:
        return {k: first(v) for k, v in part.items()} if isinstance(part, dict) else part[0]

    found: dict[str, Any] = first(block([value], set()))
    return found


def test_compute_reward_sees_whole_batches_with_the_new_goals_in_place() -> None:
    seen = []

    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        seen.append((achieved.shape, desired.shape))
        assert info["obs"]["desired_goal"].tolist() == desired.tolist()
        return np.float32(-1) * (achieved != desired)[:, 0]

    batch = rc.HindsightSampler(buffer([9]), 32, reward, "final", 0.5, seed=0).sample()
    assert seen == [((32, 1), (32, 1))]
    assert batch["reward"].dtype == np.float64


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [(np.zeros((8, 1)), rc.SchemaError, r"shape \(8,\)"), (0.0, rc.SchemaError, "shape"),
     (np.zeros(8, complex), rc.DtypeError, "float64"), (np.array(["a"] * 8), rc.DtypeError, "float64")],
)  # fmt: skip
def test_a_reward_that_does_not_fit_is_named(said: Any, error: type[Exception], match: str) -> None:
    sampler = rc.HindsightSampler(buffer([9]), 8, lambda a, d, i: said, seed=0)
    with pytest.raises(error, match=f"compute_reward.*{match}"):
        sampler.sample()


@pytest.mark.parametrize("in_epoch", [False, True])
def test_resumes_bit_for_bit(in_epoch: bool) -> None:
    data = buffer([5, 9])
    sampler = rc.HindsightSampler(data, 4, zero, seed=3)
    sampler.sample()
    epoch = sampler.epoch_iter_with_metadata() if in_epoch else iter(())
    next(epoch, None)
    state = sampler.state_dict()
    wanted = [*epoch, sampler.sample_with_metadata()]
    resumed = rc.HindsightSampler(data, 4, zero)
    resumed.load_state_dict(state)
    found = [*(resumed.epoch_iter_with_metadata() if in_epoch else ()), resumed.sample_with_metadata()]
    assert len(found) == len(wanted)
    for (a, ma), (b, mb) in zip(found, wanted):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["obs"]["desired_goal"], b["obs"]["desired_goal"])
        np.testing.assert_array_equal(ma["goal_step"], mb["goal_step"])
    for name, other in (("strategy", "final"), ("ratio", 0.5)):
        with pytest.raises(ValueError, match=name):
            rc.HindsightSampler(data, 4, zero, **{name: other}).load_state_dict(state)  # type: ignore[arg-type]


def test_getters_show_samples_as_they_are() -> None:
    data = buffer([5])
    sampler = rc.HindsightSampler(data, 4, zero, ratio=1.0, seed=3)
    found, meta = sampler.get_at_with_metadata([0, 1])
    assert (found["obs"]["desired_goal"] == -1).all()
    assert meta is not None and not meta["relabelled"].any()
    assert sampler.sampled_metadata_space.contains(sampler.sample_with_metadata()[1])  # type: ignore[union-attr]
    assert sampler.sample_flat().shape == (4, sampler.get_flattened_at(0).size)


def test_torch_in_torch_out() -> None:
    torch = pytest.importorskip("torch")
    view = rc.ToBackendOrDeviceBatch(buffer([9]), "torch")

    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        assert isinstance(achieved, torch.Tensor) and isinstance(desired, torch.Tensor)
        return (achieved - desired)[:, 0]

    batch = rc.HindsightSampler(view, 16, reward, ratio=1.0, seed=0).sample()
    assert torch.equal(batch["reward"], batch["x"].double() - batch["obs"]["desired_goal"][:, 0])


def test_refusals() -> None:
    data = buffer([5])
    for wrong in ({"strategy": "past"}, {"ratio": 1.5}, {"ratio": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rc.HindsightSampler(data, 4, zero, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="compute_reward"):
        rc.HindsightSampler(data, 4, None)  # type: ignore[arg-type]
    plain = rc.ReplayBuffer.create(
        rc.MemoryStorage, {"reward": ((), "float32")}, capacity=4, maintain_segment_metadata=True
    )
    with pytest.raises(ValueError, match="next_obs/achieved_goal"):
        rc.HindsightSampler(plain, 4, zero)
    flagged = rc.TransformedBatch(data, lambda b: {**b, "terminated": b["x"] < 0})
    for several in (rc.FrameStackedBatch(data, 1), rc.NStepBatch(flagged, 3, 0.9)):
        with pytest.raises(ValueError, match=f"single steps.*{type(several).__name__}"):
            rc.HindsightSampler(several.get_slice(...), 4, zero)
    data.clear()
    with pytest.raises(rc.EmptyError):
        rc.HindsightSampler(data, 4, zero).sample()

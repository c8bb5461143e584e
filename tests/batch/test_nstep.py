"""NStepBatch: keys, types, views and samplers over it. The returns themselves: tests/boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recollect as rc

SPACE = {
    "obs": ((2,), "float32"),
    "next_obs": ((2,), "float32"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
}


def buffer(n: int = 6, ends: Any = None, terminated: Any = None, space: Any = SPACE) -> rc.ReplayBuffer:
    data = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=n, maintain_segment_metadata=True)
    flags = np.zeros(n, np.bool_) if terminated is None else np.asarray(terminated)
    t = np.arange(1, n + 1, dtype="f4")
    two = np.stack([t, t], 1)
    data.extend({"obs": two, "next_obs": two + 1, "reward": t, "terminated": flags}, ends=ends)
    return data


def test_a_truncated_end_bootstraps_and_a_terminated_one_does_not() -> None:
    data = buffer(6, np.array([0, 0, 1, 0, 0, 1], bool), np.array([0, 0, 0, 0, 0, 1], bool))
    found = rc.NStepBatch(data, 3, 0.5)[:]
    assert found["reward"].tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5 + 1.5, 5 + 3, 6]
    assert found["discount"].tolist() == [0.125, 0.25, 0.5, 0, 0, 0]
    assert found["next_obs"][:, 0].tolist() == [4, 4, 4, 7, 7, 7]
    assert found["obs"][:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_nothing_follows_a_terminated_step_inside_a_segment() -> None:
    """A block that was recorded without `ends` is one segment; a return must not run on into the next episode."""
    found = rc.NStepBatch(buffer(4, None, np.array([0, 1, 0, 0], bool)), 3, 1.0)[:]
    assert found["reward"].tolist() == [3, 2, 7, 4]
    assert found["discount"].tolist() == [0, 0, 1, 1]


def test_the_view_is_live() -> None:
    data = rc.ReplayBuffer.create(rc.MemoryStorage, SPACE, capacity=4, maintain_segment_metadata=True)
    view = rc.NStepBatch(data, 2, 1.0)
    one = {"obs": np.zeros(2, "f4"), "next_obs": np.zeros(2, "f4"), "reward": 1.0, "terminated": False}
    data.append(one)
    assert (len(view), view[0]["reward"].item()) == (1, 1.0)
    data.append(one)
    assert (len(view), view[0]["reward"].item(), view[-1]["discount"].item()) == (2, 2.0, 1.0)


def test_the_space_is_that_of_the_samples() -> None:
    view = rc.NStepBatch(buffer(), 3, 0.99)
    assert list(view.single_space.spaces) == [*SPACE, "discount"]  # type: ignore[attr-defined]
    assert view.single_space.contains(view[0])
    assert view.get_flattened_at([0, 1]).shape == (2, 7)
    assert view.get_column("discount")[[0]].tolist() == [pytest.approx(0.99**3)]


@pytest.mark.parametrize("reward", ["agent/r", ("agent", "r")])
def test_nested_keys(reward: Any) -> None:
    space = {
        "agent": {"r": ((1,), "int16"), "next": ((), "float64")},
        "ended": ({"flag": ((1,), "uint8")}, ((), "int8")),
    }
    data = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=3, maintain_segment_metadata=True)
    data.extend({"agent": {"r": np.array([[1], [2], [3]], "i2"), "next": np.arange(3.0)},
                 "ended": ({"flag": np.array([[0], [0], [1]], "u1")}, np.zeros(3, "i1"))})  # fmt: skip
    view = rc.NStepBatch(data, 2, 0.5, reward, "agent/next", ("ended", 0, "flag"))
    found = view[:]
    assert found["agent"]["r"].dtype == np.float32
    assert found["agent"]["r"].tolist() == [[2.0], [3.5], [3.0]]
    assert found["agent"]["next"].tolist() == [1, 2, 2]
    assert found["ended"][0]["flag"].tolist() == [[0], [1], [1]]
    assert found["discount"].tolist() == [[0.25], [0.0], [0.0]]
    assert view.single_space.contains(view[1])


def test_a_reward_beyond_the_end_is_not_touched() -> None:
    data = buffer(4, np.array([0, 1, 0, 0], bool))
    data.set_at(2, {**data[2], "reward": np.float32("nan")})
    found = rc.NStepBatch(data, 3, 0.9)[[0, 1]]["reward"]
    assert np.isfinite(found).all()


def test_samplers_over_it() -> None:
    view = rc.NStepBatch(buffer(6), 2, 1.0)
    batch = rc.StepSampler(view, 32, seed=0).sample()
    assert set(batch) == {*SPACE, "discount"}
    first = batch["obs"][:, 0]
    np.testing.assert_allclose(batch["reward"], first + np.where(first < 6, first + 1, 0))
    assert sum(len(b["obs"]) for b in rc.StepSampler(view, 4, seed=0).epoch_iter()) == 6
    assert rc.SequenceSampler(view, 2, 3, seed=0).sample()["discount"].shape == (2, 3)


def test_places_are_the_first_steps() -> None:
    data = buffer(6)
    view = rc.NStepBatch(data, 3, 0.9)
    place = view.locate([1, 4])
    np.testing.assert_array_equal(place.row, data.locate([1, 4]).row)
    data.append(data[0])
    found = view.get_located(place)
    assert found is not None and found[0]["obs"][:, 0].tolist() == [2, 5]
    assert view.relocate(place).tolist() == [0, 3]
    for _ in range(2):
        data.append(data[0])
    assert view.is_current(place).tolist() == [False, True]
    assert view.get_located(place) is None


def test_torch_underneath() -> None:
    torch = pytest.importorskip("torch")
    found = rc.NStepBatch(rc.ToBackendOrDeviceBatch(buffer(4), "torch"), 2, 0.5)[[0, 3]]
    assert all(isinstance(leaf, torch.Tensor) for leaf in found.values())
    assert found["reward"].tolist() == [2.0, 4.0]


def test_refusals() -> None:
    data = buffer()
    for wrong, error in (
        ({"n": 0}, ValueError), ({"n": 1.5}, TypeError), ({"gamma": 1.1}, ValueError), ({"gamma": -0.1}, ValueError),
        ({"reward": "rewards"}, KeyError), ({"terminated": "obs"}, ValueError), ({"reward": "terminated"}, ValueError),
    ):  # fmt: skip
        with pytest.raises(error):
            rc.NStepBatch(data, **({"n": 2, "gamma": 0.9} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="discount"):
        rc.NStepBatch(rc.NStepBatch(data, 2, 0.9), 2, 0.9)
    with pytest.raises(rc.ReadOnlyError):
        rc.NStepBatch(data, 2, 0.9).append(data[0])

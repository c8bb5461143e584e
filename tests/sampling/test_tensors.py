"""`backend="torch"` of every sampler: the same batches as tensors, and no copy more on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.backends import map_arrays

torch = pytest.importorskip("torch")

GOAL = {"achieved_goal": ((1,), "float32"), "desired_goal": ((1,), "float32")}
SPACE = {"obs": GOAL, "next_obs": GOAL, "reward": ((), "float32"), "id": ((), "int32")}


def buffer(kind: str = "memory", n: int = 40) -> rc.ReplayBuffer:
    data = rc.ReplayBuffer.create(
        kind, SPACE, capacity=64, maintain_segment_metadata=True, multiprocessing=kind == "shared"
    )
    t = np.arange(n, dtype="float32")[:, None]
    goals = {"achieved_goal": t, "desired_goal": t + 100}
    data.extend({"obs": goals, "next_obs": goals, "reward": t[:, 0], "id": np.arange(n, dtype="int32")},
                ends=np.arange(n) % 10 == 9)  # fmt: skip
    return data


def reached(achieved: Any, desired: Any, info: Any) -> Any:
    assert isinstance(achieved, np.ndarray) and isinstance(
        info["reward"], np.ndarray
    )  # as environments compute
    return (achieved == desired).all(-1).astype("float32")


Make = Callable[..., rc.BatchSampler]
SAMPLERS: dict[str, Make] = {
    "step": lambda data, **how: rc.StepSampler(data, 6, seed=3, **how),
    "without": lambda data, **how: rc.StepSampler(data, 6, seed=3, replace=False, **how),
    "sequence": lambda data, **how: rc.SequenceSampler(data, 6, length=3, burn_in=2, seed=3, **how),
    "prioritized": lambda data, **how: rc.PrioritizedSampler(data, 6, seed=3, **how),
    "hindsight": lambda data, **how: rc.HindsightSampler(data, 6, reached, seed=3, **how),
}


def plain(data: Any) -> Any:
    return map_arrays(lambda x: np.asarray(x).tolist(), data)


def tensors(data: Any) -> list[Any]:
    found: list[Any] = []
    map_arrays(lambda x: found.append(x) or x, data)  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_batches_are_the_same_and_tensors(make: Make) -> None:
    data = buffer()
    numpy, torched = make(data), make(data, backend="torch")
    for form in ("sample", "sample_flat", "sample_with_metadata", "sample_flat_with_metadata"):
        want, got = getattr(numpy, form)(), getattr(torched, form)()
        batch = got[0] if "metadata" in form else got
        assert all(isinstance(x, torch.Tensor) for x in tensors(batch))
        assert plain(got) == plain(want)
    for want, got in zip(numpy.epoch_iter(), torched.epoch_iter(), strict=True):
        assert all(isinstance(x, torch.Tensor) for x in tensors(got)) and plain(got) == plain(want)
    assert isinstance(torched[0]["reward"], torch.Tensor) and plain(torched[0]) == plain(numpy[0])


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_tensor_is_the_memory_of_the_batch_and_belongs_to_the_caller(make: Make) -> None:
    sampler = make(buffer(), backend="torch")
    first = sampler.sample()
    assert not any(x.untyped_storage().resizable() for x in tensors(first))  # torch did not allocate it
    before = plain(first)
    for _ in range(5):
        sampler.sample()
    assert plain(first) == before


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_the_backend_stays_for_other_data_and_the_device_moves(make: Make) -> None:
    sampler = make(buffer(), backend="torch", device="meta")
    sampler.data = buffer(n=30)
    assert len(sampler) == 30 and {x.device.type for x in tensors(sampler.sample())} == {"meta"}
    with pytest.raises(ValueError, match="^device: .*choose backend='torch'"):
        make(buffer(), device="cuda")


@pytest.mark.process
def test_workers_hand_out_tensors_too() -> None:
    with buffer("shared") as data:
        alone = rc.StepSampler(data, 6, seed=3)
        with (
            rc.MultiprocessingSampler(alone, 1, ctx="fork") as numpy,
            rc.MultiprocessingSampler(SAMPLERS["step"](data, backend="torch"), 1, ctx="fork") as torched,
        ):
            got = torched.sample()
            assert all(isinstance(x, torch.Tensor) for x in tensors(got))
            assert plain(got) == plain(numpy.sample())


def test_priorities_come_back_as_tensors() -> None:
    sampler = rc.PrioritizedSampler(buffer(), 6, seed=3, backend="torch")
    batch, meta = sampler.sample_with_metadata()
    assert meta is not None and (meta["weight"] * batch["reward"]).shape == (6,)
    assert sampler.update_priorities(meta, batch["reward"].abs()) == 6


def test_what_it_prints() -> None:
    data = buffer()
    leaves = ("obs/achieved_goal float32[1], obs/desired_goal float32[1], next_obs/achieved_goal float32[1], "
              "next_obs/desired_goal float32[1], reward float32, id int32")  # fmt: skip
    assert repr(data) == f"ReplayBuffer(40 samples of 64, MemoryStorage: {leaves})"
    assert repr(rc.StepSampler(data, 6)) == f"StepSampler(6 of 40 samples: {leaves})"
    assert repr(rc.StepSampler(data, 6, backend="torch")) == f"StepSampler(6 of 40 samples, torch: {leaves})"
    assert repr(data.get_column("reward")) == "SubItemBatch(40 samples: float32)"
    assert "reward float32[3]" in repr(rc.SequenceSampler(data, 6, 3))
    data.close()
    assert repr(data) == f"ReplayBuffer(closed, MemoryStorage: {leaves})"
    many = rc.ReplayBuffer.create("memory", {f"x{i}": ((), "bool") for i in range(10)}, capacity=None)
    assert repr(many).startswith("ReplayBuffer(0 samples, MemoryStorage: x0 bool, ")
    assert repr(many).endswith("x7 bool, and 2 more)")

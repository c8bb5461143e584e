"""A buffer and its model written to side by side, and the comparison of all that rests on boundaries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from tests.boundaries import reference as ref
from tests.replay.make import create
from tests.replay.model import Model

import recollect as rc

GOAL = {"achieved_goal": ((1,), "float64"), "desired_goal": ((1,), "float64")}
SPACE = {
    "obs": GOAL,
    "next_obs": GOAL,
    "x": ((), "int64"),
    "reward": ((), "float64"),
    "terminated": ((), "bool"),
}
OWN_GOAL = -1.0


def block(values: list[int], terminated: set[int]) -> dict[str, Any]:
    x = np.array(values, np.int64)
    goal = {"achieved_goal": x[:, None].astype(float), "desired_goal": np.full((len(x), 1), OWN_GOAL)}
    flags = np.array([v in terminated for v in values], np.bool_)
    return {"obs": goal, "next_obs": goal, "x": x, "reward": x.astype(float), "terminated": flags}


def sample(value: int, terminated: set[int]) -> dict[str, Any]:
    def first(part: Any) -> Any:
        return {k: first(v) for k, v in part.items()} if isinstance(part, dict) else part[0]

    return first(block([value], terminated))


class Pair:
    """A buffer and the model of it; values are 1, 2, 3, ... and every third segment end is a terminated one."""

    def __init__(self, kind: str, run: int | None, n_lanes: int = 1, directory: Any = ".") -> None:
        capacity = None if run is None else run * n_lanes
        lanes: dict[str, Any] = {} if kind == "test-list" else {"num_lanes": n_lanes}
        self.buffer = create(
            kind, SPACE, directory=directory, capacity=capacity, maintain_segment_metadata=True, **lanes
        )
        self.model = Model(run, True, n_lanes)
        self.lanes = [self.buffer.on_lane(k) for k in range(n_lanes)] if n_lanes > 1 else [self.buffer]
        self.terminated: set[int] = set()
        self.next = 1

    def take(self, n: int) -> list[int]:
        values = list(range(self.next, self.next + n))
        self.next += n
        return values

    def append(self, k: int, ends: bool) -> None:
        (value,) = self.take(1)
        if ends and value % 3 == 0:
            self.terminated.add(value)
        self.lanes[k].append(sample(value, self.terminated))
        self.model.add(k, value, ends)
        if ends:
            self.lanes[k].mark_segment_end()

    def extend(self, k: int, lengths: list[int]) -> None:
        self.end(k)
        values = self.take(sum(lengths))
        ends = np.zeros(len(values), np.bool_)
        ends[np.cumsum(lengths) - 1] = True
        self.terminated |= {v for v, e in zip(values, ends) if e and v % 3 == 0}
        self.lanes[k].extend(block(values, self.terminated), ends=ends)
        self.model.extend(k, values, ends.tolist())

    def end(self, k: int) -> None:
        self.lanes[k].mark_segment_end()
        self.model.open[k] = None

    def remove(self, gone: set[int]) -> None:
        for k in range(len(self.lanes)):
            self.end(k)
        self.buffer.remove_at(sorted(gone))
        self.model.remove(gone)

    @property
    def steps(self) -> list[ref.Step]:
        return ref.steps_of(self.model, self.terminated)

    def close(self) -> None:
        self.buffer.close()


def check_stacks(data: rc.BatchBase, steps: list[ref.Step], offsets: list[int]) -> None:
    if not steps:
        return
    found, meta = rc.SliceStackedBatch(data, offsets).get_at_with_metadata(range(len(steps)))
    assert meta is not None
    assert found["x"].tolist() == [ref.stack(steps, i, offsets) for i in range(len(steps))]
    assert meta["slice_valid_mask"].tolist() == [ref.mask(steps, i, offsets) for i in range(len(steps))]


def windows_of(found: Any, meta: Any) -> list[tuple[Any, ...]]:
    assert (found["reward"] == found["x"]).all()
    assert (found["next_obs"]["achieved_goal"][..., 0] == found["x"]).all()
    return [
        (*x, *ok, step)
        for x, ok, step in zip(found["x"].tolist(), meta["valid_mask"].tolist(), meta["step"].tolist())
    ]


def check_windows(data: rc.BatchBase, steps: list[ref.Step], length: int, burn_in: int, pad: bool) -> None:
    """An epoch is every window once; draws are windows and nothing else; the getter shows any start."""
    sampler = rc.SequenceSampler(data, 4, length, burn_in, pad, seed=length)
    offsets = list(range(-burn_in, length))
    every = [(*ref.window(steps, i, length, burn_in), *ref.mask(steps, i, offsets), steps[i].step)
             for i in range(len(steps))]  # fmt: skip
    wanted = [every[i] for i in ref.starts(steps, length, pad)]
    epoch = [w for batch in sampler.epoch_iter_with_metadata() for w in windows_of(*batch)]
    assert Counter(epoch) == Counter(wanted)
    if steps:
        assert windows_of(*sampler.get_at_with_metadata(range(len(steps)))) == every
    if wanted:
        drawn = {w for _ in range(3) for w in windows_of(*sampler.sample_with_metadata())}
        assert drawn <= set(wanted)
        assert {every[i] for i in sampler.sample_index()} <= set(wanted)
        assert sampler.skipped == 0
        return
    try:
        sampler.sample()
    except rc.EmptyError:
        return
    raise AssertionError("a draw from no window must raise EmptyError")


def check_n_step(data: rc.BatchBase, steps: list[ref.Step], n: int, gamma: float) -> None:
    if not steps:
        return
    view = rc.NStepBatch(data, n, gamma)
    wanted = [ref.n_step(steps, i, n, gamma) for i in range(len(steps))]
    for found in (view[:], view.get_located(view.locate(range(len(steps))))[0]):  # type: ignore[index]
        assert found["x"].tolist() == [s.value for s in steps]
        got = zip(
            found["reward"], found["next_obs"]["achieved_goal"][:, 0], found["terminated"], found["discount"]
        )
        for have, want in zip(got, wanted):
            np.testing.assert_allclose([*map(float, have)], [*map(float, want)], rtol=1e-12)


def check_goals(data: rc.BatchBase, steps: list[ref.Step], strategy: str) -> None:
    if not steps:
        return

    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        assert achieved.shape == desired.shape == (len(info["x"]), 1)
        return (achieved - 10 * desired)[:, 0]

    sampler = rc.HindsightSampler(data, 16, reward, strategy, ratio=0.5, seed=1)
    at = {s.value: i for i, s in enumerate(steps)}
    draws = [sampler.sample_with_metadata() for _ in range(2)] + list(sampler.epoch_iter_with_metadata())
    for found, meta in draws:
        assert meta is not None
        if len(found["x"]) == 16:
            assert meta["relabelled"].sum() == 8
        for j, value in enumerate(found["x"].tolist()):
            goal = float(found["next_obs"]["desired_goal"][j, 0])
            assert goal == found["obs"]["desired_goal"][j, 0]
            if not meta["relabelled"][j]:
                assert (goal, found["reward"][j]) == (OWN_GOAL, value)
                assert meta["goal_segment"][j] == meta["goal_step"][j] == -1
                continue
            allowed = {steps[k].value: steps[k].step for k in ref.goals(steps, at[value], strategy)}
            assert meta["goal_step"][j] == allowed[int(goal)]
            assert found["reward"][j] == value - 10 * goal
            assert meta["goal_segment"][j] == data.locate([at[value]]).segment[0]


def check_all(data: rc.BatchBase, steps: list[ref.Step]) -> None:
    """Everything, in a few sizes each."""
    for offsets in ([-2, -1, 0], [-3, 0, 1, 4]):
        check_stacks(data, steps, offsets)
    for length, burn_in, pad in ((1, 0, False), (2, 1, False), (3, 2, True), (4, 5, False)):
        check_windows(data, steps, length, burn_in, pad)
    for n in (1, 3):
        check_n_step(data, steps, n, 0.5)
    check_goals(data, steps, ("future", "final", "episode")[sum(s.value for s in steps) % 3])

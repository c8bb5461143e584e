"""Transition builders, conversions, validation, and what becomes of a transition that cannot be recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.collect.worlds import (
    NEXT_STEP,
    Contextual,
    Counting,
    Nested,
    counting,
    lanes_for,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc
from recollect.collect.bounds import outside

Wrapper = rc.ReplayBufferCollectionWrapper
Z = np.zeros(2, np.int64)
ARGUMENTS = {
    "cached_obs", "cached_context", "action", "next_obs", "reward", "terminated", "truncated", "env_index",
    "rb_single_space",
}  # fmt: skip


def long() -> Any:
    return Counting(longest=10**9)


def buffer_of(space: Any, n: int = 1, tracked: bool = True, **kwargs: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create(
        rc.MemoryStorage, space, capacity=100 * n, num_lanes=n, maintain_segment_metadata=tracked, **kwargs
    )


# -- the default


def test_every_key_of_the_default_builder() -> None:
    keys = ["env_index", "done", "next_obs", "obs", "truncated", "terminated", "reward", "action"]
    env = Counting(longest=1)
    buf = buffer_of(rc.transition_space(env, keys))
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(3)
    row = buf[0]
    assert list(row) == keys
    assert (row["env_index"], row["done"], row["action"], row["reward"]) == (0, True, 3, 1.25)
    envs = vector(counting, 3, NEXT_STEP)
    buf = untracked_for(envs, keys=keys)
    wrapped = Wrapper(envs, buf)
    wrapped.reset(seed=1)
    wrapped.step(np.array([1, 2, 3]))
    assert buf[:]["env_index"].tolist() == [0, 1, 2]
    assert buf[:]["action"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("space", "match"),
    [
        (spaces.Box(0, 1, (3,)), "needs a Dict space"),
        (spaces.Dict({"rewards": spaces.Box(0, 1, ())}), "keys must be among .* got 'rewards'"),
    ],
)
def test_another_space_or_key_is_refused_at_construction(space: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Wrapper(counting(), rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=3))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("n", [1, 2])
def test_rewards_and_flags_become_the_leafs_dtype(dtype: str, n: int) -> None:
    class Rewarding(Counting):
        def step(self, action: Any) -> Any:
            obs, _, terminated, truncated, info = super().step(action)
            return obs, 1.0, terminated, truncated, info

    def make() -> Any:
        return Rewarding(longest=1)

    env = make() if n == 1 else vector(make, n, NEXT_STEP)
    space = dict.fromkeys(("reward", "terminated", "truncated", "done"), ((), dtype))
    buf = buffer_of(space, n)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0 if n == 1 else Z)
    for key, expected in (("reward", 1), ("terminated", 0), ("truncated", 1), ("done", 1)):
        column = buf[:][key]
        assert column.dtype == dtype and (column == expected).all()


@pytest.mark.parametrize("n", [1, 2])
def test_an_end_of_both_kinds_is_stored_as_given(n: int) -> None:
    class Both(Counting):
        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return obs, reward, True, True, info

    env = Both() if n == 1 else vector(Both, n, NEXT_STEP)
    buf = lanes_for(env, n)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0 if n == 1 else Z)
    assert buf[:]["terminated"].tolist() == buf[:]["truncated"].tolist() == [True] * n


@pytest.mark.parametrize("n", [1, 2])
def test_a_reward_that_would_change_is_refused(n: int) -> None:
    env = counting() if n == 1 else vector(counting, n, NEXT_STEP)  # rewards end in .25
    buf = buffer_of({"reward": ((), "int32")}, n)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    with pytest.raises(rc.SchemaError, match="reward"):
        wrapped.step(0 if n == 1 else Z)
    assert buf.stats().rejected == n

    class Huge(Counting):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, 1e300, *rest

    env = Huge() if n == 1 else vector(Huge, n, NEXT_STEP)
    buf = buffer_of({"reward": ((), "float32")}, n)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    with pytest.raises(rc.SchemaError, match="reward: value must fit float32, got 1e"):
        wrapped.step(0 if n == 1 else Z)


def test_rewards_that_are_vectors() -> None:
    class Two(Counting):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, np.array([reward, -reward]), *rest

    buf = buffer_of({"reward": ((2,), "float32")})
    wrapped = Wrapper(Two(), buf)
    wrapped.reset()
    wrapped.step(0)
    assert buf[0]["reward"].tolist() == [1.25, -1.25]


# -- callables


@pytest.mark.parametrize("n", [1, 2])
def test_a_callable_gets_nine_arguments_for_one_slot(n: int) -> None:
    seen: list[dict[str, Any]] = []

    def build(**kwargs: Any) -> Any:
        seen.append(kwargs)
        return {"x": np.float32(kwargs["next_obs"][2] * 10 + kwargs["env_index"])}

    env = long() if n == 1 else vector(long, n, NEXT_STEP)
    buf = buffer_of({"x": ((), "float32")}, n)
    wrapped = Wrapper(env, buf, transition_builder=build)
    wrapped.reset()
    for action in (1, 2):
        wrapped.step(action if n == 1 else np.array([action, action + 1]))
    assert all(set(kwargs) == ARGUMENTS for kwargs in seen)
    assert [kwargs["env_index"] for kwargs in seen] == [0, 1] * 2 if n == 2 else [0, 0]
    assert buf[:]["x"].tolist() == ([10, 20] if n == 1 else [10, 20, 11, 21])
    last = seen[-1]
    assert last["cached_obs"].shape == last["next_obs"].shape == (4,)
    assert last["cached_obs"][2] == 1 and last["next_obs"][2] == 2
    assert last["action"] == n + 1 and np.ndim(last["action"]) == 0
    assert float(last["reward"]) == 2.25 and not last["terminated"] and not last["truncated"]
    assert last["cached_context"] is None
    assert last["rb_single_space"] is buf.single_space
    assert [kwargs["next_obs"][2] for kwargs in seen] == (
        [1, 2] if n == 1 else [1, 1, 2, 2]
    )  # what it kept, stays


@pytest.mark.parametrize("n", [1, 2])
def test_a_builder_that_changes_what_it_gets_spoils_nothing(n: int) -> None:
    def build(cached_obs: Any, next_obs: Any, **rest: Any) -> Any:
        sample = {"obs": cached_obs.copy(), "next_obs": next_obs.copy()}
        cached_obs[...] = next_obs[...] = -1
        return sample

    env = long() if n == 1 else vector(long, n, NEXT_STEP)
    buf = buffer_of(rc.transition_space(env, ["obs", "next_obs"]), n)
    wrapped = Wrapper(env, buf, transition_builder=build)
    wrapped.reset()
    for _ in range(3):
        obs, *_ = wrapped.step(0 if n == 1 else Z)
    assert buf[:]["obs"][:3, 2].tolist() == [0, 1, 2]
    assert (np.atleast_2d(obs)[:, 2] == 3).all()


def test_a_callable_sees_the_context() -> None:
    env = Contextual(ident=5)
    buf = buffer_of({"c": ((2,), "float32")})
    wrapped = Wrapper(env, buf, transition_builder=lambda cached_context, **_: {"c": cached_context})
    wrapped.reset()
    wrapped.step(0)
    assert buf[0]["c"].tolist() == [5, 1]


def test_a_callable_over_nested_spaces() -> None:
    envs = vector(Nested, 2, NEXT_STEP)
    buf = buffer_of({"name": ((), "int64")}, 2)
    names: list[str] = []

    def build(next_obs: Any, action: Any, **rest: Any) -> Any:
        assert set(action) == {"go", "how"} and action["how"].shape == (2,)
        names.append(next_obs["name"])
        return {"name": int(next_obs["image"][0, 0])}

    wrapped = Wrapper(envs, buf, transition_builder=build)
    wrapped.reset(seed=0)
    wrapped.step(wrapped.action_space.sample())
    assert names == ["e1s1", "e1s1"]
    assert buf[:]["name"].tolist() == [1, 1]


def fails_in_slot_1(env_index: int, next_obs: Any, **rest: Any) -> Any:
    if env_index == 1 and next_obs[2] == 2:
        raise KeyError("no such thing")
    return {"x": float(next_obs[2])}


def test_an_error_of_a_callable_costs_only_its_slot() -> None:
    envs = vector(long, 2, NEXT_STEP)
    buf = buffer_of({"x": ((), "float32")}, 2)
    wrapped = Wrapper(envs, buf, transition_builder=fails_in_slot_1)
    wrapped.reset()
    wrapped.step(Z)
    with pytest.raises(KeyError, match="no such thing"):
        wrapped.step(Z)
    wrapped.step(Z)
    assert buf[:]["x"].tolist() == [1, 2, 3, 1, 3]
    assert buf.stats().rejected == 1
    wrapped.close()
    assert buf.get_segments() == [(0, 3), (3, 4), (4, 5)]  # no window spans the gap


def test_per_env_an_error_of_a_callable_counts_in_its_slots_buffer() -> None:
    envs = vector(long, 2, NEXT_STEP)
    buffers = [buffer_of({"x": ((), "float32")}) for _ in range(2)]
    wrapped = Wrapper(envs, buffers, transition_builder=fails_in_slot_1)
    wrapped.reset()
    wrapped.step(Z)
    with pytest.raises(KeyError, match="no such thing"):
        wrapped.step(Z)
    assert [(b.stats().live, b.stats().rejected) for b in buffers] == [(2, 0), (1, 1)]


# -- transformations


class Sum(rc.DataTransformation):
    """obs + next_obs, and everything it was given, once."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def get_target_space_from_source(self, space: Any) -> Any:
        self.source = space
        return {"sum": ((4,), "float32"), "who": ((), "int64")}

    def transform(self, space: Any, data: Any) -> Any:
        assert space is self.source
        self.given.append({k: v.copy() for k, v in data.items()})
        data["next_obs"] += data["obs"]  # its own copy
        return {"sum": data["next_obs"], "who": data["env_index"]}


@pytest.mark.parametrize("n", [1, 3])
def test_a_transformation_gets_the_canonical_dict_of_the_recorded_slots(n: int) -> None:
    env = Counting(longest=3) if n == 1 else vector(lambda: Counting(longest=3), n, NEXT_STEP)
    transformation = Sum()
    buf = buffer_of({"sum": ((4,), "float32"), "who": ((), "int64")}, 1, tracked=n == 1)
    wrapped = Wrapper(env, buf, transition_builder=transformation)
    wrapped.reset(seed=0)
    for _ in range(12):
        _, _, terminated, truncated, _ = wrapped.step(0 if n == 1 else np.zeros(n, np.int64))
        if n == 1 and (terminated or truncated):
            wrapped.reset()
    n_rows = sum(len(given["obs"]) for given in transformation.given)
    keys = {"obs", "action", "reward", "next_obs", "terminated", "truncated", "done", "env_index"}
    assert all(set(given) == keys for given in transformation.given)
    first = transformation.given[0]
    assert (
        first["obs"].shape == (n, 4) and first["reward"].dtype == np.float32 and first["done"].dtype == bool
    )
    rows = buf[:]
    assert len(rows["sum"]) == n_rows
    if n == 3:
        assert n_rows < 36  # some steps were resets
    truth = np.concatenate([g["obs"] + g["next_obs"] for g in transformation.given])
    assert (rows["sum"] == truth).all()
    assert (truth[:, 2] % 2 == 1).all()  # step k and step k + 1: what it changed did not reach the next step


def test_a_transformation_of_another_space_is_refused() -> None:
    with pytest.raises(ValueError, match="transition_builder: must make samples of the buffer's space.*sum"):
        Wrapper(
            counting(), buffer_of({"sum": ((3,), "float32"), "who": ((), "int64")}), transition_builder=Sum()
        )
    with pytest.raises(TypeError, match="transition_builder: must be a callable"):
        Wrapper(counting(), tracked_for(counting()), transition_builder=3)


def test_a_transformation_that_fails_rejects_the_step() -> None:
    class Broken(Sum):
        def transform(self, space: Any, data: Any) -> Any:
            raise ZeroDivisionError

    envs = vector(long, 2, NEXT_STEP)
    buf = buffer_of({"sum": ((4,), "float32"), "who": ((), "int64")}, 2)
    wrapped = Wrapper(envs, buf, transition_builder=Broken())
    wrapped.reset()
    with pytest.raises(ZeroDivisionError):
        wrapped.step(Z)
    assert buf.stats().rejected == 2


# -- what cannot be recorded


class Wrong(Counting):
    """Gives one observation of another dtype when asked with action 4."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (obs.astype(np.float64) if action == 4 else obs), *rest


def test_a_refused_step_counts_ends_its_segment_and_the_run_goes_on() -> None:
    env = Wrong(longest=10**9)
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0)
    with pytest.raises(rc.DtypeError, match="next_obs: dtype must be float32, got float64"):
        wrapped.step(4)
    with pytest.raises(rc.DtypeError, match="^obs: dtype"):  # what it led to cannot be started from either
        wrapped.step(0)
    wrapped.step(0)
    wrapped.close()
    stats = buf.stats()
    assert (stats.offered, stats.live, stats.rejected) == (4, 2, 2)
    assert buf.get_segments() == [(0, 1), (1, 2)]
    assert buf[:]["obs"][:, 2].tolist() == [0, 3]


@pytest.mark.parametrize("layout", ["lanes", "block", "per_env"])
def test_a_refused_block_counts_every_slot(layout: str) -> None:
    class Wide(Counting):
        observation_space = spaces.Box(-1, 1e6, (4,), np.float64)

        def _obs(self, action: float) -> Any:
            return super()._obs(action).astype(np.float64)

    envs = vector(Wide, 2, NEXT_STEP)

    def narrow(n: int, tracked: bool) -> rc.ReplayBuffer:
        return buffer_of({"obs": ((4,), "float32")}, n, tracked)

    buffers = {
        "lanes": [narrow(2, True)],
        "block": [narrow(1, False)],
        "per_env": [narrow(1, True), narrow(1, True)],
    }[layout]
    wrapped = Wrapper(envs, buffers)
    wrapped.reset()
    with pytest.raises(rc.DtypeError, match="^obs: dtype must be float32, got float64"):
        wrapped.step(Z)
    assert sum(buf.stats().rejected for buf in buffers) == 2
    assert sum(len(buf) for buf in buffers) == 0


def test_per_env_a_slot_that_fails_does_not_stop_the_others() -> None:
    envs = vector(long, 2, NEXT_STEP)
    buffers = [tracked_for(envs), tracked_for(envs)]
    wrapped = Wrapper(envs, buffers)
    wrapped.reset()
    wrapped.step(Z)
    buffers[0].close()
    with pytest.raises(rc.ClosedError):
        wrapped.step(Z)
    assert len(buffers[1]) == 2


# -- validation


@pytest.mark.parametrize("n", [1, 2])
def test_validate_transition_checks_bounds_and_nan(n: int) -> None:
    class Odd(Counting):
        """Slot 1 (or the only one) gives what action says: 3 too high, 4 NaN."""

        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            obs[3] = {3: 2e6, 4: np.nan}.get(int(action), 0)
            return obs, reward, *rest

    def make() -> Any:
        return Odd(longest=10**9)

    for bad, text in ((3, r"within \[-1.0, 1000000.0\] at \[3\], got 2000000.0"), (4, "got nan")):
        env = make() if n == 1 else vector(make, n, NEXT_STEP)
        for validate in (False, True):
            buf = lanes_for(env, n)
            wrapped = Wrapper(env, buf, validate_transition=validate)
            wrapped.reset()
            wrapped.step(0 if n == 1 else Z)
            action = bad if n == 1 else np.array([0, bad])
            if not validate:
                wrapped.step(action)
                assert buf.stats().rejected == 0
                continue
            with pytest.raises(rc.SchemaError, match=("slot 1: " if n == 2 else "^") + "next_obs: .*" + text):
                wrapped.step(action)
            assert buf.stats().rejected == 1
            assert len(buf) == 2 * n - 1  # the other slot's was recorded
            assert len(buf.get_segments()) == 1


def test_validation_after_a_callable_keeps_the_right_slots() -> None:
    def build(env_index: int, **rest: Any) -> Any:
        if env_index == 0:
            raise LookupError
        return {"x": float(env_index)}

    envs = vector(long, 4, NEXT_STEP)
    space = spaces.Dict({"x": spaces.Box(0, 2, (), np.float32)})
    buf = buffer_of(space, 4)
    wrapped = Wrapper(envs, buf, transition_builder=build, validate_transition=True)
    wrapped.reset()
    with pytest.raises(LookupError):
        wrapped.step(np.zeros(4, np.int64))
    assert buf[:]["x"].tolist() == [1, 2]
    assert buf.stats().rejected == 2


@pytest.mark.parametrize(
    ("space", "batch", "bad"),
    [
        (spaces.Discrete(3, start=2), [1, 2, 4, 5], [0, 3]),
        (spaces.MultiDiscrete([2, 3]), [[1, 2], [2, 0], [0, 3]], [1, 2]),
        (spaces.MultiBinary(2), [[0, 1], [0, 2]], [1]),
        (spaces.Box(0, 1, (2,), np.float32), [[0, 1], [np.nan, 0], [-1, 0]], [1, 2]),
        (spaces.Box(-np.inf, np.inf, (), np.float32), [0, np.nan], [1]),
        (spaces.Text(2, charset="ab"), ("ab", "c", "aaa"), [1, 2]),
    ],
    ids=str,
)
def test_what_is_outside_of_each_kind_of_space(space: Any, batch: Any, bad: list[int]) -> None:
    values = batch if isinstance(batch, tuple) else np.array(batch, space.dtype)
    found = outside(spaces.Dict({"x": space}), {"x": values}, len(batch))
    assert sorted(found) == bad
    assert all(text.startswith("x: ") for text in found.values())

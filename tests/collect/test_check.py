"""check_env_pipeline finds each fault in an environment that has exactly that one, and nothing in good ones."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tests.collect.test_episodes import Final, Undeclared, without
from tests.collect.worlds import (
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Contextual,
    ContextualVector,
    Counting,
    Nested,
    cartpole,
    counting,
    lanes_for,
    pendulum,
    reusing,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc

check = rc.check_env_pipeline


def only(findings: list[rc.Finding]) -> rc.Finding:
    assert len(findings) == 1, findings
    return findings[0]


class Spoilt(Counting):
    """Counting, but the named part of every third step is changed by a function."""

    def __init__(self, part: str, change: Any) -> None:
        super().__init__()
        self.part, self.change, self.n = part, change, 0

    def step(self, action: Any) -> Any:
        self.n += 1
        result = list(super().step(action))
        at = ["obs", "reward", "terminated", "truncated"].index(self.part)
        if self.n % 3 == 0:
            result[at] = self.change(result[at])
        return tuple(result)


def high(obs: Any) -> Any:
    return obs + np.float32(2e6)


def nan(obs: Any) -> Any:
    obs[1] = np.nan
    return obs


FAULTS = [
    ("obs", lambda o: o[:3], "obs", r"shape must be \(4,\), got \(3,\)"),
    ("obs", lambda o: o.astype(np.float64), "obs", "dtype must be float32, got float64"),
    ("obs", high, "obs", r"within \[-1.0, 1000000.0\] at \[0\], got 2"),
    ("obs", nan, "obs", r"at \[1\], got nan"),
    ("obs", lambda o: o.tolist(), "obs", "must be an array, got a list of 4"),
    ("reward", lambda r: float("nan"), "reward", "must be finite, got nan"),
    ("reward", lambda r: "much", "reward", "must be a number, got str"),
    ("terminated", int, "terminated", "must be a bool, got int"),
    ("truncated", lambda t: np.float32(t), "truncated", "must be a bool, got float32"),
]


# -- good ones


GOOD = [
    ("CartPole", cartpole),
    ("Pendulum", pendulum),
    ("Counting", counting),
    ("Nested", Nested),
    ("Contextual", Contextual),
    ("FrozenLake", lambda: gymnasium.make("FrozenLake-v1")),
    ("Blackjack", lambda: gymnasium.make("Blackjack-v1")),
    ("Autoreset", lambda: gymnasium.wrappers.Autoreset(cartpole())),
    (
        "native",
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"),
    ),
    ("one slot", lambda: vector(cartpole, 1, NEXT_STEP)),
    ("contexts", lambda: ContextualVector(DISABLED)),
    *[(f"vector {mode.name}", lambda mode=mode: vector(cartpole, 3, mode)) for mode in MODES],
    *[(f"nested {mode.name}", lambda mode=mode: vector(Nested, 2, mode)) for mode in MODES],
]


@pytest.mark.parametrize("make", [make for _, make in GOOD], ids=[name for name, _ in GOOD])
def test_nothing_is_found_in_a_good_environment(make: Any) -> None:
    env = make()
    assert check(env, steps=120) == []
    env.close()


def test_nothing_is_found_in_an_async_one() -> None:
    envs = vector(cartpole, 2, SAME_STEP, "async", context="fork")
    assert check(envs, steps=60) == []
    envs.close()


@pytest.mark.parametrize("layout", ["lanes", "untracked"])
def test_nothing_is_found_with_a_good_buffer(layout: str) -> None:
    envs = vector(cartpole, 3, NEXT_STEP)
    buf = lanes_for(envs, 3) if layout == "lanes" else untracked_for(envs)
    assert check(envs, buf, steps=60) == []
    assert len(buf) > 100  # it was written to


# -- one fault each


@pytest.mark.parametrize(("part", "change", "place", "problem"), FAULTS)
def test_values_off_the_space(part: str, change: Any, place: str, problem: str) -> None:
    finding = only(check(Spoilt(part, change), steps=30))
    assert (finding.level, finding.place) == ("error", place)
    assert re.search(problem, finding.problem), finding
    assert "(step 3)" in finding.problem and finding.remedy


@pytest.mark.parametrize(("part", "change", "place", "problem"), [*FAULTS[2:4], FAULTS[5]])
def test_values_off_the_space_in_a_vector(part: str, change: Any, place: str, problem: str) -> None:
    envs = SyncVectorEnv([counting, lambda: Spoilt(part, change)], autoreset_mode=NEXT_STEP)
    finding = only(check(envs, steps=30))
    assert finding.place == place and "slot 1" in finding.problem


@pytest.mark.parametrize("at", [2, 3])
def test_flags_of_a_vector_that_are_not_bools(at: int) -> None:
    class Numbers(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            result = list(self.env.step(actions))
            result[at] = result[at].astype(np.int8)
            return tuple(result)

    finding = only(check(Numbers(vector(counting, 2, NEXT_STEP)), steps=5))
    assert (finding.level, finding.place) == ("error", ["terminated", "truncated"][at - 2])
    assert "must be an array of 2 bool, got int8" in finding.problem


def test_a_reset_off_the_space_is_found_too() -> None:
    class Bad(Counting):
        def reset(self, **kwargs: Any) -> Any:
            obs, info = super().reset(**kwargs)
            return obs - np.float32(5), info

    assert "reset returns one off its space" in only(check(Bad(), steps=5)).problem


def test_a_nested_leaf_is_named() -> None:
    class Bad(Nested):
        def _obs(self, action: float) -> Any:
            return {**super()._obs(action), "name": "far too long a name"}

    places = {f.place for f in check(Bad(), steps=5)}
    assert "obs/name" in places

    class Lacking(Nested):
        def _obs(self, action: float) -> Any:
            return {"pair": super()._obs(action)["pair"]}

    assert any("must have the parts" in f.problem for f in check(Lacking(), steps=5))


def test_reused_arrays() -> None:
    for env in (reusing(), vector(counting, 2, NEXT_STEP, copy=False)):
        finding = only(check(env, steps=20))
        assert (finding.level, finding.place) == ("warning", "obs")
        assert "writes over arrays" in finding.problem


def test_a_changed_action() -> None:
    class Grabbing(Counting):
        action_space = spaces.Box(-1, 1, (2,), np.float32)

        def step(self, action: Any) -> Any:
            action += 1
            return super().step(0)

    finding = only(check(Grabbing(), steps=5))
    assert (finding.level, finding.place) == ("warning", "action")


def test_a_missing_final_obs() -> None:
    finding = only(check(Final(vector(counting, 2, SAME_STEP), without), steps=20))
    assert (finding.level, finding.place) == ("error", "final_obs")
    assert "got none" in finding.problem


def test_an_overwritten_final_obs() -> None:
    finding = only(check(vector(reusing, 2, SAME_STEP), steps=20))
    assert (finding.level, finding.place) == ("error", "final_obs")
    assert "next episode's first" in finding.problem


def test_a_stale_final_obs() -> None:
    class Stale(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            self.last, info = self.env.reset(**kwargs)
            return self.last, info

        def step(self, actions: Any) -> Any:
            last = self.last
            self.last, *rest, info = self.env.step(actions)
            if "final_obs" in info:
                for i in np.flatnonzero(info["_final_obs"]):
                    info["final_obs"][i] = last[i]
            return self.last, *rest, info

    finding = only(check(Stale(vector(counting, 2, SAME_STEP)), steps=20))
    assert finding.place == "final_obs" and "before the last step" in finding.problem


def test_a_final_obs_off_the_space() -> None:
    def wide(info: dict[str, Any]) -> dict[str, Any]:
        for i in np.flatnonzero(info.get("_final_obs", [])):
            info["final_obs"][i] = info["final_obs"][i].astype(np.float64)
        return info

    finding = only(check(Final(vector(counting, 2, SAME_STEP), wide), steps=20))
    assert finding.place == "final_obs" and re.search(
        "must fit the observation space.*float64", finding.problem
    )


def test_an_undeclared_mode() -> None:
    finding = only(check(Undeclared([counting] * 2), steps=20))
    assert (finding.level, finding.place) == ("error", "metadata")
    assert "autoreset_mode" in finding.remedy


def test_rows_unlike_the_environments() -> None:
    env = pendulum()
    names = {"obs": ((3,), "float16"), "reward": ((), "float32")}
    lossy = rc.ReplayBuffer.create(rc.MemoryStorage, names, capacity=100, cast=True)
    finding = only(check(env, lossy, steps=20))
    assert (finding.level, finding.place) == ("error", "rows/obs")


def test_rows_of_a_storage_that_spoils_them() -> None:
    env = counting()
    buf = tracked_for(env)
    append = buf._append
    buf._append = lambda sample: append({**sample, "action": np.int64((sample["action"] + 1) % 5)})
    finding = only(check(env, buf, steps=20))
    assert finding.place == "rows/action"


def test_rows_that_somebody_else_writes() -> None:
    env = counting()
    buf = tracked_for(env)
    append = buf._append

    def twice(sample: Any) -> None:
        append(sample)
        append(sample)

    buf._append = twice
    assert only(check(env, buf, steps=5)).problem.startswith("1 transitions gave 2 rows")


def test_a_buffer_of_another_space_or_layout() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    finding = only(check(envs, tracked_for(envs), steps=5))
    assert finding.place == "buffer" and "num_lanes=2" in finding.remedy
    narrow = rc.ReplayBuffer.create(rc.MemoryStorage, {"obs": ((4,), "float16")}, capacity=10)
    finding = only(check(counting(), narrow, steps=5))
    assert finding.place == "recording" and "dtype must be float16" in finding.problem


def test_an_environment_that_raises() -> None:
    class Failing(Counting):
        def step(self, action: Any) -> Any:
            raise OSError("no gripper")

    finding = only(check(Failing(), steps=5))
    assert finding.place == "step" and "OSError: no gripper" in finding.problem

    class Old(Counting):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated or truncated, info

    assert "must return a tuple as gymnasium says" in only(check(Old(), steps=5)).problem


# -- the call


def test_strict_raises_the_first_error_and_not_a_warning() -> None:
    with pytest.raises(ValueError, match=r"^error: obs: .*\(step 3\)"):
        check(Spoilt("obs", high), steps=30, strict=True)
    assert check(reusing(), steps=20, strict=True)


def test_findings_are_frozen_records_errors_first() -> None:
    class Both(Spoilt):
        pass

    env = Both("reward", lambda r: float("inf"))
    env.reuses = True
    findings = check(env, steps=20)
    assert [f.level for f in findings] == ["error", "warning"]
    assert [f.name for f in dataclasses.fields(rc.Finding)] == ["level", "place", "problem", "remedy"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        findings[0].level = "fine"  # type: ignore[misc]


def test_it_leaves_env_and_buffer_open_and_tells_its_steps() -> None:
    env = counting()
    buf = tracked_for(env)
    seen: list[int] = []
    check(env, buf, steps=7, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert len(buf) == 7 and buf.open_segment is None


def test_equal_seeds_give_equal_runs() -> None:
    def rows(seed: int) -> Any:
        env = cartpole()
        buf = tracked_for(env)
        check(env, buf, steps=30, seed=seed)
        return buf[:]["obs"].tobytes()

    assert rows(1) == rows(1) != rows(2)

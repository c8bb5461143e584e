"""What a learner is told of an environment's steps is true, in every auto-reset mode, against a plain loop."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.collect.worlds import DISABLED, MODES, NEXT_STEP, SAME_STEP, Counting

from recollect.errors import EnvContractError
from recollect.learners.environment import EnvDriver, ObsReader, spaces_of


class Boxed(Counting):
    """Counting with a continuous action and a Dict of observation and critic leaf, reusing its arrays if asked."""

    observation_space = spaces.Dict(
        {"critic": spaces.Box(-1e6, 1e6, (2,), np.float64), "obs": spaces.Box(-1, 1e6, (2, 2), np.float32)}
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def _obs(self, action: float) -> Any:
        flat = np.array(super()._obs(action))
        return {"critic": np.array([flat[2], -flat[1]], np.float64), "obs": flat.reshape(2, 2)}

    def step(self, action: Any) -> Any:
        return super().step(action[0])


def envs(make: Any, mode: AutoresetMode, n: int = 3, **kwargs: Any) -> Any:
    return SyncVectorEnv([(lambda i=i: make(i)) for i in range(n)], autoreset_mode=mode, **kwargs)


def truth(make: Any, i: int, seed: int, actions: Any) -> list[Any]:
    """Transitions of one environment by a plain loop that resets when an episode is over."""
    env = make(i)
    obs, _ = env.reset(seed=seed + i)
    rows = []
    for action in actions:
        next_obs, reward, terminated, truncated, _ = env.step(np.float32([action]))
        rows.append((obs, float(action), reward, next_obs, terminated or truncated, truncated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    return rows


def flat(obs: Any) -> list[float]:
    return [float(x) for x in np.ravel(obs["obs"])]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("copy", [True, False])
def test_rows_are_those_of_a_plain_loop(mode: AutoresetMode, copy: bool) -> None:
    """Vector auto-reset gives a fake transition (cleanrl#499, Mighty#108): not one of them is passed on."""
    driver = EnvDriver(envs(Boxed, mode, copy=copy), seed=7)
    rows: list[list[Any]] = [[] for _ in range(3)]
    used: list[list[Any]] = [[] for _ in range(3)]
    for t in range(60):
        actions = np.array([[np.sin(10 * t + i)] for i in range(3)], np.float32)
        step = driver.step(actions)
        for i in np.flatnonzero(step.valid).tolist():
            used[i].append(actions[i, 0])
            assert step.critic is not None and step.next_critic is not None
            assert step.critic[i, 0] == step.obs[i, 2] and step.next_critic[i, 0] == step.next_obs[i, 2]
            rows[i].append(
                (step.obs[i].tolist(), float(step.actions[i, 0]), float(step.rewards[i]), step.next_obs[i].tolist(),
                 bool(step.dones[i]), bool(step.truncated[i]))
            )  # fmt: skip
    driver.close()
    for i in range(3):
        wanted = truth(Boxed, i, 7, used[i])
        assert rows[i] == [(flat(o), a, r, flat(n), bool(d), bool(u)) for o, a, r, n, d, u in wanted]
        assert sum(row[4] for row in rows[i]) > 5
    if mode is not NEXT_STEP:
        assert all(len(r) == 60 for r in rows)


def test_spaces_are_read() -> None:
    spec = spaces_of(envs(Boxed, NEXT_STEP))
    assert (spec.obs_dim, spec.critic_dim, spec.action_dim, spec.n_choices) == (4, 2, 1, 0)
    spec = spaces_of(envs(Counting, SAME_STEP))
    assert (spec.obs_dim, spec.critic_dim, spec.action_dim, spec.n_choices) == (4, 0, 1, 5)
    assert spec.to_env(np.float32([[3.0]])).tolist() == [3]


class Other(Counting):
    """Counting with any space and any observation."""

    def __init__(self, space: Any, obs: Any = None, action: Any = None, reward: Any = 0.0) -> None:
        super().__init__()
        self.observation_space, self.given, self.reward = space, obs, reward
        self.action_space = action or spaces.Discrete(2)

    def _obs(self, action: float) -> Any:
        return self.given if action != -1 or self.given is None else self.observation_space.sample()

    def step(self, action: Any) -> Any:
        return self._obs(0.0), self.reward, False, False, {}


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (spaces.Discrete(3), None, "observation: must be a Box"),
        (spaces.Dict({"obs": BOX, "critic": spaces.Discrete(2)}), None, "observation/critic: must be a Box"),
        (spaces.Dict({"a": BOX, "b": spaces.Text(3)}), None, "observation/b: must be a Box"),
        (BOX, spaces.MultiDiscrete([2, 2]), "action: must be a Box of floats or Discrete"),
    ],
)
def test_spaces_no_learner_can_use_are_named(space: Any, action: Any, said: str) -> None:
    env = envs(lambda i: Other(space, action=action), NEXT_STEP, n=2)
    with pytest.raises(EnvContractError, match=said):
        spaces_of(env)


def test_another_dict_is_flattened_in_layout_order() -> None:
    space = spaces.Dict({"z": spaces.Box(-1, 1, (1,), np.float32), "a": spaces.Box(0, 255, (2,), np.uint8)})
    env = envs(lambda i: Other(space, {"z": np.float32([0.5]), "a": np.uint8([7, 8])}), NEXT_STEP, n=1)
    step = EnvDriver(env, seed=0).step(np.zeros((1, 1), np.float32))
    order = {"z": [0.5], "a": [7.0, 8.0]}
    assert step.next_obs.tolist() == [[x for key in space.spaces for x in order[key]]]
    assert step.next_obs.dtype == np.float32


@pytest.mark.parametrize("names", ["obs critic more", "critic"])
def test_only_a_dict_of_obs_and_critic_has_a_leaf_for_the_critic(names: str) -> None:
    space = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in names.split()})
    reader = ObsReader(space)
    assert (reader.obs_dim, reader.critic_dim) == (2 * len(names.split()), 0)


def test_what_is_beyond_float32_is_infinite_and_no_warning() -> None:
    reader = ObsReader(spaces.Box(-np.inf, np.inf, (2,), np.float64))
    obs, critic = reader.read(np.array([[1e300, 2.0]]), 1)
    assert obs.tolist() == [[np.inf, 2.0]] and critic is None


class Vector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Two slots that return whatever they are told to."""

    def __init__(self, steps: list[Any], mode: Any = NEXT_STEP, first: Any = None) -> None:
        self.num_envs, self._steps = 2, iter(steps)
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = BOX, spaces.Box(-1, 1, (1,), np.float32)
        self._first = np.zeros((2, 2), np.float32) if first is None else first

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._first, {}

    def step(self, actions: Any) -> Any:
        return next(self._steps)


def result(
    obs: Any = 0.0, reward: Any = 0.0, term: Any = (0, 0), trunc: Any = (0, 0), info: Any = None
) -> Any:
    obs = np.broadcast_to(np.float32(obs), (2, 2)).copy() if np.ndim(obs) < 2 else obs
    reward = np.broadcast_to(np.float64(reward), (2,)).copy()
    return obs, reward, np.array(term, bool), np.array(trunc, bool), info or {}


NAN = float("nan")
ACT = np.zeros((2, 1), np.float32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (result(np.zeros((2, 3), np.float32)), r"observation: shape must be \(2, 2\)"),
        (result(np.zeros((2, 2), np.float64)), "observation: dtype must be float32"),
        (
            (np.zeros((2, 2), np.float32), np.zeros(3), np.zeros(2, bool), np.zeros(2, bool), {}),
            "reward: shape",
        ),
        (
            (np.zeros((2, 2), np.float32), np.zeros(2), np.zeros(2), np.zeros(2, bool), {}),
            "terminated: dtype",
        ),
        (result(np.float32([[0, 0], [0, NAN]])), "observation: must be finite, .* in environment 1"),
        (result(reward=[0, np.inf]), "reward: must be finite, .* in environment 1"),
    ],
)
def test_what_breaks_the_contract_is_named(given: Any, said: str) -> None:
    with pytest.raises(EnvContractError, match=said):
        EnvDriver(Vector([given]), seed=0).step(ACT)


def test_non_finite_rows_are_rejected_and_counted_when_asked() -> None:
    bad = np.float32([[0, 0], [0, NAN]])
    driver = EnvDriver(
        Vector([result(), result(bad), result(), result(reward=[NAN, 0])]), seed=0, nan_policy="reject"
    )
    steps = []
    for _ in range(4):
        assert np.isfinite(driver.acting_obs()).all()
        steps.append(driver.step(ACT))
    # a row ends in the bad observation, the next begins there; then a reward
    assert [s.valid.tolist() for s in steps] == [[True, True], [True, False], [True, False], [False, True]]
    assert [s.rejected for s in steps] == [0, 1, 1, 1]
    assert [s.n_steps for s in steps] == [2, 2, 2, 2]


@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_same_step_takes_the_final_observation_from_info(key: str) -> None:
    final = np.array([None, np.float32([0.5, 0.25])], object)
    info = {key: final, f"_{key}": np.array([False, True])}
    step = EnvDriver(Vector([result(0.75, trunc=(0, 1), info=info)], SAME_STEP), seed=0).step(ACT)
    assert step.next_obs.tolist() == [[0.75, 0.75], [0.5, 0.25]]


def test_a_final_observation_that_is_not_finite_is_named() -> None:
    info = {"final_obs": np.array([None, np.float32([0.5, NAN])], object)}
    with pytest.raises(EnvContractError, match="observation: must be finite, .* in environment 1"):
        EnvDriver(Vector([result(0.75, trunc=(0, 1), info=info)], SAME_STEP), seed=0).step(ACT)


def test_a_reset_observation_that_is_not_finite_is_named() -> None:
    env = Vector([result(0.75, trunc=(0, 1))], DISABLED)
    driver = EnvDriver(env, seed=0)
    env._first = np.float32([[0, 0], [NAN, 0]])
    with pytest.raises(EnvContractError, match="observation: must be finite, .* in environment 1"):
        driver.step(ACT)


def test_an_overwritten_final_observation_is_warned_of_once() -> None:
    info = {"final_obs": np.array([None, np.float32([0.75, 0.75])], object)}
    driver = EnvDriver(Vector([result(0.75, trunc=(0, 1), info=info)] * 2, SAME_STEP), seed=0)
    with pytest.warns(UserWarning, match="equals the next episode's first observation"):
        driver.step(ACT)
    driver.step(ACT)


def test_same_step_without_a_final_observation_is_an_error() -> None:
    with pytest.raises(EnvContractError, match="slot 1: info"):
        EnvDriver(Vector([result(0.75, trunc=(0, 1))], SAME_STEP), seed=0).step(ACT)


def test_disabled_resets_the_slots_that_are_done() -> None:
    first = np.float32([[0.125, 0], [0.25, 0]])
    env = Vector([result(0.75, trunc=(0, 1))], DISABLED, first)
    masks = []
    reset = env.reset
    env.reset = lambda **kw: masks.append(kw.get("options")) or reset(**kw)  # type: ignore[method-assign,func-returns-value]
    driver = EnvDriver(env, seed=0)
    step = driver.step(ACT)
    assert step.next_obs.tolist() == [[0.75, 0.75], [0.75, 0.75]]
    assert masks[1]["reset_mask"].tolist() == [False, True]
    assert driver.obs.tolist() == first.tolist()


def test_no_declared_mode_is_next_step_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="declares no auto-reset mode"):
        driver = EnvDriver(Vector([result(trunc=(1, 0)), result()], None), seed=0)
    driver.step(ACT)
    assert driver.step(ACT).valid.tolist() == [False, True]


def test_terminated_at_the_time_limit_is_terminated() -> None:
    step = EnvDriver(Vector([result(term=(1, 0), trunc=(1, 1))]), seed=0).step(ACT)
    assert step.dones.tolist() == [True, True] and step.truncated.tolist() == [False, True]


@pytest.mark.parametrize(
    ("space", "actions", "wanted"),
    [
        (spaces.Box(-1, 2, (2, 1), np.float64), [[5, -5]], [[[2], [-1]]]),
        (spaces.Discrete(3, start=-1), [[0], [2]], [-1, 1]),
    ],
)
def test_actions_reach_the_environment_as_its_space_says(space: Any, actions: Any, wanted: Any) -> None:
    spec = spaces_of(envs(lambda i: Other(BOX, action=space), NEXT_STEP, n=1))
    found = spec.to_env(np.float32(actions))
    assert found.tolist() == wanted and found.dtype == space.dtype


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Box(-np.inf, 1, (1,), np.float32), "bounds must be finite and apart"),
        (spaces.Box(-1, np.inf, (1,), np.float32), "bounds must be finite and apart"),
        (spaces.Box(1, 1, (1,), np.float32), "bounds must be finite and apart"),
        (spaces.Discrete(3), r"must be a Box for a tanh policy, got Discrete\(3\)"),
    ],
)
def test_bounds_that_a_tanh_policy_cannot_have_are_refused(space: Any, said: str) -> None:
    with pytest.raises(EnvContractError, match=f"action: {said}"):
        spaces_of(envs(lambda i: Other(BOX, action=space), NEXT_STEP, n=1)).action_bounds()


def test_an_action_of_no_numbers_is_refused() -> None:
    empty = spaces.Box(-1, 1, (0,), np.float32)
    with pytest.raises(EnvContractError, match="action: must have at least one number"):
        spaces_of(envs(lambda i: Other(BOX, action=empty), NEXT_STEP, n=1))


def seen(mode: Any = NEXT_STEP, first: Any = None, steps: Any = ()) -> Any:
    """A vector environment with an observation of two leaves and one for the critic."""
    env = Vector(list(steps), mode, first or leaves())
    inner = spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32), "b": BOX})
    env.single_observation_space = spaces.Dict({"obs": inner, "critic": BOX})
    return env


def leaves(**bad: int) -> dict[str, Any]:
    """Observations of two slots; the leaves named are not finite in slot 1, at that place."""
    found = {name: np.zeros((2, n), np.float32) for name, n in (("a", 1), ("b", 2), ("critic", 2))}
    for name, column in bad.items():
        found[name][1, column] = NAN
    return {"obs": {"a": found["a"], "b": found["b"]}, "critic": found["critic"]}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [("critic", "observation/critic"), ("b", "observation/obs/b"), ("obs", "observation/obs/a")],
)
def test_a_leaf_that_does_not_come_is_named(lacks: str, said: str) -> None:
    first = leaves()
    (first["obs"] if lacks == "b" else first).pop(lacks)
    with pytest.raises(EnvContractError, match=f"{said}: must be in the observation"):
        EnvDriver(seen(first=first), seed=0)


NO = np.zeros(2, bool)
DONE = np.array([False, True])


@pytest.mark.parametrize(
    ("bad", "said"), [({"a": 0}, "obs/a"), ({"b": 0}, "obs/b"), ({"b": 1}, "obs/b"), ({"critic": 1}, "critic")]
)  # fmt: skip
@pytest.mark.parametrize("when", ["at first", "after a step", "after a reset"])
def test_the_leaf_that_is_not_finite_is_named(when: str, bad: dict[str, int], said: str) -> None:
    match = f"observation/{said}: must be finite, .* in environment 1"
    wrong = leaves(**bad)
    if when == "at first":
        with pytest.raises(EnvContractError, match=match):
            EnvDriver(seen(first=wrong), seed=0)
        return
    env = seen(NEXT_STEP, steps=[(wrong, np.zeros(2), NO, NO, {})])
    if when == "after a reset":  # that nobody asked for: its observation is acted on next
        env = seen(DISABLED, steps=[(leaves(), np.zeros(2), DONE, NO, {})])
    driver = EnvDriver(env, seed=0)
    env._first = wrong
    with pytest.raises(EnvContractError, match=match):
        driver.step(ACT)


def test_a_critic_leaf_that_is_not_finite_rejects_its_row() -> None:
    steps = [(leaves(critic=1), np.zeros(2), NO, NO, {})]
    step = EnvDriver(seen(steps=steps), seed=0, nan_policy="reject").step(ACT)
    assert step.valid.tolist() == [True, False] and step.rejected == 1


def test_nothing_that_comes_with_a_reset_counts() -> None:
    """Under NEXT_STEP: neither its flags nor its reward, whatever they are."""
    steps = [result(trunc=(1, 0)), result(reward=[NAN, 0], term=(1, 0), trunc=(1, 0)), result()]
    driver = EnvDriver(Vector(steps), seed=0)
    driver.step(ACT)
    step = driver.step(ACT)
    assert step.dones.tolist() == [False, False] == step.truncated.tolist()
    assert step.valid.tolist() == [False, True] and step.rejected == 0
    assert driver.step(ACT).valid.tolist() == [True, True]


def test_environments_are_seeded() -> None:
    seeds: list[Any] = []
    env = Vector([])
    reset = env.reset
    env.reset = lambda **kw: seeds.append(kw["seed"]) or reset(**kw)  # type: ignore[method-assign,func-returns-value]
    EnvDriver(env, seed=2**31 + 5)
    assert seeds == [5]


def test_a_number_that_is_no_reward_is_refused() -> None:
    given = (np.zeros((2, 2), np.float32), np.array(["a", "b"]), NO, NO, {})
    with pytest.raises(EnvContractError, match="reward: dtype must be a number"):
        EnvDriver(Vector([given]), seed=0).step(ACT)


def test_it_closes_its_environment() -> None:
    closed: list[int] = []
    env = Vector([])
    env.close = lambda **kwargs: closed.append(1)  # type: ignore[method-assign]
    EnvDriver(env, seed=0).close()
    assert closed == [1]

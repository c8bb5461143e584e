"""Every recorded transition equals, bit for bit, what a plain loop over one environment sees with the same seed."""

from __future__ import annotations

import multiprocessing
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.collect.worlds import (
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Counting,
    assert_episodes,
    assert_rows,
    cartpole,
    counting,
    lanes_for,
    pendulum,
    plain_transitions,
    reusing,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc

N, SEED = 3, 7


def run(envs: Any, steps: int, mode: Any) -> tuple[list[list[Any]], Any]:
    """Step at random; return the actions that each slot really took, as the mode has it."""
    rng = np.random.default_rng(0)
    envs.reset(seed=SEED)
    taken: list[list[Any]] = [[] for _ in range(N)]
    over = np.zeros(N, bool)
    for _ in range(steps):
        if isinstance(envs.single_action_space, gymnasium.spaces.Discrete):
            actions = rng.integers(0, envs.single_action_space.n, N)
        else:
            actions = rng.uniform(-2, 2, (N, 1)).astype("float32")
        given = actions.copy()
        _, _, terminated, truncated, _ = envs.step(actions)
        actions[...] = 0  # the caller's array is the caller's
        for i in range(N):
            if not (mode is NEXT_STEP and over[i]):
                taken[i].append(given[i])
        over = terminated | truncated
        if mode is DISABLED and over.any():
            envs.reset(mask=over)
    return taken, over


def expected_of(make: Any, taken: list[list[Any]]) -> list[list[dict[str, Any]]]:
    return [list(plain_transitions(make, SEED + i, iter(actions))) for i, actions in enumerate(taken)]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("make", [cartpole, pendulum, counting])
def test_lanes(make: Any, mode: Any) -> None:
    envs = vector(make, N, mode)
    buf = lanes_for(envs, N)
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buf)
    taken, _ = run(wrapped, 100, mode)
    expected = expected_of(make, taken)
    at = 0
    for truth in expected:
        assert_rows(buf[at : at + len(truth)], truth)
        at += len(truth)
    assert at == len(buf)
    wrapped.close()
    segments = buf.get_segments()
    at = 0
    for truth in expected:
        mine = [(a - at, b - at) for a, b in segments if at <= a < at + len(truth)]
        assert_episodes(mine, truth, open_end=False)
        at += len(truth)
    assert sum(len([e for e in t if e["terminated"] or e["truncated"]]) for t in expected) > 5


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_a_buffer_for_each_slot(make: Any, mode: Any) -> None:
    envs = vector(make, N, mode)
    buffers = [tracked_for(envs) for _ in range(N)]
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buffers)
    taken, _ = run(wrapped, 60, mode)
    for buf, truth in zip(buffers, expected_of(make, taken)):
        assert_rows(buf[:], truth)
        assert_episodes(buf.get_segments(), truth)
    wrapped.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_interleaved(mode: Any) -> None:
    envs = vector(cartpole, N, mode)
    buf = untracked_for(envs, keys=["env_index", "done", *rc.transition_space(envs)])
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buf)
    taken, _ = run(wrapped, 60, mode)
    rows = buf[:]
    assert buf.get_segments() is None
    assert (rows["done"] == (rows["terminated"] | rows["truncated"])).all()
    for i, truth in enumerate(expected_of(cartpole, taken)):
        mine = np.flatnonzero(rows["env_index"] == i)
        assert_rows({k: v[mine] for k, v in rows.items() if k not in ("env_index", "done")}, truth)
    wrapped.close()


ASYNC = [(cartpole, mode) for mode in MODES] + [(reusing, NEXT_STEP), (reusing, DISABLED)]


@pytest.mark.parametrize(("make", "mode"), ASYNC, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_async(make: Any, mode: Any) -> None:
    # Not marked `process`: multiprocessing keeps the shared memory of gymnasium's observations for itself.
    envs = vector(make, N, mode, "async", context="fork")
    buf = lanes_for(envs, N)
    with rc.ReplayBufferCollectionWrapper(envs, buf) as wrapped:
        taken, _ = run(wrapped, 40, mode)
        assert_rows(buf[:], [t for truth in expected_of(make, taken) for t in truth])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda m: m.name)
@pytest.mark.parametrize("copy", [True, False])
def test_an_environment_that_reuses_its_arrays(mode: Any, copy: bool) -> None:
    """copy=False: the vector environment itself returns one array again and again."""
    envs = vector(reusing, N, mode, copy=copy)
    buf = lanes_for(envs, N)
    taken, _ = run(rc.ReplayBufferCollectionWrapper(envs, buf), 40, mode)
    assert_rows(buf[:], [t for truth in expected_of(reusing, taken) for t in truth])


def test_same_step_and_reused_arrays_are_out_of_reach_and_said_once() -> None:
    envs = vector(reusing, N, SAME_STEP)
    buf = lanes_for(envs, N)
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buf)
    with pytest.warns(UserWarning, match=r"final_obs.*check_env_pipeline") as said:
        taken, _ = run(wrapped, 40, SAME_STEP)
    assert len(said) == 1
    rows = buf[:]
    truth = [t for part in expected_of(reusing, taken) for t in part]
    ends = np.array([t["terminated"] or t["truncated"] for t in truth])
    assert_rows({"obs": rows["obs"], "reward": rows["reward"]}, truth)
    kept = np.flatnonzero(~ends)
    assert_rows({k: v[kept] for k, v in rows.items()}, [truth[i] for i in kept])


@pytest.mark.parametrize("make", [cartpole, pendulum, counting, reusing])
@pytest.mark.parametrize("auto", [False, True], ids=["plain", "Autoreset"])
def test_one_env(make: Any, auto: bool) -> None:
    env = gymnasium.wrappers.Autoreset(make()) if auto else make()
    buf = tracked_for(env)
    wrapped = rc.ReplayBufferCollectionWrapper(env, buf)
    wrapped.action_space.seed(3)
    wrapped.reset(seed=SEED)
    taken, over = [], False
    for _ in range(90):
        action = wrapped.action_space.sample()
        kept = np.copy(action)
        _, _, terminated, truncated, _ = wrapped.step(action)
        if not (auto and over):
            taken.append(kept)
        over = terminated or truncated
        if over and not auto:
            wrapped.reset()
    truth = list(plain_transitions(make, SEED, iter(taken)))
    assert_rows(buf[:], truth)
    assert_episodes(buf.get_segments(), truth)
    assert sum(t["terminated"] or t["truncated"] for t in truth) > 2


@pytest.mark.parametrize("layout", ["lanes", "untracked"])
def test_the_native_vector_environment(layout: str) -> None:
    """CartPoleVectorEnv draws for all slots at once: its truth is a second one with the same seed, looped by hand."""

    def make() -> Any:
        return gymnasium.make_vec(
            "CartPole-v1", num_envs=N, vectorization_mode="vector_entry_point", max_episode_steps=25
        )

    envs, twin = make(), make()
    buf = lanes_for(envs, N) if layout == "lanes" else untracked_for(envs)
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buf)
    wrapped.reset(seed=SEED)
    obs = twin.reset(seed=SEED)[0].copy()
    rng = np.random.default_rng(0)
    over = np.zeros(N, bool)
    truth: list[list[dict[str, Any]]] = [[] for _ in range(N)]
    order: list[dict[str, Any]] = []
    for _ in range(150):
        actions = rng.integers(0, 2, N)
        wrapped.step(actions)
        found, reward, terminated, truncated, _ = twin.step(actions)
        for i in np.flatnonzero(~over):
            row = {"obs": obs[i], "action": actions[i], "reward": reward[i], "next_obs": found[i].copy(),
                   "terminated": terminated[i], "truncated": truncated[i]}  # fmt: skip
            truth[i].append(row)
            order.append(row)
        obs, over = found.copy(), terminated | truncated
    assert_rows(buf[:], [t for part in truth for t in part] if layout == "lanes" else order)
    assert len(order) < 150 * N


def test_what_comes_back_is_what_the_environment_returns() -> None:
    class Marked(Counting):
        def reset(self, **kwargs: Any) -> Any:
            self.gave = super().reset(**kwargs)
            return self.gave

        def step(self, action: Any) -> Any:
            self.gave = super().step(action)
            return self.gave

    env = Marked()
    wrapped = rc.ReplayBufferCollectionWrapper(env, tracked_for(env))
    assert wrapped.reset(seed=0) is env.gave
    assert wrapped.step(1) is env.gave
    assert isinstance(wrapped, gymnasium.Wrapper) and isinstance(wrapped, rc.ReplayBufferCollectionWrapper)
    envs = vector(counting, 2, NEXT_STEP)
    wrapped = rc.ReplayBufferCollectionWrapper(envs, untracked_for(envs))
    assert isinstance(wrapped, gymnasium.vector.VectorWrapper)
    assert not isinstance(wrapped, gymnasium.Env)


@pytest.mark.parametrize("builder", ["default", "callable"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_environment_that_changes_the_action_it_is_given(n: int, builder: str) -> None:
    class Grabbing(Counting):
        action_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)

        def step(self, action: Any) -> Any:
            action *= 0
            return super().step(0)

    env = Grabbing(longest=10**9) if n == 1 else vector(lambda: Grabbing(longest=10**9), n, NEXT_STEP)
    buf = lanes_for(env, n)
    function = None if builder == "default" else _canonical
    wrapped = rc.ReplayBufferCollectionWrapper(env, buf, transition_builder=function)
    wrapped.reset()
    for k in (1, 2, 3):
        wrapped.step(np.full((2,) if n == 1 else (n, 2), k, np.float32))
    assert buf[:]["action"].tolist() == [[k, k] for k in (1, 2, 3)] * n


def _canonical(
    cached_obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any, **rest: Any
) -> Any:
    return {"obs": cached_obs, "action": action, "reward": float(reward), "next_obs": next_obs,
            "terminated": bool(terminated), "truncated": bool(truncated)}  # fmt: skip

"""transition_space of environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from recollect.spaces import as_space, compile_layout, transition_space


class Task(gymnasium.Env[Any, Any]):
    """An environment with a context."""

    observation_space: Any = spaces.Dict({"x": spaces.Box(-1, 1, (3,)), "n": spaces.Discrete(4)})
    action_space: Any = spaces.Discrete(2)
    context_space = spaces.Box(0, 1, (2,))


DEFAULT = ["obs", "action", "reward", "next_obs", "terminated", "truncated"]


def test_the_default_keys_in_order() -> None:
    space = transition_space(Task())
    assert list(space.spaces) == DEFAULT
    assert space["obs"] == space["next_obs"] == Task.observation_space
    assert space["action"] == Task.action_space
    assert space["reward"] == spaces.Box(-np.inf, np.inf, (), np.float32)
    assert space["terminated"] == space["truncated"] == as_space(((), "bool"))
    assert compile_layout(space).fields[-1].dtype == bool


def test_a_vector_env_gives_the_space_of_one_slot() -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    env = gymnasium.make("CartPole-v1")
    try:
        assert transition_space(envs) == transition_space(env)
    finally:
        envs.close()
        env.close()


def test_other_keys_in_the_order_asked() -> None:
    keys = ["env_index", "done", "context", "obs"]
    space = transition_space(Task(), keys=keys)
    assert list(space.spaces) == keys
    assert space["env_index"].dtype == np.int64
    assert space["done"] == as_space(((), "bool"))
    assert space["context"] == Task.context_space


def test_a_context_is_found_through_wrappers() -> None:
    wrapped = gymnasium.wrappers.TimeLimit(Task(), 5)
    assert transition_space(wrapped, ["context"])["context"] == Task.context_space


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (["obs", "rewards"], "^keys: must be different ones of .*'rewards'"),
        (["obs", "obs"], "^keys: must be different ones of"),
        ("obs", "^keys: must be a list of names"),
    ],
)
def test_unknown_keys_are_value_errors(keys: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        transition_space(Task(), keys)


def test_an_env_without_a_context_has_none() -> None:
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match="^env: must have a context_space"):
        transition_space(env, ["context"])
    env.close()


def test_an_unsupported_observation_is_named() -> None:
    env = Task()
    env.observation_space = spaces.Dict({"g": spaces.Graph(spaces.Box(0, 1), None)})
    with pytest.raises(TypeError, match="^obs/g: space must be one of"):
        transition_space(env)

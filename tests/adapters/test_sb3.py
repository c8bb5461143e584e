"""The buffers for Stable-Baselines3 give what SB3's own give, bit for bit, from one seed."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import recollect as rc

sb3 = pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")

from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

from recollect.adapters.sb3 import SB3HerReplayBuffer, SB3ReplayBuffer  # noqa: E402

BOX = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS = {
    "box": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
    "discrete": spaces.Discrete(5),
    "dict": spaces.Dict(
        {"eye": spaces.Box(0, 255, (2, 4), np.uint8), "touch": BOX, "kind": spaces.Discrete(3)}
    ),
}
ACTIONS = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "float64": spaces.Box(-1, 1, (2, 3), np.float64),
    "discrete": spaces.Discrete(4),
    "multi": spaces.MultiDiscrete([3, 2]),
}


def stacked(space: spaces.Space[Any], n: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: stacked(part, n) for name, part in space.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(n)])


def fill(buffers: list[Any], n_steps: int, seed: int = 0) -> None:
    """Add the same steps to all, as SB3's loop does: what follows the end of an episode is another first step."""
    space, action_space, n = buffers[0].observation_space, buffers[0].action_space, buffers[0].n_envs
    rng = np.random.default_rng(seed)
    space.seed(seed)
    action_space.seed(seed)
    obs = stacked(space, n)
    for _ in range(n_steps):
        last, action, done = stacked(space, n), stacked(action_space, n), rng.random(n) < 0.15
        infos = [{"TimeLimit.truncated": bool(d and rng.random() < 0.5), "noise": rng.random()} for d in done]
        reward = rng.normal(size=n)
        for buffer in buffers:
            buffer.add(deepcopy(obs), deepcopy(last), action, reward, done, infos)
        obs = deepcopy(last)
        fresh = stacked(space, n)
        for old, new in zip(*((x.values() if isinstance(x, dict) else [x]) for x in (obs, fresh))):
            old[done] = new[done]


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, dict):
            assert x.keys() == y.keys()
            for name in x:
                assert x[name].dtype == y[name].dtype and x[name].shape == y[name].shape
                assert torch.equal(x[name], y[name])
        elif x is not None or y is not None:
            assert x.dtype == y.dtype and x.shape == y.shape and x.device == y.device
            assert torch.equal(x, y)


def assert_same_draws(ours: Any, theirs: Any, n_draws: int = 5, **kwargs: Any) -> None:
    for seed in range(n_draws):
        drawn = []
        for buffer in (ours, theirs):
            np.random.seed(seed)  # noqa: NPY002
            drawn.append((buffer.sample(64, **kwargs), np.random.randint(1 << 30)))  # noqa: NPY002
        assert_equal(drawn[0][0], drawn[1][0])
        assert drawn[0][1] == drawn[1][1]  # and the generator is where SB3's leaves it


def columns(buffer: Any) -> dict[str, Any]:
    names = ["observations", "actions", "rewards", "dones", "timeouts"]
    names += [] if buffer.optimize_memory_usage else ["next_observations"]
    found = {name: getattr(buffer, name) for name in names}
    return {
        f"{name}/{key}": column
        for name, value in found.items()
        for key, column in (value.items() if isinstance(value, dict) else [("", value)])
    }


def assert_same_columns(ours: Any, theirs: Any) -> None:
    a, b = columns(ours), columns(theirs)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name]), name


@pytest.mark.parametrize("n_steps", [1, 19, 20, 21, 50])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_draws_are_those_of_sb3(obs: str, n_envs: int, n_steps: int) -> None:
    kind = DictReplayBuffer if obs == "dict" else ReplayBuffer
    action = ACTIONS[list(ACTIONS)[(n_steps + len(obs)) % len(ACTIONS)]]
    size = 20 * n_envs + n_envs - 1
    pair = [cls(size, OBSERVATIONS[obs], action, "cpu", n_envs) for cls in (SB3ReplayBuffer, kind)]
    fill(pair, n_steps)
    ring, their_ring = ((x.buffer_size, x.size(), x.pos, x.full) for x in pair)
    assert ring == their_ring
    assert_same_draws(*pair)
    assert_same_columns(*pair)


@pytest.mark.parametrize("n_steps", [1, 19, 20, 21, 50])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_draws_without_next_observations_are_those_of_sb3(n_envs: int, n_steps: int) -> None:
    kwargs = {"n_envs": n_envs, "optimize_memory_usage": True, "handle_timeout_termination": False}
    pair = [cls(20 * n_envs, BOX, BOX, "cpu", **kwargs) for cls in (SB3ReplayBuffer, ReplayBuffer)]
    fill(pair, n_steps)
    assert_same_draws(*pair)
    for buffer in pair:
        buffer.dones[(buffer.pos - 1) % 20] = True  # as `learn` does when it is called again
    assert_same_draws(*pair)
    assert pair[0].data.single_space.keys() == {"obs", "action", "reward", "terminated", "truncated"}


@pytest.mark.parametrize("space", [BOX, OBSERVATIONS["dict"]], ids=["timeouts", "dict"])
def test_what_optimize_memory_usage_cannot_keep_is_refused(space: spaces.Space[Any]) -> None:
    timeouts = space is BOX
    with pytest.raises(ValueError, match="optimize_memory_usage: must go with a Box"):
        SB3ReplayBuffer(10, space, BOX, optimize_memory_usage=True, handle_timeout_termination=timeouts)


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("obs", (4,)),
        ("next_obs", ()),
        ("action", (7,)),
        ("reward", (2,)),
        ("terminated", (3,)),
        ("n_envs", ()),
    ],
)
def test_a_step_of_another_shape_is_refused_whole(n_envs: int, name: str, shape: tuple[int, ...]) -> None:
    buffer = SB3ReplayBuffer(10, BOX, ACTIONS["float64"], "cpu", n_envs)
    shapes = {"obs": (3,), "next_obs": (3,), "action": (2, 3), "reward": (), "terminated": ()}
    step = {key: np.zeros((n_envs, *shape)) for key, shape in shapes.items()}
    buffer.add(*step.values(), [{}] * n_envs)
    if name == "n_envs":  # SB3 would copy the step of one environment to all of them
        step = {key: np.zeros((n_envs + 1, *shape)) for key, shape in shapes.items()}
        name = "obs"
    else:
        step[name] = np.zeros((n_envs, *shape))
    with pytest.raises(rc.SchemaError, match=rf"^{name}: must have the shape \({n_envs},"):
        buffer.add(*step.values(), [{}] * n_envs)
    assert (buffer.pos, len(buffer.data)) == (1, n_envs)


def test_a_replay_buffer_that_sb3_saved_is_taken_over(tmp_path: Path) -> None:
    model = sb3.SAC("MlpPolicy", make_vec_env("Pendulum-v1", 2), buffer_size=60, device="cpu")
    fill([model.replay_buffer], 41)
    model.save_replay_buffer(tmp_path / "replay")
    model.load_replay_buffer(tmp_path / "replay")
    old = model.replay_buffer
    new = SB3ReplayBuffer(
        old.buffer_size * old.n_envs, old.observation_space, old.action_space, old.device, old.n_envs
    )
    steps = (np.arange(old.size()) + (old.pos if old.full else 0)) % old.buffer_size
    parts = old.observations, old.next_observations, old.actions, old.rewards, old.dones
    infos = [[{"TimeLimit.truncated": flag} for flag in row] for row in old.timeouts[steps]]
    new.extend(*(part[steps] for part in parts), infos)
    assert new.size() == old.size() == 30
    assert np.array_equal(new.observations, old.observations[steps])
    assert np.array_equal(new.timeouts, old.timeouts[steps]) and np.array_equal(new.dones, old.dones[steps])


def test_columns_are_copies_that_cannot_be_written() -> None:
    buffer = SB3ReplayBuffer(10, BOX, BOX, "cpu")
    fill([buffer], 4)
    for name in ("observations", "next_observations", "actions", "rewards"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(buffer, name)[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        buffer.dones[:2][0] = 1


def test_columns_of_one_buffer_extend_another() -> None:
    pair = [cls(20, BOX, BOX, "cpu") for cls in (SB3ReplayBuffer, ReplayBuffer)]
    fill(pair, 20)
    for buffer in pair:
        infos = [[{"TimeLimit.truncated": flag}] for flag in buffer.timeouts[:7]]
        parts = buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones
        buffer.extend(*(part[:7] for part in parts), infos)
    assert_same_columns(*pair)


def test_segments_are_episodes_of_one_environment() -> None:
    buffer = SB3ReplayBuffer(20, BOX, BOX, "cpu", n_envs=2)
    obs = np.zeros((2, 3), np.float32)
    for step in range(6):
        buffer.add(obs, obs, obs, [step, -step], [step == 2, step == 3], [{}, {}])
    rewards = buffer.data[:]["reward"]
    found = [rewards[first:end].tolist() for first, end in buffer.data.get_segments()]
    assert found == [[0, 1, 2], [0, -1, -2, -3]]
    buffer.dones[5] = True
    assert len(buffer.data.get_segments()) == 4


def test_reset_forgets_everything() -> None:
    pair = [cls(8, BOX, BOX, "cpu") for cls in (SB3ReplayBuffer, ReplayBuffer)]
    fill(pair, 11)
    for buffer in pair:
        buffer.reset()
    assert pair[0].size() == 0 and len(pair[0].data) == 0
    fill(pair, 3, seed=1)
    assert_same_draws(*pair)


def test_a_buffer_beyond_memory_is_refused_with_advice_that_can_be_taken() -> None:
    with pytest.raises(rc.BudgetError, match=r"^buffer_size: must fit in memory, got \d+ \(.*; make it") as e:
        SB3ReplayBuffer(1 << 36, BOX, BOX, "cpu")
    assert "MemmapStorage" not in str(e.value)


@pytest.mark.parametrize("kind", [SB3ReplayBuffer, SB3HerReplayBuffer])
def test_n_step_returns_are_refused_by_name(kind: type[Any]) -> None:
    env = make_vec_env(Reach)

    def make(**kwargs: Any) -> Any:
        return sb3.SAC(
            "MultiInputPolicy", env, buffer_size=9, replay_buffer_class=kind, replay_buffer_kwargs=kwargs
        )

    with pytest.raises(
        ValueError, match=rf"^n_steps: must be 1, as {kind.__name__} .*, got 3; .*rc.NStepBatch"
    ):
        make(n_steps=3, gamma=0.99)
    assert make(n_steps=1, gamma=0.99).replay_buffer.size() == 0


def test_an_empty_buffer_gives_no_sample() -> None:
    buffer = SB3ReplayBuffer(8, BOX, BOX, "cpu")
    with pytest.raises(rc.EmptyError, match="^sample: needs a step to draw, got an empty buffer; add steps"):
        buffer.sample(4)
    fill([buffer], 1)
    buffer.sample(4)
    buffer.reset()
    with pytest.raises(rc.EmptyError):
        buffer.sample(4)


def test_vec_normalize_is_applied_as_by_sb3() -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", 2))
    env.reset()
    for _ in range(20):
        env.step(stacked(env.action_space, 2))
    args = 40, env.observation_space, env.action_space, "cpu", 2
    pair = [cls(*args) for cls in (SB3ReplayBuffer, ReplayBuffer)]
    fill(pair, 30)
    assert_same_draws(*pair, env=env)


class Reach(gym.Env[Any, Any]):
    """Walk on a line to a goal; the reward has the info's word in it, and tells who asks for more than that."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None

    def __init__(self, length: int = 7, random_ends: bool = True) -> None:
        part = spaces.Box(-9, 9, (1,), np.float32)
        names = "observation", "achieved_goal", "desired_goal"
        self.observation_space = spaces.Dict(dict.fromkeys(names, part))
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.length, self.random_ends = length, random_ends

    def _obs(self) -> dict[str, Any]:
        at = np.array([self.at], np.float32)
        return {"observation": at.copy(), "achieved_goal": at, "desired_goal": self.goal.copy()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.t = 0.0, 0
        self.goal = self.np_random.uniform(-2, 2, 1).astype(np.float32)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.at, self.t = float(np.clip(self.at + action[0], -9, 9)), self.t + 1
        obs = self._obs()
        info = {"bonus": self.t / 100}
        reward = float(self.compute_reward(obs["achieved_goal"][None], self.goal[None], [info])[0])
        ended = bool(reward > -0.2) or (self.random_ends and self.np_random.random() < 0.1)
        return obs, reward, ended, self.t >= self.length, info

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        bonus = np.array([info.get("bonus", 0.0) for info in infos])
        return -np.abs(achieved - desired)[:, 0] + bonus


def her_pair(n_envs: int, size: int = 30, **kwargs: Any) -> tuple[Any, list[Any]]:
    env = make_vec_env(Reach, n_envs, seed=3)
    args = size * n_envs, env.observation_space, env.action_space, env
    kinds = SB3HerReplayBuffer, sb3.HerReplayBuffer
    return env, [cls(*args, device="cpu", n_envs=n_envs, **kwargs) for cls in kinds]


def walk(env: Any, buffers: list[Any], n_steps: int) -> None:
    rng = np.random.default_rng(0)
    obs = env.reset()
    for _ in range(n_steps):
        action = rng.uniform(-1, 1, (env.num_envs, 1)).astype(np.float32)
        following, reward, done, infos = env.step(action)
        last = {name: value.copy() for name, value in following.items()}
        for i in np.flatnonzero(done):
            for name in last:
                last[name][i] = infos[i]["terminal_observation"][name]
        for buffer in buffers:
            buffer.add(dict(obs), dict(last), action, reward, done, infos)
        obs = following


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [12, 30, 100])
def test_hindsight_goals_are_those_of_sb3(strategy: str, n_envs: int, n_steps: int) -> None:
    env, pair = her_pair(n_envs, goal_selection_strategy=strategy, copy_info_dict=n_steps != 30)
    walk(env, pair, n_steps)
    assert_same_draws(*pair)
    walk(env, pair, 2)  # an episode is going on, another one is partly overwritten
    assert_same_draws(*pair)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last episode is cut, SB3 says
        for buffer in pair:
            buffer.truncate_last_trajectory()
    assert_same_draws(*pair)
    assert_same_columns(*pair)
    walk(env, pair, 9)
    assert_same_draws(*pair)
    assert_same_columns(*pair)


@pytest.mark.parametrize("n_sampled_goal", [0, 1, 4])
def test_share_of_hindsight_goals_is_that_of_sb3(n_sampled_goal: int) -> None:
    env, pair = her_pair(2, n_sampled_goal=n_sampled_goal)
    walk(env, pair, 20)
    assert_same_draws(*pair)


@pytest.mark.parametrize("space", [BOX, OBSERVATIONS["dict"]], ids=["box", "dict"])
def test_hindsight_needs_goals(space: spaces.Space[Any]) -> None:
    with pytest.raises(
        rc.SchemaError, match="^observation_space: must be a Dict with achieved_goal and desired_goal"
    ):
        SB3HerReplayBuffer(9, space, BOX, None, "cpu")


def test_hindsight_needs_an_episode() -> None:
    env, (ours, _) = her_pair(1)
    obs = env.reset()
    ours.add(obs, obs, np.zeros((1, 1), np.float32), [0.0], [False], [{}])
    with pytest.raises(rc.EmptyError, match="let learning_starts be more than"):
        ours.sample(4)
    walk(env, [ours], 9)
    ours.sample(4)
    ours.reset()
    with pytest.raises(rc.EmptyError):
        ours.sample(4)


@pytest.mark.parametrize("optimize", [False, True])
def test_a_pickle_goes_on_where_the_buffer_was(optimize: bool) -> None:
    kwargs = {"optimize_memory_usage": optimize, "handle_timeout_termination": not optimize}
    pair = [cls(40, BOX, ACTIONS["discrete"], "cpu", 2, **kwargs) for cls in (SB3ReplayBuffer, ReplayBuffer)]
    fill(pair, 33)
    pair = [pickle.loads(pickle.dumps(buffer)) for buffer in pair]
    assert_same_draws(*pair)
    fill(pair, 9, seed=1)
    assert_same_draws(*pair)
    assert_same_columns(*pair)


@pytest.mark.parametrize("n_steps", [7, 20, 33])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("obs", ["box", "dict"])
def test_a_dump_is_taken_over(obs: str, n_envs: int, n_steps: int, tmp_path: Path) -> None:
    args = 20 * n_envs, OBSERVATIONS[obs], ACTIONS["box"], "cpu", n_envs
    old, new = SB3ReplayBuffer(*args), SB3ReplayBuffer(*args)
    fill([old], n_steps)
    fill([new], 3, seed=1)
    old.data.dumps(tmp_path / "dump", cut_open=True)
    new.load_dump(tmp_path / "dump")
    assert new.size() == old.size() == len(new.data) // n_envs
    assert repr(new.data[:]) == repr(old.data[:])
    assert new.data.get_segments() == rc.ReplayBuffer.load_from(tmp_path / "dump").get_segments()
    their = (DictReplayBuffer if obs == "dict" else ReplayBuffer)(*args)
    order = (np.arange(old.size()) + (old.pos if old.full else 0)) % 20
    names = "observations", "next_observations", "actions", "rewards", "dones"
    for step in order:
        parts = [getattr(old, name) for name in names]
        row = [{k: x[step] for k, x in p.items()} if isinstance(p, dict) else p[step] for p in parts]
        their.add(*row, [{"TimeLimit.truncated": bool(flag)} for flag in old.timeouts[step]])
    fill([new, their], 4, seed=2)
    assert_same_draws(new, their)
    assert_same_columns(new, their)

    small = SB3ReplayBuffer(5 * n_envs, *args[1:])
    small.load_dump(tmp_path / "dump")
    assert small.size() == 5 and small.full
    assert np.array_equal(small.rewards, old.rewards[order[-5:]])


def test_a_dump_with_hindsight_goals_is_taken_over(tmp_path: Path) -> None:
    env, pair = her_pair(2)
    walk(env, pair, 25)
    pair[0].data.dumps(tmp_path / "dump", cut_open=True)
    _, (new, _) = her_pair(2)
    new.load_dump(tmp_path / "dump")
    with pytest.warns(UserWarning, match="last trajectory"):
        pair[1].truncate_last_trajectory()
    assert_same_draws(new, pair[1])
    walk(env, [new, pair[1]], 9)
    assert_same_draws(new, pair[1])
    _, (with_infos, _) = her_pair(2, copy_info_dict=True)
    with pytest.raises(ValueError, match="^load_dump: needs no infos.*; go on from model.save_replay_buffer"):
        with_infos.load_dump(tmp_path / "dump")


def test_a_dump_that_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    old = SB3ReplayBuffer(20, BOX, BOX, "cpu", 2)
    fill([old], 4)
    old.data.dumps(tmp_path / "dump", cut_open=True)
    for args, message in (
        ((BOX, ACTIONS["discrete"], "cpu", 2), "must have rows of .*; make the buffer with the spaces"),
        ((BOX, BOX, "cpu", 1), r"must have as many steps in each of n_envs=1 lanes, got \[4, 4\]"),
    ):
        new = SB3ReplayBuffer(20, *args)
        fill([new], 3)
        with pytest.raises(rc.SchemaError, match="^load_dump: " + message):
            new.load_dump(tmp_path / "dump")
        assert new.size() == 3
    with pytest.raises(rc.ReadOnlyError, match=r"^data: cannot be assigned to, got .*; .* load_dump\(path\)"):
        old.data = rc.ReplayBuffer.load_from(tmp_path / "dump")
    assert old.size() == 4
    lean = SB3ReplayBuffer(
        9, BOX, BOX, "cpu", 2, optimize_memory_usage=True, handle_timeout_termination=False
    )
    with pytest.raises(ValueError, match="^load_dump: needs next_obs in the rows"):
        lean.load_dump(tmp_path / "dump")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks: threads that wait for each other would take most of the time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(model: Any, n: int) -> tuple[dict[str, Any], float]:
    model.learn(n)
    parameters = {name: value.clone() for name, value in model.policy.state_dict().items()}
    return parameters, float(np.mean([episode["r"] for episode in model.ep_info_buffer] or [0.0]))


def assert_same_training(make: Any, n: int) -> None:
    (ours, our_return), (theirs, their_return) = (trained(make(is_ours), n) for is_ours in (True, False))
    assert our_return == their_return
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("n_envs", [1, 2])
def test_sac_learns_the_same_weights(n_envs: int) -> None:
    def make(is_ours: bool) -> Any:
        return sb3.SAC(
            "MlpPolicy", make_vec_env("Pendulum-v1", n_envs, seed=1), seed=0, device="cpu", learning_starts=50,
            buffer_size=200, batch_size=32, policy_kwargs={"net_arch": [16]}, train_freq=4,
            replay_buffer_class=SB3ReplayBuffer if is_ours else None,
        )  # fmt: skip

    assert_same_training(make, 300)


@pytest.mark.usefixtures("one_thread")
def test_dqn_with_hindsight_goals_learns_the_same_weights() -> None:
    def make(is_ours: bool) -> Any:
        env = make_vec_env(lambda: BitFlippingEnv(n_bits=4, continuous=False), 2)
        return sb3.DQN(
            "MultiInputPolicy", env, seed=0, device="cpu", learning_starts=40, buffer_size=100, batch_size=32,
            replay_buffer_class=SB3HerReplayBuffer if is_ours else sb3.HerReplayBuffer, train_freq=4,
            policy_kwargs={"net_arch": [16]},
        )  # fmt: skip

    assert_same_training(make, 400)


@pytest.mark.usefixtures("one_thread")
def test_a_saved_replay_buffer_is_loaded_by_a_model(tmp_path: Path) -> None:
    env = make_vec_env(Reach, 2, seed=0)
    model = sb3.SAC(
        "MultiInputPolicy", env, seed=0, policy_kwargs={"net_arch": [8]}, replay_buffer_class=SB3HerReplayBuffer,
        buffer_size=500, learning_starts=40, device="cpu",
    ).learn(60)  # fmt: skip
    model.save_replay_buffer(tmp_path / "replay")
    model.save(tmp_path / "model")
    before = columns(model.replay_buffer)
    loaded = sb3.SAC.load(tmp_path / "model", env=env)
    loaded.load_replay_buffer(tmp_path / "replay", truncate_last_traj=False)
    after = columns(loaded.replay_buffer)
    assert isinstance(loaded.replay_buffer, SB3HerReplayBuffer) and loaded.replay_buffer.size() == 30
    assert all(np.array_equal(before[name], after[name]) for name in before)
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 40


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [SB3ReplayBuffer, SB3HerReplayBuffer])
def test_a_model_goes_on_from_a_dump(kind: type[Any], tmp_path: Path) -> None:
    env = make_vec_env(Reach, 2, seed=0)
    model = sb3.SAC(
        "MultiInputPolicy", env, seed=0, policy_kwargs={"net_arch": [8]}, replay_buffer_class=kind,
        buffer_size=500, learning_starts=40, device="cpu",
    ).learn(60)  # fmt: skip
    model.save(tmp_path / "model")
    model.replay_buffer.data.dumps(tmp_path / "replay", cut_open=True)
    loaded = sb3.SAC.load(tmp_path / "model", env=env)
    loaded.replay_buffer.load_dump(tmp_path / "replay")
    assert isinstance(loaded.replay_buffer, kind) and loaded.replay_buffer.size() == 30
    assert np.array_equal(loaded.replay_buffer.rewards, model.replay_buffer.rewards)
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.replay_buffer.size() == 40


@pytest.mark.process
def test_the_benchmark_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sb3_buffers.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "these figures say only that everything runs" in done.stdout

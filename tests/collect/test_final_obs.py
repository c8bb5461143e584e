"""Each frame recorded once, the last of an episode too, and shown as transitions: against a list of what happened."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import recollect as rc

KEYS = ["obs", "action", "reward", "terminated", "truncated"]
LENGTHS = [1, 2, 5, 3, 1, 7, 4]


class Frames(gym.Env[Any, Any]):
    """Episodes of known lengths; every observation is a number of its own, odd episodes are truncated."""

    observation_space = gym.spaces.Box(0, 10**9, (2,), np.int64)
    action_space = gym.spaces.Discrete(100, start=1)

    def __init__(self, slot: int = 0) -> None:
        self.slot, self.episode = slot, -1

    def _obs(self) -> Any:
        return np.full(2, 10_000 * self.slot + 100 * self.episode + self.t, np.int64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= LENGTHS[(self.episode + self.slot) % len(LENGTHS)]
        odd = self.episode % 2 == 1
        return self._obs(), float(self.t), over and not odd, over and odd, {}


def transition(
    action: int, obs: Any, reward: float, next_obs: Any, ended: tuple[bool, bool]
) -> tuple[Any, ...]:
    return (int(obs[0]), action, reward, int(next_obs[0]), *ended)


def shown(batch: Any) -> list[tuple[Any, ...]]:
    """The transitions of a batch of stacks, with both stacks whole."""
    columns = (batch["action"], batch["reward"], batch["terminated"], batch["truncated"])
    return [
        (obs[:, 0].tolist(), nxt[:, 0].tolist(), *(x.item() for x in rest))
        for obs, nxt, *rest in zip(batch["obs"], batch["next_obs"], *columns)
    ]


def naive(episodes: list[list[tuple[Any, ...]]], stack: int) -> list[tuple[Any, ...]]:
    """What transitions of whole episodes must look like: frames before the first are the first."""
    found = []
    for steps in episodes:
        frames = [steps[0][0], *(step[3] for step in steps)]
        padded = [frames[0]] * (stack - 1) + frames
        for t, (_, action, reward, _, *ended) in enumerate(steps):
            found.append((padded[t : t + stack], padded[t + 1 : t + 1 + stack], action, reward, *ended))
    return found


def buffer(env: Any, capacity: int = 1_200, **more: Any) -> rc.ReplayBuffer:
    space = rc.transition_space(env, KEYS)
    return rc.ReplayBuffer.create("memory", space, capacity=capacity, maintain_segment_metadata=True, **more)


def play(env: Any, n_steps: int, resets: frozenset[int] = frozenset()) -> list[list[tuple[Any, ...]]]:
    episodes: list[list[tuple[Any, ...]]] = [[]]
    obs, _ = env.reset()
    for t in range(n_steps):
        action = 1 + t % 100
        after, reward, *ended, _ = env.step(action)
        episodes[-1].append(transition(action, obs, reward, after, (ended[0], ended[1])))
        obs = after
        if any(ended) or t in resets:
            obs, _ = env.reset()
            episodes.append([])
    return [steps for steps in episodes if steps]


@given(
    n_steps=st.integers(1, 40),
    stack=st.integers(1, 5),
    capacity=st.integers(12, 60),
    resets=st.frozensets(st.integers(0, 40), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_every_transition_is_shown_with_both_stacks(
    n_steps: int, stack: int, capacity: int, resets: frozenset[int]
) -> None:
    buf = buffer(Frames(), capacity)
    env = rc.ReplayBufferCollectionWrapper(Frames(), buf, record_final_obs=True, validate_transition=True)
    episodes = play(env, n_steps, resets)
    env.close()
    view = rc.TransitionBatch(buf, stack=stack)
    batches = list(rc.StepSampler(view, 4, seed=0).epoch_iter_with_metadata())
    found = sorted(x for data, _ in batches for x in shown(data))
    wanted = sorted(naive(episodes, stack))
    n_rows = n_steps + len(episodes)
    assert len(buf) == min(n_rows, capacity)
    if n_rows <= capacity:
        assert found == wanted
        return
    # What was overwritten is gone. The head of the oldest episode may be cut: there its oldest frame stands in.
    newest = {x[0][-1]: x for x in wanted}
    kept = {row["obs"][0] for row in buf}
    assert {x[0][-1] for x in found} == {f for f, x in newest.items() if {f, x[1][-1]} <= kept}
    for data, meta in batches:
        for x, valid, step in zip(shown(data), meta["valid_mask"], meta["step"]):
            frames = newest[x[0][-1]]
            assert x[2:] == frames[2:] and x[0][1:] == x[1][:-1] and x[1][-1] == frames[1][-1]
            oldest = next(f for f in [*frames[0], frames[1][-1]] if f in kept)
            assert x[0] == [f if f in kept else oldest for f in frames[0]]
            whole = all(f in kept for f in frames[0])
            assert valid[:-1].sum() == min(stack, step + 1) or not whole


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("layout", ["lanes", "buffers"])
def test_slots_of_a_vector_keep_their_last_frames(mode: AutoresetMode, layout: str) -> None:
    envs = SyncVectorEnv([lambda k=k: Frames(k) for k in range(3)], autoreset_mode=mode)
    buffers = [buffer(envs, num_lanes=3)] if layout == "lanes" else [buffer(envs) for _ in range(3)]
    recorded = rc.ReplayBufferCollectionWrapper(
        envs, buffers[0] if layout == "lanes" else buffers, record_final_obs=True
    )
    recorded.reset(seed=0)
    for t in range(30):
        recorded.step(np.full(3, t + 1))
    recorded.close()
    found = [x for buf in buffers for x in shown(rc.TransitionBatch(buf, stack=2)[:])]
    segments = [buf.get_segments() for buf in buffers]
    n_rows = sum(len(buf) for buf in buffers)
    assert sum(end - start for found_here in segments for start, end in found_here or []) == n_rows
    for buf in buffers:
        for start, end in rc.TransitionBatch(buf).get_segments() or []:
            steps = rc.TransitionBatch(buf)[start:end]
            first, last = int(steps["obs"][0, 0]), int(steps["next_obs"][-1, 0])
            assert steps["obs"][:, 0].tolist() == list(range(first, last))
            assert steps["reward"].tolist() == [1.0 + k for k in range(last - first)]
            over = steps["terminated"] | steps["truncated"]
            length = LENGTHS[(first // 100 % 100 + first // 10_000) % len(LENGTHS)]
            assert over.tolist() == [k + 1 == length for k in range(last - first)]
    assert found


def test_draws_are_uniform_over_transitions_and_never_final_rows() -> None:
    buf = buffer(Frames())
    with rc.ReplayBufferCollectionWrapper(Frames(), buf, record_final_obs=True) as env:
        episodes = play(env, 23)
    wanted = sorted(naive(episodes, 3))
    view = rc.TransitionBatch(buf, stack=3)
    samplers = [
        rc.StepSampler(view, 4_000, seed=1),
        rc.StepSampler(view, len(wanted), seed=1, replace=False),
        rc.PrioritizedSampler(view, 4_000, seed=1),
        rc.StepSampler(rc.NStepBatch(view, n=1, gamma=0.9), 4_000, seed=1),
    ]
    for sampler in samplers:
        for data in (sampler.sample(), sampler.sample_with_metadata()[0]):
            found = shown(data)
            assert sorted({str(x) for x in found}) == sorted({str(x) for x in wanted})
            counts = [sum(x == y for x in found) for y in wanted]
            assert max(counts) < 2.5 * min(counts)


def test_n_step_returns_end_where_the_episode_does() -> None:
    buf = buffer(Frames())
    with rc.ReplayBufferCollectionWrapper(Frames(), buf, record_final_obs=True) as env:
        episodes = play(env, 23)
    n_step = rc.NStepBatch(rc.TransitionBatch(buf, stack=2), n=3, gamma=0.5)
    found = {int(x["obs"][-1, 0]): x for x in n_step}
    assert len(found) == 23
    for steps in episodes:
        for t, step in enumerate(steps):
            after = steps[t : t + 3]
            x = found[step[0]]
            assert x["reward"] == sum(0.5**k * s[2] for k, s in enumerate(after))
            assert x["next_obs"][-1, 0] == after[-1][3]
            assert x["discount"] == (0.0 if after[-1][4] else 0.5 ** len(after))


def test_a_row_that_is_no_transition_shows_its_last_frame_and_says_so() -> None:
    buf = buffer(Frames())
    env = rc.ReplayBufferCollectionWrapper(Frames(), buf, record_final_obs=True)
    with pytest.raises(rc.EmptyError, match="two rows of one segment"):
        rc.StepSampler(rc.TransitionBatch(buf), 4).sample()
    play(env, 1)  # an episode of one step, and one that has begun
    view = rc.TransitionBatch(buf)
    data, meta = view.get_at_with_metadata([0, 1])
    assert data["next_obs"][:, 0].tolist() == [1, 1] and data["obs"].shape == (2, 2)
    assert meta["valid_mask"].tolist() == [[True, True], [True, False]]
    assert view.get_segments() == [(0, 1)]
    data["obs"][:] = 0  # is the caller's
    assert view[0]["next_obs"][0] == 1 and view.get_flattened_at(0).shape == (8,)


def test_reset_and_new_buffers_keep_where_a_cut_episode_led() -> None:
    first, second = buffer(Frames()), buffer(Frames())
    env = rc.ReplayBufferCollectionWrapper(Frames(), first, record_final_obs=True)
    env.reset()
    env.step(1)  # the first episode has one step
    env.reset()
    env.reset()
    env.step(2)
    env.set_replay_buffers(second, finalize_old_segments=True)
    env.step(3)
    env.close()
    assert [x[0][0] for x in shown(rc.TransitionBatch(first, 1)[[0, 2]])] == [0, 200]
    assert first.get_segments() == [(0, 2), (2, 4)] and second.get_segments() == [(0, 2)]
    assert second[:]["obs"][:, 0].tolist() == [201, 202]


def test_what_cannot_be_recorded_so_is_refused_with_the_way_out() -> None:
    env = Frames()
    whole = rc.ReplayBuffer.create(
        "memory", rc.transition_space(env), capacity=9, maintain_segment_metadata=True
    )
    plain = rc.ReplayBuffer.create("memory", rc.transition_space(env, KEYS), capacity=9)
    for buf, builder, message in (
        (whole, None, "without next_obs"),
        (plain, None, "maintain_segment_metadata=True"),
        (buffer(env), lambda **parts: parts, "default builder"),
    ):
        with pytest.raises(ValueError, match=f"record_final_obs: .*{message}"):
            rc.ReplayBufferCollectionWrapper(env, buf, transition_builder=builder, record_final_obs=True)
    with pytest.raises(ValueError, match="must keep segments"):
        rc.TransitionBatch(plain)
    with pytest.raises(ValueError, match="record without it"):
        rc.TransitionBatch(whole)
    with pytest.raises(rc.MissingLeafError, match="pass obs="):
        rc.TransitionBatch(buffer(env), obs="frame")
    for stack, error in ((0, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="stack: must be"):
            rc.TransitionBatch(buffer(env), stack=stack)  # type: ignore[arg-type]

"""Hindsight goals: DQN learns to turn a row of bits into another, though it is told of success only at the very end.

One step flips one bit. Of 256 goals a random player hits its own almost never, so there is nothing to learn from; but
every episode ends somewhere, and `HindsightSampler` learns as if that had been the goal.

    python examples/her_bit_flip.py
"""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import recollect as rc

BITS, EPISODES, UPDATES, GAMMA = 8, 600, 5, 0.95


class BitFlip(gym.Env[dict[str, Any], int]):
    """Flip one of the bits at each step until they are those of the goal; -1 for each step before."""

    def __init__(self) -> None:
        bits = gym.spaces.MultiBinary(BITS)
        self.observation_space = gym.spaces.Dict({"achieved_goal": bits, "desired_goal": bits})
        self.action_space = gym.spaces.Discrete(BITS)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(0, 2, (2, BITS), dtype=np.int8)
        self.steps = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.bits[action] ^= 1
        self.steps += 1
        reward = float(reached(self.bits, self.goal) - 1)
        return self._obs(), reward, reward == 0, self.steps == BITS, {}

    def _obs(self) -> dict[str, Any]:
        return {"achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}


def reached(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(axis=-1)


def reward_of(achieved: Any, desired: Any, info: Any) -> Any:
    """What the sampler asks for goals that it put in place of the real ones; whole batches at once."""
    return reached(achieved, desired).astype(np.float32) - 1


def as_input(obs: dict[str, Any]) -> torch.Tensor:
    both = np.concatenate([obs["achieved_goal"], obs["desired_goal"]], axis=-1)
    return torch.from_numpy(both.astype(np.float32))


def main(seed: int = 0, ratio: float = 0.8) -> float:
    """Train with a share `ratio` of hindsight goals; return the share of the last 100 episodes that succeeded."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    chance = random.Random(seed)
    env: Any = BitFlip()
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(env), capacity=20_000, maintain_segment_metadata=True
    )
    env = rc.ReplayBufferCollectionWrapper(env, buf)  # an episode is a segment: goals come from the same one
    sampler = rc.HindsightSampler(buf, 128, reward_of, strategy="future", ratio=ratio, seed=seed)

    online, target = (
        nn.Sequential(nn.Linear(2 * BITS, 128), nn.ReLU(), nn.Linear(128, BITS)) for _ in range(2)
    )
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    successes = []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        terminated = truncated = False
        while not (terminated or truncated):
            with torch.no_grad():
                action = int(online(as_input(obs)).argmax())
            if chance.random() < 0.2:
                action = chance.randrange(BITS)
            obs, _, terminated, truncated, _ = env.step(action)
        successes.append(terminated)

        for _ in range(UPDATES):
            batch = sampler.sample()
            reward = torch.from_numpy(batch["reward"])
            with torch.no_grad():
                # With another goal another step is the last: the reward says which.
                goal = reward + GAMMA * target(as_input(batch["next_obs"])).amax(dim=1) * (reward < 0)
            value = online(as_input(batch["obs"])).gather(1, torch.from_numpy(batch["action"])[:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if episode % 10 == 0:
            target.load_state_dict(online.state_dict())
    env.close()
    return float(np.mean(successes[-100:]))


if __name__ == "__main__":
    share = main()
    print(f"success in the last 100 episodes: {share:.0%}")
    assert share > 0.5  # without hindsight (ratio=0) it stays near zero

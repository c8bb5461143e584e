"""DQN on pictures, each frame kept once: three views make stacks, n-step returns and tensors of them.

A ball falls, a paddle catches it. One picture does not tell which way the ball drifts, a stack of them does.

python examples/dqn_frames.py
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import recollect as rc

SIZE, STACK, N_STEP = 7, 3, 2
STEPS, WARM_UP, TRAIN_EVERY, COPY_EVERY = 6_000, 500, 2, 200
GAMMA, BATCH, RATE = 0.95, 64, 1e-3


class Catch(gym.Env[Any, Any]):
    """A ball drifts down to one side and bounces off the walls; reward 1 for catching it, 0 for missing."""

    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = gym.spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.y, self.paddle = int(self.np_random.integers(SIZE)), 0, SIZE // 2
        self.drift = int(self.np_random.choice([-1, 1]))
        return self._picture(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIZE - 1)
        if not 0 <= self.x + self.drift < SIZE:
            self.drift = -self.drift
        self.x, self.y = self.x + self.drift, self.y + 1
        landed = self.y == SIZE - 1
        return self._picture(), float(landed and self.x == self.paddle), landed, False, {}

    def _picture(self) -> Any:
        picture = np.zeros((SIZE, SIZE), np.uint8)
        picture[SIZE - 1, self.paddle] = 128
        picture[self.y, self.x] = 255
        return picture


def q_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(STACK * SIZE * SIZE, 128), nn.ReLU(), nn.Linear(128, 3))


def scaled(frames: torch.Tensor) -> torch.Tensor:
    return frames.float() / 255


def main(seed: int = 0) -> float:
    """Train; return which part of the last 100 balls was caught."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    chance = random.Random(seed)

    env = Catch()
    space = rc.transition_space(env, ["obs", "action", "reward", "terminated", "truncated"])  # no next_obs
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=3_000, maintain_segment_metadata=True)
    env = rc.ReplayBufferCollectionWrapper(env, buf, record_final_obs=True)

    stacks = rc.TransitionBatch(buf, stack=STACK)  # obs and next_obs, (B, 3, 7, 7) each
    returns = rc.NStepBatch(stacks, n=N_STEP, gamma=GAMMA)  # reward, next_obs and discount of two steps
    tensors = rc.ToBackendOrDeviceBatch(returns, "torch")
    sampler = rc.StepSampler(tensors, BATCH, seed=seed)

    online, target = q_network(), q_network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=RATE)

    caught: deque[float] = deque(maxlen=100)
    obs, _ = env.reset(seed=seed)
    recent = deque([obs] * STACK, maxlen=STACK)  # what the policy sees is stacked as the view stacks
    for step in range(STEPS):
        if chance.random() < max(0.02, 1.0 - step / 3_000):
            action = chance.randrange(3)
        else:
            with torch.no_grad():
                action = int(online(scaled(torch.from_numpy(np.stack(recent)[None]))).argmax())
        obs, reward, terminated, truncated, _ = env.step(action)
        recent.append(obs)
        if terminated or truncated:
            caught.append(float(reward))
            obs, _ = env.reset()
            recent.extend([obs] * STACK)

        if step >= WARM_UP and step % TRAIN_EVERY == 0:
            batch = sampler.sample()
            with torch.no_grad():
                best = target(scaled(batch["next_obs"])).amax(dim=1)
                goal = batch["reward"] + batch["discount"] * best  # the discount is 0 after a terminal step
            value = online(scaled(batch["obs"])).gather(1, batch["action"][:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % COPY_EVERY == 0:
            target.load_state_dict(online.state_dict())
    env.close()
    return sum(caught) / len(caught)


if __name__ == "__main__":
    part = main()
    print(f"balls caught of the last 100: {part:.0%}")
    assert part > 0.8  # a policy that knows nothing catches about one of seven

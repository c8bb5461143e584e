"""DQN on CartPole in one file: the wrapper records, a sampler draws batches of tensors, a network learns from them.

python examples/dqn_cartpole.py
"""

from __future__ import annotations

import random
from collections import deque

import gymnasium as gym
import torch
from torch import nn

import recollect as rc

STEPS, WARM_UP, TRAIN_EVERY, COPY_EVERY = 8_000, 500, 2, 250
GAMMA, BATCH, RATE = 0.99, 128, 1e-3


def q_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def main(seed: int = 1) -> float:
    """Train; return the mean of the last 20 returns."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # batches this small are slower on several
    chance = random.Random(seed)

    env = gym.make("CartPole-v1")
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, rc.transition_space(env), capacity=10_000)
    env = rc.ReplayBufferCollectionWrapper(env, buf)  # every step is a row of the buffer from here on
    sampler = rc.StepSampler(rc.ToBackendOrDeviceBatch(buf, "torch"), BATCH, seed=seed)

    online, target = q_network(), q_network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=RATE)

    returns: deque[float] = deque(maxlen=20)
    obs, _ = env.reset(seed=seed)
    total = 0.0
    for step in range(STEPS):
        epsilon = max(0.05, 1.0 - step / 3_000)
        if chance.random() < epsilon:
            action = chance.randrange(2)
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(obs)).argmax())
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            obs, _ = env.reset()
            total = 0.0

        if step >= WARM_UP and step % TRAIN_EVERY == 0:
            batch = sampler.sample()
            with torch.no_grad():
                best = target(batch["next_obs"]).amax(dim=1)
                # An episode that was cut short goes on in truth; only one that terminated is worth nothing more.
                goal = batch["reward"] + GAMMA * best * ~batch["terminated"]
            value = online(batch["obs"]).gather(1, batch["action"][:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % COPY_EVERY == 0:
            target.load_state_dict(online.state_dict())
    env.close()
    return sum(returns) / len(returns)


if __name__ == "__main__":
    mean = main()
    print(f"mean of the last 20 returns: {mean:.0f}")
    assert mean > 80  # a policy that knows nothing gets about 20

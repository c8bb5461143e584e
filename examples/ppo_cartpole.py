"""PPO on CartPole: rollouts of eight environments in turn, advantages by episode, a few passes over each rollout.

The wrapper records only true steps: the resets of a vector environment are no rows. An episode, or what of it lies in
the rollout, is a segment, so advantages need no masks.

    python examples/ppo_cartpole.py
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import recollect as rc

ENVS, STEPS, ROLLOUTS, PASSES, BATCH = 8, 128, 20, 6, 128
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs: Any) -> Any:
        return torch.distributions.Categorical(logits=self.policy(obs)), self.value(obs)[:, 0]


def advantages(rows: dict[str, Any], segments: list[tuple[int, int]], value: Any, next_value: Any) -> Any:
    """Generalized advantages, segment by segment, from the last step to the first."""
    # A segment that ends without `terminated` was cut, by the time limit or by the rollout: it bootstraps.
    delta = rows["reward"] + GAMMA * next_value * ~rows["terminated"] - value
    found = np.zeros_like(delta)
    for start, end in segments:
        ahead = 0.0
        for step in range(end - 1, start - 1, -1):
            found[step] = ahead = delta[step] + GAMMA * LAMBDA * ahead
    return found


def learn(agent: Agent, optimizer: Any, rollout: rc.ReplayBuffer) -> None:
    rows = rollout[:]
    obs, action, next_obs = (torch.from_numpy(rows[key]) for key in ("obs", "action", "next_obs"))
    with torch.no_grad():  # the policy is still the one that acted
        policy, value = agent(obs)
        log_prob, next_value = policy.log_prob(action), agent(next_obs)[1]
    advantage = torch.from_numpy(advantages(rows, rollout.get_segments(), value.numpy(), next_value.numpy()))
    returns = advantage + value
    for _ in range(PASSES):
        for part in torch.randperm(len(obs)).split(BATCH):
            policy, value = agent(obs[part])
            ratio = (policy.log_prob(action[part]) - log_prob[part]).exp()
            gain = advantage[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss = nn.functional.mse_loss(value, returns[part]) * 0.5 - surrogate
            loss = loss - ENTROPY * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main(seed: int = 0) -> float:
    """Train; return the mean length of the episodes in the last rollout, those that were cut included."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    envs: Any = gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="sync")
    empty, rollout = (
        rc.ReplayBuffer.create(
            rc.MemoryStorage,
            rc.transition_space(envs),
            capacity=ENVS * STEPS,
            num_lanes=ENVS,  # each environment its own
            maintain_segment_metadata=True,
        )
        for _ in range(2)
    )
    envs = rc.ReplayBufferCollectionWrapper(envs, empty)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    obs, _ = envs.reset(seed=seed)
    for _ in range(ROLLOUTS):
        for _ in range(STEPS):
            with torch.no_grad():
                action = agent(torch.from_numpy(obs))[0].sample().numpy()
            obs, *_ = envs.step(action)
        # The wrapper goes on in the other buffer; episodes under way end in this one, and begin in that one.
        (rollout,) = envs.set_replay_buffers(rollout, finalize_old_segments=True)
        learn(agent, optimizer, rollout)
        lengths = [end - start for start, end in rollout.get_segments()]
        rollout.clear()
    envs.close()
    return float(np.mean(lengths))


if __name__ == "__main__":
    mean = main()
    print(f"mean length in the last rollout of {STEPS} steps: {mean:.0f}")
    assert mean > 60  # a policy that knows nothing falls after about 20; more than 128 it cannot be

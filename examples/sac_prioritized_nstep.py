"""SAC on Pendulum with 3-step returns, drawn by priority and weighted for it, in one file.

Two lines make the difference to uniform single steps: `NStepBatch` shows the buffer with returns over three steps, and
`PrioritizedSampler` draws from that view what surprised the critics most. Their errors go back as new priorities.

    python examples/sac_prioritized_nstep.py
"""

from __future__ import annotations

import copy
import math
from typing import Any

import gymnasium as gym
import torch
from torch import nn

import recollect as rc

STEPS, WARM_UP, BATCH, N_STEPS, GAMMA, RATE, FOLLOW = 2_800, 300, 64, 3, 0.97, 2e-3, 0.02
SCALE = 5.0  # rewards of Pendulum go down to -16: divided, errors are of about 1


def mlp(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))


class Actor(nn.Module):
    """A Gaussian, squashed to the bounds -2 and 2 of Pendulum's action."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an action for each observation, and its log-probability."""
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # of tanh at raw
        return 2 * torch.tanh(raw), (normal.log_prob(raw) - log_slope)[..., 0]


class Critics(nn.Module):
    """Two values of each action; the smaller one is believed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = mlp(4, 1), mlp(4, 1)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([obs, action], dim=-1)
        return self.one(both)[:, 0], self.two(both)[:, 0]


def main(seed: int = 0) -> tuple[float, float]:
    """Train; return the mean of the first and of the last five returns."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    env: Any = gym.make("Pendulum-v1")
    env.action_space.seed(seed)
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(env), capacity=STEPS, maintain_segment_metadata=True
    )  # n-step returns end with their episode, so the buffer keeps where episodes end
    env = rc.ReplayBufferCollectionWrapper(env, buf)
    steps = rc.NStepBatch(buf, n=N_STEPS, gamma=GAMMA)
    sampler = rc.PrioritizedSampler(steps, BATCH, alpha=0.6, beta=0.4, seed=seed, backend="torch")

    actor, critics = Actor(), Critics()
    target = copy.deepcopy(critics)
    log_alpha = torch.zeros((), requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=RATE, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=RATE, fused=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=RATE, fused=True)

    returns: list[float] = []
    obs, _ = env.reset(seed=seed)
    total = 0.0
    for step in range(STEPS):
        if step < WARM_UP:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = actor(torch.from_numpy(obs))[0].numpy()
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            returns.append(total)
            obs, _ = env.reset()
            total = 0.0
        if step < WARM_UP:
            continue

        sampler.beta = 0.4 + 0.6 * step / STEPS  # towards 1, where the weights undo the bias in full
        batch, meta = sampler.sample_with_metadata()
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            action_ahead, log_p = actor(batch["next_obs"])
            ahead = torch.min(*target(batch["next_obs"], action_ahead)) - alpha * log_p
            # The reward is that of up to three steps; the discount fits their number, and is 0 where all ended.
            goal = batch["reward"] / SCALE + batch["discount"] * ahead
        one, two = (value - goal for value in critics(batch["obs"], batch["action"]))
        critic_optimizer.zero_grad()
        (meta["weight"] * (one**2 + two**2)).mean().backward()
        critic_optimizer.step()
        sampler.update_priorities(meta, (one.abs() + two.abs()).detach() / 2)

        action, log_p = actor(batch["obs"])
        value = torch.min(*critics(batch["obs"], action))
        actor_optimizer.zero_grad()
        (alpha * log_p - value).mean().backward()
        actor_optimizer.step()
        alpha_optimizer.zero_grad()
        (-log_alpha * (log_p.detach().mean() - 1.0)).backward()  # an entropy of -1, one for each dimension
        alpha_optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critics.parameters()):
                slow.lerp_(fast, FOLLOW)
    env.close()
    return sum(returns[:5]) / 5, sum(returns[-5:]) / 5


if __name__ == "__main__":
    first, last = main()
    print(f"mean of the last 5 returns: {last:.0f}, of the first 5: {first:.0f}")
    assert last > -600  # a policy that knows nothing gets about -1200

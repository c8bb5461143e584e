"""The networks of the reference learners: plain multi-layer perceptrons and the policies over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
_LOG_2PI = math.log(2 * math.pi)


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between them."""
    layers: list[nn.Module] = []
    for k in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[k], sizes[k + 1]))
        if k < len(sizes) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)


def gaussian_log_prob(x: Any, mean: Any, log_std: Any) -> Any:
    """Log density of a diagonal Gaussian, summed over the last axis."""
    z = (x - mean) * torch.exp(-log_std)
    return (-0.5 * (z * z + _LOG_2PI) - log_std).sum(-1)


class TanhGaussianActor(nn.Module):
    """A Gaussian squashed to (-1, 1) and scaled to the bounds of the action space.

    Actions leave it on the environment's scale; log probabilities are of the squashed action in (-1, 1), so that
    the entropy target does not depend on the bounds.

    >>> actor = TanhGaussianActor(3, 1, (8,), [-2.0], [2.0])
    >>> actor.act(torch.zeros(5, 3), torch.zeros(5, 1)).shape
    torch.Size([5, 1])
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden: Sequence[int],
        low: Sequence[float],
        high: Sequence[float],
    ) -> None:
        super().__init__()
        self.body = mlp((obs_dim, *hidden, 2 * action_dim))
        low_, high_ = torch.as_tensor(low, dtype=torch.float32), torch.as_tensor(high, dtype=torch.float32)
        self.register_buffer("scale", (high_ - low_) / 2)
        self.register_buffer("center", (high_ + low_) / 2)

    def forward(self, obs: Any) -> tuple[Any, Any]:
        """Return mean and log std before squashing, each `[..., action_dim]`."""
        mean, log_std = self.body(obs).chunk(2, -1)
        half = (LOG_STD_MAX - LOG_STD_MIN) / 2
        return mean, LOG_STD_MIN + half * (torch.tanh(log_std) + 1)

    def sample(self, obs: Any, noise: Any) -> tuple[Any, Any]:
        """Return the squashed action in (-1, 1) made from standard normal `noise`, and its log probability."""
        mean, log_std = self(obs)
        raw = mean + torch.exp(log_std) * noise
        # log(1 - tanh(x)²) = 2·(log 2 - x - softplus(-2x)): exact where tanh has rounded to 1
        squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return torch.tanh(raw), gaussian_log_prob(raw, mean, log_std) - squash.sum(-1)

    @torch.no_grad()
    def act(self, obs: Any, noise: Any = None) -> Any:
        """Return actions on the environment's scale; without noise the mode."""
        mean, log_std = self(obs)
        raw = mean if noise is None else mean + torch.exp(log_std) * noise
        return torch.tanh(raw) * self.scale + self.center

    def to_unit(self, actions: Any) -> Any:
        """Return the environment's actions as the squashed ones they were made from."""
        return (actions - self.center) / self.scale


class TwinCritic(nn.Module):
    """Two action values of one state and action, each from its own network.

    >>> TwinCritic(3, 1, (8,))(torch.zeros(5, 3), torch.zeros(5, 1)).shape
    torch.Size([2, 5])
    """

    def __init__(self, obs_dim: int, action_dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp((obs_dim + action_dim, *hidden, 1)) for _ in range(2))

    def forward(self, obs: Any, action: Any) -> Any:
        """Return `[2, n]` values."""
        x = torch.cat([obs, action], -1)
        return torch.stack([net(x).squeeze(-1) for net in self.nets])


class ActorCritic(nn.Module):
    """A policy and a state value for PPO: Gaussian for `n_choices=0`, else categorical over so many choices.

    The value may see more than the policy (`critic_dim > 0`).

    >>> net = ActorCritic(4, 1, 0, (8,), n_choices=2)
    >>> net.value(torch.zeros(5, 4)).shape
    torch.Size([5])
    """

    def __init__(
        self, obs_dim: int, action_dim: int, critic_dim: int, hidden: Sequence[int], n_choices: int = 0
    ) -> None:
        super().__init__()
        self.n_choices, self.action_dim = n_choices, action_dim
        self.actor = mlp((obs_dim, *hidden, n_choices or action_dim), nn.Tanh)
        self.critic = mlp((critic_dim or obs_dim, *hidden, 1), nn.Tanh)
        if not n_choices:
            self.log_std = nn.Parameter(torch.zeros(action_dim))
        for net, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            for module in net:
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight, gain if module is net[-1] else math.sqrt(2))
                    nn.init.zeros_(module.bias)

    def value(self, critic_obs: Any) -> Any:
        """Return `[...]` values."""
        return self.critic(critic_obs).squeeze(-1)

    def evaluate(self, obs: Any, actions: Any) -> tuple[Any, Any]:
        """Return log probability and entropy of stored actions `[..., action_dim]`, each `[...]`."""
        out = self.actor(obs)
        if self.n_choices:
            logp = torch.log_softmax(out, -1)
            chosen = logp.gather(-1, actions.long()).squeeze(-1)
            return chosen, -(logp.exp() * logp).sum(-1)
        entropy = (self.log_std + 0.5 * (1 + _LOG_2PI)).sum(-1)
        return gaussian_log_prob(actions, out, self.log_std), entropy.expand(out.shape[:-1])

    @torch.no_grad()
    def act(self, obs: Any, generator: Any = None) -> tuple[Any, Any]:
        """Draw actions `[..., action_dim]` (an index as float32 if categorical) and their log probabilities."""
        out = self.actor(obs)
        if self.n_choices:
            logp = torch.log_softmax(out, -1)
            # Gumbel: the largest of log p plus its noise is a draw from p
            u = torch.rand(logp.shape, generator=generator).clamp_min(1e-20)
            choice = (logp - torch.log(-torch.log(u))).argmax(-1, keepdim=True)
            return choice.to(torch.float32), logp.gather(-1, choice).squeeze(-1)
        noise = torch.randn(out.shape, generator=generator)
        actions = out + torch.exp(self.log_std) * noise
        return actions, gaussian_log_prob(actions, out, self.log_std)

"""SACLearner: the networks, targets, temperature and optimisers of soft actor-critic, and its three updates."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from recollect.learners.checkpoint import load_optimizer
from recollect.learners.config import SACConfig
from recollect.learners.environment import EnvSpaces
from recollect.learners.networks import TanhGaussianActor, TwinCritic
from recollect.learners.normalization import RunningStats, normalize


def bootstrap_mask(dones: Any, truncated: Any) -> Any:
    """1 where the next observation counts: (running, timed out, terminated) → [1, 1, 0]."""
    return 1 - dones * (1 - truncated)


def make_actor(spec: EnvSpaces, config: SACConfig) -> TanhGaussianActor:
    """Return the actor for these spaces; learner and collectors make theirs with this."""
    low, high = spec.action_bounds()
    return TanhGaussianActor(spec.obs_dim, spec.action_dim, config.hidden, low.tolist(), high.tolist())


class SACLearner:
    """Soft actor-critic over batches of transitions (the keys of `ReplayBuffer.sample`).

    Ownership: batches are read, never kept. Concurrency: one thread.
    """

    def __init__(self, spec: EnvSpaces, config: SACConfig, device: Any, seed: int) -> None:
        self.config, self.device = config, torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # the layers' own initialisers know the global generator only
            torch.manual_seed(seed)
            self.actor = make_actor(spec, config).to(self.device)
            critic_dim = spec.critic_dim or spec.obs_dim
            self.critic = TwinCritic(critic_dim, spec.action_dim, config.hidden).to(self.device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), device=self.device, requires_grad=True)
        self.target_entropy = -float(spec.action_dim)
        self.optimizers = {
            "actor": torch.optim.Adam(self.actor.parameters(), lr=config.lr),
            "critic": torch.optim.Adam(self.critic.parameters(), lr=config.lr),
            "alpha": torch.optim.Adam([self.log_alpha], lr=config.lr),
        }
        self.update_count = 0
        wanted = config.obs_normalization
        self.obs_normalizer = RunningStats(spec.obs_dim) if wanted else None
        self._critic_normalizer = RunningStats(spec.critic_dim) if wanted and spec.critic_dim else None

    # -- updates

    def update_critic(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """One step of both critics towards the entropy-regularised target."""
        self._observe(batch)
        _, critic = self._inputs(batch, "")
        next_obs, next_critic = self._inputs(batch, "next_")
        with torch.no_grad():
            action, logp = self.actor.sample(next_obs, self._noise(next_obs))
            value = self.target(next_critic, action).amin(0) - self.alpha * logp
            keep = bootstrap_mask(batch["dones"], batch["truncated"])
            wanted = batch["rewards"] + self.config.gamma * keep * value
        found = self.critic(critic, self.actor.to_unit(batch["actions"]))
        loss = ((found - wanted) ** 2).mean(1).sum()
        self._descend("critic", loss)
        self.update_count += 1
        return {"critic": float(loss.detach()), "q": float(found.detach().mean())}

    def update_actor(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """One step of the actor, then one of the temperature."""
        obs, critic = self._inputs(batch, "")
        action, logp = self.actor.sample(obs, self._noise(obs))
        self.critic.requires_grad_(False)
        loss = (self.alpha * logp - self.critic(critic, action).amin(0)).mean()
        self._descend("actor", loss)
        self.critic.requires_grad_(True)
        entropy = -logp.detach()
        alpha_loss = (self.log_alpha.exp() * (entropy - self.target_entropy)).mean()
        self._descend("alpha", alpha_loss)
        return {"actor": float(loss.detach()), "alpha": float(self.alpha), "entropy": float(entropy.mean())}

    @torch.no_grad()
    def soft_update_target(self) -> None:
        """Move the target critics by tau towards the critics."""
        targets, sources = list(self.target.parameters()), list(self.critic.parameters())
        torch._foreach_lerp_(targets, sources, self.config.tau)

    @property
    def alpha(self) -> Any:
        """The temperature."""
        return self.log_alpha.detach().exp()

    def _descend(self, name: str, loss: Any) -> None:
        optimizer = self.optimizers[name]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def _noise(self, obs: Any) -> Any:
        """Standard normal numbers from the learner's own generator, the same on every device."""
        shape = (obs.shape[0], self.actor.scale.numel())
        return torch.randn(shape, generator=self.generator).to(self.device)

    # -- observations

    def _observe(self, batch: Mapping[str, Any]) -> None:
        if self.obs_normalizer is not None:
            self.obs_normalizer.update(batch["obs"].detach().cpu().numpy())
        if self._critic_normalizer is not None:
            self._critic_normalizer.update(batch["critic"].detach().cpu().numpy())

    def _inputs(self, batch: Mapping[str, Any], when: str) -> tuple[Any, Any]:
        """What the actor and the critic see; the critic has its own leaf or sees the actor's."""
        obs = batch[f"{when}obs"]
        if self.obs_normalizer is not None:
            obs = normalize(obs, self.obs_normalizer.pair())
        if f"{when}critic" not in batch:
            return obs, obs
        critic = batch[f"{when}critic"]
        if self._critic_normalizer is not None:
            critic = normalize(critic, self._critic_normalizer.pair())
        return obs, critic

    # -- state

    def get_state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on, as nested dicts of tensors and numbers."""
        state: dict[str, Any] = {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "target": self.target.state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "generator": self.generator.get_state(),
            "update_count": self.update_count,
        }
        for name, stats in self._normalizers().items():
            state[name] = stats.get_state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state_dict` returned."""
        for name in ("actor", "critic", "target"):
            getattr(self, name).load_state_dict(state[name])
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        for name, optimizer in self.optimizers.items():
            load_optimizer(f"optimizers.{name}", optimizer, state["optimizers"][name])
        self.generator.set_state(state["generator"])
        self.update_count = int(state["update_count"])
        for name, stats in self._normalizers().items():
            stats.load_state_dict(state[name])

    def _normalizers(self) -> dict[str, RunningStats]:
        found = {"obs_normalizer": self.obs_normalizer, "critic_normalizer": self._critic_normalizer}
        return {name: stats for name, stats in found.items() if stats is not None}

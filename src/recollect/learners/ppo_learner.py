"""PPOLearner: clipped PPO on V-trace advantages, over time-major rollouts with ended episodes and invalid cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recollect.learners.checkpoint import load_optimizer
from recollect.learners.config import APPOConfig
from recollect.learners.environment import EnvSpaces
from recollect.learners.networks import ActorCritic


def make_network(spec: EnvSpaces, config: APPOConfig) -> ActorCritic:
    """Return the network for these spaces; learner and collectors make theirs with this."""
    return ActorCritic(spec.obs_dim, spec.action_dim, spec.critic_dim, config.hidden, spec.n_choices)


class PPOLearner:
    """Trains on staged rollouts: a dict of tensors `[T, N, ...]` with the ring's fields and `valid`.

    Ownership: rollouts are read, never kept. Concurrency: one thread.
    """

    def __init__(self, spec: EnvSpaces, config: APPOConfig, device: Any, seed: int) -> None:
        self.config, self.device = config, torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = make_network(spec, config).to(self.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=config.lr, eps=1e-5)
        critic = list(self.network.critic.parameters())
        ids = {id(p) for p in critic}
        self._parts = [critic, [p for p in self.network.parameters() if id(p) not in ids]]
        self.update_count = 0

    def train(self, rollout: Mapping[str, Any]) -> dict[str, float]:
        """One iteration: targets by the current network, then epochs × minibatches; mean losses."""
        valid = rollout["valid"].bool()
        data = self._cells(rollout, valid)
        n = data["obs"].shape[0]
        if n == 0:
            return {}
        sums: dict[str, Any] = {}
        steps = 0
        for _ in range(self.config.epochs):
            order = torch.randperm(n, generator=self.generator).to(self.device)
            for part in order.chunk(self.config.minibatches):
                losses = self._step({name: x[part] for name, x in data.items()})
                steps += 1
                for name, loss in losses.items():
                    sums[name] = sums.get(name, 0.0) + loss
        self.update_count += steps
        return {name: float(total) / steps for name, total in sums.items()}

    @torch.no_grad()
    def _cells(self, rollout: Mapping[str, Any], valid: Any) -> dict[str, Any]:
        """The valid cells of a rollout, flat, with targets and advantages."""
        logp, _ = self.network.evaluate(rollout["obs"], rollout["actions"])
        targets, advantages = self.targets(rollout, logp)
        columns = {
            "obs": rollout["obs"], "critic": rollout.get("critic", rollout["obs"]), "actions": rollout["actions"],
            "log_probs": rollout["log_probs"], "targets": targets, "advantages": advantages,
        }  # fmt: skip
        data = {name: x[valid] for name, x in columns.items()}
        a = data["advantages"]
        if a.numel() > 1:
            data["advantages"] = (a - a.mean()) / (a.std() + 1e-8)
        return data

    @torch.no_grad()
    def targets(self, rollout: Mapping[str, Any], logp: Any) -> tuple[Any, Any]:
        """V-trace targets and advantages `[T, N]` by the current critic and log probabilities of the actions."""
        values, next_values = state_values(self.network, rollout)
        dones, truncated = rollout["dones"].bool(), rollout["truncated"].bool()
        c = self.config
        return vtrace(
            rewards=rollout["rewards"], values=values, next_values=next_values,
            ratios=torch.exp((logp - rollout["log_probs"]).clamp(-20, 20)), terminated=dones & ~truncated,
            goes_on=continues(rollout["valid"].bool(), dones),
            gamma=c.gamma, lam=c.lam, rho_bar=c.rho_bar, c_bar=c.c_bar,
        )  # fmt: skip

    def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        c = self.config
        logp, entropy = self.network.evaluate(data["obs"], data["actions"])
        ratio = torch.exp(logp - data["log_probs"])
        a = data["advantages"]
        policy = -torch.minimum(ratio * a, ratio.clamp(1 - c.clip, 1 + c.clip) * a).mean()
        value = ((self.network.value(data["critic"]) - data["targets"]) ** 2).mean()
        loss = policy + c.value_coef * value - c.entropy_coef * entropy.mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for part in self._parts:  # each by its own norm: large value errors must not still the policy
            torch.nn.utils.clip_grad_norm_(part, c.max_grad_norm)
        self.optimizer.step()
        return {"policy": policy.detach(), "value": value.detach(), "entropy": entropy.detach().mean()}

    # -- state

    def get_state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "update_count": self.update_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state_dict` returned."""
        self.network.load_state_dict(state["network"])
        load_optimizer("optimizer", self.optimizer, state["optimizer"])
        self.generator.set_state(state["generator"])
        self.update_count = int(state["update_count"])


def continues(valid: Any, dones: Any) -> Any:
    """Where a cell's episode goes on in the next cell of the rollout, `[T, N]` bool."""
    next_valid = torch.zeros_like(valid)
    next_valid[:-1] = valid[1:]
    return next_valid & ~dones


def state_values(network: ActorCritic, rollout: Mapping[str, Any]) -> tuple[Any, Any]:
    """Values of the observations and of the true next observations, both `[T, N]`.

    The next cell's observation is the true one, except where an environment that resets at once ended an episode:
    there the rollout's `final_*` block has it.
    """
    name = "critic" if "critic" in rollout else "obs"
    values = network.value(rollout[name])
    last = network.value(rollout[f"last_{name}"])
    next_values = torch.cat([values[1:], last[None]])
    for index, finals in final_blocks(rollout, name):
        flat = next_values.view(-1)
        flat[index] = network.value(finals)
    return values, next_values


def final_blocks(rollout: Mapping[str, Any], name: str) -> list[tuple[Any, Any]]:
    """Cells `t·N + n` of a staged rollout with a final observation of their own, and those observations."""
    if "final_cells" not in rollout:
        return []
    return [(rollout["final_cells"], rollout[f"final_{name}"])]


def vtrace(
    *,
    rewards: Any,
    values: Any,
    next_values: Any,
    ratios: Any,
    terminated: Any,
    goes_on: Any,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Any, Any]:
    """Return targets and advantages `[T, N]` from tensors `[T, N]`; flags are bool.

    `next_values` are values of the true next observations, before any mask. Where a cell is invalid the result is
    meaningless and must be left out; it spoils no other cell, even if its inputs are not finite.
    """
    rho = ratios.clamp(max=rho_bar)
    trace = lam * ratios.clamp(max=c_bar)
    zero = torch.zeros_like(values)
    bootstrap = torch.where(terminated, zero, next_values)
    surprise = rewards + gamma * bootstrap - values
    delta = rho * surprise
    targets, advantages = torch.empty_like(values), torch.empty_like(values)
    later = zero[0]
    for t in range(values.shape[0] - 1, -1, -1):
        carried = torch.where(goes_on[t], later, zero[0])
        advantages[t] = surprise[t] + gamma * lam * carried
        later = delta[t] + gamma * trace[t] * carried
        targets[t] = values[t] + later
    return targets, advantages

"""V-trace targets and advantages over rollouts that may contain ended episodes and invalid cells.

For a cell with reward r, value v and value v' of its true next observation (0 where the episode terminated), and the
ratio w of today's probability of its action to that at the time of acting:

    rho = min(rho_bar, w)      c = lam · min(c_bar, w)
    delta  = rho · (r + gamma · v' - v)
    target = v + delta + gamma · c · (target⁺ - v⁺)               where the next cell goes on, else v + delta
    advantage = r + gamma · v' - v + gamma · lam · (target⁺ - v⁺)  the same

⁺ is the next cell. A cell goes on unless its episode ended there or the next cell is invalid. With w = 1 the
advantage is GAE(lam) and the target is advantage + v. The advantage is that of the action itself, without rho: PPO's
ratio is against the policy that acted, so w is counted there, once, and clipped there.
"""

from __future__ import annotations

from typing import Any

import torch


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

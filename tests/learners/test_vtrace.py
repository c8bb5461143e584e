"""V-trace against the sums of its definition, written out one cell at a time in plain Python."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from recollect.learners.ppo_learner import continues, vtrace


def reference(x: dict[str, Any], n: int, gamma: float, lam: float, rho_bar: float, c_bar: float) -> Any:
    """Targets and advantages of environment n by the sum over later cells; nothing recursive, nothing shared."""
    T = len(x["rewards"])
    out = []
    for t in range(T):
        if not x["valid"][t, n]:
            out.append((math.nan, math.nan))
            continue
        target, advantage, weight_t, weight_a, k = x["values"][t, n], 0.0, 1.0, 1.0, t
        while True:
            rho = min(rho_bar, x["ratios"][k, n])
            v_next = 0.0 if x["terminated"][k, n] else x["next_values"][k, n]
            surprise = x["rewards"][k, n] + gamma * v_next - x["values"][k, n]
            target += weight_t * rho * surprise
            advantage += weight_a * (1.0 if k == t else rho) * surprise
            ends = x["terminated"][k, n] or x["truncated"][k, n]
            if ends or k + 1 == T or not x["valid"][k + 1, n]:
                break
            c = gamma * lam * min(c_bar, x["ratios"][k, n])
            weight_t *= c
            weight_a *= gamma * lam if k == t else c
            k += 1
        out.append((target, advantage))
    return np.array(out)


@st.composite
def rollouts(draw: Any) -> dict[str, Any]:
    T, N = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    end = rng.random((T, N))
    return {
        "rewards": rng.normal(size=(T, N)), "values": rng.normal(size=(T, N)), "next_values": rng.normal(size=(T, N)),
        "ratios": np.exp(rng.normal(size=(T, N))), "terminated": end < 0.2, "truncated": (end >= 0.2) & (end < 0.4),
        "valid": rng.random((T, N)) < 0.8,
    }  # fmt: skip


def run(x: dict[str, Any], **kwargs: float) -> Any:
    tensors = {k: torch.from_numpy(v) for k, v in x.items() if k not in ("truncated", "valid")}
    dones = torch.from_numpy(x["terminated"] | x["truncated"])
    goes_on = continues(torch.from_numpy(x["valid"]), dones)
    return vtrace(**tensors, goes_on=goes_on, **kwargs)


@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3), st.floats(0.1, 3))
def test_equals_the_definition(x: Any, gamma: float, lam: float, rho_bar: float, c_bar: float) -> None:
    targets, advantages = run(x, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    for n in range(x["rewards"].shape[1]):
        valid = x["valid"][:, n]
        wanted = reference(x, n, gamma, lam, rho_bar, c_bar)[valid]
        found = np.stack([targets[:, n].numpy(), advantages[:, n].numpy()], 1)[valid]
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


@given(rollouts())
def test_on_policy_it_is_gae(x: Any) -> None:
    x |= {"ratios": np.ones_like(x["rewards"]), "valid": np.ones_like(x["valid"])}
    gamma, lam = 0.97, 0.9
    targets, advantages = run(x, gamma=gamma, lam=lam)
    last = np.zeros(x["rewards"].shape[1])
    for t in reversed(range(len(x["rewards"]))):
        v_next = np.where(x["terminated"][t], 0, x["next_values"][t])
        carry = ~(x["terminated"][t] | x["truncated"][t])
        last = x["rewards"][t] + gamma * v_next - x["values"][t] + gamma * lam * carry * last
        np.testing.assert_allclose(advantages[t].numpy(), last, atol=1e-12)
        np.testing.assert_allclose(targets[t].numpy(), last + x["values"][t], atol=1e-12)


def test_an_invalid_cell_spoils_no_other() -> None:
    T = 4
    x = {name: np.ones((T, 1)) for name in ("rewards", "values", "next_values", "ratios")}
    x |= {name: np.zeros((T, 1), bool) for name in ("terminated", "truncated")}
    x["valid"] = np.array([[True], [True], [False], [True]])
    for name in ("rewards", "values", "next_values", "ratios"):
        x[name][2] = math.nan
    targets, advantages = run(x, gamma=0.9, lam=0.95)
    for found in (targets, advantages):
        assert torch.isfinite(found[[0, 1, 3]]).all()


@pytest.mark.parametrize(("terminated", "truncated", "bootstraps"), [(1, 0, False), (0, 1, True)])
def test_a_timeout_bootstraps_and_an_end_does_not(terminated: int, truncated: int, bootstraps: bool) -> None:
    """Truncated treated as terminated (sb3#934, cleanrl#460) biases every time-limited task."""
    one = np.ones((1, 1))
    x = {"rewards": one, "values": 0 * one, "next_values": 10 * one, "ratios": one}
    x |= {"terminated": one * terminated > 0, "truncated": one * truncated > 0, "valid": one > 0}
    targets, _ = run(x, gamma=0.9, lam=0.95)
    assert targets.item() == pytest.approx(1 + 9 * bootstraps)

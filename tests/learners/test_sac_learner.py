"""SAC's updates against plain numpy, and its state: what is saved is all that the next update depends on."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from recollect.errors import EnvContractError
from recollect.learners.config import SACConfig
from recollect.learners.environment import EnvSpaces
from recollect.learners.networks import TanhGaussianActor
from recollect.learners.normalization import RunningStats
from recollect.learners.sac_learner import SACLearner, bootstrap_mask


def spec(**kwargs: Any) -> EnvSpaces:
    base = {
        "obs_dim": 3, "critic_dim": 0, "action_dim": 2, "n_choices": 0, "first_choice": 0, "low": (-2.0, 0.0),
        "high": (2.0, 1.0), "action_shape": (2,), "action_dtype": "float32", "autoreset": "NEXT_STEP",
    }  # fmt: skip
    return EnvSpaces(**{**base, **kwargs})


def batch(n: int = 16, seed: int = 0, critic_dim: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    done = rng.random(n) < 0.5
    found = {
        "obs": rng.normal(size=(n, 3)), "next_obs": rng.normal(size=(n, 3)),
        "actions": np.stack([rng.uniform(-2, 2, n), rng.uniform(0, 1, n)], 1), "rewards": rng.normal(size=n),
        "dones": done, "truncated": done & (rng.random(n) < 0.5),
    }  # fmt: skip
    if critic_dim:
        found |= {name: rng.normal(size=(n, critic_dim)) for name in ("critic", "next_critic")}
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in found.items()}


def forward(net: Any, x: Any) -> Any:
    """A multi-layer perceptron in numpy, in float64."""
    layers = [m for m in net if isinstance(m, torch.nn.Linear)]
    for k, layer in enumerate(layers):
        x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
        x = np.maximum(x, 0) if k < len(layers) - 1 else x
    return x


def squashed(actor: Any, obs: Any, noise: Any) -> tuple[Any, Any]:
    """The action in (-1, 1) and its log density by change of variables, in numpy."""
    mean, raw_log_std = np.split(forward(actor.body, obs), 2, 1)
    log_std = -5 + 3.5 * (np.tanh(raw_log_std) + 1)
    raw = mean + np.exp(log_std) * noise
    density = -0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - log_std
    return np.tanh(raw), (density - np.log(1 - np.tanh(raw) ** 2)).sum(1)


@pytest.mark.parametrize("critic_dim", [0, 4])
def test_losses_equal_plain_numpy(critic_dim: int) -> None:
    config = SACConfig(hidden=(8, 8), lr=1e-9, gamma=0.9)
    learner = SACLearner(spec(critic_dim=critic_dim), config, "cpu", seed=3)
    data = batch(critic_dim=critic_dim)
    x = {name: v.double().numpy() for name, v in data.items()}
    noises = torch.Generator().manual_seed(3)
    eps = [torch.randn((16, 2), generator=noises).double().numpy() for _ in range(2)]
    unit = (x["actions"] - [0.0, 0.5]) / [2.0, 0.5]
    state, next_state = ("critic", "next_critic") if critic_dim else ("obs", "next_obs")

    action, logp = squashed(learner.actor, x["next_obs"], eps[0])
    q_next = np.min(
        [forward(net, np.concatenate([x[next_state], action], 1))[:, 0] for net in learner.target.nets], 0
    )
    keep = 1 - x["dones"] * (1 - x["truncated"])
    wanted = x["rewards"] + 0.9 * keep * (q_next - 1.0 * logp)
    q = [forward(net, np.concatenate([x[state], unit], 1))[:, 0] for net in learner.critic.nets]
    critic_loss = sum(((found - wanted) ** 2).mean() for found in q)

    action, logp = squashed(learner.actor, x["obs"], eps[1])
    q_pi = np.min(
        [forward(net, np.concatenate([x[state], action], 1))[:, 0] for net in learner.critic.nets], 0
    )
    actor_loss = (1.0 * logp - q_pi).mean()

    assert learner.update_critic(data)["critic"] == pytest.approx(critic_loss, rel=1e-4)
    found = learner.update_actor(data)
    assert found["actor"] == pytest.approx(actor_loss, rel=1e-4)
    assert found["entropy"] == pytest.approx(-logp.mean(), rel=1e-4)


def test_temperature_rises_when_the_policy_is_too_sure() -> None:
    learner = SACLearner(spec(), SACConfig(hidden=(8,), lr=1e-2), "cpu", seed=0)
    learner.target_entropy = 100.0
    before = float(learner.alpha)
    learner.update_actor(batch())
    assert float(learner.alpha) > before
    learner.target_entropy = -100.0
    for _ in range(3):
        learner.update_actor(batch())
    assert float(learner.alpha) < before


def test_actor_update_moves_no_critic_and_the_target_follows_by_tau() -> None:
    learner = SACLearner(spec(), SACConfig(hidden=(8,), tau=0.25), "cpu", seed=0)
    first = [p.detach().clone() for p in learner.critic.parameters()]
    learner.update_critic(batch())
    assert learner.update_count == 1
    assert all(torch.equal(a, b) for a, b in zip(first, learner.target.parameters()))
    critic = [p.detach().clone() for p in learner.critic.parameters()]
    target = [p.detach().clone() for p in learner.target.parameters()]
    learner.update_actor(batch())
    assert all(torch.equal(a, b) for a, b in zip(critic, learner.critic.parameters()))
    learner.soft_update_target()
    for old, new, source in zip(target, learner.target.parameters(), critic):
        torch.testing.assert_close(new, 0.75 * old + 0.25 * source)


def test_mask_for_running_timed_out_and_terminated() -> None:
    dones, truncated = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    assert bootstrap_mask(dones, truncated).tolist() == [1, 1, 0]


def run(learner: SACLearner, seeds: range, critic_dim: int = 0) -> None:
    for seed in seeds:
        data = batch(seed=seed, critic_dim=critic_dim)
        learner.update_critic(data)
        learner.update_actor(data)
        learner.soft_update_target()


def flat(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, x in state.items() for k, v in flat(x, f"{path}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for i, x in enumerate(state) for k, v in flat(x, f"{path}/{i}").items()}
    return {path: np.asarray(state)}


@pytest.mark.parametrize("critic_dim", [0, 4])
@pytest.mark.parametrize("normalization", [False, True])
def test_going_on_from_a_saved_state_is_bit_exact(normalization: bool, critic_dim: int) -> None:
    """Resume ≡ not stopped: weights, targets, moments, temperature, statistics and generator."""
    config = SACConfig(hidden=(8,), obs_normalization=normalization)
    one = SACLearner(spec(critic_dim=critic_dim), config, "cpu", seed=1)
    run(one, range(3), critic_dim)
    two = SACLearner(spec(critic_dim=critic_dim), config, "cpu", seed=99)
    from recollect.learners.state_json import Encoder, decode

    encoder = Encoder()
    tree = encoder.encode(one.get_state_dict())
    data = np.concatenate([np.frombuffer(block, np.uint8) for block in encoder.blocks])
    two.load_state_dict(decode(tree, data))
    run(one, range(3, 6), critic_dim)
    run(two, range(3, 6), critic_dim)
    a, b = flat(one.get_state_dict()), flat(two.get_state_dict())
    assert a.keys() == b.keys() and len(a) > 30
    assert all(np.array_equal(a[k], b[k]) for k in a)


def test_each_leaf_is_normalised_by_what_the_critic_was_trained_on() -> None:
    learner = SACLearner(spec(critic_dim=4), SACConfig(hidden=(8,), obs_normalization=True), "cpu", seed=1)
    data = batch(critic_dim=4)
    data["critic"] = 5 + 3 * data["critic"]
    learner.update_critic(data)
    learner.update_actor(data)
    assert learner.obs_normalizer is not None and learner.obs_normalizer.count == 16  # once for each batch
    for found, name in zip(learner._inputs(data, "next_"), ("obs", "critic")):
        mean, std = data[name].mean(0), data[name].std(0, correction=0)
        torch.testing.assert_close(found, (data[f"next_{name}"] - mean) / (std + 1e-2), rtol=1e-4, atol=1e-4)


def test_rates_and_entropy_are_those_of_the_configuration_and_the_actions() -> None:
    learner = SACLearner(spec(), SACConfig(hidden=(8,), lr=0.0125), "cpu", seed=1)
    assert [o.param_groups[0]["lr"] for o in learner.optimizers.values()] == [0.0125] * 3
    assert learner.target_entropy == -2.0


def test_statistics_of_blocks_are_those_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(3.0, 2.0, (60, 2)).astype(np.float32)
    rows[40:] += 50.0
    stats = RunningStats(2)
    for block in (rows[:7], rows[:0], rows[7:40], rows[40:]):
        stats.update(block)
    found = stats.pair()
    assert found is not None and stats.count == 60
    assert np.allclose(found[0], rows.mean(0), rtol=1e-5) and np.allclose(found[1], rows.std(0), rtol=1e-5)


def test_saved_statistics_stay_as_they_were() -> None:
    stats = RunningStats(2)
    stats.update(np.float32([[1, 2], [3, 4]]))
    state = stats.get_state_dict()
    before = copy.deepcopy(state)
    stats.update(np.float32([[7, 7]]))
    again = RunningStats(2)
    again.load_state_dict(state)
    again.update(np.float32([[7, 7]]))
    assert all(np.array_equal(before[name], state[name]) for name in before)


def test_a_loaded_state_stays_as_it_was() -> None:
    """So that it can be loaded again."""
    config = SACConfig(hidden=(8,))
    one, two = (SACLearner(spec(), config, "cpu", seed=s) for s in (1, 2))
    run(one, range(2))
    state = copy.deepcopy(one.get_state_dict())
    before = copy.deepcopy(flat(state))
    two.load_state_dict(state)
    run(two, range(2))
    after = flat(state)
    assert all(np.array_equal(before[k], after[k]) for k in before)


def test_networks_are_drawn_by_the_seed_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(12345)
    before = torch.random.get_rng_state()
    one, two, other = (SACLearner(spec(), SACConfig(hidden=(8,)), "cpu", seed=s) for s in (1, 1, 2))
    a, b, c = (flat([x.actor.state_dict(), x.critic.state_dict()]) for x in (one, two, other))
    assert not any(np.array_equal(a[name], c[name]) for name in a if name.endswith("weight"))
    run(one, range(2))
    run(two, range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(np.array_equal(a[name], b[name]) for name in a)  # also what came of them


def test_actions_stay_in_their_bounds_and_go_back_to_the_unit() -> None:
    actor = TanhGaussianActor(3, 2, (8,), [-2.0, 0.0], [2.0, 1.0])
    noise = 10 * torch.randn((200, 2), generator=torch.Generator().manual_seed(0))
    actions = actor.act(torch.zeros(200, 3), noise)
    assert (actions >= torch.tensor([-2.0, 0.0])).all() and (actions <= torch.tensor([2.0, 1.0])).all()
    unit, logp = actor.sample(torch.zeros(200, 3), noise)
    torch.testing.assert_close(actor.to_unit(actions), unit, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(logp).all()


@pytest.mark.parametrize(
    "changed", [{"n_choices": 3}, {"high": (2.0, float("inf"))}, {"low": (-2.0, 1.0)}], ids=str
)
def test_action_spaces_it_cannot_use_are_named(changed: Any) -> None:
    with pytest.raises(EnvContractError, match="action"):
        SACLearner(spec(**changed), SACConfig(hidden=(8,)), "cpu", seed=0)

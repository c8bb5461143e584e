"""From environment to targets: every bootstrap is of the true final observation, in every auto-reset mode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tests.collect.worlds import MODES
from tests.learners.test_environment import Boxed, Vector, envs, result
from tests.learners.test_sac_learner import flat

from recollect.learners.config import APPOConfig
from recollect.learners.environment import EnvDriver, EnvSpaces
from recollect.learners.networks import ActorCritic
from recollect.learners.ppo_learner import PPOLearner, state_values
from recollect.learners.rollout import RolloutWriter, StagingPool, has_finals


def slot_for(spec: EnvSpaces, T: int, n: int) -> dict[str, Any]:
    """Arrays as a ring of order "time" hands them out, filled with what must not stay."""
    shapes: dict[str, Any] = {
        "obs": (T, n, spec.obs_dim),
        "actions": (T, n, spec.action_dim),
        "last_obs": (n, spec.obs_dim),
    }
    shapes |= dict.fromkeys(("log_probs", "rewards", "dones", "truncated"), (T, n))
    if spec.critic_dim:
        shapes |= {"critic": (T, n, spec.critic_dim), "last_critic": (n, spec.critic_dim)}
    if has_finals(spec):
        shapes |= {"final_obs": (T * n, spec.obs_dim)}
        shapes |= {"final_critic": (T * n, spec.critic_dim)} if spec.critic_dim else {}
    slot = {name: np.full(shape, 1e9, np.float32) for name, shape in shapes.items()}
    slot["valid"] = np.ones((T, n), bool)
    if has_finals(spec):
        slot |= {"final_index": np.full(T * n, -1), "final_count": np.array(-1)}
    return slot


def joined(rollouts: list[dict[str, Any]], size: int | None = None) -> dict[str, Any]:
    """Rollouts through a staging pool, as the learner sees them."""
    shapes = {name: tuple(x.shape) for name, x in rollouts[0].items()}
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in rollouts[0].items()}
    pool = StagingPool(shapes, dtypes, size or len(rollouts), "cpu")
    for k, rollout in enumerate(rollouts):
        for name, x in pool.slot(k % pool.size).items():
            x.copy_(rollout[name])
    return pool.batch()


def test_a_rejected_step_is_an_invalid_cell_without_a_final_observation() -> None:
    info = {"final_obs": np.float32([[5, 6], [7, 8]])}
    driver = EnvDriver(
        Vector([result(0.5, reward=[1, np.nan], term=(1, 1), info=info)], AutoresetMode.SAME_STEP), seed=0,
        nan_policy="reject",
    )  # fmt: skip
    slot = slot_for(driver.spec, 1, 2)
    writer = RolloutWriter(slot)
    writer.write(driver.step(np.zeros((2, 1), np.float32)), np.float32([-1, -2]))
    writer.finish(driver.obs, driver.critic)
    assert slot["valid"].tolist() == [[True, False]] and slot["last_obs"].tolist() == [[0.5, 0.5]] * 2
    assert int(slot["final_count"]) == 1 and slot["final_index"][0] == 0
    assert slot["final_obs"][0].tolist() == [5, 6]


class Plain:
    """A critic whose value is a fixed function of what it sees."""

    def value(self, x: Any) -> Any:
        return x[..., 0] * 3 + x[..., 1] * 7


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_next_values_are_of_the_true_next_observations(mode: AutoresetMode) -> None:
    T, n, k = 5, 3, 4
    driver = EnvDriver(envs(Boxed, mode, n), seed=3)
    for _ in range(k):  # rollouts follow one another: an episode may end in the last cell
        rollouts, wanted = [], []
        for _lane in range(2):
            slot = slot_for(driver.spec, T, n)
            writer = RolloutWriter(slot)
            truth = np.empty((T, n))
            for t in range(T):
                step = driver.step(np.zeros((n, 1), np.float32))
                writer.write(step, np.zeros(n, np.float32))
                assert step.next_critic is not None
                truth[t] = step.next_critic @ [3, 7]
            writer.finish(driver.obs, driver.critic)
            rollouts.append({name: torch.from_numpy(np.asarray(x)) for name, x in slot.items()})
            wanted.append(truth)
        both = joined(rollouts, size=3)
        _, found = state_values(Plain(), both)  # type: ignore[arg-type]
        valid = both["valid"].numpy()
        assert np.array_equal(found.numpy()[valid], np.concatenate(wanted, 1)[valid])
        assert both["dones"].sum() > 2


def test_rollouts_stay_in_the_batch_until_they_are_replaced() -> None:
    rollouts = [
        {"rewards": torch.full((2, 3), k), "last_obs": torch.full((3, 1), k)} for k in (1.0, 2.0, 3.0)
    ]
    batch = joined(rollouts, size=2)
    assert batch["rewards"][0].tolist() == [3, 3, 3, 2, 2, 2] == batch["last_obs"].flatten().tolist()
    assert joined(rollouts[:1], size=2)["rewards"].shape == (2, 3)  # what was never filled is no part of it


def test_invalid_cells_enter_no_loss() -> None:
    """A cell that is not finite and marked invalid leaves the update as if it were not there."""
    bad = np.float32([[0.1, 0.2], [np.nan, 0.3]])
    net = ActorCritic(2, 1, 0, (8,))
    found = []
    for second in (bad, np.float32([[0.1, 0.2], [0.9, 0.3]])):
        learner = PPOLearner(spec2(), APPOConfig(hidden=(8,), epochs=1, minibatches=1), "cpu", seed=1)
        slot = slot_for(spec2(), 3, 2)
        steps = [result(0.5), result(second), result(0.25), result(0.1)]
        driver = EnvDriver(Vector(steps), seed=0, nan_policy="reject")
        writer = RolloutWriter(slot)
        for _ in range(3):
            writer.write(driver.step(np.zeros((2, 1), np.float32)), np.zeros(2, np.float32))
        writer.finish(driver.obs, driver.critic)
        slot["valid"][1:, 1] = False
        losses = learner.train(joined([{name: torch.from_numpy(np.asarray(x)) for name, x in slot.items()}]))
        assert all(np.isfinite(x) for x in losses.values())
        found.append([p.detach().clone() for p in learner.network.parameters()])
    assert len(found[0]) == len(list(net.parameters()))
    # the cell before the bad one bootstraps from its true next observation, which is the bad one: it is rejected too
    assert all(torch.isfinite(p).all() for p in found[0])


def spec2() -> EnvSpaces:
    return EnvSpaces(2, 0, 1, 0, 0, (-1.0,), (1.0,), (1,), "float32", "NEXT_STEP")


def numpy_loss(learner: PPOLearner, data: dict[str, Any]) -> tuple[float, float]:
    """Clipped surrogate and value loss in numpy, for a categorical policy."""

    def net(layers: Any, x: Any) -> Any:
        linear = [m for m in layers if isinstance(m, torch.nn.Linear)]
        for k, layer in enumerate(linear):
            x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
            x = np.tanh(x) if k < len(linear) - 1 else x
        return x

    logits = net(learner.network.actor, data["obs"])
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chosen = logp[np.arange(len(logp)), data["actions"][:, 0].astype(int)]
    ratio = np.exp(chosen - data["log_probs"])
    a = data["advantages"]
    policy = -np.minimum(
        ratio * a, np.clip(ratio, 1 - learner.config.clip, 1 + learner.config.clip) * a
    ).mean()
    value = ((net(learner.network.critic, data["obs"])[:, 0] - data["targets"]) ** 2).mean()
    return float(policy), float(value)


@pytest.mark.parametrize("clip", [0.2, 0.05])
def test_losses_equal_plain_numpy(clip: float) -> None:
    spec = EnvSpaces(4, 0, 1, 3, 0, (), (), (), "int64", "NEXT_STEP")
    learner = PPOLearner(spec, APPOConfig(hidden=(8,), lr=1e-9, clip=clip), "cpu", seed=2)
    rng = np.random.default_rng(0)
    data = {
        "obs": rng.normal(size=(32, 4)), "actions": rng.integers(0, 3, (32, 1)), "log_probs": rng.normal(size=32) - 1,
        "advantages": rng.normal(size=32), "targets": rng.normal(size=32),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(x.astype(np.float32)) for name, x in data.items()}
    policy, value = numpy_loss(learner, data)
    found = learner._step({**tensors, "critic": tensors["obs"]})
    assert float(found["policy"]) == pytest.approx(policy, rel=1e-4)
    assert float(found["value"]) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("n_choices", [0, 3])
def test_drawn_actions_have_the_log_probability_they_say(n_choices: int) -> None:
    net = ActorCritic(4, 1 if n_choices else 2, 0, (8,), n_choices)
    obs = torch.randn((4000, 4), generator=torch.Generator().manual_seed(0))
    actions, logp = net.act(obs, torch.Generator().manual_seed(1))
    again, entropy = net.evaluate(obs, actions)
    torch.testing.assert_close(again, logp)
    assert entropy.mean().item() == pytest.approx(-float(logp.mean()), abs=0.08)
    if n_choices:
        assert torch.bincount(actions.long().flatten(), minlength=3).min() > 1000


def test_going_on_from_a_saved_state_is_bit_exact() -> None:
    spec = EnvSpaces(4, 0, 1, 3, 0, (), (), (), "int64", "NEXT_STEP")
    config = APPOConfig(hidden=(8,))
    slot = {name: torch.from_numpy(np.asarray(x)) for name, x in slot_for(spec, 4, 3).items()}
    for name in ("obs", "last_obs", "rewards", "log_probs", "dones", "truncated", "actions"):
        slot[name] = torch.zeros_like(slot[name]) + (0.1 if "obs" in name else 0)
    slot["rewards"][1] = 1.0
    one, two = (PPOLearner(spec, config, "cpu", seed=s) for s in (1, 2))
    one.train(slot)
    two.load_state_dict(one.get_state_dict())
    one.train(slot)
    two.train(slot)
    assert all(torch.equal(a, b) for a, b in zip(one.network.parameters(), two.network.parameters()))
    assert torch.equal(one.generator.get_state(), two.generator.get_state())
    assert one.update_count == two.update_count


def test_a_loaded_state_stays_as_it_was() -> None:
    """So that it can be loaded again."""
    spec = EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    one, two = (PPOLearner(spec, APPOConfig(hidden=(4,)), "cpu", seed=s) for s in (1, 2))
    one.train(stale_rollout(one))
    state = copy.deepcopy(one.get_state_dict())
    before = copy.deepcopy(flat(state))
    two.load_state_dict(state)
    two.train(stale_rollout(two))
    after = flat(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_networks_are_drawn_by_the_seed_and_the_global_generator_is_left_alone() -> None:
    spec = EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    torch.manual_seed(12345)
    before = torch.random.get_rng_state()
    one, two, other = (PPOLearner(spec, APPOConfig(hidden=(4,), lr=0.0125), "cpu", seed=s) for s in (1, 1, 2))
    a, b, c = (flat(learner.network.state_dict()) for learner in (one, two, other))
    assert not any(np.array_equal(a[name], c[name]) for name in a if name.endswith("weight"))
    one.train(stale_rollout(one))
    two.train(stale_rollout(two))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(np.array_equal(a[name], b[name]) for name in a)  # also what came of them
    assert one.optimizer.param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize("off_policy", [False, True])
def test_targets_bootstrap_where_an_episode_timed_out_and_not_where_it_terminated(off_policy: bool) -> None:
    config = APPOConfig(hidden=(4,), gamma=0.9, rho_bar=0.7, c_bar=0.1)
    learner = PPOLearner(EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP"), config, "cpu", seed=1)
    rollout = stale_rollout(learner, T=1, n=2)
    rollout["truncated"] = torch.tensor([[0.0, 1.0]])
    logp = rollout["log_probs"] + (np.log(0.5) if off_policy else 0.0)  # half as likely now as then
    targets, _ = learner.targets(rollout, logp)
    with torch.no_grad():
        value, last = learner.network.value(rollout["obs"]), learner.network.value(rollout["last_obs"])
    wanted = rollout["rewards"] + 0.9 * torch.tensor([0.0, 1.0]) * last
    torch.testing.assert_close(targets, value + (0.5 if off_policy else 0.7) * (wanted - value))


def test_each_epoch_takes_all_cells_in_another_order_with_advantages_of_one_scale() -> None:
    spec = EnvSpaces(2, 3, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    learner = PPOLearner(spec, APPOConfig(epochs=2, minibatches=3, hidden=(4,)), "cpu", seed=1)
    rollout = stale_rollout(learner)
    cells = torch.randn((16 * 8, 3), generator=torch.Generator().manual_seed(1))
    rollout |= {"critic": cells.view(16, 8, 3), "last_critic": cells[:8]}
    seen: list[Any] = []
    learner._step = lambda data: (seen.append(data), {"policy": torch.tensor(len(seen))})[1]  # type: ignore[method-assign]
    assert learner.train(rollout) == {"policy": 3.5}  # the mean of 1 to 6
    first, second = (torch.cat([data["critic"] for data in part]) for part in (seen[:3], seen[3:]))
    assert not torch.equal(first, second) and not torch.equal(first, cells)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(cells.tolist())
    advantages = torch.cat([data["advantages"] for data in seen[:3]])
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(advantages.std()) == pytest.approx(1, rel=1e-4)


def test_an_iteration_is_epochs_of_minibatches() -> None:
    spec = EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    learner, parts = (
        PPOLearner(spec, APPOConfig(epochs=3, minibatches=5, hidden=(4,)), "cpu", seed=1),
        list[int](),
    )
    step = learner._step
    learner._step = lambda data: (parts.append(len(data["obs"])), step(data))[1]  # type: ignore[method-assign]
    learner.train(stale_rollout(learner, 4, 5))
    assert parts == [4] * 15 and learner.update_count == 15


@pytest.mark.parametrize("cells", [0, 1])
def test_hardly_a_valid_cell_spoils_no_weight(cells: int) -> None:
    spec = EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    learner = PPOLearner(spec, APPOConfig(hidden=(4,)), "cpu", seed=1)
    rollout = stale_rollout(learner, 4, 5)
    rollout["valid"] = torch.zeros_like(rollout["valid"])
    rollout["valid"].view(-1)[:cells] = True
    losses = learner.train(rollout)
    assert bool(losses) is (cells > 0)
    assert all(torch.isfinite(p).all() for p in learner.network.parameters())


def test_the_parts_of_the_loss_count_as_configured_and_each_network_is_clipped_by_its_own_norm() -> None:
    spec, rng = EnvSpaces(4, 0, 1, 3, 0, (), (), (), "int64", "NEXT_STEP"), np.random.default_rng(0)
    data = {
        "obs": rng.normal(size=(32, 4)), "actions": rng.integers(0, 3, (32, 1)), "log_probs": np.full(32, -1.0),
        "advantages": np.zeros(32), "targets": 100 + rng.normal(size=32),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(x.astype(np.float32)) for name, x in data.items()}
    tensors["critic"] = tensors["obs"]

    def norms(**config: Any) -> list[float]:
        learner = PPOLearner(spec, APPOConfig(hidden=(8,), max_grad_norm=0.01, **config), "cpu", seed=2)
        with torch.no_grad():
            learner.network.actor[-1].bias.copy_(torch.tensor([2.0, 0.0, 0.0]))
            before = float(learner.network.evaluate(tensors["obs"], tensors["actions"])[1].mean())
        learner._step(tensors)
        with torch.no_grad():
            after = float(learner.network.evaluate(tensors["obs"], tensors["actions"])[1].mean())
        sums = [sum(float((p.grad**2).sum()) for p in part if p.grad is not None) for part in learner._parts]
        return [*(x**0.5 for x in sums), after - before]

    critic, actor, gained = norms(value_coef=0.0, entropy_coef=0.5)
    assert critic == 0 and actor == pytest.approx(0.01, rel=1e-3) and gained > 0
    critic, actor, gained = norms(entropy_coef=0.0)
    assert critic == pytest.approx(0.01, rel=1e-3) and actor == 0


def stale_rollout(learner: PPOLearner, T: int = 16, n: int = 8) -> dict[str, Any]:
    """A rollout by the learner's policy of now, in which the first of two actions pays and the second costs."""
    g = torch.Generator().manual_seed(1)
    obs = torch.randn((T, n, 2), generator=g)
    actions, log_probs = learner.network.act(obs, g)
    none = torch.zeros((T, n))
    return {
        "obs": obs, "actions": actions, "log_probs": log_probs, "rewards": 1 - 2 * actions[..., 0], "dones": none + 1,
        "truncated": none, "valid": none == 0, "last_obs": torch.randn((n, 2), generator=g),
    }  # fmt: skip


def test_rollouts_of_old_weights_do_not_push_the_policy_on_and_on() -> None:
    """Clipping against the newest weights lets every late rollout push again, until the policy is certain."""
    spec = EnvSpaces(2, 0, 1, 2, 0, (), (), (), "int64", "NEXT_STEP")
    learner = PPOLearner(spec, APPOConfig(hidden=(8,), lr=3e-3), "cpu", 0)
    rollout = stale_rollout(learner)
    for _ in range(20):
        learner.train(rollout)
    logp, entropy = learner.network.evaluate(rollout["obs"], rollout["actions"])
    ratio = torch.exp(logp - rollout["log_probs"])
    assert 1.1 < ratio.max() < 1.6  # it went where the advantages said, and stayed where the clip is
    assert entropy.mean() > 0.5

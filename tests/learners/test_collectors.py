"""A collector's patience: it waits for the learner as long as that lives, and never acts on another version."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.learners.test_sac_learner import spec

import recollect as rc
from recollect import _core
from recollect.errors import DeadlineError, EnvContractError
from recollect.learners import collectors
from recollect.learners.config import APPOConfig, SACConfig
from recollect.learners.metrics import open_sinks
from recollect.learners.ppo_learner import make_network
from recollect.learners.sac_learner import make_actor

ROW = ("obs", "actions", "rewards", "next_obs", "dones", "truncated", "critic", "next_critic")


class FullRing:
    """A ring that is full for a while."""

    def __init__(self, n_deadlines: int) -> None:
        self.left = n_deadlines

    @property
    def write_buffer(self) -> str:
        if self.left:
            self.left -= 1
            raise DeadlineError("ring: a free slot must come within 60 s, got none; see stats()")
        return "slot"


class Context:
    """A collector's context that stops after so many looks."""

    def __init__(self, looks: int = 1000) -> None:
        self.looks, self.phases = looks, []

    def stopping(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def beat(self, phase: str) -> None:
        self.phases.append(phase)


def test_at_a_full_ring_it_waits_and_shows_that_it_lives() -> None:
    ctx = Context()
    assert collectors._claim(ctx, FullRing(3)) == "slot"
    assert ctx.phases == ["ring is full"] * 3


def test_at_a_full_ring_it_stops_when_told() -> None:
    assert collectors._claim(Context(looks=2), FullRing(10**6)) is None


def test_told_to_stop_at_a_full_ring_it_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    work = SimpleNamespace(
        begin=lambda: True, tally=SimpleNamespace(lap=lambda phase: None),
        driver=SimpleNamespace(close=lambda: closed.append(1)),
    )  # fmt: skip
    monkeypatch.setattr(collectors, "_Collector", lambda *args, **names: work)
    collectors.collect_rollouts(
        Context(looks=1), ring=FullRing(10**6), weights=None, board=None, plan=None  # type: ignore[arg-type]
    )  # fmt: skip
    assert closed == [1]


@pytest.mark.parametrize("collect", ["collect_transitions", "collect_rollouts"])
def test_it_stops_at_the_next_step_not_at_the_end_of_a_chunk(
    collect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    steps = SimpleNamespace(write=lambda *args: None)
    work = SimpleNamespace(
        begin=lambda *args: True, step=lambda actions: done.append("step") or SimpleNamespace(valid=np.ones(1)),
        driver=SimpleNamespace(acting_obs=lambda: None, close=lambda: done.append("closed")),
        policy=SimpleNamespace(transition_actions=lambda obs: None, rollout_actions=lambda obs: (None, None)),
        tally=SimpleNamespace(lap=lambda phase: None),
    )  # fmt: skip
    monkeypatch.setattr(collectors, "_Collector", lambda *args, **names: work)
    monkeypatch.setattr(collectors, "_add", lambda replay, step: None)
    monkeypatch.setattr(collectors, "RolloutWriter", lambda slot: steps)
    plan = SimpleNamespace(steps=100, limiter=None)
    kind = "replay" if collect == "collect_transitions" else "ring"
    looks = 2 if kind == "replay" else 3  # a rollout looks once more, for its slot
    getattr(collectors, collect)(
        Context(looks), weights=None, board=None, plan=plan, **{kind: SimpleNamespace(write_buffer="slot")}
    )
    assert done == ["step", "step", "closed"]


def test_who_waits_for_leave_to_add_hears_that_all_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def attach_limiter(self, limiter: Any) -> None:
            limiter.attach(_core.Mapping(-1, 0, 4096, True), 0, lambda: (100, 50))

    def look() -> None:
        raise rc.ClosedError("runner: is stopping")

    limiter = {"samples_per_insert": 1.0, "min_size": 1, "band": 4.0, "deadline": 0.01}
    work = SimpleNamespace(
        begin=lambda *args: True, step=lambda actions: SimpleNamespace(valid=np.ones(1)),
        driver=SimpleNamespace(acting_obs=lambda: None, close=lambda: None),
        policy=SimpleNamespace(transition_actions=lambda obs: None),
    )  # fmt: skip
    monkeypatch.setattr(collectors, "_Collector", lambda *args, **names: work)
    ctx: Any = Context(1000)
    ctx.look = look
    with pytest.raises(rc.ClosedError, match="is stopping"):
        collectors.collect_transitions(
            ctx, replay=Full(), weights=None, board=None, plan=SimpleNamespace(steps=100, limiter=limiter)
        )  # type: ignore[arg-type]


def beginner(sync: bool, looks: int = 1000) -> tuple[Any, list[str]]:
    """A worker about to begin a chunk, and what it does."""
    done: list[str] = []
    worker: Any = collectors._Collector.__new__(collectors._Collector)
    worker.ctx, worker.plan = Context(looks), SimpleNamespace(sync=sync)
    worker.tally = SimpleNamespace(lap=done.append)
    worker.policy = SimpleNamespace(version=4, refresh=lambda: done.append("refresh"))
    return worker, done


def test_running_free_it_takes_the_newest_weights_for_each_chunk() -> None:
    worker, done = beginner(sync=False, looks=2)
    assert [worker.begin() for _ in range(3)] == [True, True, False]
    assert done == ["refresh", "weight_sync"] * 2


def test_in_step_no_chunk_begins_without_a_permit() -> None:
    worker, done = beginner(sync=True, looks=4)
    leave = iter([False, False, True])
    worker._take = lambda pack: next(leave)
    assert worker.begin() and done == ["weight_sync"]
    worker._take = lambda pack: False
    assert not worker.begin()


@pytest.mark.parametrize("packs", [True, False])
def test_the_weights_are_read_before_the_learner_hears_that_the_permit_was_taken(packs: bool) -> None:
    """And one that packs batches never waits long for a permit: the learner may wait for its batch."""
    worker, done = beginner(sync=True)

    def permit(timeout: float, on_take: Any) -> Any:
        done.append(f"permit within {timeout}")
        on_take(None)
        done.append("taken")
        return SimpleNamespace(version=4)

    worker.ctx = SimpleNamespace(permit=permit)
    assert worker._take((lambda timeout: done.append("pack")) if packs else None)
    taken = ["refresh", "taken", "wait"]
    assert done == (["pack", "permit within 0.0"] if packs else ["permit within 1.0"]) + taken


def test_each_step_says_what_it_did_last() -> None:
    """A collector that hangs in an environment must not be reported as one that never started."""
    beats, counted = list[Any](), list[int]()
    worker: Any = collectors._Collector.__new__(collectors._Collector)
    worker.tally = SimpleNamespace(lap=lambda phase: None, count=lambda step: counted.append(step.n_steps))
    worker.driver = SimpleNamespace(step=lambda actions: SimpleNamespace(n_steps=4))
    worker.ctx = SimpleNamespace(beat=lambda *phase, **counted: beats.append((phase, counted)))
    worker.step(None)
    assert beats == [(("env_step",), {"env_steps": 4})] and counted == [4]


def test_a_factory_that_makes_another_environment_elsewhere_is_found_out() -> None:
    worker: Any = collectors._Collector.__new__(collectors._Collector)
    worker.driver, worker.plan = SimpleNamespace(n=3, spec="ours"), SimpleNamespace(spec="ours")
    worker._check(3)
    with pytest.raises(EnvContractError, match="num_envs: the environment must have 4 slots, got 3"):
        worker._check(4)
    worker.plan.spec = "theirs"
    with pytest.raises(EnvContractError, match="must have the spaces the learner saw, theirs, got ours"):
        worker._check(3)


def test_an_environment_that_cannot_be_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    driver = SimpleNamespace(n=3, spec="ours", close=lambda: closed.append(1))
    monkeypatch.setattr(collectors, "EnvDriver", lambda *args, **kwargs: driver)
    ctx = SimpleNamespace(seed=1, num_envs=4, make_env=lambda: None)
    plan: Any = SimpleNamespace(salt=1, nan_policy="raise", spec="ours")
    with pytest.raises(EnvContractError, match="num_envs"):
        collectors._Collector(ctx, None, None, None, plan, None)  # type: ignore[arg-type]
    assert closed == [1]


def test_each_run_and_each_lane_has_environments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    driver = SimpleNamespace(n=4, spec="ours")
    monkeypatch.setattr(
        collectors, "EnvDriver", lambda env, *, seed, nan_policy: seeds.append(seed) or driver
    )
    monkeypatch.setattr(collectors, "Policy", lambda *args: None)
    monkeypatch.setattr(collectors, "Tally", lambda *args: None)
    for seed, salt in ((1, 1), (1, 21), (2, 1), (1, 1)):
        ctx = SimpleNamespace(seed=seed, num_envs=4, lane=0, device="cpu", make_env=lambda: None)
        plan: Any = SimpleNamespace(salt=salt, nan_policy="raise", spec="ours")
        collectors._Collector(ctx, None, None, None, plan, None)  # type: ignore[arg-type]
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]


def test_a_policy_acts_on_observations_of_the_newest_statistics() -> None:
    seen: list[Any] = []
    pairs = iter([None, (np.float32([4.0]), np.float32([1.99])), (np.float32([2.0]), np.float32([0.99]))])
    network = SimpleNamespace(act=lambda obs, noise: (seen.append(obs.numpy().tolist()), noise)[1])
    spec = SimpleNamespace(action_dim=1, action_bounds=lambda: (np.float32([-1]), np.float32([1])))
    policy: Any = collectors.Policy.__new__(collectors.Policy)
    policy.version, policy.network, policy._device, policy._pair = 3, network, "cpu", None
    policy._weights, policy._stats = SimpleNamespace(version=3), SimpleNamespace(latest=lambda: next(pairs))
    policy._plan, policy._generator = SimpleNamespace(spec=spec, random_version=1), None
    for _ in range(3):
        policy.refresh()
        policy.transition_actions(np.float32([[8.0]]))
    assert seen == [[[8.0]], [[2.0]], [[6.0]]]


@pytest.mark.parametrize("random_version", [0, 1])
def test_actions_are_drawn_by_the_collectors_own_generator(random_version: int) -> None:
    """By the uniform one at first, by the network's later; the global one is left alone."""
    space = spec()
    network = collectors.pack_network(make_actor(space, SACConfig(hidden=(4,))))
    plan = collectors.CollectorPlan(space, network, 1, True, "raise", 1, random_version)
    obs, before = np.zeros((5, space.obs_dim), np.float32), torch.random.get_rng_state()
    a, b, c = (collectors.Policy(plan, None, None, "cpu", seed).transition_actions(obs) for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_uniform_actions_fill_the_bounds() -> None:
    space = spec()
    network = collectors.pack_network(make_actor(space, SACConfig(hidden=(4,))))
    policy = collectors.Policy(
        collectors.CollectorPlan(space, network, 1, True, "raise", 1), None, None, "cpu", 1
    )
    actions = policy.transition_actions(np.zeros((1000, space.obs_dim), np.float32))
    low, high = space.action_bounds()
    assert (low <= actions).all() and (actions <= high).all() and actions.dtype == np.float32
    assert (actions.min(0) < low + 0.1).all() and (actions.max(0) > high - 0.1).all()


def test_actions_of_rollouts_are_drawn_by_the_collectors_own_generator() -> None:
    space = spec()
    network = collectors.pack_network(make_network(space, APPOConfig(hidden=(4,))))
    plan = collectors.CollectorPlan(space, network, 1, True, "raise", 1)
    obs, before = np.zeros((5, space.obs_dim), np.float32), torch.random.get_rng_state()
    one, two, other = (collectors.Policy(plan, None, None, "cpu", seed) for seed in (1, 1, 2))
    a, b, c = (policy.rollout_actions(obs)[0] for policy in (one, two, other))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert not np.array_equal(a, one.rollout_actions(obs)[0])
    assert torch.equal(torch.random.get_rng_state(), before)


class Network:
    """A network somewhere."""

    device = "cuda"

    def cpu(self) -> Any:
        self.device = "cpu"
        return self


def test_the_network_travels_on_the_cpu_and_the_learners_stays_where_it_is() -> None:
    network = Network()
    assert pickle.loads(collectors.pack_network(network)).device == "cpu" and network.device == "cuda"


@pytest.mark.parametrize("valid", [[True, False, True], [True, True, True]])
@pytest.mark.parametrize("has_critic", [True, False])
def test_only_transitions_are_stored_and_whole(valid: list[bool], has_critic: bool) -> None:
    rows = {name: np.arange(3.0) + 10 * k for k, name in enumerate(ROW)}
    if not has_critic:
        rows |= {"critic": None, "next_critic": None}  # type: ignore[dict-item]
    step: Any = SimpleNamespace(valid=np.array(valid), rejected=0, **rows)
    added: dict[str, Any] = {}
    replay = SimpleNamespace(add=lambda *args, **kwargs: added.update(zip(ROW, args), **kwargs))
    collectors._add(replay, step)
    assert added.pop("envs").tolist() == np.flatnonzero(valid).tolist()
    wanted = {name: x[valid].tolist() for name, x in rows.items() if x is not None}
    assert {name: x.tolist() for name, x in added.items()} == wanted


def test_the_report_of_a_chunk_tells_its_version() -> None:
    published: list[Any] = []
    worker: Any = collectors._Collector.__new__(collectors._Collector)
    totals = {"chunks": 4.0, "version": 6.0}
    worker.tally = SimpleNamespace(
        report=SimpleNamespace(totals=totals), publish=lambda: published.append(dict(totals))
    )
    worker.policy = SimpleNamespace(version=7)
    worker.end()
    assert published == [{"chunks": 5.0, "version": 7}]


def test_a_permit_for_another_version_than_the_weights_is_refused() -> None:
    worker: Any = collectors._Collector.__new__(collectors._Collector)
    worker.tally = SimpleNamespace(lap=lambda phase: None)
    worker.policy = SimpleNamespace(version=3, refresh=lambda: None)

    def permit(timeout: float, on_take: Any) -> Any:
        granted = SimpleNamespace(version=4)
        on_take(granted)
        return granted

    worker.ctx = SimpleNamespace(permit=permit)
    with pytest.raises(RuntimeError, match="names version 4 but the weights are of 3"):
        worker._take(None)
    worker.policy.version = 5
    with pytest.raises(RuntimeError, match="names version 4 but the weights are of 5"):
        worker._take(None)
    worker.policy.version = 4
    assert worker._take(None)


def test_curves_for_tensorboard(tmp_path: Any) -> None:
    sinks = open_sinks(tmp_path, "tensorboard")
    for sink in sinks:
        sink.write(10, {"reward/mean": 1.5})
        sink.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in found.Scalars("reward/mean")] == [(10, 1.5)]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 10, "reward/mean": 1.5}\n'


def test_curves_for_wandb(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: said.append((step, values)), finish=lambda: said.append("end")
    )
    init = lambda **kwargs: (said.append(kwargs), run)[1]  # noqa: E731
    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=init))
    for sink in open_sinks(tmp_path, "wandb"):
        sink.write(10, {"reward/mean": 1.5})
        sink.close()
    assert said == [{"dir": str(tmp_path), "project": "recollect"}, (10, {"reward/mean": 1.5}), "end"]

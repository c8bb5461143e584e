"""APPO runs: every bootstrap true, every rollout counted, repeatable in step with the collectors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tests.learners.test_sac import without_collectors
from tests.learners.test_sac_learner import flat
from tests.learners.worlds import reach

from recollect.errors import BudgetError, CollectorDiedError, FormatError
from recollect.ipc import memory_budget
from recollect.learners import appo
from recollect.learners.appo import APPORunner
from recollect.learners.checkpoint import load_checkpoint

SMALL = {"steps_per_env": 8, "hidden": (8,), "epochs": 2, "minibatches": 2}
SAME = {"autoreset_mode": AutoresetMode.SAME_STEP}


def runner(cfg: Any = None, env: Any = None, **kwargs: Any) -> Any:
    given = {
        "num_envs": 4,
        "device": "cpu",
        "seed": 3,
        "deadline": 20.0,
        "start_method": "forkserver",
        **kwargs,
    }
    return APPORunner(reach, env or {}, {**SMALL, **(cfg or {})}, **given)


@pytest.mark.timeout(120)
def test_in_step_two_runs_are_bit_equal_and_one_goes_on(tmp_path: Path) -> None:
    cfg = {"sync_collection": True, "staging": 2}
    for k in range(2):
        with runner(cfg, SAME, num_collectors=2) as r:
            r.learn(12, 6, tmp_path / str(k))
    for k in (6, 12):
        a, b = (flat(load_checkpoint(tmp_path / name / f"model_{k}")) for name in "01")
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    lines = [json.loads(line) for line in (tmp_path / "0" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [10, 12]
    assert lines[-1]["lag/weight_versions"] == 0 and lines[-1]["ring/dropped"] == 0
    assert {"loss/policy", "loss/value", "loss/entropy", "lag/rollout_age_ms", "reward/mean"} <= lines[
        -1
    ].keys()


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_running_free_every_rollout_is_counted(tmp_path: Path) -> None:
    with runner({"max_lag": 4}, num_collectors=2) as r:
        r.learn(10, 0, tmp_path)
        summary, stats = r.last_run_summary, r._ring.stats()
        assert summary.status == "completed" and summary.total_env_steps > 0
        assert stats.written == stats.delivered + stats.dropped + stats.skipped + r._ring.available()
        assert summary.dropped >= stats.dropped + r._stale


def test_restored_state_is_the_saved_one(tmp_path: Path) -> None:
    with without_collectors(runner()) as r:
        r.learn(4, 0, tmp_path)
    state = load_checkpoint(tmp_path / "model_4")
    assert state["weight_version"] == 1  # nothing was trained
    with runner(seed=9) as r:
        r._make(r._look_at_env())
        r._restore(state, tmp_path / "model_4")
        a, b = flat(r._learner.get_state_dict()), flat(state["learner"])
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        assert r.version == state["weight_version"]
        network = r._learner.network.state_dict()
        mine = {name: torch.zeros_like(x) for name, x in network.items()}
        assert r._weights.read_weights_into(mine) == 2
        assert all(torch.equal(x, mine[name]) for name, x in network.items())


class FakeRing:
    """A ring with rollouts of these lanes and versions."""

    def __init__(self, rollouts: list[tuple[int, int]]) -> None:
        self.rollouts, self.copied, self.skipped = rollouts, [], 0
        self.taken: tuple[int, int] | None = None

    def wait_for_data(self, timeout: float) -> bool:
        assert timeout == 1.0
        return bool(self.rollouts)

    def available(self) -> int:
        return len(self.rollouts)

    @property
    def read_info(self) -> Any:
        self.taken = self.rollouts[0]
        return type("Info", (), {"lane": self.taken[0], "version": self.taken[1], "committed_ns": 0})

    def copy_read_slot_to_torch(self, slot: Any) -> None:
        self.copied.append((self.taken, slot))

    def advance_read(self) -> None:
        self.rollouts.pop(0)
        self.skipped, self.taken = self.skipped + (self.taken is None), None


class FakePool:
    def __init__(self, size: int) -> None:
        self.size = size

    def slot(self, k: int) -> int:
        return k


def staging(rollouts: list[tuple[int, int]], version: int = 9, lanes: int = 2, **cfg: Any) -> Any:
    r = runner(cfg, num_collectors=lanes)
    r._ring, r._pool = FakeRing(rollouts), FakePool(lanes * r.rl_cfg.staging)
    r._weights, r._version_base = SimpleNamespace(version=version), 40
    return r


def test_the_newest_rollouts_are_kept_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async RL trains on old rollouts unseen (miles#2030): what the pool cannot hold is skipped by the ring's count."""
    monkeypatch.setattr(appo, "monotonic_ns", lambda: 5_000_000)
    r = staging([(0, 1), (1, 2), (0, 3), (1, 4), (0, 5)])
    laps: list[str] = []
    r._watch = SimpleNamespace(lap=laps.append)
    assert r._stage() == 2 and laps == ["wait"]
    assert r._ring.skipped == 3 and [x for x, _ in r._ring.copied] == [(1, 4), (0, 5)]
    assert r._lags == [5.0, 4.0] and r._ages_ms == [5.0, 5.0]


def test_a_dead_collector_is_told_of_while_the_others_supply_rollouts() -> None:
    r = staging([(0, 9), (0, 9)])

    def check() -> None:
        raise CollectorDiedError("collector 1: must live, got a dead process")

    r.check_collectors = check
    with pytest.raises(CollectorDiedError):
        r._stage()


def test_rollouts_beyond_the_lag_are_skipped_and_counted() -> None:
    r = staging([(0, 6), (1, 7)], max_lag=2)
    assert r._stage() == 1 and r._stale == 1
    assert [x for x, _ in r._ring.copied] == [(1, 7)]  # two versions behind is not over two
    exact = staging([(0, 8), (1, 9)], max_lag=0)
    assert exact._stage() == 1 and exact._stale == 1
    r._ring.stats = lambda: SimpleNamespace(dropped=3, skipped=5)
    assert r._loss_counts() == (3 + 5 + 1, 0)


def test_while_no_rollout_comes_collectors_are_looked_after() -> None:
    r, looks = staging([]), list[int]()

    def check() -> None:
        looks.append(1)
        if len(looks) == 4:
            r._ring.rollouts = [(0, 9)]

    r.check_collectors = check
    assert r._stage() == 1 and len(looks) == 4


def test_in_step_whoever_lives_goes_on_when_a_lane_died_with_its_permit() -> None:
    r, calls = staging([], sync_collection=True, staging=2), list[str]()
    r.wait_permits_done = lambda: calls.append("done")

    def permit() -> None:
        calls.append("permit")
        r._ring.rollouts = [(1, 9)]

    r._permit = permit
    assert r._stage() == 1 and calls == ["done", "permit", "done"]
    r._ring.rollouts = [(1, 9), (0, 9)]
    assert r._stage() == 2
    assert [place for _, place in r._ring.copied] == [1, 3, 2]  # by lane, in the rounds' order


def test_in_step_a_rollout_that_came_late_needs_no_second_permit() -> None:
    r, looks = staging([], sync_collection=True), list[int]()
    r.wait_permits_done, r._permit = lambda: None, lambda: pytest.fail("gave leave for a second rollout")

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:  # after the wait, before the look
            r._ring.rollouts = [(0, 9), (1, 9)]

    r.check_collectors = check
    assert r._stage() == 2


def test_staged_rollouts_go_round_the_pool() -> None:
    r = staging([(0, 9)], staging=2, lanes=1)
    places = []
    for _ in range(5):
        r._ring.rollouts = [(0, 9)]
        r._stage()
        places.append(r._ring.copied[-1][1])
    assert places == [0, 1, 0, 1, 0]


def test_too_large_a_ring_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "available_nbytes", lambda: 1 << 12)
    with runner() as r, pytest.raises(BudgetError, match="APPORunner: must fit"):
        r.learn(5, 0, tmp_path)


@pytest.mark.parametrize(("env", "finals"), [({}, False), (SAME, True)])
def test_the_ring_is_made_as_the_configuration_says_and_the_budget_counts_it(
    env: Any, finals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(memory_budget, "warn_if_over_budget", lambda *args: said.append(args))
    cfg = {"num_slots": 3, "ring_policy": "drop_oldest", "staging": 2}
    with runner(cfg, env, num_collectors=2) as r:
        r._make(replace(r._look_at_env(), critic_dim=5))
        ring = r._ring
        assert (ring.num_slots, ring.num_lanes, ring.policy, ring.order) == (3, 2, "drop_oldest", "time")
        assert (ring._ring.deadline, ring.num_envs, ring.num_steps) == (20.0, 2, 8)
        assert ring.slot_shapes["critic"] == (8, 2, 5)
        assert ("final_obs" in ring.slot_shapes) is finals and "valid" in ring.slot_shapes
        assert r._pool.size == 4 and len(r._board.read()) == 2
        ((estimate, label),) = said
        assert (estimate["ring_buffer"], estimate["weights"]) == (ring.nbytes, r._weights.nbytes)
        assert (estimate["staging_pool"], label) == (4 * ring._plan.slot_nbytes, "APPORunner")


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    from recollect.learners.checkpoint import save_checkpoint

    save_checkpoint(tmp_path / "model_1", {"algorithm": "sac", "iteration": 1})
    with runner() as r, pytest.raises(FormatError, match="must be a checkpoint of appo, got 'sac'"):
        r.learn(5, 0, tmp_path, resume=tmp_path / "model_1")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_cartpole(seed: int, tmp_path: Path) -> None:
    with APPORunner("CartPole-v1", {}, {}, num_envs=16, device="cpu", seed=seed) as r:
        r.learn(1000, 0, tmp_path)
        last = [episode[1] for episode in r._board_totals().episodes[-20:]]
    assert np.mean(last) > 450

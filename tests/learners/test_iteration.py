"""The order of an iteration, as the contract gives it: what a tick may see, and when the next weights come out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.learners import test_appo, test_sac
from tests.learners.test_metrics import lane
from tests.learners.worlds import own_learner

from recollect.ipc.async_runner import RunnerStats
from recollect.learners import run as run_module
from recollect.learners.collectors import Policy
from recollect.learners.metrics import Merged, RunSummary
from recollect.learners.sac import OffPolicyRunner


class Calls(list[Any]):
    """Notes the calls of what stands in for the parts of a runner."""

    def to(self, name: str, returns: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.append((name, *args, *sorted(kwargs.items())) if args or kwargs else name)
            return returns

        return call


def off_policy(calls: Calls, **cfg: Any) -> Any:
    r = test_sac.runner(OffPolicyRunner, cfg, learner=own_learner, num_collectors=2)
    r._pipe = SimpleNamespace(
        sample_large_batch=calls.to("sample", {}), start_prepare=calls.to("prepare"), wait_asked=calls.to("wait asked"),
        after_tick=calls.to("after_tick"),
    )  # fmt: skip
    r._weights = SimpleNamespace(version=7, write_weights=calls.to("publish"))
    r._version_base = 40  # of the run it goes on from; collectors know of this one only
    r._learner = SimpleNamespace(actor=SimpleNamespace(state_dict=lambda: "weights"))
    r._update = calls.to("update", {"critic": 0.5})
    r.wait_permits_done, r.wait_permits_taken = calls.to("wait for the chunk"), calls.to("wait for takers")
    r.grant_permits, r.check_collectors = calls.to("permit"), calls.to("check")
    r._watch = SimpleNamespace(lap=calls.to("lap"))
    return r


def without_laps(calls: Calls) -> list[Any]:
    """The names of the calls."""
    return [call if isinstance(call, str) else call[0] for call in calls if call[0] != "lap"]


def test_a_tick_of_sac_in_step_with_its_collectors() -> None:
    """The permit names the version, which stays until everybody has taken it; the next tick leaves out a chunk."""
    calls = Calls()
    r = off_policy(calls, env_steps_per_sync=3)
    assert r._iterate(5, False) == {"critic": 0.5}
    chunk = 3  # steps: each environment has a ring of its own
    n = r.rl_cfg.batch_size
    assert calls == [
        "wait for the chunk", ("lap", "wait"), ("sample", 5, n), ("prepare", 6, n, ("headroom", chunk)),
        "wait asked", ("permit", 7, 3), ("lap", "batch"), ("update", {}), "after_tick", ("lap", "train"),
        "wait for takers", ("publish", "weights"), ("lap", "weight_sync"),
    ]  # fmt: skip


def test_the_last_tick_of_sac_starts_nothing() -> None:
    calls = Calls()
    off_policy(calls)._iterate(5, True)
    assert without_laps(calls) == [
        "wait for the chunk", "sample", "update", "after_tick", "publish",
    ]  # fmt: skip


def test_a_tick_of_sac_running_free_waits_for_nobody() -> None:
    calls = Calls()
    off_policy(calls, sync_collection=False)._iterate(5, False)
    assert without_laps(calls) == [
        "check", "sample", "prepare", "update", "after_tick", "publish",
    ]  # fmt: skip


@pytest.mark.parametrize("resumed", [True, False])
def test_actions_are_drawn_at_random_until_the_first_update_of_a_new_run(resumed: bool) -> None:
    sent: dict[str, Any] = {}
    with test_sac.runner() as r:
        r._make(r._look_at_env())
        r._make_pipe, r._fill_replay = lambda: None, lambda first: None
        r.start_collectors = lambda fn, kwargs: sent.update(kwargs)
        r._begin(21, resumed)
        assert sent["plan"].salt == 21  # a run that goes on does not repeat the environments of the first
        policy = Policy(sent["plan"], r._weights, None, "cpu", 0)
        policy.refresh()
        policy.network = SimpleNamespace(act=lambda seen, noise: torch.full_like(noise, 5.0))
        actions = policy.transition_actions(np.zeros((50, 2), np.float32))
        assert (actions == 1.0).all() == resumed and (
            abs(actions) <= 1
        ).all()  # in bounds, whatever was drawn


MAKERS: dict[str, Any] = {"sac": test_sac.runner, "appo": test_appo.runner}
STEPS = {"sac": "env_steps_per_sync", "appo": "steps_per_env"}


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("algorithm", MAKERS)
def test_collectors_begin_as_the_configuration_says(algorithm: str, sync: bool) -> None:
    calls, sent = Calls(), dict[str, Any]()
    cfg = {"sync_collection": sync, STEPS[algorithm]: 5, "nan_policy": "reject"}
    cfg |= {"obs_normalization": True} if algorithm == "sac" else {}
    with MAKERS[algorithm](cfg=cfg) as r:
        r._make(r._look_at_env())
        r._fill_replay, r.grant_permits = calls.to("fill"), calls.to("permit")
        r.start_collectors = lambda fn, kwargs: sent.update(kwargs)
        r._begin(21, False)
        plan = sent["plan"]
        assert (plan.steps, plan.sync, plan.nan_policy, plan.salt) == (5, sync, "reject", 21)
        assert calls == ([("fill", 21)] if algorithm == "sac" else [("permit", 1, 5)] if sync else [])
        assert all(sent[name] is getattr(r, f"_{name}") for name in sent.keys() - {"plan", "pack"})
        assert sent.keys() >= {
            "weights",
            "board",
            "trace",
            *(("replay", "stats") if algorithm == "sac" else ["ring"]),
        }


@pytest.mark.parametrize("algorithm", MAKERS)
def test_all_that_is_shared_ends_with_the_runner(algorithm: str) -> None:
    cfg = {"obs_normalization": True, "pack": "collector"} if algorithm == "sac" else {}
    with MAKERS[algorithm](cfg=cfg) as r:
        r._make(r._look_at_env())
        made = [r._weights, r._board]
        if algorithm == "sac":
            pack = r._make_pipe()
            made += [r._replay, r._stats, pack[2], r._pipe]
        else:
            made.append(r._ring)
        assert {id(x) for x in made} == {id(x) for x in r._resources}


@pytest.mark.parametrize("algorithm", MAKERS)
def test_the_learner_begins_by_the_seed(algorithm: str) -> None:
    generators = []
    for seed in (3, 4, 3):
        with MAKERS[algorithm](seed=seed) as r:
            r._make(r._look_at_env())
            generators.append(r._learner.get_state_dict()["generator"])
    assert torch.equal(generators[0], generators[2]) and not torch.equal(generators[0], generators[1])


def test_updates_take_slices_in_order_and_the_actor_every_nth() -> None:
    calls = Calls()
    r = test_sac.runner(cfg={"batch_size": 4, "updates_per_step": 3, "policy_frequency": 2})
    learner = SimpleNamespace(update_count=0, soft_update_target=calls.to("target"))

    def update_critic(batch: Any) -> dict[str, float]:
        learner.update_count += 1
        calls.append(("critic", batch["rewards"].tolist()))
        return {"critic": 1.0}

    def update_actor(batch: Any) -> dict[str, float]:
        calls.append(("actor", batch["rewards"].tolist()))
        return {"actor": 2.0}

    learner.update_critic, learner.update_actor, r._learner = update_critic, update_actor, learner
    assert r._update({"rewards": np.arange(12)}) == {"critic": 1.0, "actor": 2.0}
    assert calls == [
        ("critic", [0, 1, 2, 3]), "target", ("critic", [4, 5, 6, 7]), ("actor", [4, 5, 6, 7]), "target",
        ("critic", [8, 9, 10, 11]), "target",
    ]  # fmt: skip
    learner.update_critic = learner.update_actor = lambda batch: None
    learner.update_count = 2
    assert r._update({"rewards": np.arange(12)}) == {}  # a learner need not tell of losses


def test_statistics_go_out_before_the_weights_that_were_trained_with_them() -> None:
    calls = Calls()
    r = off_policy(calls)
    r._stats = SimpleNamespace(put=calls.to("put"))
    r._learner.obs_normalizer = SimpleNamespace(pair=lambda: None)
    r._publish()
    r._learner.obs_normalizer = SimpleNamespace(pair=lambda: "pair")
    r._publish()
    assert calls == [("publish", "weights"), ("put", "pair"), ("publish", "weights")]


@pytest.mark.parametrize("sync", [True, False])
def test_an_iteration_of_appo(sync: bool) -> None:
    """Weights are published before the next permit, which names them."""
    calls = Calls()
    r = test_appo.runner({"sync_collection": sync, "steps_per_env": 8})
    staged = iter([0, 0, 2, 1])  # what was too old is no iteration
    r._stage = lambda: (calls.append("stage"), next(staged))[1]
    r._pool = SimpleNamespace(batch=lambda: "batch")
    network = SimpleNamespace(state_dict=lambda: "weights")
    r._learner = SimpleNamespace(train=calls.to("train", {"policy": 0.5}), network=network)
    r._weights, r._version_base = SimpleNamespace(version=7, write_weights=calls.to("publish")), 40
    r.grant_permits, r._watch = calls.to("permit"), SimpleNamespace(lap=calls.to("lap"))
    assert r._iterate(5, False) == r._iterate(6, True) == {"policy": 0.5}
    one = ["stage", ("lap", "batch"), ("train", "batch"), ("lap", "train"), ("publish", "weights")]
    last = ("lap", "weight_sync")
    assert calls == ["stage", "stage", *one, *([("permit", 7, 8)] if sync else []), last, *one, last]


def test_what_the_algorithms_count_themselves() -> None:
    with test_sac.runner() as r:
        r._replay, pipe = SimpleNamespace(size=9), SimpleNamespace(redrawn=5, misses=2)
        r._pipe = SimpleNamespace(stats=lambda: pipe)
        assert r._more_metrics() == {"replay/size": 9, "replay/redrawn": 5, "pipeline/misses": 2}
        assert r._loss_counts() == (0, 2)
    with test_appo.runner() as r:
        r._ring, r._stale = SimpleNamespace(stats=lambda: SimpleNamespace(dropped=3, skipped=5)), 4
        r._lags, r._ages_ms = [1.0, 3.0], [10.0, 50.0]
        lags = {"lag/weight_versions": 2.0, "lag/rollout_age_ms": 30.0}
        assert r._more_metrics() == {"ring/dropped": 3, "ring/skipped": 5, "ring/stale": 4, **lags}
        assert r._more_metrics() == {
            "ring/dropped": 3,
            "ring/skipped": 5,
            "ring/stale": 4,
        }  # no rollout since
        r._ring = None


def test_phases_of_the_learner_exclude_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 2_000_000, 5_000_000, 9_000_000, 10_000_000])
    monkeypatch.setattr(run_module, "monotonic_ns", lambda: next(ticks))
    watch = run_module.Stopwatch()
    watch.lap("wait")
    watch.lap("train")
    watch.skip()
    watch.lap("train")
    assert watch.read(2) == {"time/learner_wait_ms": 1.0, "time/learner_train_ms": 2.0}
    assert watch.read(1) == {}


def test_a_line_of_metrics_has_rates_of_wall_time_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps, lines, shown = [100.0], [200.0], [], []
    monkeypatch.setattr(run_module, "monotonic", lambda: now[0])
    rewards, chunks = iter([-5.0, -9.0]), iter([(2.0, 4e6), (4.0, 10e6)])

    def board() -> Merged:
        n, spent_ns = next(chunks)
        totals = {"env_steps": steps[0], "version": 5.0, "chunks": n, "env_step_ns": spent_ns}
        return Merged([lane([(1.0, next(rewards), 2.0, 0.0)], **totals)])

    r = SimpleNamespace(
        _board_totals=board, _watch=SimpleNamespace(read=lambda n: {"time/learner_train_ms": 1.0 * n}),
        beacon=SimpleNamespace(publish=lambda values, tables: shown.append((values, tables))), _more_metrics=dict,
        stats=lambda: RunnerStats(2, 1, 5, {}, ()), _weights=SimpleNamespace(version=8), _steps_base=1000,
    )  # fmt: skip
    slow = SimpleNamespace(
        write=lambda i, values: now.append(now.pop() + 0.5)
    )  # part of the next line's time
    log = run_module._MetricsLog(r, [slow], lambda i, values: lines.append(values))  # type: ignore[arg-type, list-item]
    summary = RunSummary()
    log._start, log._steps = now[0], steps[0]
    for spent, made, loss in ((8.0, 400.0, 1.0), (2.0, 10.0, 5.0)):
        log.add({"critic": loss, "q": math.nan})
        log.add({"critic": loss + 1})
        now[0] += spent
        steps[0] += made
        log.write(10, summary)
    assert [line["perf/steps_per_sec"] for line in lines] == [50.0, 4.0]
    assert [line["perf/iter_ms"] for line in lines] == [4000.0, 1250.0]
    assert [line["axis/env_steps_total"] for line in lines] == [1600.0, 1610.0]
    assert [line["loss/critic"] for line in lines] == [1.5, 5.5] and lines[0]["lag/weight_versions"] == 3
    assert "loss/q" not in lines[0]  # JSON has no word for it
    assert [line["time/collector_env_step_ms"] for line in lines] == [2.0, 3.0]
    assert [line["time/learner_train_ms"] for line in lines] == [2.0, 2.0]  # of two iterations
    assert (lines[0]["collectors/alive"], lines[0]["collectors/restarts"]) == (2, 1)
    assert summary.best_mean_reward == -5.0
    assert shown == [({"iteration": 10, **line}, {"collectors": []}) for line in lines]

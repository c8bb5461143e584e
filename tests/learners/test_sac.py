"""SAC runs: repeatable bit for bit, resumable to the bit, and clear about how they ended."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiBinary
from tests.learners.test_metrics import lane
from tests.learners.test_sac_learner import flat
from tests.learners.worlds import OwnLearner, own_learner, reach

import recollect as rc
from recollect.errors import (
    BudgetError,
    ClosedError,
    CollectorDiedError,
    DeadlineError,
    EnvContractError,
    FormatError,
    MissingExtraError,
    PeerDiedError,
)
from recollect.ipc import memory_budget
from recollect.ipc.async_runner import RunnerStats
from recollect.learners import run as run_module
from recollect.learners import sac as sac_module
from recollect.learners.checkpoint import load_checkpoint, replay_path
from recollect.learners.metrics import Merged
from recollect.learners.sac import OffPolicyRunner, SACConfig, SACRunner

ROW = {"obs": (2,), "actions": (1,), "rewards": (), "next_obs": (2,), "dones": (), "truncated": ()}
SMALL = {"batch_size": 16, "hidden": (8,), "learning_starts": 40, "replay_buffer_n": 200}


def runner(cls: Any = SACRunner, cfg: Any = None, env: Any = None, **kwargs: Any) -> Any:
    given = {
        "num_envs": 4,
        "device": "cpu",
        "seed": 3,
        "deadline": 20.0,
        "start_method": "forkserver",
        **kwargs,
    }
    return cls(reach, env or {}, {**SMALL, **(cfg or {})}, **given)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One run of 30 iterations with two collectors, checkpoints with replay every 10."""
    path = tmp_path_factory.mktemp("run")
    with runner(num_collectors=2, cfg={"obs_normalization": True, "updates_per_step": 2}) as r:
        r.learn(30, 10, path, save_replay=True)
        return path, r.last_run_summary


@pytest.mark.timeout(120)
def test_two_runs_are_bit_equal(run: Any, tmp_path: Path) -> None:
    with runner(num_collectors=2, cfg={"obs_normalization": True, "updates_per_step": 2}) as r:
        r.learn(30, 10, tmp_path, save_replay=True)
    for k in (10, 20, 30):
        a, b = (flat(load_checkpoint(p / f"model_{k}")) for p in (run[0], tmp_path))
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)
        one, two = (rc.ReplayBuffer.load_from(replay_path(p / f"model_{k}")) for p in (run[0], tmp_path))  # type: ignore[arg-type]
        assert len(one) == len(two) > 40
        assert all(np.array_equal(one[...][name], two[...][name]) for name in one[...])


@pytest.mark.process
@pytest.mark.timeout(120)
def test_whoever_packs_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    for pack in ("learner", "collector"):
        with runner(cfg={"pack": pack, "env_steps_per_sync": 2}) as r:
            r.learn(12, 0, tmp_path / pack)
    a, b = (load_checkpoint(tmp_path / pack / "model_12") for pack in ("learner", "collector"))
    assert a.pop("config") != b.pop("config")
    x, y = flat(a), flat(b)
    assert x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


def test_summary_tells_how_it_ended(run: Any) -> None:
    path, summary = run
    assert summary.status == "completed" and summary.completed_iterations == 30
    assert summary.last_checkpoint == str(path / "model_30")
    assert summary.total_env_steps >= 4 * 30 and summary.wall_time_s > 0 and summary.restarts == 0
    assert summary.final_mean_reward < 0 and summary.best_mean_reward >= summary.final_mean_reward
    assert 0 < summary.mean_episode_length <= 10
    assert summary.misses >= 1  # nobody started the first tick


def test_metrics_are_those_of_the_contract(run: Any) -> None:
    lines = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [10, 20, 30]
    names = """loss/critic loss/actor loss/alpha reward/mean episode/length episode/timeout_rate episode/terminated_rate
    axis/env_steps_total time/learner_wait_ms time/learner_batch_ms time/learner_train_ms time/learner_weight_sync_ms
    time/collector_weight_sync_ms time/collector_action_select_ms time/collector_env_step_ms time/collector_replay_ms
    time/collector_wait_ms perf/iter_ms perf/steps_per_sec lag/weight_versions replay/size replay/redrawn
    pipeline/misses collectors/alive collectors/restarts""".split()
    assert set(names) <= lines[-1].keys()
    assert lines[-1]["collectors/alive"] == 2 and lines[-1]["replay/redrawn"] == 0
    assert lines[-1]["axis/env_steps_total"] >= lines[0]["axis/env_steps_total"] + 60
    assert all(
        lines[-1][f"time/collector_{phase}_ms"] > 0
        for phase in ("weight_sync", "action_select", "env_step", "replay")
    )
    assert 40 < lines[-1]["replay/size"] <= lines[-1]["axis/env_steps_total"]
    assert lines[-1]["pipeline/misses"] == run[1].misses
    # in step, collectors act on the version before the one just published, or on it
    assert 0 < lines[-1]["lag/weight_versions"] <= 2


def restored(path: Path, **kwargs: Any) -> Any:
    """A runner just after it took over a checkpoint, before any collector runs."""
    r = runner(cfg={"obs_normalization": True, "updates_per_step": 2}, **kwargs)
    r._make(r._look_at_env())
    r._restore(load_checkpoint(path), path)
    return r


@pytest.mark.parametrize("collectors", [2, 1])
def test_restored_state_is_the_saved_one(run: Any, collectors: int) -> None:
    """Buffer empty after restore, agent forgets (ray#8151): weights, moments, generators and rows are all back."""
    path = run[0] / "model_20"
    state, saved = load_checkpoint(path), rc.ReplayBuffer.load_from(replay_path(path))  # type: ignore[arg-type]
    with restored(path, num_collectors=collectors, seed=77) as r:
        a, b = flat(r._learner.get_state_dict()), flat(state["learner"])
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        assert r._replay.size == len(saved) and r.version == state["weight_version"]
        mine = {name: torch.zeros_like(x) for name, x in r._learner.actor.state_dict().items()}
        r._weights.read_weights_into(mine)
        assert all(torch.equal(x, mine[name]) for name, x in r._learner.actor.state_dict().items())
        pair = r._learner.obs_normalizer.pair()
        assert all(np.array_equal(x, y) for x, y in zip(r._stats.latest(), pair))
        rows = r._replay.sample(400, seed=1)
        kept = {tuple(row) for row in saved[...]["obs"].tolist()}
        assert {tuple(row) for row in rows["obs"].tolist()} <= kept


def episodes_of(path: Path) -> list[Any]:
    """The rows of each segment of a saved replay."""
    with rc.ReplayBuffer.load_from(path) as saved:
        segments = saved.get_segments()
        assert segments is not None
        return [saved[a:b] for a, b in segments]


def test_a_saved_replay_keeps_the_episodes_of_each_environment_apart(run: Any, tmp_path: Path) -> None:
    path = run[0] / "model_30"
    episodes = episodes_of(replay_path(path))  # type: ignore[arg-type]
    assert len(episodes) > 8
    for rows in episodes:
        assert np.array_equal(rows["next_obs"][:-1], rows["obs"][1:])
        assert not rows["dones"][:-1].any()
    assert sum(bool(rows["dones"][-1]) for rows in episodes) >= len(episodes) - 4
    with restored(path, num_collectors=2) as r:
        r._replay.dumps(tmp_path / "again")
    again = episodes_of(tmp_path / "again")
    assert [rows["rewards"].tolist() for rows in again] == [rows["rewards"].tolist() for rows in episodes]


@pytest.mark.timeout(120)
def test_resume_goes_on_and_the_number_of_collectors_may_change(run: Any, tmp_path: Path) -> None:
    before = load_checkpoint(run[0] / "model_20")
    with runner(num_collectors=1, cfg={"obs_normalization": True, "updates_per_step": 2}) as r:
        r.learn(24, 0, tmp_path, resume=run[0] / "model_20")
        total = r.last_run_summary.total_env_steps
    after = load_checkpoint(tmp_path / "model_24")
    assert after["iteration"] == 24 and after["weight_version"] == before["weight_version"] + 4
    assert before["env_steps"] < total == after["env_steps"] <= before["env_steps"] + 4 * 5
    assert after["learner"]["update_count"] == before["learner"]["update_count"] + 8
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["metrics.jsonl", "model_24"]


def test_resume_with_nothing_left_writes_nothing(run: Any, tmp_path: Path) -> None:
    with runner(cfg={"obs_normalization": True}) as r:
        r.learn(20, 10, tmp_path, resume=run[0] / "model_20")
        assert r.last_run_summary.status == "completed" and r.last_run_summary.completed_iterations == 20
    assert list(tmp_path.iterdir()) == []


def test_resume_of_another_network_names_the_parameter(run: Any, tmp_path: Path) -> None:
    with runner(cfg={"obs_normalization": True, "hidden": (9,)}) as r:
        with pytest.raises(
            FormatError, match=r"actor\.body\.0\.weight: shape must be \(9, 2\), got \(8, 2\)"
        ):
            r.learn(40, 10, tmp_path, resume=run[0] / "model_20")
        assert r.last_run_summary.status == "error"


def test_a_replay_of_other_spaces_is_refused(tmp_path: Path) -> None:
    with rc.ipc.ReplayBuffer(8, 3, 1, "numpy") as other:
        obs, no = np.zeros((2, 3), np.float32), np.zeros(2, bool)
        other.add(obs, obs[:, :1], obs[:, 0], obs, no, no)
        other.dumps(tmp_path / "replay")
    with runner() as r:
        r._make(r._look_at_env())
        with pytest.raises(FormatError, match="must hold rows of .* as these spaces have them"):
            r._restore_replay(tmp_path / "replay")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_running_free_with_a_packing_collector_and_a_learner_of_ones_own(tmp_path: Path) -> None:
    cfg = {"sync_collection": False, "pack": "collector"}
    seen: list[Any] = []
    with runner(OffPolicyRunner, cfg, learner=own_learner) as r:
        r.learn(20, 0, tmp_path, on_metrics=lambda i, values: seen.append((i, values)))
        assert r.last_run_summary.status == "completed"
    assert [i for i, _ in seen] == [10, 20] and seen[-1][1]["loss/own"] == 1.0
    assert load_checkpoint(tmp_path / "model_20")["algorithm"] == "off_policy"


def without_collectors(r: Any, iterate: Any = lambda iteration, is_last: {}) -> Any:
    """A runner whose iterations do what the test says, and that starts no process."""
    r._begin, r._iterate, r._more_metrics = lambda first, resumed: None, iterate, dict
    return r


def test_the_time_of_a_checkpoint_is_part_of_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, lines = [100.0], list[float]()
    monkeypatch.setattr(run_module, "monotonic", lambda: now[0])

    def save(log_dir: Path, iteration: int) -> Path:
        now[0] += 5.0
        return log_dir

    with without_collectors(runner()) as r:
        r._save = save
        r.learn(20, 10, tmp_path, on_metrics=lambda i, values: lines.append(values["perf/iter_ms"]))
    assert lines == [pytest.approx(0.0, abs=1e-3), 500.0]


def test_without_a_word_the_replay_holds_a_million_rows_and_is_filled_with_what_a_batch_needs() -> None:
    with runner(cfg={"replay_buffer_n": None}, num_envs=8) as r:
        assert r._capacity == 10**6
    for batch_size, starts in ((64, 40), (16, 70)):
        with runner(cfg={"batch_size": batch_size, "learning_starts": starts}) as r:
            assert r._fill == max(batch_size, starts)


def filling(r: Any, monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> list[Any]:
    """Let the replay grow by these rows, a chunk or a deadline each, on a clock that a chunk moves by 15 s."""
    now, prepared = [100.0], list[Any]()
    monkeypatch.setattr(sac_module, "monotonic", lambda: now[0])
    r._replay = SimpleNamespace(ptr=0, size=0)

    def collect(*args: Any, **kwargs: Any) -> bool:
        now[0] += 15.0
        r._replay.ptr = r._replay.size = r._replay.ptr + (rows.pop(0) if rows else 0)
        if kwargs and r._replay.size < r._fill:
            raise DeadlineError("tick 1: needs rows")
        return True

    r.wait_permits_wanted = r.wait_permits_done = lambda: None
    r._permit = collect
    r._pipe = SimpleNamespace(
        start_prepare=lambda *args, **kwargs: prepared.append((args, kwargs)), wait_until_ready=collect
    )
    return prepared


@pytest.mark.parametrize("sync", [True, False])
def test_filling_goes_on_while_rows_are_kept_and_ends_when_none_is_for_the_deadline(
    sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner(cfg={"sync_collection": sync}) as r:
        prepared = filling(r, monkeypatch, [10, 0, 20, 10])
        if sync:
            r._fill_replay(1)  # 30 s without a row are too long, 15 are not
        else:
            with pytest.raises(DeadlineError, match="replay: must get a row within 20 s"):
                r._fill_replay(1)
            filling(r, monkeypatch, [10, 20, 10])
            r._fill_replay(1)
            wanted = ((1, 16), {"min_snapshot_ptr": 40, "headroom": 1})
            assert prepared == [wanted, wanted]
        filling(r, monkeypatch, [10, 0, 0])
        with pytest.raises(DeadlineError, match="replay: must get a row within 20 s"):
            r._fill_replay(1)
        r._pipe = r._replay = None


def test_lines_come_every_tenth_iteration_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[Any] = []
    sink = SimpleNamespace(write=lambda i, values: wrote.append(i), close=lambda: wrote.append("closed"))
    monkeypatch.setattr(run_module, "open_sinks", lambda directory, logger: [sink])
    with without_collectors(runner()) as r:
        r.stop_collectors = lambda: wrote.append("stopped")
        r.learn(22, 0, tmp_path)
        assert wrote == [10, 20, 22, "closed", "stopped"]
        assert [p.name for p in tmp_path.iterdir()] == ["model_22"]


def test_without_a_word_checkpoints_come_every_fiftieth_iteration_in_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    monkeypatch.chdir(tmp_path)
    with without_collectors(runner()) as r:
        r._save = lambda log_dir, iteration: saved.append((log_dir, iteration))
        r.learn(101)
    assert saved == [(tmp_path / "logs", k) for k in (50, 100, 101)]


def test_going_on_begins_after_the_saved_iteration(tmp_path: Path) -> None:
    done: list[Any] = []
    with without_collectors(runner()) as r:
        r.learn(4, 0, tmp_path / "a")

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        done.append(iteration)
        return {}

    with without_collectors(runner(), iterate) as r:
        r._begin = lambda first, resumed: done.append((first, resumed))
        r.learn(8, 3, tmp_path / "b", resume=tmp_path / "a" / "model_4")
    assert done == [(5, True), 5, 6, 7, 8]
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["metrics.jsonl", "model_6", "model_8"]


def test_no_name_of_a_checkpoint_begins_no_other_run(tmp_path: Path) -> None:
    with without_collectors(runner()) as r, pytest.raises(FormatError, match="it is no checkpoint"):
        r.learn(5, 0, tmp_path, resume="")


def test_a_runner_that_is_closed_meanwhile_closes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    sink = SimpleNamespace(write=lambda i, values: None, close=lambda: closed.append(1))
    monkeypatch.setattr(run_module, "open_sinks", lambda directory, logger: [sink])
    with without_collectors(runner()) as r, pytest.raises(ClosedError):
        r.learn(20, 0, tmp_path, on_metrics=lambda i, values: r.close())
    assert closed == [1] and r.last_run_summary.status == "error"


def test_finish_ends_it_after_one_more_iteration(tmp_path: Path) -> None:
    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 3:
            r.finish()
        assert is_last == (iteration == 4)
        return {}

    stopped: list[int] = []
    with without_collectors(runner(), iterate) as r:
        r.stop_collectors = lambda: stopped.append(r.last_run_summary.completed_iterations)
        r.learn(1000, 0, tmp_path)
        assert stopped == [4]
        assert (r.last_run_summary.status, r.last_run_summary.completed_iterations) == ("completed", 4)
    assert load_checkpoint(tmp_path / "model_4")["iteration"] == 4


def test_the_sum_of_a_run_has_the_best_and_the_last_rewards(tmp_path: Path) -> None:
    rewards = [(float(k), float(-k), 3.0, 0.0) for k in range(100)]
    with without_collectors(runner()) as r:
        r._board_totals = lambda: Merged([lane(rewards, env_steps=7.0)])
        r.learn(2, 0, tmp_path)
        summary = r.last_run_summary
        assert (summary.final_mean_reward, summary.recent_mean_reward) == (-49.5, -89.5)
        assert (summary.mean_episode_length, summary.total_env_steps) == (3.0, 7)
        for best, wanted in ((None, -49.5), (-60.0, -49.5), (-3.0, -3.0)):
            summary.best_mean_reward = best
            r._sum_up(summary)
            assert summary.best_mean_reward == wanted


@pytest.mark.parametrize("error", [CollectorDiedError, DeadlineError])
def test_a_checkpoint_in_step_is_of_whole_chunks_and_a_dead_collector_does_not_cost_it(
    error: Any, tmp_path: Path
) -> None:
    waited: list[int] = []

    def wait() -> None:
        waited.append(1)
        raise error("collector 0: must live and make progress, got neither")

    for sync in (True, False):
        with runner(cfg={"sync_collection": sync}) as r:
            r._make(r._look_at_env())
            r._save_replay, r.wait_permits_done = None, wait
            r._crew = SimpleNamespace(close=lambda: None, members=[])
            r._save(tmp_path, 1 + sync)
    assert waited == [1]
    assert load_checkpoint(tmp_path / "model_2")["iteration"] == 2


def test_a_checkpoint_tells_what_it_was_made_with(tmp_path: Path) -> None:
    with without_collectors(runner()) as r:
        r.learn(1, 0, tmp_path)
        state = load_checkpoint(tmp_path / "model_1")
        assert (state["algorithm"], state["seed"]) == ("sac", 3)
        assert SACConfig(**state["config"]) == r.rl_cfg
        assert state["spaces"] == {**asdict(r._spaces), "low": [-1.0], "high": [1.0], "action_shape": [1]}


def test_a_network_that_the_checkpoint_lacks_or_has_otherwise_is_named() -> None:
    net = {"w": torch.zeros(1)}
    wanted = {"actor": net, "critic": net, "update_count": 3}
    run_module.check_state(wanted, {"actor": net, "critic": net})
    with pytest.raises(FormatError, match="critic: is not in the checkpoint"):
        run_module.check_state(wanted, {"actor": net})
    with pytest.raises(FormatError, match=r"critic\.w: shape must be"):
        run_module.check_state(wanted, {"actor": net, "critic": {"w": torch.zeros(2)}})


def test_a_replay_that_was_not_saved_is_filled_again_before_the_first_tick() -> None:
    with runner() as r:
        r._make(r._look_at_env())
        rows = {name: np.zeros((4, *shape), "float32") for name, shape in ROW.items()}
        r._make_pipe = r.wait_permits_wanted = r.wait_permits_done = lambda: None
        r.start_collectors = lambda fn, kwargs: None
        r._permit = lambda: r._replay.add(**rows)
        r._begin(21, resumed=True)
        assert r._replay.size == 40 + 4  # and a chunk is under way


@pytest.mark.parametrize(
    ("config", "keyword", "wanted"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_the_replay_is_saved_if_the_configuration_or_else_learn_says_so(
    config: bool, keyword: bool | None, wanted: bool
) -> None:
    with runner(cfg={"save_replay": config}) as r:
        r._replay, r._save_replay = SimpleNamespace(dumps="dumps"), keyword
        assert r._dump_replay() == ("dumps" if wanted else None)


def press(iteration: int, values: Any) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_a_checkpoint_of_the_last_whole_iteration(tmp_path: Path) -> None:
    with without_collectors(runner()) as r:
        with pytest.raises(KeyboardInterrupt):
            r.learn(1000, 0, tmp_path, on_metrics=press)
        assert r.last_run_summary.status == "interrupted"
        assert r.last_run_summary.last_checkpoint == str(tmp_path / "model_10")
    assert load_checkpoint(tmp_path / "model_10")["iteration"] == 10
    assert replay_path(tmp_path / "model_10") is None  # nobody asked for it


def test_ctrl_c_in_an_iteration_saves_the_one_before_while_there_are_collectors(tmp_path: Path) -> None:
    calls: list[Any] = []

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 4:
            raise KeyboardInterrupt
        return {}

    r = without_collectors(runner(), iterate)
    r._save = lambda log_dir, iteration: calls.append(iteration)
    r.stop_collectors = lambda: calls.append("stopped")
    with pytest.raises(KeyboardInterrupt):
        r.learn(1000, 0, tmp_path)
    assert calls == [3, "stopped"]


def test_ctrl_c_after_a_checkpoint_writes_no_other(tmp_path: Path) -> None:
    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 3:
            raise KeyboardInterrupt
        return {}

    saved: list[int] = []
    with without_collectors(runner(), iterate) as r:
        r._save = lambda log_dir, iteration: saved.append(iteration)
        with pytest.raises(KeyboardInterrupt):
            r.learn(1000, 2, tmp_path)
    assert saved == [2]


def test_ctrl_c_in_a_checkpoint_writes_it_again(tmp_path: Path) -> None:
    saved: list[int] = []

    def save(log_dir: Path, iteration: int) -> Path:
        saved.append(iteration)
        if len(saved) == 1:
            raise KeyboardInterrupt
        return log_dir

    r = without_collectors(runner())
    r._save = save
    with pytest.raises(KeyboardInterrupt):
        r.learn(1000, 2, tmp_path)
    assert saved == [2, 2]


def test_ctrl_c_closes_also_when_the_checkpoint_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left")

    r = without_collectors(runner())
    r._save = full
    with pytest.raises(KeyboardInterrupt):
        r.learn(1000, 0, tmp_path, on_metrics=press)
    with pytest.raises(ClosedError):
        r.check_collectors()
    assert (r.last_run_summary.status, r.last_run_summary.last_checkpoint) == ("interrupted", None)
    assert "no space left" in caplog.text


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (CollectorDiedError("gone"), "collector_died"),
        (DeadlineError("stuck"), "error"),
        (OSError("disk"), "error"),
    ],
)
def test_the_summary_is_there_when_learn_raises(raised: Exception, status: str, tmp_path: Path) -> None:
    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 3:
            raise raised
        return {"critic": 1.0}

    with without_collectors(runner(), iterate) as r:
        r._board_totals = lambda: Merged([lane([], env_steps=100.0)])
        r.stats = lambda: RunnerStats(1, 2, 3, {}, ())
        with pytest.raises(type(raised)):
            r.learn(1000, 2, tmp_path)
        summary = r.last_run_summary
        assert (summary.status, summary.completed_iterations) == (status, 2)
        assert (summary.total_env_steps, summary.restarts) == (100, 2)
        assert summary.last_checkpoint == str(tmp_path / "model_2") and summary.wall_time_s > 0


@pytest.mark.parametrize("error", [CollectorDiedError, PeerDiedError, DeadlineError])
@pytest.mark.parametrize("fails", [False, True])
def test_what_collectors_end_leaves_a_checkpoint(
    fails: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 3:
            raise error("gone")
        return {"critic": 1.0}

    def full(*args: Any, **kwargs: Any) -> Path:
        raise OSError("no space left")

    with without_collectors(runner(), iterate) as r:
        r._board_totals = lambda: Merged([lane([], env_steps=100.0)])
        r.stats = lambda: RunnerStats(1, 2, 3, {}, ())
        if fails:
            monkeypatch.setattr(r, "_save", full)
        with pytest.raises(error, match="gone") as caught:
            r.learn(1000, 0, tmp_path)
        assert r.last_run_summary.last_checkpoint == (None if fails else str(tmp_path / "model_2"))
        notes = ["nor was a checkpoint written: OSError('no space left')"] if fails else []
        assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize(("keep", "left"), [(None, {2, 4, 6, 7}), (2, {6, 7}), (1, {7})])
def test_the_newest_checkpoints_stay(keep: int | None, left: set[int], tmp_path: Path) -> None:
    (tmp_path / "model_1").mkdir()  # of another run: it stays
    with without_collectors(runner()) as r:
        r.learn(7, 2, tmp_path, keep=keep)
        assert {int(p.name[6:]) for p in tmp_path.glob("model_*")} == left | {1}
        assert r.last_run_summary.last_checkpoint == str(tmp_path / "model_7")
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_that_is_written_again_stays(tmp_path: Path) -> None:
    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        if iteration == 2:
            r.on_interrupt()
            raise CollectorDiedError("gone")
        return {"critic": 1.0}

    with without_collectors(runner(), iterate) as r:
        with pytest.raises(CollectorDiedError):
            r.learn(9, 0, tmp_path, keep=1)
        assert (tmp_path / "model_1").is_dir()


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_at_least_one_checkpoint_stays(keep: Any, tmp_path: Path) -> None:
    with runner() as r, pytest.raises(ValueError, match="keep: must be an int of at least 1"):
        r.learn(9, 0, tmp_path, keep=keep)


def test_a_log_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with runner() as r, pytest.raises(ValueError, match="log_dir: must be a directory, got the file"):
        r.learn(9, 0, tmp_path / "a")


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_dead_collector_ends_the_run_with_its_report(tmp_path: Path) -> None:
    with runner(env={"dies_at": 20}) as r:
        with pytest.raises(CollectorDiedError) as caught:
            r.learn(1000, 0, tmp_path)
        assert caught.value.signal == signal.SIGKILL.name
        assert r.last_run_summary.status == "collector_died"


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_run_goes_on_while_dead_collectors_are_due_again(tmp_path: Path) -> None:
    with runner(env={"dies_at": 60}, restart="on_death", num_collectors=2) as r:
        r.learn(60, 0, tmp_path)
        assert r.last_run_summary.status == "completed" and r.stats().deaths >= 1


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_value_that_is_not_finite_is_named_by_the_collector(tmp_path: Path) -> None:
    with runner(env={"nan_at": 5}) as r:
        with pytest.raises(CollectorDiedError, match="reward: must be finite") as caught:
            r.learn(1000, 0, tmp_path)
        assert isinstance(caught.value.__cause__, EnvContractError)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_pendulum(seed: int, tmp_path: Path) -> None:
    with SACRunner("Pendulum-v1", {}, {}, num_envs=16, device="cpu", seed=seed) as r:
        r.learn(8000, 0, tmp_path)
        last = [episode[1] for episode in r._board_totals().episodes[-20:]]
    assert np.mean(last) > -250


# -- before anything is made


@pytest.mark.parametrize(
    ("cfg", "kwargs", "said"),
    [
        ({"pack": "collector"}, {"num_collectors": 2}, "pack: 'collector' needs num_collectors=1, got 2"),
        ({"replay_buffer_n": 9}, {}, "replay_buffer_n: 9 rows"),
        # a chunk of every lane is left out of what can be drawn from
        ({"replay_buffer_n": 10, "learning_starts": 37}, {"num_collectors": 2}, "replay_buffer_n: 10 rows"),
        # without a word there is a million in all
        ({"replay_buffer_n": None, "env_steps_per_sync": 250_000}, {}, "replay_buffer_n: 250000 rows"),
        ({"replay_buffer_n": None}, {"num_envs": 10**6 + 1}, "replay_buffer_n: 0 rows"),
        ({"batchsize": 1}, {}, "did you mean 'batch_size'"),
    ],
)
def test_configurations_that_cannot_be_are_refused(cfg: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        runner(cfg=cfg, **kwargs)


def test_sac_takes_a_learner_too() -> None:
    with runner(learner=own_learner) as r:
        r._make(r._look_at_env())
        assert isinstance(r._learner, OwnLearner)


def test_the_smallest_replay_that_can_be() -> None:
    with runner(cfg={"replay_buffer_n": 10, "learning_starts": 36}, num_collectors=2) as r:
        assert r._capacity == 40


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"max_iterations": 0}, "max_iterations: must be an int of at least 1"),
        ({"max_iterations": True}, "max_iterations: must be an int"),
        ({"max_iterations": 2.0}, "max_iterations: must be an int"),
        ({"max_iterations": 5, "save_interval": -1}, "save_interval"),
        ({"max_iterations": 5, "logger": "tb"}, "logger: must be one of None, tensorboard"),
    ],
)
def test_arguments_of_learn_are_checked(kwargs: Any, said: str) -> None:
    with runner() as r:
        with pytest.raises(ValueError, match=said):
            r.learn(**kwargs)
        assert r.last_run_summary is None  # nothing was begun


def test_a_runner_that_refused_its_arguments_can_still_learn(tmp_path: Path) -> None:
    with without_collectors(runner()) as r:
        with pytest.raises(ValueError, match="max_iterations"):
            r.learn(0, 0, tmp_path)
        r.learn(1, 0, tmp_path)
        assert r.last_run_summary.status == "completed"


def test_without_torch_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with runner() as r, pytest.raises(MissingExtraError, match=r'pip install "recollect\[torch\]"'):
        r.learn(5, 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_discrete_actions_are_refused(tmp_path: Path) -> None:
    with SACRunner("CartPole-v1", {}, SMALL, num_envs=4, device="cpu") as r:
        with pytest.raises(EnvContractError, match="use APPO"):
            r.learn(5, 0, tmp_path)
        assert r.last_run_summary.status == "error"


def test_actions_that_no_bounded_policy_has_are_refused_before_a_learner_is_made(tmp_path: Path) -> None:
    def factory(*args: Any) -> Any:
        pytest.fail("made a learner")

    with (
        OffPolicyRunner("CartPole-v1", {}, SMALL, num_envs=4, device="cpu", learner=factory) as r,
        pytest.raises(EnvContractError, match="use APPO"),
    ):
        r.learn(5, 0, tmp_path)


@pytest.mark.parametrize("has_none", [True, False])
def test_normalisation_of_a_learner_without_a_normaliser_is_an_error(has_none: bool, tmp_path: Path) -> None:
    def factory(*args: Any) -> Any:
        learner = own_learner(*args)
        if not has_none:
            del learner.obs_normalizer
        return learner

    said = "obs_normalization: needs a learner with an obs_normalizer"
    with (
        runner(OffPolicyRunner, {"obs_normalization": True}, learner=factory) as r,
        pytest.raises(ValueError, match=said),
    ):
        r.learn(5, 0, tmp_path)


def test_too_large_a_replay_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAM runs out hours in; size was never stated (reverb#55, sb3#323)."""
    monkeypatch.setattr(memory_budget, "available_nbytes", lambda: 1 << 16)
    with runner() as r, pytest.raises(BudgetError, match="SACRunner: must fit"):
        r.learn(5, 0, tmp_path)


@pytest.mark.parametrize("pack", ["learner", "collector"])
def test_the_pipeline_has_the_runners_seed_and_deadline_and_ends_with_it(pack: str) -> None:
    with runner(cfg={"pack": pack}, seed=2**32 + 5) as r:
        r._make(r._look_at_env())
        packs = r._make_pipe()
        assert (r._pipe.base_seed, r._pipe.deadline) == (5, 20.0)
        assert r._pipe.transfer_manifest["pack_executor"] == ("learner_thread" if pack == "learner" else pack)
    if packs is not None:
        with pytest.raises(ClosedError):
            packs[2].stats()


@pytest.mark.parametrize("is_usable", [True, False])
def test_the_environment_that_was_looked_at_is_closed(
    is_usable: bool,
) -> None:
    closed: list[Any] = []

    def factory(num_envs: int, sim_backend: str) -> Any:
        env = reach(num_envs, sim_backend)
        close, env.close = env.close, lambda: (closed.append((num_envs, sim_backend)), close())
        if not is_usable:
            env.single_action_space = MultiBinary(2)
        return env

    wanted: Any = nullcontext() if is_usable else pytest.raises(EnvContractError)
    with SACRunner(factory, {}, SMALL, num_envs=4, device="cpu", sim_backend="newton") as r, wanted:
        r._look_at_env()
    assert closed == [(1, "newton")]


@pytest.mark.parametrize(("collectors", "pack"), [(1, "collector"), (32, "learner")])
def test_the_budget_counts_what_is_made_and_a_run_over_its_share_is_warned_of(
    collectors: int, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(memory_budget, "warn_if_over_budget", lambda *args: said.append(args))
    cfg = {"pack": pack, "batch_size": 128, "updates_per_step": 3}
    with runner(cfg=cfg, num_envs=32, num_collectors=collectors) as r:
        r._make(replace(r._look_at_env(), critic_dim=5))
        ((estimate, label),) = said
        assert (estimate["replay_buffer"], estimate["weights"]) == (r._replay.nbytes, r._weights.nbytes)
        assert "next_critic" in [f.name for f in r._replay.layout.fields]
        assert len(r._replay.stats().lanes) == len(r._board.read()) == collectors
        packs = r._make_pipe()
        if packs is not None:
            assert packs[2].nbytes == estimate["double_buffer_slots"]
    assert label == "SACRunner"


@pytest.mark.parametrize(("lanes", "wanted"), [(1, [70_001]), (2, [35_000, 35_001])])
def test_a_large_replay_comes_back_whole_over_any_number_of_lanes(
    lanes: int, wanted: list[int], tmp_path: Path
) -> None:
    n = 70_001
    with rc.ipc.ReplayBuffer(80_000, 2, 1, "numpy") as saved:
        x, no = np.arange(n, dtype=np.float32), np.zeros(n, bool)
        saved.add(np.stack([x, x], 1), x[:, None], x, np.stack([x, x], 1), no, no)
        saved.dumps(tmp_path / "replay")
    with runner(cfg={"replay_buffer_n": 36_000}, num_envs=4, num_collectors=lanes) as r:
        r._make(r._look_at_env())
        r._restore_replay(tmp_path / "replay")
        assert [lane.ptr for lane in r._replay.stats().lanes] == wanted
        r._replay.dumps(tmp_path / "again")
        with rc.ReplayBuffer.load_from(tmp_path / "again") as again:
            assert np.array_equal(np.sort(again[...]["rewards"]), x)
        assert {lane.writer_pid for lane in r._replay.stats().lanes} == {None}  # they are for the collectors


def test_filling_in_step_gives_permits_to_who_can_use_them() -> None:
    calls: list[str] = []
    with runner() as r:
        r._replay = SimpleNamespace(ptr=0, size=0)

        def permit() -> None:
            calls.append("permit")
            r._replay.ptr = r._replay.size = r._replay.ptr + 20

        r.wait_permits_wanted, r._permit = lambda: calls.append("wanted"), permit
        r.wait_permits_done = lambda: calls.append("done")
        r._fill_replay(1)
        r._replay = None
    assert calls == ["wanted", "permit", "done"] * 2 + ["permit"]


def test_filling_while_running_free_looks_after_collectors() -> None:
    ready, looks = iter([False, False, True]), list[int]()
    with runner(cfg={"sync_collection": False}) as r:
        r._replay = SimpleNamespace(ptr=0)
        r._pipe = SimpleNamespace(
            start_prepare=lambda *args, **kwargs: True, wait_until_ready=lambda *args, **kwargs: next(ready)
        )
        r.check_collectors = lambda: looks.append(1)
        r._fill_replay(1)
        r._replay = r._pipe = None
    assert looks == [1, 1]


def test_filling_and_checkpoints_are_no_part_of_the_learners_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made, lines = [100.0], [0.0], list[Any]()
    monkeypatch.setattr(run_module, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_module, "monotonic_ns", lambda: int(now[0] * 1e9))

    def spend(seconds: float, env_steps: float = 0.0) -> Any:
        now[0] += seconds
        made[0] += env_steps
        return tmp_path

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        spend(1.0, 30.0)
        r._watch.lap("train")
        return {}

    with without_collectors(runner(), iterate) as r:
        r._begin, r._save = lambda first, resumed: spend(50.0, 900.0), lambda log_dir, iteration: spend(5.0)
        r._board_totals = lambda: Merged([lane([], env_steps=made[0])])
        r.learn(20, 10, tmp_path, on_metrics=lambda i, values: lines.append(values))
    assert [line["time/learner_train_ms"] for line in lines] == [1000.0, 1000.0]
    # the first line begins with the first iteration
    assert [line["perf/iter_ms"] for line in lines] == [1000.0, 1500.0]
    assert [line["perf/steps_per_sec"] for line in lines] == [30.0, 20.0]


def test_a_runner_learns_once(run: Any, tmp_path: Path) -> None:
    with runner(cfg={"obs_normalization": True}) as r:
        r.learn(20, 10, tmp_path, resume=run[0] / "model_20")
        with pytest.raises(RuntimeError, match="learns once"):
            r.learn(20, 10, tmp_path)

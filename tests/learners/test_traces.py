"""What a run tells a trace, and what its phases add up to: collectors and learner, here in one process."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.learners import test_appo, test_sac
from tests.learners.worlds import reach

from recollect.ipc import replay_pipelines
from recollect.ipc.runner.control import Permit
from recollect.learners.collectors import collect_rollouts, collect_transitions
from recollect.learners.episodes import PHASES
from recollect.observe.trace import TraceRecorder


class Recorder:
    """Keeps slices."""

    def __init__(self) -> None:
        self.slices: list[tuple[str, int, int]] = []
        self.process = ""

    def name_process(self, name: str) -> None:
        self.process = name

    def add_slice(self, name: str, category: str, start_ns: int, end_ns: int) -> None:
        assert category == self.process
        self.slices.append((name, start_ns, end_ns))


class Context:
    """A collector's context that gives one permit and stops after so many steps."""

    lane, num_envs, seed, device = 0, 4, 1, "cpu"

    def __init__(self, steps: int) -> None:
        self.left = steps

    def make_env(self) -> Any:
        return reach(4, "mujoco")

    def stopping(self) -> bool:
        return self.left <= 0

    def beat(self, phase: str, **counted: float) -> None:
        self.left -= 1

    def permit(self, timeout: float, on_take: Any) -> Permit:
        on_take(None)
        return Permit(1, 1, self.left)


def begun(r: Any) -> tuple[Recorder, dict[str, Any]]:
    """Set a runner up as for `learn(trace=...)`; what its collectors would be started with."""
    recorder, sent = Recorder(), dict[str, Any]()
    r._trace = recorder
    r._make(r._look_at_env())
    r._fill_replay = r._permit = lambda *args: None
    r.start_collectors = lambda fn, kwargs: sent.update(kwargs)
    r._begin(1, False)
    return recorder, sent


@pytest.mark.parametrize("algorithm", ["sac", "appo"])
def test_phases_of_a_collector(algorithm: str) -> None:
    """Each begins where the one before ended: they exclude one another and leave nothing out."""
    make: Any = test_sac.runner if algorithm == "sac" else test_appo.runner
    collect: Any = collect_transitions if algorithm == "sac" else collect_rollouts
    with make(cfg={"env_steps_per_sync": 3} if algorithm == "sac" else {"steps_per_env": 3}) as r:
        recorder, sent = begun(r)
        collect(Context(3), **sent)
        waits = "collector/wait" if algorithm == "sac" else "ring/write_wait"
        step = ["collector/action_select", "collector/env_step", "collector/replay"]
        first = [waits, "weight_sync/read"] if algorithm == "sac" else ["weight_sync/read", waits]
        assert [name for name, *_ in recorder.slices] == [*first, *step, *step, *step]
        assert recorder.process == "collector 0"
        assert all(a[2] == b[1] for a, b in pairwise(recorder.slices))
        (report,) = r._board.read()
        spent = {phase: report.totals[f"{phase}_ns"] for phase in PHASES}
        assert (
            sum(spent.values()) == recorder.slices[-1][2] - recorder.slices[0][1] and min(spent.values()) > 0
        )
        assert report.totals["chunks"] == 1 and report.totals["version"] == 1
        if algorithm == "sac":
            assert r._pipe._trace._recorder is recorder and r._replay.size == 12
        else:
            assert r._ring.read_info.version == 1


def test_a_packing_collector_packs_before_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner asked for the next batch before it gave leave to go on."""
    done: list[Any] = []
    serve = lambda *args, timeout, trace_recorder: done.append((args[1:], timeout, trace_recorder))  # noqa: E731
    monkeypatch.setattr(replay_pipelines, "serve_pack_requests", serve)
    with test_sac.runner(cfg={"pack": "collector"}) as r:
        recorder, sent = begun(r)
        ctx = Context(1)
        monkeypatch.setattr(
            ctx, "beat", lambda *args, **kwargs: (done.append("step"), setattr(ctx, "left", 0))
        )
        collect_transitions(ctx, **sent)
        assert done == [(sent["pack"], 0.02, recorder), (sent["pack"], 0.0, recorder), "step"]


@pytest.mark.parametrize(("algorithm", "waits"), [("sac", "learner/wait"), ("appo", "ring/read_wait")])
def test_phases_of_the_learner(algorithm: str, waits: str, tmp_path: Path) -> None:
    make: Any = test_sac.runner if algorithm == "sac" else test_appo.runner
    path = tmp_path / "trace.json"

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        for phase in ("wait", "train", "weight_sync"):
            r._watch.lap(phase)
        return {}

    with test_sac.without_collectors(make(), iterate) as r:
        r.learn(1, 0, tmp_path, trace=path)
        assert r.last_run_summary.trace_path == str(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in events] == [waits, "learner/train", "weight_sync/write"]


def test_a_recorder_that_is_given_records_the_run_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        r._watch.lap("train")
        return {}

    with test_sac.without_collectors(test_sac.runner(), iterate) as r:
        r.learn(1, 0, tmp_path, trace=TraceRecorder(path))
        assert r.last_run_summary.trace_path == str(path)
    assert "learner/train" in [e["name"] for e in json.loads(path.read_text())["traceEvents"]]


def test_without_a_trace_there_is_none(tmp_path: Path) -> None:
    with test_sac.without_collectors(test_sac.runner()) as r:
        r.learn(1, 0, tmp_path)
        assert r.last_run_summary.trace_path is None
    assert not [p for p in tmp_path.rglob("*.json") if p.name != "manifest.json"]


def test_a_run_stays_where_it_was_told_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment or a watcher may change the directory of the process."""
    there, elsewhere = tmp_path / "a", tmp_path / "b"
    there.mkdir()
    elsewhere.mkdir()

    def iterate(iteration: int, is_last: bool) -> dict[str, float]:
        monkeypatch.chdir(elsewhere)
        return {}

    for n, resume in ((1, None), (2, "logs/model_1")):
        monkeypatch.chdir(there)
        with test_sac.without_collectors(test_sac.runner(), iterate) as r:
            r.learn(n, 1, "logs", resume=resume, trace="trace.json")
    assert not list(elsewhere.iterdir())
    assert {"model_1", "model_2"} < {p.name for p in (there / "logs").iterdir()}
    assert (there / "trace.json").is_file()

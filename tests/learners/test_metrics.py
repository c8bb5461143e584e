"""Reports of collectors and what becomes of them: last episodes over all lanes, rates, files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.learners.test_environment import ACT, NAN, Vector, result

from recollect.errors import FormatError, MissingExtraError
from recollect.learners import episodes, metrics
from recollect.learners.environment import EnvDriver
from recollect.learners.episodes import WINDOW, EpisodeBoard, Report, Tally
from recollect.learners.metrics import JsonLines, Merged, open_sinks


def play(board: EpisodeBoard, steps: list[Any], **kwargs: Any) -> Tally:
    driver, tally = EnvDriver(Vector(steps), seed=0, **kwargs), Tally(board, 2)
    for _ in steps:
        tally.count(driver.step(ACT))
        tally.lap("env_step")
    tally.publish()
    return tally


def test_episodes_are_followed_through_the_steps() -> None:
    with EpisodeBoard(1) as board:
        steps = [result(reward=[1, 2]), result(reward=[1, 2], trunc=(1, 0)), result(reward=[50, 2], term=(0, 1)),
                 result(reward=[5, 70]), result(reward=[5, 9], term=(1, 1))]  # fmt: skip
        play(board, steps)
        report = board.read()[0]
        assert report is not None
        # slot 0: 1 + 1, then a reset whose reward 50 counts for nothing, then 5 + 5; slot 1: 2 + 2 + 2, reset, 9
        assert [e[1:] for e in report.episodes] == [(2, 2, 1), (6, 3, 0), (10, 2, 0), (9, 1, 0)]
        assert report.totals["env_steps"] == 8 and report.totals["episodes"] == 4
        assert report.totals["timeouts"] == 1 and report.totals["terminated"] == 3
        assert report.totals["env_step_ns"] > 0
        values = Merged(board.read()).values(None)
        assert values["reward/mean"] == (2 + 6 + 10 + 9) / 4 and values["episode/length"] == 2
        assert values["episode/timeout_rate"] == 0.25 and values["episode/terminated_rate"] == 0.75
        board.cleanup()


def test_an_episode_with_a_rejected_reward_has_no_return() -> None:
    with EpisodeBoard(1) as board:
        steps = [result(reward=[NAN, 1]), result(reward=[1, 1], term=(1, 1))]
        tally = play(board, steps, nan_policy="reject")
        assert [e[1] for e in tally.report.episodes] == [2]
        assert tally.report.totals["rejected"] == 1 and tally.report.totals["episodes"] == 2
        board.cleanup()


def test_a_restarted_collector_goes_on_from_the_totals() -> None:
    with EpisodeBoard(1) as board:
        for k in range(1, 3):
            play(board, [result(reward=1, term=(1, 1))])
            report = board.read()[0]
            assert report is not None and report.totals["env_steps"] == 2 * k
        board.cleanup()


def lane(episodes: list[tuple[float, ...]], **totals: float) -> Report:
    report = Report(episodes=episodes)
    report.totals |= totals
    return report


def test_the_last_episodes_are_those_over_all_lanes() -> None:
    a = lane([(s, 1.0, 1.0, 0.0) for s in range(0, 2 * WINDOW, 2)])
    b = lane([(s, 5.0, 3.0, 1.0) for s in range(WINDOW + 1, 3 * WINDOW + 1, 2)])
    merged = Merged([a, None, b])
    assert WINDOW == 100
    wanted = sorted([*a.episodes, *b.episodes])[-WINDOW:]
    assert merged.episodes == wanted
    assert merged.mean(1) == sum(e[1] for e in wanted) / WINDOW


def test_recent_episodes_are_twenty() -> None:
    merged = Merged([lane([(k, float(k), 1.0, 0.0) for k in range(WINDOW)])])
    assert merged.values(None)["reward/recent"] == sum(range(80, 100)) / 20


def test_a_lane_keeps_its_last_episodes() -> None:
    with EpisodeBoard(1) as board:
        tally = Tally(board, 1)
        for k in range(WINDOW + 1):
            tally._return[0] = k
            tally._end(0, timed_out=False)
        tally.publish()
        report = board.read()[0]
        assert report is not None and [e[1] for e in report.episodes] == [*range(1, WINDOW + 1)]
        board.cleanup()


def test_phases_of_a_collector_exclude_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 2, 5, 9])
    monkeypatch.setattr(episodes, "monotonic_ns", lambda: next(ticks))
    with EpisodeBoard(1) as board:
        tally = Tally(board, 1)
        for phase in ("env_step", "replay", "env_step"):
            tally.lap(phase)
        assert (tally.report.totals["env_step_ns"], tally.report.totals["replay_ns"]) == (6, 3)
        board.cleanup()


def test_reward_components_are_means_since_the_last_line() -> None:
    with EpisodeBoard(1) as board:
        info = {"log": {"speed": np.array([1.0, 3.0]), "energy": -2.0}}
        play(board, [result(info=info)])
        first = Merged(board.read())
        assert first.values(None)["reward/speed"] == 2 and first.values(None)["reward/energy"] == -2
        play(board, [result(info={"log": {"speed": np.array([7.0, 9.0])}})])
        values = Merged(board.read()).values(first)
        assert values["reward/speed"] == 8 and "reward/energy" not in values
        board.cleanup()


def test_what_is_no_finite_number_spoils_no_component() -> None:
    with EpisodeBoard(1) as board:
        logs: list[Any] = [
            {"speed": np.array([1.0, NAN]), "energy": -2.0, "image": np.ones((2, 2)), "gait": "trot"},
            {"speed": np.array([3.0, 5.0]), "energy": NAN},
            "walked",
        ]
        play(board, [result(info={"log": log}) for log in logs])
        values = Merged(board.read()).values(None)
        assert values["reward/speed"] == 3 and values["reward/energy"] == -2
        assert not {"reward/image", "reward/gait"} & values.keys()
        board.cleanup()


def test_an_environment_without_a_component_does_not_count_in_its_mean() -> None:
    """As gymnasium's vector environments tell it, which put 0 where there is none: at a reset, say."""
    with EpisodeBoard(1) as board:
        play(
            board, [result(info={"log": {"speed": np.array([0.0, 2.0]), "_speed": np.array([False, True])}})]
        )
        values = Merged(board.read()).values(None)
        assert values["reward/speed"] == 2 and "reward/_speed" not in values
        board.cleanup()


def test_more_components_than_there_is_room_for_are_left_out() -> None:
    with EpisodeBoard(1) as board:
        report = lane([], env_steps=3.0)
        report.components = {f"component {k}": [1.0, 1.0] for k in range(2000)}
        board.publish(report)
        (found,) = board.read()
        assert found is not None and found.components == {} and found.totals["env_steps"] == 3
        board.cleanup()


def test_components_and_counts_of_lanes_add_up() -> None:
    a, b = lane([], rejected=2.0), lane([], rejected=3.0)
    a.components, b.components = {"speed": [6.0, 2.0]}, {"speed": [2.0, 2.0]}
    values = Merged([a, b]).values(None)
    assert values["reward/speed"] == 2 and values["collectors/rejected"] == 5


def test_collector_times_are_means_per_chunk_since_the_last_line() -> None:
    before, after = (Merged([lane([], chunks=c, env_step_ns=ns)]) for c, ns in ((2, 4e6), (4, 10e6)))
    assert after.values(before)["time/collector_env_step_ms"] == 3


def test_lines_are_json_and_appended(tmp_path: Path) -> None:
    for k in (10, 20):
        sink = JsonLines(tmp_path / "run")
        sink.write(k, {"loss/critic": 1.5, "loss/q": float("nan")})
        assert f'"iteration": {k}' in (tmp_path / "run" / "metrics.jsonl").read_text()  # at once
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"iteration": 10, "loss/critic": 1.5}, {"iteration": 20, "loss/critic": 1.5}]


def test_a_line_that_a_kill_cut_short_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "loss/cri')
    sink = JsonLines(tmp_path)
    sink.write(2, {"loss/critic": 1.5})
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in (lines[0], lines[2])] == [1, 2] and len(lines) == 3


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent / "other")])
def test_a_link_or_a_pipe_is_not_written(make: Any, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(FormatError, match="plain file"):
        JsonLines(tmp_path)


@pytest.mark.parametrize(
    ("logger", "module", "said"),
    [
        ("tensorboard", "torch.utils.tensorboard", r'pip install "recollect\[tensorboard\]"'),
        ("wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_logger_that_is_not_installed_is_said_and_leaves_no_file_open(
    logger: str, module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []

    class Noting(JsonLines):
        def close(self) -> None:
            super().close()
            closed.append(tmp_path)

    monkeypatch.setattr(metrics, "JsonLines", Noting)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=said):
        open_sinks(tmp_path, logger)
    assert closed == [tmp_path]


def test_unknown_logger_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="logger: must be one of None, tensorboard"):
        open_sinks(tmp_path, "tensorbord")

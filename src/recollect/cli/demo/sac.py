"""`recollect demo`: SAC on Pendulum-v1 with collectors in their own processes, from the first step to the plot."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from recollect.errors import MissingExtraError

TRACE_EVENTS = 20_000  # of each process: the first minute or so, a file that Perfetto opens at once
CONFIG = {
    "lr": 1e-3,
    "hidden": (128, 128),
    "batch_size": 256,
    "learning_starts": 1000,
    "env_steps_per_sync": 1,
}


@dataclass
class DemoSac:
    """Train SAC on Pendulum-v1: collectors in their own processes, shared replay, batches packed one tick ahead.

    A few minutes on 2 cores, from a pendulum that only swings to one that stands. Half way one collector is killed
    with SIGKILL; it is started again and the run goes on. Meanwhile `recollect top` and `recollect dash` show it from
    another terminal. At the end: a summary, a plot, the replay on disk, a trace, and the commands to look at them.

    Example: recollect demo --seconds 60
    """

    env: str = "Pendulum-v1"
    """A gymnasium environment with continuous actions."""
    iterations: int = 6000
    """Learner iterations, one update each."""
    seconds: float | None = None
    """End after this time if the iterations are not done by then."""
    num_envs: int = 4
    """Environments in all collectors together."""
    collectors: int = 2
    """Collector processes."""
    replay_rows: int = 200_000
    """Transitions that the replay holds."""
    kill: bool = True
    """Kill a collector half way."""
    out: Path = Path("runs/demo")
    """Where everything goes."""
    seed: int = 0
    """Seed of everything."""
    json: bool = False
    """Print one JSON object with the summary instead of the live view."""

    def run(self) -> None:
        """Train, show, plot, and say what to look at; Ctrl-C saves and shows what there is."""
        import gymnasium

        from recollect.cli.live import JobView

        log = RunLog()
        with JobView(quiet=self.json) as view:
            try:
                with self._runner() as runner:
                    try:
                        self._learn(runner, log, view)
                    finally:
                        summary = runner.last_run_summary
            except KeyboardInterrupt:
                log.is_interrupted = True
            except (gymnasium.error.Error, ValueError) as error:
                sys.exit(f"recollect demo: {error}")
        self._report(summary, log)
        if log.is_interrupted:
            sys.exit(130)

    def _runner(self) -> Any:
        from recollect.learners.sac import SACRunner

        return SACRunner(
            self.env, {}, self._config(), num_envs=self.num_envs, num_collectors=self.collectors,
            restart="on_death", device="cpu", seed=self.seed,
        )  # fmt: skip

    def _config(self) -> dict[str, Any]:
        return {**CONFIG, "replay_buffer_n": max(1, self.replay_rows // self.num_envs)}

    def _learn(self, runner: Any, log: RunLog, view: Any) -> None:
        from recollect.observe import TraceRecorder

        started, killed = monotonic(), not self.kill

        def on_metrics(iteration: int, values: Mapping[str, float]) -> None:
            nonlocal killed
            spent = monotonic() - started
            log.add(spent, values)
            view.show(runner.beacon.last)
            share = max(iteration / self.iterations, spent / self.seconds if self.seconds else 0.0)
            if share >= 0.5 and not killed:
                killed = log.kill_one(runner.stats().lanes, spent)
            if share >= 1.0:
                runner.finish()

        trace = TraceRecorder(self.out / "trace.json", limit=TRACE_EVENTS)
        runner.learn(
            self.iterations,
            0,
            self.out,
            save_replay=True,
            on_metrics=on_metrics,
            trace=trace,
            logger=_tensorboard(),
        )

    def _report(self, summary: Any, log: RunLog) -> None:
        from recollect.cli.demo.report import draw, show

        plot: Path | None = self.out / "demo.png"
        try:
            draw(log.points, log.kills, f"SAC on {self.env}", self.out / "demo.png")
        except MissingExtraError as error:
            plot = None
            print(f"no plot: {error}", file=sys.stderr)
        if self.json:
            found = {"env": self.env, **summary.to_json(), "kills": log.kills, "plot": plot and str(plot)}
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
        else:
            show(summary, log, f"sac {self.env}", self.out, plot, self._train_command())

    def _train_command(self) -> str:
        """The command that trains the same learner, and takes the demo's checkpoint."""
        options = {
            "env": self.env, "num_envs": self.num_envs, "collectors": self.collectors, "log_dir": self.out,
            **self._config(),
        }  # fmt: skip
        words = (f"--{name.replace('_', '-')} {_words(value)}" for name, value in options.items())
        return f"recollect train sac {' '.join(words)}"


@dataclass
class RunLog:
    """What was seen of the run: its metrics over time, and who was killed when."""

    points: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    is_interrupted: bool = False

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """Keep one line of metrics."""
        self.points.append((at, dict(values)))

    def kill_one(self, lanes: Any, at: float) -> bool:
        """SIGKILL the first collector that lives; whether there was one."""
        pids = [lane.pid for lane in lanes if lane.pid is not None]
        if pids:
            os.kill(pids[0], signal.SIGKILL)
            self.kills.append(at)
        return bool(pids)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _tensorboard() -> str | None:
    """TensorBoard if it is installed."""
    from importlib.util import find_spec

    return "tensorboard" if find_spec("tensorboard") else None

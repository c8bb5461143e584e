"""`recollect train`: a reference learner on a gymnasium environment, watched live, resumable."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import gymnasium
import tyro
from rich.console import Console

from recollect.cli.live import clock
from recollect.cli.terminal import words
from recollect.errors import DeadlineError, PeerDiedError, RecollectError
from recollect.learners.config import APPOConfig, SACConfig
from recollect.text import printable


@dataclass
class Options:
    """What both algorithms are told."""

    env: str
    """A gymnasium environment id, as my_module:MyEnv-v0 too."""
    iterations: int = 8000
    """Learner iterations in all, those of a resumed run included."""
    num_envs: int = 16
    """Environments in all collectors together; divides by the collectors."""
    collectors: int = 1
    """Collector processes."""
    log_dir: Path = Path("runs/train")
    """Where metrics.jsonl and the checkpoints model_N go."""
    save_interval: int = 1000
    """Iterations between checkpoints; 0: only the last."""
    keep: int | None = None
    """How many of its checkpoints stay, the newest; without a number all."""
    resume: Path | None = None
    """A checkpoint to go on from, such as runs/train/model_1000."""
    logger: Literal["none", "tensorboard", "wandb"] = "none"
    """Where metrics go besides metrics.jsonl."""
    restart: Literal["never", "on_death"] = "never"
    """What happens when a collector dies."""
    device: str | None = None
    """The learner's torch device; without one the best there is."""
    seed: int = 0
    """Seed of everything."""
    trace: Path | None = None
    """A file for what every process did when, to open in Perfetto."""
    json: bool = False
    """Print one JSON object with the summary instead of the live view."""

    def runner(self) -> Any:
        """Make the runner."""
        raise NotImplementedError

    def make(self, runner_type: Any, config: Any) -> Any:
        """Make a runner of this type."""
        return runner_type(
            self.env, {}, config, num_envs=self.num_envs, num_collectors=self.collectors, restart=self.restart,
            device=self.device, seed=self.seed,
        )  # fmt: skip

    def run(self) -> None:
        """Train, show and report; status 1 with one line for what went wrong, 130 for Ctrl-C or SIGTERM, which save."""
        try:
            runner = self._trained()
        except (gymnasium.error.Error, ValueError, RuntimeError) as error:
            if isinstance(error, RecollectError):
                raise
            sys.exit(f"recollect train: {error}")
        summary = runner.last_run_summary
        if self.json:
            sys.stdout.write(json.dumps({"env": self.env, **summary.to_json()}, indent=2) + "\n")
        else:
            report(summary, f"{runner.algorithm} {self.env}", self.log_dir)
        done = summary.completed_iterations
        if self.resume is not None and done >= self.iterations and not summary.last_checkpoint:
            sys.stderr.write(
                f"recollect train: nothing was left to do: {printable(self.resume)} has {done:,} iterations; pass more "
                "--iterations, the total\n"
            )
        if summary.status == "interrupted":
            sys.exit(130)

    def _trained(self) -> Any:
        """The runner after its run, whole or interrupted."""
        from recollect.cli.live import JobView

        with self.runner() as runner, JobView(quiet=self.json) as view, terminated_as_interrupted():
            try:
                runner.learn(
                    self.iterations, self.save_interval, self.log_dir, resume=self.resume,
                    logger=None if self.logger == "none" else self.logger,
                    on_metrics=lambda *_: view.show(runner.beacon.last), trace=self.trace, keep=self.keep,
                )  # fmt: skip
            except KeyboardInterrupt:
                if runner.last_run_summary is None:
                    raise
            except (PeerDiedError, DeadlineError):
                saved = runner.last_run_summary.last_checkpoint
                if saved is not None:
                    saved = printable(saved)
                    sys.stderr.write(
                        f"recollect train: saved {saved}; go on from there with --resume {saved}\n"
                    )
                raise
        return runner


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, as schedulers and containers send it, end and save as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        pressed = signal.getsignal(signal.SIGINT)  # ignored where a shell has put the job into the background
        (pressed if callable(pressed) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class TrainSac(Options):
    """Train soft actor-critic on continuous actions: replay in shared memory, batches packed one tick ahead.

    Example: recollect train sac --env Pendulum-v1 --num-envs 16 --iterations 8000
    """

    config: tyro.conf.OmitArgPrefixes[SACConfig] = field(default_factory=SACConfig)
    """Settings of the algorithm."""

    def runner(self) -> Any:
        """Make the runner."""
        from recollect.learners.sac import SACRunner

        return self.make(SACRunner, self.config)


@dataclass
class TrainAppo(Options):
    """Train asynchronous PPO with V-trace on continuous or discrete actions: rollouts through a shared ring.

    Example: recollect train appo --env CartPole-v1 --num-envs 16 --iterations 800
    """

    config: tyro.conf.OmitArgPrefixes[APPOConfig] = field(default_factory=APPOConfig)
    """Settings of the algorithm."""

    def runner(self) -> Any:
        """Make the runner."""
        from recollect.learners.appo import APPORunner

        return self.make(APPORunner, self.config)


@dataclass
class Train:
    """Train a reference learner on a gymnasium environment.

    Example: recollect train sac --env Pendulum-v1
    """

    algorithm: tyro.conf.OmitArgPrefixes[
        Annotated[TrainSac, tyro.conf.subcommand("sac", prefix_name=False)]
        | Annotated[TrainAppo, tyro.conf.subcommand("appo", prefix_name=False)]
    ]

    def run(self) -> None:
        """Train."""
        self.algorithm.run()


def report(
    summary: Any,
    title: str,
    log_dir: Path,
    console: Console | None = None,
    go_on: str = "the same command with",
) -> None:
    """Print how a run ended and what to do next; `go_on` is the command that a checkpoint can be given to."""
    console = console or Console()
    recent, final = summary.recent_mean_reward, summary.final_mean_reward
    shown = "no episode ended"
    if recent is not None:
        shown = f"mean return of the last 20 episodes {recent:,.1f}, of the last 100 {final:,.1f}"
    told = (
        f": {summary.status} after {summary.completed_iterations:,} iterations and "
        f"{summary.total_env_steps:,} environment steps in {clock(summary.wall_time_s)}; {shown}; "
        f"{summary.restarts} restarts, {summary.misses} batches late, {summary.dropped} rollouts dropped."
    )
    console.print(words("\n", (title, "bold"), told))
    console.print(words(f"Metrics: {log_dir / 'metrics.jsonl'}"), soft_wrap=True)
    if summary.last_checkpoint:
        more = "   (and more --iterations)" if summary.status == "completed" else ""
        console.print(words(f"Go on: {go_on} --resume {summary.last_checkpoint}{more}"), soft_wrap=True)

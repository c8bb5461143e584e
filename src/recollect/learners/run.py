"""What one call of `learn` is made of, whichever the algorithm: iterations, metrics, checkpoints, the summary."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from inspect import Signature, signature
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any, ClassVar, TypeVar

from recollect import checks, interrupts
from recollect.errors import (
    CollectorDiedError,
    DeadlineError,
    FormatError,
    MissingExtraError,
    PeerDiedError,
    RecollectError,
    check_installed,
)
from recollect.files.record import damage_in
from recollect.ipc.async_runner import AsyncRunner
from recollect.ipc.runner.collector import EnvSpec
from recollect.learners.checkpoint import check_shapes, load_checkpoint, remove_checkpoint, save_checkpoint
from recollect.learners.config import config_json
from recollect.learners.environment import EnvSpaces, spaces_of
from recollect.learners.episodes import EpisodeBoard
from recollect.learners.metrics import LOGGERS, RECENT, Merged, MetricsSink, RunSummary, open_sinks
from recollect.learners.shown import collector_table, light
from recollect.observe.beacon import Beacon
from recollect.observe.phases import Phases
from recollect.observe.trace import TraceRecorder

LOG_EVERY = 10
F = TypeVar("F", bound=Callable[..., None])
Watcher = Callable[[int, Mapping[str, float]], None]


class Stopwatch:
    """Time by phase since it was last read; phases exclude one another."""

    def __init__(self, phases: Phases | None = None) -> None:
        self._ns: dict[str, int] = {}
        self._clock, self._phases = monotonic_ns(), phases or Phases(None, "learner")

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = monotonic_ns()
        self._ns[phase] = self._ns.get(phase, 0) + now - self._clock
        self._phases.add(phase, self._clock, now)
        self._clock = now

    def skip(self) -> None:
        """Count the time since the last lap to nobody."""
        self._clock = monotonic_ns()

    def read(self, n: int) -> dict[str, float]:
        """Return milliseconds per iteration over `n`, and begin again."""
        found, self._ns = {f"time/learner_{k}_ms": ns / 1e6 / n for k, ns in self._ns.items()}, {}
        return found


def as_runner(init: F) -> F:
    """Show the parameters of AsyncRunner, and its own, as those of a constructor that passes `*args` on to it."""
    passed = [*signature(AsyncRunner.__init__).parameters.values()]
    own = [p for p in signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
    init.__signature__ = Signature([*passed, *own])  # type: ignore[attr-defined]
    return init


class ReferenceRunner(AsyncRunner):
    """A runner with the loop of `learn`; an algorithm says how to set up, iterate and describe itself.

    Ownership: as AsyncRunner. A runner learns once. Concurrency: one thread.
    """

    algorithm = ""
    _phase_names: ClassVar[
        dict[str, str]
    ] = {}  # what a trace calls the learner's phases, if not learner/<phase>
    _learner: Any
    _weights: Any

    @as_runner
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last_run_summary: RunSummary | None = None
        self._watch = Stopwatch()
        self._trace: TraceRecorder | None = None
        self.beacon: Beacon | None = None
        self._version_base = self._steps_base = 0
        self._checkpoint: Callable[[], None] | None = None
        self._has_learned = self._is_finishing = False

    # -- an algorithm's part

    @abstractmethod
    def _make(self, spaces: EnvSpaces) -> None:
        """Check the budget, make the learner and the shared memory."""

    @abstractmethod
    def _begin(self, first: int, resumed: bool) -> None:
        """Start the collectors and wait until the first iteration can begin."""

    @abstractmethod
    def _iterate(self, iteration: int, is_last: bool) -> dict[str, float]:
        """Make one iteration and return its losses."""

    def _more_metrics(self) -> dict[str, float]:
        """Return what the algorithm's own resources count."""
        return {}

    def _dump_replay(self) -> Callable[[Path], None] | None:
        """Return what writes the replay into a checkpoint, None if it is not wanted."""
        return None

    def _own_state(self) -> dict[str, Any]:
        """Return what else of the algorithm's belongs into a checkpoint."""
        return {}

    def _loss_counts(self) -> tuple[int, int]:
        """Return (dropped rollouts, missed ticks)."""
        return 0, 0

    # -- the loop

    def learn(
        self,
        max_iterations: int,
        save_interval: int = 50,
        log_dir: str | Path = "logs",
        *,
        resume: str | Path | None = None,
        save_replay: bool | None = None,
        logger: str | None = None,
        on_metrics: Watcher | None = None,
        trace: str | Path | TraceRecorder | None = None,
        keep: int | None = None,
    ) -> None:
        """Train up to iteration `max_iterations`, the total, writing metrics and checkpoints to `log_dir`.

        `save_interval` iterations lie between checkpoints (0: only the last). `resume` is a checkpoint to go on from.
        `save_replay` overrides the configuration. `logger`: None, "tensorboard" or "wandb". `on_metrics(iteration,
        values)` is called for each line of metrics. `trace` is a file for what every process did when; it is whole once
        the runner is closed. `keep` is how many of its checkpoints stay, the newest (None: all). `last_run_summary`
        says how it ended, also after an error. Ctrl-C and a collector that died or is stuck leave a checkpoint too.
        While it goes on, `recollect top` and `recollect dash` show it.
        """
        log_dir = Path(log_dir).absolute()  # an environment may change the directory of this process
        resume = None if resume is None else Path(resume).absolute()
        _check_arguments(max_iterations, save_interval, log_dir, logger, keep)
        if self._has_learned:
            raise RuntimeError("learn: a runner learns once; make another one, and pass resume= to go on")
        self._has_learned, self._save_replay, self._keep = True, save_replay, keep
        summary = self.last_run_summary = RunSummary()
        start = monotonic()
        try:
            self._record(summary, trace)
            with light(self, max_iterations, log_dir) as self.beacon:
                self._run(summary, max_iterations, save_interval, log_dir, resume, logger, on_metrics)
            summary.status = "completed"
        except KeyboardInterrupt:
            summary.status = "interrupted"
            raise
        except (PeerDiedError, DeadlineError) as error:  # it was not the learner that failed
            if isinstance(error, CollectorDiedError):
                summary.status = "collector_died"
            try:
                self.on_interrupt()
            except Exception as also:
                error.add_note(f"nor was a checkpoint written: {also!r}")
            raise
        finally:
            summary.wall_time_s = monotonic() - start

    def _record(self, summary: RunSummary, trace: str | Path | TraceRecorder | None) -> None:
        if trace is None:
            return
        self._trace = self.own(trace if isinstance(trace, TraceRecorder) else TraceRecorder(trace))
        names = {"weight_sync": "weight_sync/write", **self._phase_names}
        self._watch = Stopwatch(Phases(self._trace, "learner", **names))
        summary.trace_path = str(self._trace.path)

    def finish(self) -> None:
        """Let `learn` end as completed after one more iteration, with its checkpoint; from any thread."""
        self._is_finishing = True

    def on_interrupt(self) -> None:
        """Write a checkpoint of the last whole iteration, unless that has one."""
        if self._checkpoint is not None:
            self._checkpoint()

    def _run(
        self, summary: RunSummary, max_iterations: int, save_interval: int, log_dir: Path,
        resume: Path | None, logger: str | None, on_metrics: Watcher | None,
    ) -> None:  # fmt: skip
        need_torch(logger)
        state = None if resume is None else load_checkpoint(resume)
        first = 1 if state is None else self._checked_iteration(state, Path(str(resume))) + 1
        summary.completed_iterations = first - 1
        if first > max_iterations:
            return
        self._make(self._look_at_env())
        if state is not None:
            self._restore(state, Path(str(resume)))
        sinks = open_sinks(log_dir, logger)
        try:
            self._loop(
                summary, range(first, max_iterations + 1), save_interval, log_dir, state, sinks, on_metrics
            )
        finally:
            if not self._is_closed:  # as `on_metrics` may have; the counts are gone then
                self._sum_up(summary)
            for sink in sinks:
                sink.close()
            if summary.completed_iterations == max_iterations or self._is_finishing:
                self.stop_collectors()

    def _loop(
        self, summary: RunSummary, iterations: range, save_interval: int, log_dir: Path, state: Any,
        sinks: list[MetricsSink], on_metrics: Watcher | None,
    ) -> None:  # fmt: skip
        log = _MetricsLog(self, sinks, on_metrics)
        saved: list[Path] = []
        self._begin(iterations.start, state is not None)
        self._watch.skip()
        log.begin()
        for iteration in iterations:
            is_last = iteration == iterations.stop - 1 or self._is_finishing
            log.add(self._iterate(iteration, is_last))
            summary.completed_iterations = iteration

            def write(iteration: int = iteration) -> None:
                path = self._save(log_dir, iteration)
                summary.last_checkpoint = str(path)
                if path not in saved:
                    saved.append(path)
                while self._keep is not None and len(saved) > self._keep:
                    _remove_old(saved.pop(0))

            self._checkpoint = write
            if iteration % LOG_EVERY == 0 or is_last:
                log.write(iteration, summary)
            if is_last or (save_interval and iteration % save_interval == 0):
                write()
                self._checkpoint = None
                self._watch.skip()
            if is_last:
                return

    def _look_at_env(self) -> EnvSpaces:
        """Make one environment, read its spaces, close it."""
        env = EnvSpec(self.env_name, self.env_cfg_overrides, self.sim_backend).make(1)
        try:
            return spaces_of(env)
        finally:
            env.close()

    # -- state

    @property
    def version(self) -> int:
        """The version of the weights published last, counted from the first run on."""
        return self._version_base + int(self._weights.version)

    def _board_totals(self) -> Merged:
        return Merged(self._board.read())

    _board: EpisodeBoard

    def _save(self, log_dir: Path, iteration: int) -> Path:
        if self.rl_cfg.sync_collection and self._crew is not None:
            with suppress(
                RecollectError
            ):  # a dead collector is told of elsewhere and must not cost the checkpoint
                self.wait_permits_done()  # what was counted and stored is then that of whole chunks, every time
        steps = self._steps_base + int(self._board_totals().totals.get("env_steps", 0))
        state = {
            "algorithm": self.algorithm, "iteration": iteration, "env_steps": steps, "weight_version": self.version,
            "config": config_json(self.rl_cfg), "spaces": {k: _plain(v) for k, v in asdict(self._spaces).items()},
            "seed": self.seed, "learner": self._learner.get_state_dict(), **self._own_state(),
        }  # fmt: skip
        return save_checkpoint(log_dir / f"model_{iteration}", state, dump_replay=self._dump_replay())

    _spaces: EnvSpaces

    def _checked_iteration(self, state: Mapping[str, Any], path: Path) -> int:
        if state.get("algorithm") != self.algorithm:
            raise FormatError(
                f"{path}: must be a checkpoint of {self.algorithm}, got {state.get('algorithm')!r}"
            )
        with damage_in(path):
            return int(state["iteration"])

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        """Take over a checkpoint: learner, counts, and the replay if it is there."""
        with damage_in(path):
            check_state(self._learner.get_state_dict(), state["learner"])
            self._learner.load_state_dict(state["learner"])
            self._steps_base = int(state["env_steps"])
            self._version_base = int(state["weight_version"]) - int(self._weights.version)
        self._publish_restored()

    @abstractmethod
    def _publish_restored(self) -> None:
        """Publish the restored weights, so that collectors begin with them."""

    def _sum_up(self, summary: RunSummary) -> None:
        merged = self._board_totals()
        summary.total_env_steps = self._steps_base + int(merged.totals.get("env_steps", 0))
        summary.final_mean_reward, summary.mean_episode_length = merged.mean(1), merged.mean(2)
        summary.recent_mean_reward = merged.mean(1, RECENT)
        best = [x for x in (summary.best_mean_reward, summary.final_mean_reward) if x is not None]
        summary.best_mean_reward = max(best) if best else None
        summary.restarts = self.stats().restarts
        summary.dropped, summary.misses = self._loss_counts()


class _MetricsLog:
    """Gathers losses and reports into a line every few iterations."""

    def __init__(self, runner: ReferenceRunner, sinks: list[MetricsSink], on_metrics: Watcher | None) -> None:
        self._runner, self._sinks, self._on_metrics = runner, sinks, on_metrics
        self._losses: dict[str, list[float]] = {}
        self._before: Merged | None = None
        self._n, self._start, self._steps = 0, monotonic(), 0.0

    def begin(self) -> None:
        """Start the clock; what came before the first iteration is no part of its rate."""
        self._start, self._steps = monotonic(), self._env_steps(self._runner._board_totals())

    @staticmethod
    def _env_steps(merged: Merged) -> float:
        return merged.totals.get("env_steps", 0.0)

    def add(self, losses: Mapping[str, float]) -> None:
        """Take one iteration's losses."""
        self._n += 1
        for name, x in losses.items():
            self._losses.setdefault(name, []).append(x)

    def write(self, iteration: int, summary: RunSummary) -> None:
        """Write a line to every sink."""
        runner, merged, now = self._runner, self._runner._board_totals(), monotonic()
        values = {f"loss/{name}": sum(x) / len(x) for name, x in self._losses.items() if x}
        values |= merged.values(self._before)
        values["axis/env_steps_total"] += runner._steps_base
        values |= runner._watch.read(self._n)
        wall = max(now - self._start, 1e-9)
        stats = runner.stats()
        values |= {
            "perf/iter_ms": 1e3 * wall / self._n,
            "perf/steps_per_sec": (self._env_steps(merged) - self._steps) / wall,
            "collectors/alive": float(stats.alive), "collectors/restarts": float(stats.restarts),
            "lag/weight_versions": _mean([runner._weights.version - v for v in merged.versions]),
            **runner._more_metrics(),
        }  # fmt: skip
        values = {name: float(x) for name, x in values.items() if math.isfinite(x)}
        for sink in self._sinks:
            sink.write(iteration, values)
        if runner.beacon is not None:
            runner.beacon.publish({"iteration": iteration, **values}, {"collectors": collector_table(stats)})
        if self._on_metrics is not None:
            self._on_metrics(iteration, values)
        reward = values.get("reward/mean")
        if reward is not None:
            best = summary.best_mean_reward
            summary.best_mean_reward = reward if best is None else max(best, reward)
        self._losses, self._before, self._n = {}, merged, 0
        self._start, self._steps = now, self._env_steps(merged)


def check_state(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise FormatError naming the first parameter of any network that is missing or of another shape."""
    for name, part in wanted.items():
        if isinstance(part, Mapping) and part and all(hasattr(x, "shape") for x in part.values()):
            if name not in found:
                raise FormatError(f"{name}: is not in the checkpoint; it is of another learner")
            check_shapes(name, part, found[name])


def _remove_old(path: Path) -> None:
    """Remove a checkpoint; one with files of somebody else in it stays, and that is said."""
    try:
        remove_checkpoint(path)
    except FileExistsError as error:
        warnings.warn(f"{error}; it is not removed", RuntimeWarning, stacklevel=2)


def need_torch(logger: str | None = None) -> None:
    """Raise MissingExtraError if torch, or what the logger needs beside it, is not there."""
    check_installed("reference learner", "torch", *(["tensorboard"] if logger == "tensorboard" else []))
    try:
        interrupts.import_whole("torch")
    except ImportError as error:
        raise MissingExtraError(
            'the reference learners need torch; run pip install "recollect[torch]"'
        ) from error
    with suppress(ImportError):  # the first optimizer imports it, and half of it spoils every later one
        interrupts.import_whole("torch._dynamo")


def _check_arguments(max_iterations: Any, save_interval: Any, log_dir: Path, logger: Any, keep: Any) -> None:
    checks.count("max_iterations", max_iterations)
    checks.count("save_interval", save_interval, 0)
    if keep is not None:
        checks.count("keep", keep)
    if log_dir.exists() and not log_dir.is_dir():
        raise ValueError(f"log_dir: must be a directory, got the file {log_dir}")
    checks.choice("logger", logger, (None, *LOGGERS))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

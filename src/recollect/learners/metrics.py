"""Metrics of a run: one JSON line per report, TensorBoard or W&B beside it, and the summary at the end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from recollect import checks, interrupts
from recollect.errors import MissingExtraError, check_installed
from recollect.files import open_inside
from recollect.learners.episodes import PHASES, WINDOW, Report

RECENT = 20  # episodes of reward/recent, which follows a policy that changes fast
LOGGERS = ("tensorboard", "wandb")


@dataclass(slots=True)
class RunSummary:
    """How a run ended; there also when `learn` raised. Means are of 100 episodes, the recent one of 20."""

    status: str = "error"
    completed_iterations: int = 0
    total_env_steps: int = 0
    final_mean_reward: float | None = None
    best_mean_reward: float | None = None
    mean_episode_length: float | None = None
    last_checkpoint: str | None = None
    trace_path: str | None = None
    wall_time_s: float = 0.0
    restarts: int = 0
    dropped: int = 0
    misses: int = 0
    recent_mean_reward: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return asdict(self)


class MetricsSink(Protocol):
    """Where metrics go."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object per line, flushed, numbers that are not finite left out.

    It goes on behind the lines that are there, the last of which may have been cut short by a kill.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open_inside(directory, "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        end = os.fstat(self._file.fileno()).st_size
        if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
            self._file.write(b"\n")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        finite = {name: x for name, x in values.items() if math.isfinite(x)}
        self._file.write(json.dumps({"iteration": iteration, **finite}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        check_installed('logger="tensorboard"', "torch", "tensorboard")
        try:
            interrupts.import_whole("torch.utils.tensorboard")
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                'logger="tensorboard" needs tensorboard; run pip install "recollect[tensorboard]"'
            ) from error
        self._writer = SummaryWriter(str(directory))

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, x in values.items():
            self._writer.add_scalar(name, x, iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Scalars for Weights & Biases."""

    def __init__(self, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError('logger="wandb" needs wandb; run pip install wandb') from error
        self._run = wandb.init(dir=str(directory), project="recollect")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def open_sinks(directory: Path, logger: str | None) -> list[MetricsSink]:
    """Return the sinks of a run: metrics.jsonl always, and the one named."""
    checks.choice("logger", logger, (None, *LOGGERS))
    sinks: list[MetricsSink] = [JsonLines(directory)]
    try:
        if logger is not None:
            sinks.append(TensorBoard(directory) if logger == "tensorboard" else WandB(directory))
    except BaseException:
        sinks[0].close()
        raise
    return sinks


class Merged:
    """The reports of all lanes as one: totals, the last episodes over all of them, component means."""

    def __init__(self, reports: list[Report | None]) -> None:
        found = [(lane, report) for lane, report in enumerate(reports) if report is not None]
        self.totals: dict[str, float] = {}
        self.components: dict[str, list[float]] = {}
        episodes = []
        for lane, report in found:
            for name, x in report.totals.items():
                self.totals[name] = self.totals.get(name, 0.0) + x
            for name, (total, count) in report.components.items():
                kept = self.components.setdefault(name, [0.0, 0.0])
                kept[0], kept[1] = kept[0] + total, kept[1] + count
            episodes += [(e[0], lane, e) for e in report.episodes]
        self.versions = [report.totals["version"] for _, report in found]
        # The last by their lane's own steps: lanes step side by side, so that is the order in time, and repeatable.
        self.episodes = [e for *_, e in sorted(episodes)[-WINDOW:]]

    def mean(self, column: int, last: int = WINDOW) -> float | None:
        """Mean over the last episodes of 1: return, 2: length, 3: share that timed out; None without episodes."""
        episodes = self.episodes[-last:]
        return sum(e[column] for e in episodes) / len(episodes) if episodes else None

    def values(self, before: Merged | None) -> dict[str, float]:
        """Return the metrics of these reports; times and components are of what came since `before`."""
        found: dict[str, float] = {"axis/env_steps_total": self.totals.get("env_steps", 0.0)}
        if self.episodes:
            timed_out = self.mean(3) or 0.0
            found |= {
                "reward/mean": self.mean(1) or 0.0, "reward/recent": self.mean(1, RECENT) or 0.0,
                "episode/length": self.mean(2) or 0.0, "episode/timeout_rate": timed_out,
                "episode/terminated_rate": 1.0 - timed_out,
            }  # fmt: skip
        for name, (total, count) in self.components.items():
            old = before.components.get(name, [0.0, 0.0]) if before else [0.0, 0.0]
            if count > old[1]:
                found[f"reward/{name}"] = (total - old[0]) / (count - old[1])
        found["collectors/rejected"] = self.totals.get("rejected", 0.0)
        chunks = self._since("chunks", before)
        for phase in PHASES if chunks > 0 else ():
            found[f"time/collector_{phase}_ms"] = self._since(f"{phase}_ns", before) / chunks / 1e6
        return found

    def _since(self, name: str, before: Merged | None) -> float:
        return self.totals.get(name, 0.0) - (before.totals.get(name, 0.0) if before else 0.0)

"""What others see of a run while it goes on: its beacon, its charts, a table of its collectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recollect.ipc.async_runner import RunnerStats
from recollect.observe.beacon import Beacon
from recollect.observe.jobs import Table

CHARTS = {
    "mean return": ["reward/recent", "reward/mean"],
    "environment steps/s": ["perf/steps_per_sec"],
    "replay rows": ["replay/size"],
    "wait for a batch, ms": ["time/learner_batch_ms"],
    "weight lag, versions": ["lag/weight_versions"],
    "rollout age, ms": ["lag/rollout_age_ms"],
    "learner, ms an iteration": ["time/learner_*"],
    "collectors, ms a chunk": ["time/collector_*"],
    "losses": ["loss/*"],
    "restarts": ["collectors/restarts"],
}


def light(runner: Any, max_iterations: int, log_dir: Path) -> Beacon:
    """Return the beacon of a run of `runner`."""
    env = (
        runner.env_name
        if isinstance(runner.env_name, str)
        else getattr(runner.env_name, "__name__", "factory")
    )
    facts = {
        "algorithm": runner.algorithm, "environment": env, "environments": runner.num_envs,
        "collectors": runner.num_collectors, "device": runner.device, "iterations": max_iterations,
        "log_dir": str(log_dir),
    }  # fmt: skip
    return Beacon("train", f"{runner.algorithm} {env}", charts=CHARTS, facts=facts)


def collector_table(stats: RunnerStats) -> Table:
    """Return a row for each collector."""
    return [
        {
            "lane": lane.lane, "pid": lane.pid, "state": lane.phase if lane.pid else "dead",
            "env steps": lane.counters.get("env_steps", 0), "beat age, s": lane.beat_age_s, "restarts": lane.restarts,
        }
        for lane in stats.lanes
    ]  # fmt: skip

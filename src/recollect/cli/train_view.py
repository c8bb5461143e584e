"""How a training run ended, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from recollect.cli.job_view import clock
from recollect.cli.words import words


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

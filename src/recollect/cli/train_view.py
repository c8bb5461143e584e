"""Training as it goes on, in the terminal: progress, returns, losses, rates, who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 48
_LINE_EVERY_S = 5.0


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """Return numbers as bars, lowest to highest, the last `width` of them.

    >>> sparkline([0.0, 1.0, 2.0])
    ' ▄█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((x - low) * scale)] for x in shown)


class TrainView:
    """Shows each line of metrics; on a terminal in place, else one plain line every few seconds."""

    def __init__(
        self, env: str, iterations: int, quiet: bool = False, console: Console | None = None
    ) -> None:
        self._console = console or Console(stderr=True)
        self._quiet, self._env = quiet, env
        self._rewards: list[float] = []
        self._last_line = 0.0
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task(env, total=iterations)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(self._progress, console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, iteration: int, values: Mapping[str, float]) -> None:
        """Show one line of metrics."""
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        if self._quiet:
            return
        if self._live is not None:
            self._progress.update(self._task, completed=iteration)
            self._live.update(Group(self._progress, self._table(values)))
        elif monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = monotonic()
            self._console.print(self._line(iteration, values), highlight=False)

    def _line(self, iteration: int, values: Mapping[str, float]) -> str:
        reward = values.get("reward/mean")
        shown = "no episode yet" if reward is None else f"mean return {reward:,.1f}"
        return (
            f"{self._env} iteration {iteration:,}: {shown}, {values.get('axis/env_steps_total', 0):,.0f} env steps, "
            f"{values.get('perf/steps_per_sec', 0):,.0f}/s"
        )

    def _table(self, values: Mapping[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        rows = {
            "mean return": f"{values.get('reward/mean', float('nan')):,.1f}  {sparkline(self._rewards)}",
            "episodes": _joined(values, "episode/"),
            "env steps": f"{values.get('axis/env_steps_total', 0):,.0f}  "
            f"({values.get('perf/steps_per_sec', 0):,.0f}/s, {values.get('perf/iter_ms', 0):.1f} ms an iteration)",
            "losses": _joined(values, "loss/"),
            "learner, ms": _joined(values, "time/learner_", "_ms"),
            "collector, ms": _joined(values, "time/collector_", "_ms"),
            "data": _joined(values, "replay/", "ring/", "pipeline/", "lag/"),
            "collectors": _joined(values, "collectors/"),
        }
        for name, text in rows.items():
            if text:
                table.add_row(f"[dim]{name}", text)
        return table

    def report(self, summary: Any, log_dir: Path) -> None:
        """Print how it ended and what to do next."""
        console = Console()
        final = summary.final_mean_reward
        shown = (
            "no episode ended"
            if final is None
            else f"mean return {final:,.1f} (best {summary.best_mean_reward:,.1f})"
        )
        console.print(
            f"\n[bold]{self._env}[/]: {summary.status} after {summary.completed_iterations:,} iterations and "
            f"{summary.total_env_steps:,} environment steps in {summary.wall_time_s:,.0f} s; {shown}, "
            f"{summary.restarts} restarts."
        )
        if self._rewards:
            console.print(f"  {sparkline(self._rewards)}")
        console.print(f"Metrics are in {log_dir / 'metrics.jsonl'}.")
        if summary.last_checkpoint:
            console.print(f"Go on with --resume {summary.last_checkpoint} and more --iterations.")


def _joined(values: Mapping[str, float], *affixes: str) -> str:
    """Metrics under prefixes (all but the affixes that begin with _), as `name value`."""
    suffix = next((a for a in affixes if a.startswith("_")), "")
    return "  ".join(
        f"{name.removeprefix(prefix).removesuffix(suffix)} {x:,.3g}"
        for name, x in values.items()
        for prefix in affixes
        if not prefix.startswith("_") and name.startswith(prefix)
    )

"""A rollout job as it goes on: every batch, what is stuck and why, and the doors, in the terminal and by a beacon."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from time import monotonic
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from recollect.cli.job_view import sparkline
from recollect.cli.words import words
from recollect.observe import Beacon

LOOK_EVERY_S = 0.25
LINE_EVERY_S = 10.0
DOORS = ("submitted", "delivered", "filtered", "unused", "failed", "cancelled", "live")
CHARTS = {
    "reward": ["reward/mean"],
    "runs per second": ["rate/runs"],
    "doors": [f"runs/{name}" for name in DOORS[1:]],
    "attempts": ["attempts/running", "queue/runs"],
}


def batch_rows(c: Any) -> list[dict[str, Any]]:
    """Live batches in order: how far each is, and why it is not done."""
    rows = []
    for ident in c.batches():
        state, why = c.batch_state(ident), c.why_waiting(ident)
        rows.append(
            {
                "batch": str(ident),
                "type": state.batch_type,
                "state": state.state.value,
                "done": state.completed_task_count,
                "of": state.expected_task_count,
                "why": "" if why is None else "; ".join(why.reasons[:4]),
            }
        )
    return rows


class RolloutView:
    """Shows a coordinator; on a terminal in place, else plain lines. Publishes the same to a beacon.

    Concurrency: `watch` and `finished` in the coordinator's loop.
    """

    def __init__(self, name: str, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.name, self.steps, self.quiet = name, steps, quiet
        self.n_done = 0
        self._console = console or Console(stderr=True)
        self._rewards: list[float] = []
        self._evals: dict[str, float] = {}
        self._doors: dict[str, int] = dict.fromkeys(DOORS, 0)
        self._start = monotonic()
        self._last_line = self._start
        self._live: Live | None = None
        self._beacon = Beacon("rollout", name, charts=CHARTS, facts={"steps": steps})

    def __enter__(self) -> Self:
        if not self.quiet and self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.stop()
        self._beacon.__exit__(*error)

    async def watch(self, c: Any) -> None:
        """Show the coordinator until cancelled."""
        try:
            while True:
                self.show(c)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self.show(c)

    def show(self, c: Any) -> None:
        """Show one moment."""
        stats, batches = c.stats(), batch_rows(c)
        self._doors = asdict(stats.runs)
        models = [asdict(model) for model in stats.models]
        self._beacon.publish(self.figures(stats), {"batches": batches, "models": models})
        if self._live is not None:
            self._live.update(Group(*self._parts(stats, batches)), refresh=True)
        elif not self.quiet and monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = monotonic()
            for row in batches:
                self._print(
                    f"batch {row['batch']} {row['state']}: {row['done']} of {row['of']}; {row['why']}"
                )

    def figures(self, stats: Any) -> dict[str, float]:
        """The numbers of one moment, by the names that charts use."""
        runs, attempts = asdict(stats.runs), asdict(stats.attempts)
        ended = sum(runs[name] for name in DOORS[1:6])
        found = {f"runs/{name}": float(runs[name]) for name in DOORS}
        found |= {f"attempts/{name}": float(value) for name, value in attempts.items()}
        found |= {
            "rate/runs": ended / max(monotonic() - self._start, 1e-9),
            "queue/runs": float(stats.queue.queued_runs),
            "queue/staged_nbytes": float(stats.staged_nbytes),
            "runners/alive": float(stats.runners.alive),
            "runners/fenced": float(stats.runners.fenced),
            "loop/lag_s": stats.loop_lag_s,
            "model/version": float(stats.model_version),
            "batches/done": float(self.n_done),
        }
        return found | self._evals | ({"reward/mean": self._rewards[-1]} if self._rewards else {})

    def _parts(self, stats: Any, batches: list[dict[str, Any]]) -> list[Any]:
        title = words((f"{self.name}: {self.n_done} batches done", "table.title"))
        table = Table(box=None, title=title, title_justify="left")
        for column in ("batch", "state", "", "tasks", "why it is not done"):
            table.add_column(column, overflow="fold")
        for row in batches:
            bar = ProgressBar(max(row["of"], 1), row["done"], width=20)
            table.add_row(
                words(row["batch"]),
                words(row["state"]),
                bar,
                f"{row['done']} of {row['of']}",
                words(row["why"]),
            )
        facts = Table.grid(padding=(0, 2))
        for name, text in self._facts(stats).items():
            facts.add_row(words((name, "dim")), words(text))
        return [table, facts]

    def _facts(self, stats: Any) -> dict[str, str]:
        runs, runners = asdict(stats.runs), stats.runners
        busy = [f"{m.name}: {m.calls} calls, {m.served} served, {m.failed} failed" for m in stats.models]
        found = {
            "runs": "  ".join(f"{name} {runs[name]:,}" for name in DOORS),
            "runners": f"{runners.alive} {runners.kind}, {runners.free} free, {runners.fenced} fenced",
            "models": "; ".join(busy),
        }
        if self._rewards:
            found["reward"] = f"{self._rewards[-1]:.3f}  {sparkline(self._rewards)}"
        return found

    def finished(self, result: dict[str, Any]) -> None:
        """A batch was finalized."""
        self.n_done += 1
        metrics = result["metrics"]
        reward = metrics.get("rollout/reward/mean")
        if reward is not None:
            self._rewards.append(reward)
        self._evals |= {
            key: x for key, x in metrics.items() if key.startswith("eval/") and key.endswith("/mean")
        }
        if self._live is None and not self.quiet:
            self._print(_line(result))

    def _print(self, text: str) -> None:
        self._console.print(words(text), soft_wrap=True)

    def report(self) -> None:
        """Print how it ended."""
        doors = ", ".join(f"{self._doors[name]:,} {name}" for name in DOORS[:-1])
        Console().print(words(f"{self.name}: {self.n_done} batches; runs: {doors}"))


def _line(result: dict[str, Any]) -> str:
    counts = [f"{result[f'{kind}_task_count']} {kind}" for kind in ("ok", "partial", "failed", "cancelled")]
    means = [
        f"{name.split('/')[-2]} {value:.3f}"
        for name, value in result["metrics"].items()
        if name.endswith("/mean") and name.split("/")[-2] not in ("run_s", "attempts", "staleness")
    ]
    return f"batch {result['batch_id']}: {', '.join(counts)}; {', '.join(means)}"

"""`recollect rollout`: run a job that a TOML file describes, watched live, resumable from its journal."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Self

import tyro
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from recollect.cli.live import sparkline
from recollect.cli.terminal import words
from recollect.observe import Beacon
from recollect.text import printable


@dataclass
class Rollout:
    """Roll out batches of tasks with the models, workflows and sink that a TOML file names.

    The file has a table [rollout] (fields of recollect.rollout.Config), [[models]], [[auxiliary.NAME]], [train] and
    [eval]; paths in it are meant from where it is, and so are workflow_modules. Shown live: every batch, what is stuck
    and why, and by which door each run left. Ctrl-C ends cleanly; with a journal the same command goes on.

    Example: recollect rollout job.toml --steps 100
    """

    config: Annotated[Path, tyro.conf.Positional]
    """The TOML file of the job."""
    steps: int | None = None
    """Train batches in all, instead of the file's."""
    runners: int | None = None
    """Attempts at once, instead of the file's."""
    journal: Path | None = None
    """SQLite file that makes the job resumable, instead of the file's."""
    json: bool = False
    """Print one JSON object per finished batch instead of the live view."""

    def run(self) -> None:
        """Run what is left of the job and report."""
        try:
            job = self._job()
        except (OSError, ValueError, ImportError) as error:
            sys.exit(f"recollect rollout: {error}")
        view = RolloutView(job.config.name, job.spec.train.steps, quiet=self.json)
        try:
            with view:
                asyncio.run(job.run(view.watch, self._told(view)))
        except KeyboardInterrupt:
            again = (
                "run the same command to go on" if job.config.journal else "without a journal it starts anew"
            )
            sys.stderr.write(f"recollect rollout: stopped after {view.n_done} batches; {again}\n")
            raise
        except (RuntimeError, TimeoutError) as error:
            sys.exit(f"recollect rollout: {error}")
        if not view.n_done and job.config.journal:
            sys.stderr.write(
                f"recollect rollout: nothing was left to do: {printable(job.config.journal)} has all "
                f"{job.spec.train.steps:,} steps; pass more --steps, the total, or another --journal\n"
            )
        elif not self.json:
            view.report()
            _tell_where(job.config.sink)

    def _job(self) -> Any:
        from recollect.rollout.job import RolloutJob

        sys.path.insert(0, str(self.config.resolve().parent))  # where workflow_modules are
        overrides: dict[str, Any] = {}
        if self.runners is not None:
            overrides["runners"] = self.runners
        if self.journal is not None:
            overrides["journal"] = str(self.journal.resolve())
        job = RolloutJob.from_toml(self.config, **overrides)
        if self.steps is not None:
            job.spec.train.steps = self.steps
        return job

    def _told(self, view: Any) -> Any:
        def told(result: dict[str, Any]) -> None:
            view.finished(result)
            if self.json:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()

        return told


def _tell_where(sink: Any) -> None:
    path = sink.get("path") if isinstance(sink, dict) else sink
    if isinstance(path, str | Path):
        path = printable(path)
        print(f"The experience is in {path}; look at it with recollect view {path}")


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

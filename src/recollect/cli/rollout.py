"""`recollect rollout`: run a job that a TOML file describes, watched live, resumable from its journal."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

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
        from recollect.cli.rollout_view import RolloutView

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

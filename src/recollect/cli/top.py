"""`recollect top`: a running job of this user, watched from another terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import tyro

from recollect.observe.jobs import Job, Snapshot, find_jobs
from recollect.text import printable


@dataclass
class Top:
    """Watch a running job from another terminal: what it makes, how fast, and who waits for whom.

    It finds jobs of the same user on this computer (train, demo, serve, rollout) without any server. With one job it
    shows that one; with several it lists them and takes a pid, or the id of one of several jobs of a process. Ctrl-C
    ends the watching, not the job.

    Example: recollect top
    """

    job: Annotated[str | None, tyro.conf.Positional] = None
    """The process of the job, or its id as listed; may be left out if there is only one."""
    once: bool = False
    """Show the state of now and end."""
    json: bool = False
    """Print one JSON object for each state, and one line for each job if there are several."""

    def run(self) -> None:
        """Find, choose, follow."""
        jobs = find_jobs()
        try:
            chosen = [job for job in jobs if self.job in (None, str(job.pid), job.id)]
            if not chosen:
                sys.exit(_nothing(self.job, jobs))
            if len(chosen) > 1:
                self._list(chosen)
            else:
                self._follow(chosen[0])
        finally:
            for job in jobs:
                job.close()

    def _list(self, jobs: list[Job]) -> None:
        from recollect.cli.live import line

        for job in jobs:
            seen = job.snapshot()
            if seen is not None:
                print(
                    _as_json(seen)
                    if self.json
                    else f"{_name(job, jobs):>8} {printable(job.kind):8} {line(seen)}"
                )
        if not self.json and not self.once:
            name = _name(jobs[-1], jobs)
            sys.exit(f"recollect top: {len(jobs)} jobs are running; choose one: recollect top {name}")

    def _follow(self, job: Job) -> None:
        from rich.console import Console

        from recollect.cli.live import JobView, render

        console = Console()
        seen: Snapshot | None = None
        with JobView(quiet=self.json or self.once, console=console) as view:
            for seen in states(job, self.once):
                if self.json:
                    print(_as_json(seen), flush=True)
                view.show(seen)
        if seen is not None and not self.json:
            console.print(render(seen))


def _name(job: Job, jobs: list[Job]) -> str:
    """The shortest that tells a job from the others: its pid, or its id if its process has several."""
    is_alone = sum(other.pid == job.pid for other in jobs) == 1
    return str(job.pid) if is_alone else str(job.id)


def states(job: Job, once: bool = False) -> Iterator[Snapshot]:
    """Yield a job's states as they come, at least one a second, until it has ended."""
    while True:
        seen = job.snapshot()
        if seen is not None:
            yield seen
        if once or (seen is not None and seen.is_over):
            return
        job.wait_newer(1.0)


def _as_json(snapshot: Snapshot) -> str:
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    del plain["history"]
    return json.dumps({**plain, "charts": snapshot.chart_names()})


def _nothing(wanted: str | None, jobs: list[Job]) -> str:
    if wanted is None:
        return "recollect top: no job is running; start one, such as recollect demo, and look again"
    others = ", ".join(f"{_name(job, jobs)} ({job.title})" for job in jobs) or "none"
    return f"recollect top: process {wanted} has no job that can be watched; there are: {others}"

"""The page of `recollect dash`: running jobs of this user and runs on disk, one in full or several in one plot."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from recollect.observe.jobs import Job, Snapshot, find_jobs
from recollect.observe.runs import Run
from recollect.observe.web import event_stream, page

PACE_S = 0.5  # between two messages: eyes are slow, and a message carries the whole history
MOST_SHOWN = 8  # in one plot: as many as there are colours
_BODY = '<nav id="jobs" class="tiles"></nav><section id="job"></section>'


def dash_routes(
    paths: Sequence[str | Path] = (), charts: Mapping[str, Sequence[str]] | None = None
) -> list[BaseRoute]:
    """Return the page and its stream of events, with the runs that are in the directories `paths`.

    `?job=` chooses jobs and runs by id, several for one plot, and `?pid=` the newest job of a process. Without either
    it is the runs that were given, or else the job that began last. `charts` are those of the runs, as for a Beacon.
    """

    def events(request: Any) -> Any:
        query = request.query_params
        return event_stream(messages(query.getlist("job") or None, _pid(query.get("pid")), paths, charts))

    return [
        Route("/", lambda request: page("Recollect", _BODY, scripts=["static/dash.js"])),
        Route("/events", events),
    ]


def _pid(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def messages(
    wanted: Sequence[str] | None = None,
    pid: int | None = None,
    paths: Sequence[str | Path] = (),
    charts: Mapping[str, Sequence[str]] | None = None,
    pace_s: float = PACE_S,
) -> Iterator[dict[str, Any] | None]:
    """Yield {"jobs": [...], "shown": [...]} whenever there is something new, None at least once a second otherwise."""
    watched, pause, said = Watched(wanted, pid, paths, charts), threading.Event(), None
    try:
        while True:
            message = watched.look()
            yield message if message != said else None
            said = message
            pause.wait(pace_s)
    finally:
        watched.close()


class Watched:
    """The jobs and runs that one page shows. A job stays when it has ended, until, unchosen, another begins.

    Concurrency: one thread at a time.
    """

    def __init__(
        self,
        wanted: Sequence[str] | None = None,
        pid: int | None = None,
        paths: Sequence[str | Path] = (),
        charts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Show the jobs and runs with the ids `wanted`, else those of `paths`, else the newest job (of `pid`)."""
        self._runs = {f"run-{k}": Run(path, charts) for k, path in enumerate(paths)}
        self._wanted = list(self._runs) if wanted is None and pid is None and paths else wanted
        self._pid = pid
        self._jobs: dict[str, Job] = {}

    def look(self) -> dict[str, Any]:
        """Return the jobs and runs there are, and the states of those that are shown."""
        jobs = find_jobs()
        listed = [
            {"id": job.id, "pid": job.pid, "kind": job.kind, "title": job.title, "started": job.started}
            for job in jobs
        ]
        listed += [
            {"id": name, "pid": 0, "kind": "run", "title": run.title} for name, run in self._runs.items()
        ]
        self._choose(jobs)
        for job in jobs:
            if self._jobs.get(job.id) is not job:
                job.close()
        return {"jobs": listed, "shown": [as_message(name, seen) for name, seen in self._seen()]}

    def _choose(self, jobs: list[Job]) -> None:
        if self._wanted is None:
            newest = [job for job in jobs if self._pid in (None, job.pid)][-1:]
            for job in newest:
                if job.id not in self._jobs:
                    self.close()
                    self._jobs = {job.id: job}
            return
        for job in jobs:
            if job.id in self._wanted:
                self._jobs.setdefault(job.id, job)

    def _seen(self) -> Iterator[tuple[str, Snapshot]]:
        for name in list(self._jobs if self._wanted is None else self._wanted)[:MOST_SHOWN]:
            source = self._jobs.get(name) or self._runs.get(name)
            seen = None
            with suppress(OSError):  # its directory was removed
                seen = None if source is None else source.snapshot()
            if seen is not None:
                yield name, seen

    def close(self) -> None:
        """Let the jobs go."""
        for job in self._jobs.values():
            job.close()
        self._jobs = {}


def as_message(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return a state as the page wants it: the figures of each chart, and which charts have a headline."""
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    return {**plain, "id": name, "charts": snapshot.chart_names(), "tiles": snapshot.headlines}

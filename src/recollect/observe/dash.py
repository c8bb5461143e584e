"""The page of `recollect dash`: the running jobs of this user, one of them in full, live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from recollect.observe.jobs import Job, Snapshot, find_jobs
from recollect.observe.web import event_stream, page

PACE_S = 0.5  # between two messages: eyes are slow, and a message carries the whole history
_BODY = '<nav id="jobs" class="tiles"></nav><section id="job"></section>'


def dash_routes() -> list[BaseRoute]:
    """Return the page and its stream of events; `?pid=` chooses a job, else it is the one that began last."""
    return [
        Route("/", lambda request: page("Recollect", _BODY, scripts=["static/dash.js"])),
        Route("/events", lambda request: event_stream(messages(_pid(request.query_params.get("pid"))))),
    ]


def _pid(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def messages(pid: int | None, pace_s: float = PACE_S) -> Iterator[dict[str, Any] | None]:
    """Yield {"jobs": [...], "job": {...}} whenever there is something new, None at least once a second otherwise."""
    watched, pause, said = Watched(pid), threading.Event(), None
    try:
        while True:
            message = watched.look()
            yield message if message != said else None
            said = message
            pause.wait(pace_s)
    finally:
        watched.close()


class Watched:
    """The job that one page shows. It stays when it has ended, until another is chosen or, unchosen, begins.

    Concurrency: one thread at a time.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self.job: Job | None = None

    def look(self) -> dict[str, Any]:
        """Return the jobs there are and the state of the one that is shown."""
        jobs = find_jobs()
        self._choose(jobs)
        for job in jobs:
            if job is not self.job:
                job.close()
        listed = [
            {"pid": job.pid, "kind": job.kind, "title": job.title, "started": job.started} for job in jobs
        ]
        seen = self.job.snapshot() if self.job is not None else None
        return {"jobs": listed, "job": None if seen is None else as_message(seen)}

    def _choose(self, jobs: list[Job]) -> None:
        wanted = [job for job in jobs if self._pid in (None, job.pid)]
        if wanted and (self.job is None or wanted[-1].entry != self.job.entry):
            if self.job is not None:
                self.job.close()
            self.job = wanted[-1]

    def close(self) -> None:
        """Let the job go."""
        if self.job is not None:
            self.job.close()


def as_message(snapshot: Snapshot) -> dict[str, Any]:
    """Return a state as the page wants it: the figures of each chart, and which charts have a headline."""
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    return {**plain, "charts": snapshot.chart_names(), "tiles": snapshot.headlines}

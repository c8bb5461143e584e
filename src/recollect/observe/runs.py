"""Runs on disk: what `metrics.jsonl` of a run tells, also when the run ended long ago.

A line has an `iteration` and figures by name. A run that was taken up again from an earlier iteration wrote some of
them twice: what it wrote last counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import localtime, strftime

import msgspec

from recollect.observe.jobs import RECORDED, History, Snapshot

METRICS = "metrics.jsonl"
MOST_POINTS = 500
_BLOCK_NBYTES = 16 << 20


class Run:
    """The metrics of one run, read on as the file grows.

    Concurrency: one thread at a time. The run, if it still goes on, notices nothing.
    """

    def __init__(self, path: str | Path, charts: Mapping[str, Sequence[str]] | None = None) -> None:
        """FileNotFoundError if there is no metrics.jsonl in the directory `path`."""
        self.directory, self.title = Path(os.path.abspath(path)), str(path)
        self._file = self.directory / METRICS
        self._charts = {title: list(names) for title, names in (charts or {}).items()}
        self._forget()
        if not self._file.is_file():
            raise FileNotFoundError(f"{path}: must hold {METRICS}, got none; give the directory of a run")

    def _forget(self) -> None:
        self._read_to, self._n_seen, self._every = 0, 0, 1
        self._points: list[dict[str, float]] = []
        self._last: dict[str, float] = {}

    def snapshot(self) -> Snapshot:
        """Return what is written so far; what cannot be read as a line of figures is passed over."""
        about = self._file.stat()
        if about.st_size < self._read_to:  # another run began here
            self._forget()
        with open(self._file, "rb") as f:
            f.seek(self._read_to)
            while block := f.read(_BLOCK_NBYTES):
                end = block.rfind(b"\n") + 1
                if not end:
                    break  # a line that is not whole yet
                self._take(block[:end].splitlines())
                self._read_to += end
                f.seek(self._read_to)
        last = self._last
        points = self._points if not last or self._points[-1] is last else [*self._points, last]
        names = dict.fromkeys(name for point in points for name in point)
        history = History([], {name: [point.get(name) for point in points] for name in names})
        written = strftime("%Y-%m-%d %H:%M", localtime(about.st_mtime))
        found = Snapshot(
            "run", self.title, 0, about.st_mtime, 0.0, RECORDED, last, {}, self._charts, {"last written": written},
            history,
        )  # fmt: skip
        return found if found.chart_names() else msgspec.structs.replace(found, charts=_by_group(last))

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            point = _figures(line)
            if point is None:
                continue
            while self._points and self._points[-1]["iteration"] >= point["iteration"]:
                self._points.pop()
            self._last = point
            if self._n_seen % self._every == 0 or not self._points:
                self._points.append(point)
            self._n_seen += 1
            if len(self._points) > MOST_POINTS:
                self._points, self._every = self._points[::2], 2 * self._every


def _figures(line: bytes) -> dict[str, float] | None:
    try:
        found = msgspec.json.decode(line)
        numbers = {str(k): float(x) for k, x in found.items() if type(x) in (int, float)}
    except (ValueError, OverflowError, AttributeError):
        return None
    finite = {name: x for name, x in numbers.items() if math.isfinite(x)}
    return finite if "iteration" in finite else None


def _by_group(figures: Mapping[str, float]) -> dict[str, list[str]]:
    """A chart for each group of names: reward/mean and reward/recent are of one."""
    groups = dict.fromkeys(name.partition("/")[0] for name in figures if "/" in name)
    alone = [name for name in figures if "/" not in name and name != "iteration"]
    return {group: [f"{group}/*"] for group in groups} | {name: [name] for name in alone}

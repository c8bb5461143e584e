"""What collectors report: running totals and their last episodes, newest whole report per lane."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Self

import numpy as np

from recollect.learners.environment import Step
from recollect.memory.latest import Latest
from recollect.observe.phases import Phases

WINDOW = 100
PHASES = ("weight_sync", "action_select", "env_step", "replay", "wait")
TOTALS = (
    "env_steps", "rows", "rejected", "episodes", "timeouts", "terminated", "chunks", "version",
    *(f"{phase}_ns" for phase in PHASES),
)  # fmt: skip
_COLUMNS = ("step", "return", "length", "timed_out")
_COMPONENTS_NBYTES = 1 << 14
_SIZES = [8 * len(TOTALS), 8 * WINDOW * len(_COLUMNS), _COMPONENTS_NBYTES]


@dataclass(slots=True)
class Report:
    """One lane's totals since the run began, its last episodes (oldest first) and sums of reward components."""

    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))
    episodes: list[tuple[float, ...]] = field(default_factory=list)
    components: dict[str, list[float]] = field(default_factory=dict)


class EpisodeBoard:
    """A report of each collector in shared memory.

    Ownership: reports are copied both ways. Concurrency: lane i is written by the process that has it; a restarted
    collector goes on from its predecessor's totals. Any process reads.

    >>> board = EpisodeBoard(2)
    >>> board.on_lane(1).publish(Report())
    >>> [report is None for report in board.read()]
    [True, False]
    >>> board.cleanup()
    """

    def __init__(self, num_lanes: int) -> None:
        self._boxes, self.lane = [Latest.create(_SIZES) for _ in range(num_lanes)], 0

    def on_lane(self, number: int) -> EpisodeBoard:
        """Return the board as collector `number` writes it."""
        board = EpisodeBoard.__new__(EpisodeBoard)
        board._boxes, board.lane = [Latest.attach(box.name) for box in self._boxes], number
        return board

    def publish(self, report: Report) -> None:
        """Replace this lane's report."""
        totals = np.array([report.totals[name] for name in TOTALS])
        episodes = np.full((WINDOW, len(_COLUMNS)), np.nan)
        if report.episodes:
            episodes[: len(report.episodes)] = report.episodes
        text = json.dumps(report.components).encode()
        if len(text) > _COMPONENTS_NBYTES:
            text = b"{}"  # more names than anyone can read
        self._boxes[self.lane].publish(
            [totals, episodes, np.frombuffer(text.ljust(_COMPONENTS_NBYTES), np.uint8)]
        )

    def read(self) -> list[Report | None]:
        """Return each lane's newest report, None before its first."""
        return [_read(box) for box in self._boxes]

    def mine(self) -> Report:
        """Return this lane's report to go on from."""
        return _read(self._boxes[self.lane]) or Report()

    def close(self) -> None:
        """Detach this object."""
        for box in self._boxes:
            box.close()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody."""
        for box in self._boxes:
            box.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, ([box.name for box in self._boxes], self.lane)


def _attach(names: list[str], lane: int) -> EpisodeBoard:
    board = EpisodeBoard.__new__(EpisodeBoard)
    board._boxes, board.lane = [Latest.attach(name) for name in names], lane
    return board


def _read(box: Latest) -> Report | None:
    totals, episodes = np.empty(len(TOTALS)), np.empty((WINDOW, len(_COLUMNS)))
    text = np.empty(_COMPONENTS_NBYTES, np.uint8)
    if not box.latest([totals, episodes, text]):
        return None
    kept = [tuple(row) for row in episodes.tolist() if row[0] == row[0]]
    return Report(dict(zip(TOTALS, totals.tolist())), kept, json.loads(text.tobytes()))


class Tally:
    """A collector's own account: follows episodes through the steps, times its phases, publishes its report."""

    def __init__(self, board: EpisodeBoard, n: int, phases: Phases | None = None) -> None:
        self._board, self.report = board, board.mine()
        self._phases = phases or Phases(None, "collector")
        self._return, self._length = np.zeros(n), np.zeros(n, np.int64)
        self._clock = monotonic_ns()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = monotonic_ns()
        self.report.totals[f"{phase}_ns"] += now - self._clock
        self._phases.add(phase, self._clock, now)
        self._clock = now

    def count(self, step: Step) -> None:
        """Take one step of all environments into account; an episode with a rejected reward has no return."""
        totals = self.report.totals
        totals["env_steps"] += step.n_steps
        totals["rows"] += int(np.count_nonzero(step.valid))
        totals["rejected"] += step.rejected
        self._return += np.where(step.is_step, step.rewards, 0.0)
        self._length += step.is_step
        for i in np.flatnonzero(step.dones).tolist():
            self._end(i, bool(step.truncated[i]))
        if "log" in step.info:
            self._log(step.info["log"])

    def _end(self, i: int, timed_out: bool) -> None:
        totals, total = self.report.totals, float(self._return[i])
        totals["episodes"] += 1
        totals["timeouts" if timed_out else "terminated"] += 1
        if np.isfinite(total):
            self.report.episodes.append(
                (totals["env_steps"], total, float(self._length[i]), float(timed_out))
            )
            del self.report.episodes[:-WINDOW]
        self._return[i], self._length[i] = 0.0, 0

    def _log(self, components: Any) -> None:
        if not isinstance(components, Mapping):
            return
        for name, value in components.items():
            if str(name).startswith("_") and str(name)[1:] in components:
                continue  # it says which environments have the component
            numbers = _numbers(value, components.get(f"_{name}"))
            if numbers.size:
                kept = self.report.components.setdefault(str(name), [0.0, 0.0])
                kept[0] += float(numbers.sum())
                kept[1] += numbers.size

    def publish(self) -> None:
        """Let the learner see it."""
        self._board.publish(self.report)


def _numbers(value: Any, present: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The finite numbers of a component, one or one for each environment that has it; none of anything else."""
    try:
        found = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        return np.empty(0)
    if found.ndim != 1:
        return np.empty(0)
    keep = np.isfinite(found)
    if np.shape(present) == found.shape:
        keep &= np.asarray(present, bool)
    return found[keep]

"""Episodes: the list of a set's episodes with length, return and how each ended.

Lengths come from the segments and cost nothing. Returns and ends need one pass over up to three columns, which a
thread makes while the list is shown already.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.batch import BatchBase
from recollect.observe.view.leaves import ShownLeaf, named, reward_of
from recollect.observe.view.series import plain

Array = np.ndarray[Any, Any]
ENDS = (
    "",
    "terminated",
    "truncated",
    "cut",
    "done",
)  # "": the set has no flags; done: by its task or by a limit
RUN_LENGTH = 1000  # how a set without episode boundaries is cut, to be shown at all
_PASS_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes to list, and in what order; None: no bound."""

    min_length: float | None = None
    max_length: float | None = None
    min_return: float | None = None
    max_return: float | None = None
    end: str = ""
    task: str = ""
    sort: str = "episode"
    descending: bool = False


class Episodes:
    """The episodes that a batch holds when this is made.

    Concurrency: any thread may ask while the pass goes on; a return is known once `is_known`.
    """

    def __init__(
        self, batch: BatchBase, leaves: list[ShownLeaf], reward: str | None = None, tasks: Sequence[str] = ()
    ) -> None:
        """List them now and begin to sum the leaf `reward` (default: the one called so); `tasks` has their texts."""
        self.reward = reward_of(leaves, reward)
        self._cut = named(leaves, "truncated", "truncations")
        self._done = named(leaves, "terminated", "terminations", "done", "dones")
        # A leaf called done is set by a limit too; one called terminated has the last word.
        self._cut_first = self._done is not None and self._done.last_word in ("done", "dones")
        # Without a flag for limits it cannot be told which of the two it was.
        self._done_end = ENDS.index("done" if self._cut_first and self._cut is None else "terminated")
        self._batch = batch
        segments = batch.get_segments()
        self.are_real = segments is not None
        if segments is None:
            self.reward = None  # the sum over a stretch of samples that is no episode is no return
            segments = [(a, min(a + RUN_LENGTH, len(batch))) for a in range(0, len(batch), RUN_LENGTH)]
        bounds = np.array(segments, np.int64).reshape(-1, 2)
        self.starts, self.lengths = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
        self.tasks = list(tasks) if len(tasks) == len(bounds) else [""] * len(bounds)
        self._places = batch.locate(self.starts) if len(bounds) else None
        self.returns: Array = np.zeros(len(bounds))
        self.ends: Array = np.zeros(len(bounds), np.int8)
        self.problem = ""
        self._n_passed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._guarded_pass, name="returns", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def n_samples(self) -> int:
        """How many samples they have in all."""
        return int(self.lengths.sum())

    def start(self, episode: int) -> int:
        """Where an episode is now: in a live ring it moves to smaller indices and is overwritten in the end."""
        if self._places is None or not 0 <= episode < len(self):
            raise IndexError(f"episode: must be one of the {len(self)}, got {episode}")
        now = int(self._batch.relocate(self._places.take(slice(episode, episode + 1)))[0])
        if now < 0:
            raise IndexError(
                f"episode {episode}: was overwritten by a live writer meanwhile; open the set again"
            )
        return now

    def index(self, episode: int, step: int) -> int:
        """Where a step of an episode is now."""
        start = self.start(episode)
        if not 0 <= step < self.lengths[episode]:
            raise IndexError(f"step: must be one of the {self.lengths[episode]}, got {step}")
        return start + step

    # -- the list

    def listed(self, wanted: Filter, offset: int = 0, limit: int = 200) -> dict[str, Any]:
        """One page of the list: its `rows`, the `count` of all that fit, and the `progress` of the returns."""
        chosen = self._chosen(wanted)
        part = chosen[offset : offset + limit]
        known = self.is_known
        sums = plain(self.returns[part]) if self.reward is not None and known else [None] * len(part)
        lengths, ends = self.lengths[part].tolist(), self.ends[part].tolist()
        rows = [
            {"episode": e, "length": n, "return": total, "end": ENDS[end], "task": self.tasks[e]}
            for e, n, total, end in zip(part.tolist(), lengths, sums, ends)
        ]
        progress = 1.0 if known else self._n_passed / max(1, self.n_samples)
        return {"rows": rows, "count": len(chosen), "progress": progress, "problem": self.problem}

    def _chosen(self, wanted: Filter) -> Array:
        keep = np.ones(len(self), bool)
        for values, low, high in (
            (self.lengths, wanted.min_length, wanted.max_length),
            (self.returns, wanted.min_return, wanted.max_return),
        ):
            keep &= (values >= low) if low is not None else True
            keep &= (values <= high) if high is not None else True
        if wanted.end:
            keep &= self.ends == ENDS.index(wanted.end)
        if wanted.task:
            part = wanted.task.casefold()
            keep &= np.array([part in task.casefold() for task in self.tasks], bool)
        chosen = np.flatnonzero(keep)
        if wanted.sort in ("length", "return"):
            values = self.lengths if wanted.sort == "length" else self.returns
            chosen = chosen[np.argsort(values[chosen], kind="stable")]
        return chosen[::-1] if wanted.descending else chosen

    # -- the pass over rewards and flags

    @property
    def is_known(self) -> bool:
        """Whether every return is known."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until every return is known."""
        self._thread.join()

    def stop(self) -> None:
        """End the pass where it is."""
        self._stop.set()
        self._thread.join()

    def _guarded_pass(self) -> None:
        try:
            self._pass()
        except Exception as error:  # a damaged file: the list stays, and says what it lacks
            self.problem = f"Returns could not be computed: {error}"

    def _pass(self) -> None:
        columns = [leaf for leaf in (self.reward, self._done, self._cut) if leaf is not None]
        if not columns or not self.are_real or self._places is None:
            return
        stop = int(self.starts[-1] + self.lengths[-1])
        for first in range(0, stop, _PASS_ROWS):
            if self._stop.is_set():
                return
            end = min(first + _PASS_ROWS, stop)
            self._take(np.arange(first, end), {leaf: read(self._batch, leaf, first, end) for leaf in columns})
            self._n_passed = end
        if not np.array_equal(self._batch.relocate(self._places), self.starts):
            self.problem = (
                "Samples were overwritten while returns were summed: open the set again for exact ones."
            )

    def _take(self, index: Array, found: dict[ShownLeaf, Array]) -> None:
        episode = np.searchsorted(self.starts, index, side="right") - 1
        ends = self.starts + self.lengths
        inside = (episode >= 0) & (index < ends[episode])
        if self.reward is not None:
            low, high = max(int(episode[0]), 0), int(episode[-1]) + 1
            reward = found[self.reward][inside, 0].astype(np.float64)
            self.returns[low:high] += np.bincount(episode[inside] - low, reward, minlength=high - low)
        if self._done is not None or self._cut is not None:
            last = inside & (index == ends[episode] - 1)
            done, cut = (_flags(found, leaf, last) for leaf in (self._done, self._cut))
            done = done & ~cut if self._cut_first else done
            # Where no leaf says that an episode came to its end, one that no limit cut may have done so.
            neither = 0 if self._done is None else ENDS.index("cut")
            self.ends[episode[last]] = np.where(done, self._done_end, np.where(cut, 2, neither))


def _flags(found: dict[ShownLeaf, Array], leaf: ShownLeaf | None, rows: Array) -> Array:
    return np.zeros(rows.sum(), bool) if leaf is None else found[leaf][rows, 0].astype(bool)


def read(batch: BatchBase, leaf: ShownLeaf, first: int, end: int) -> Array:
    """The numbers of a leaf as `[end - first, components]`."""
    values = np.asarray(batch.get_column_at(leaf.path, slice(first, end)))
    if values.dtype.kind not in "biuf":
        values = values.astype(np.float32)  # bfloat16 and its kin
    return values.reshape(end - first, -1)

"""State: what a manager holds. Containers go in; scores, a baseline and figures come out. It knows of no messages.

The work on one container: store, score, baseline, count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.errors import EmptyError, ScoringError
from recollect.remote.config import check_draw
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import ItemSpace
from recollect.remote.manager.baseline import Baseline, ShardSummary
from recollect.remote.manager.diversity import Diversity
from recollect.remote.manager.peers import Senders, Workers
from recollect.remote.manager.scoring import BASELINE, Scored, Scoring, call_scoring
from recollect.remote.manager.store import Placement, Store, make_buffer
from recollect.remote.stats import ManagerStats, Sender, Timing
from recollect.sampling.stream import IndexStream

_COUNTS = ("offered", "evicted", "removed", "passed", "containers", "duplicates", "stray", "malformed",
           "scoring_errors")  # fmt: skip


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """What the buffer of a manager is to be."""

    capacity: int
    evict: str
    storage: str
    store_locally: bool
    diversity: Diversity | None


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a user of a manager may set or override; each is looked up when it is needed.

    `scoring` gives the scoring function; `inject_baseline` writes the baseline into the scores of a container.
    """

    scoring: Callable[[], Scoring]
    inject_baseline: Callable[[dict[str, float], PackedItems], None]


class ManagerState:
    """The buffer of a manager, its baseline and its counts. Concurrency: the manager's lock is held in every call."""

    def __init__(
        self, items: ItemSpace, settings: BufferSettings, baseline: Baseline, workers: Workers, timing: Timing,
        hooks: Hooks, seed: int | None,
    ) -> None:  # fmt: skip
        _check_items(items, settings.evict, settings.diversity)
        self.items, self.settings, self.baseline = items, settings, baseline
        self.workers, self.timing, self.hooks = workers, timing, hooks
        self.senders = Senders(workers)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rejected: Counter[str] = Counter()
        self.stream = IndexStream(seed)
        self._at_close: tuple[int, float | None] | None = None  # live and baseline, once the buffer is gone

    def new_buffer(self) -> Any:
        """A new, empty buffer of this kind."""
        capacity = self.settings.capacity if self.settings.store_locally else 1
        return make_buffer(self.items, capacity, self.settings.evict, self.settings.storage)

    def use_buffer(self, buffer: Any) -> None:
        """Use a buffer from now on; it is this object's."""
        self.buffer = buffer
        self.store = Store(self.items, buffer, self.settings.diversity)

    # -- the work on one container

    def keep(self, packed: PackedItems, sender: int) -> Placement:
        """Store a container, or let it pass; count every item."""
        with self.timing.phase("store"):
            if self.settings.store_locally and not packed.scoring_only:
                placement = self.store.add(packed)
            else:
                placement = Placement(np.zeros(packed.n, bool), np.full(packed.n, -1), passed=packed.n)
        counts = self.counts
        counts["offered"] += packed.n
        counts["containers"] += 1
        counts["evicted"] += placement.evicted
        counts["removed"] += placement.removed
        counts["passed"] += placement.passed
        for reason, n in placement.rejected.items():
            if n:
                self.rejected[reason] += n
        self.senders.about(sender)["items"] += packed.n
        return placement

    def score(self, packed: PackedItems, placement: Placement, sender: int) -> dict[str, float]:
        """Score a container and add the baseline; ScoringError says what was kept."""
        scored = Scored(self.items, packed, placement.kept, placement.row)
        with self.timing.phase("score"):
            try:
                scores = call_scoring(self.hooks.scoring(), scored, sender)
            except ScoringError as error:
                self.counts["scoring_errors"] += 1
                error.kept = int(placement.kept.sum())
                raise
        with self.timing.phase("baseline"):
            self.hooks.inject_baseline(scores, packed)
        return scores

    # -- baseline

    def is_full(self) -> bool:
        return self.settings.store_locally and len(self.buffer) == self.buffer.capacity

    def _ranking(self) -> Any:
        return self.store.ranking if self.settings.store_locally else None

    def next_baseline(self, log_rewards: Any) -> tuple[int | None, float] | None:
        """Take a batch into the average; return (epoch, baseline), None if there is none yet."""
        self.baseline.add_batch(log_rewards)
        epoch, value = self.baseline.current(self._ranking(), self.is_full())
        return None if value is None else (epoch, value)

    def inject_baseline(self, scores: dict[str, float], log_rewards: Any) -> None:
        """Take a batch into the average, and write the baseline, if there is one, into the scores of the batch."""
        found = self.next_baseline(log_rewards)
        if found is None:
            scores.pop(BASELINE, None)
            return
        epoch, scores[BASELINE] = found
        if epoch is not None:
            scores["baseline_epoch"] = float(epoch)

    def current_baseline(self) -> float | None:
        """The baseline as the next answer would have it, without a batch."""
        if self._at_close is not None:
            return self._at_close[1]
        return self.baseline.current(self._ranking(), self.is_full())[1]

    def shard_summary(self) -> ShardSummary:
        """What other managers need to know of this shard."""
        return self.baseline.summary(self._ranking(), self.is_full(), self.counts["containers"])

    # -- drawing

    def draw(self, n: Any, by: str, replace: bool, most_nbytes: int | None = None) -> PackedItems:
        """Draw n items; EmptyError if none can be drawn, BudgetError if they have more than `most_nbytes`."""
        check_draw(n, by)
        if not self.settings.store_locally:
            raise EmptyError("sample: this manager stores nothing; ask the one it forwards to")
        return self.store.read(self.store.draw(int(n), by, replace, self.stream), most_nbytes)

    # -- figures

    def live(self) -> int:
        """Items held now."""
        if self._at_close is not None:
            return self._at_close[0]
        return len(self.buffer) if self.settings.store_locally else 0

    def metadata(self) -> dict[str, Any]:
        """Plain values about what is here and which peers were here."""
        ranking = self._ranking()
        finite = ranking.values[np.isfinite(ranking.values)] if ranking is not None else np.empty(0)
        some = len(finite) > 0
        return {
            "length": self.live(),
            "capacity": self.settings.capacity,
            "log_reward_min": float(finite.min()) if some else None,
            "log_reward_max": float(finite.max()) if some else None,
            "log_reward_mean": float(finite.mean()) if some else None,
            "baseline_log_reward": self.current_baseline(),
            "n_requests": {str(rank): about["requests"] for rank, about in self.senders.by_rank.items()},
            "n_items": {str(rank): about["items"] for rank, about in self.senders.by_rank.items()},
            "n_present": self.workers.n_present,
            "n_left": self.workers.n_left,
        }

    def stats(self, **more: Any) -> ManagerStats:
        """A frozen record of all this; `more` is what others know."""
        senders = {rank: Sender(**about) for rank, about in self.senders.with_states().items()}
        counts: dict[str, Any] = dict(self.counts)
        return ManagerStats(
            live=self.live(), rejected=dict(self.rejected), baseline=self.current_baseline(), senders=senders,
            exit_counter=self.workers.n_left, **counts, **more,
        )  # fmt: skip

    def close(self) -> None:
        """Give up the buffer; the figures stay."""
        if self._at_close is None:
            self._at_close = (self.live(), self.current_baseline())
            self.buffer.close()


def _check_items(items: ItemSpace, evict: str, diversity: Diversity | None) -> None:
    if evict not in ("lowest", "oldest"):
        raise ValueError(f"evict: must be 'lowest', 'oldest' or None, got {evict!r}")
    if evict == "lowest" and not items.has_log_reward:
        raise ValueError(f"evict: 'lowest' needs items with a log_reward, got {items.space}")
    if diversity is not None:
        layout = items.fields.layout if items.is_trajectory and items.fields else items.rows.layout
        names = [leaf.name for leaf in layout.leaves if leaf.kind not in ("text", "sequence")]
        if diversity.key not in names or (items.is_trajectory and items.fields is None):
            raise ValueError(
                f"diversity: key must be a leaf of the items, one of {names}, got {diversity.key!r}; "
                "pass diversity=Diversity(key=...)"
            )

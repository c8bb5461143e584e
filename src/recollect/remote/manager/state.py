"""Shelf: what a manager holds. Containers go in, scores, draws and figures come out; it knows of no messages.

The work on one container: store, score, baseline, count.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from recollect.errors import EmptyError, ScoringError
from recollect.remote import config
from recollect.remote.config import Shards
from recollect.remote.items.packed import Packed
from recollect.remote.items.space import ItemSpace
from recollect.remote.items.trajectories import Array
from recollect.remote.manager.baseline import Agreement, Summary, from_buffer, next_ema
from recollect.remote.manager.diversity import Diversity
from recollect.remote.manager.scoring import Scored, call_scoring
from recollect.remote.manager.store import Outcome, Store, make_buffer
from recollect.remote.stats import OTHERS, ManagerStats, Sender
from recollect.sampling.stream import IndexStream

if TYPE_CHECKING:
    from recollect.remote.manager.manager import ReplayBufferManager

_COUNTS = ("offered", "evicted", "removed", "passed", "containers", "duplicates", "stray", "malformed",
           "scoring_errors")  # fmt: skip
_MOST_COUNTED = 2**62
_OF_A_SENDER = ("requests", "items", "nbytes", "malformed", "undelivered")


class Shelf:
    """The buffer of a manager, its baseline and its counts. Concurrency: the manager's lock is held in every call."""

    def __init__(
        self, manager: ReplayBufferManager, items: ItemSpace, evict: str | None, storage: str,
        diversity: Diversity | None, shards: Shards | None, seed: int | None,
    ) -> None:  # fmt: skip
        self.manager, self.items, self.diversity = manager, items, diversity
        self.evict = evict or ("lowest" if items.has_log_reward else "oldest")
        self.storage = storage
        _check_items(items, self.evict, diversity)
        self.ema: float | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rejected: Counter[str] = Counter()
        self.senders: OrderedDict[int, dict[str, int]] = OrderedDict()  # who was heard last, last
        self.stream = IndexStream(seed)
        self._at_close: tuple[int, float | None] | None = None  # live and baseline, once the buffer is gone
        self.agreement: Agreement | None = None
        if shards is not None:
            self.agreement = Agreement(
                manager.rank, shards, manager.baseline_strategy, manager.baseline_percentile
            )

    def fresh(self) -> Any:
        """A new, empty buffer of this kind."""
        capacity = self.manager.capacity if self.manager.store_locally else 1
        return make_buffer(self.items, capacity, self.evict, self.storage)

    def adopt(self, buffer: Any) -> None:
        """Use a buffer from now on; it is this object's."""
        self.buffer = buffer
        self.store = Store(self.items, buffer, self.diversity)

    def about(self, sender: int) -> dict[str, int]:
        """What is counted of one sender; of too many, one that is not present is counted among the others."""
        found = self.senders.get(sender)
        if found is None:
            found = self.senders[sender] = dict.fromkeys(_OF_A_SENDER, 0)
            if len(self.senders) - (OTHERS in self.senders) > config.MOST_CLIENTS:
                self._fold()
        self.senders.move_to_end(sender)
        return found

    def _fold(self) -> None:
        """Add what is counted of the longest silent sender, one that has left if there is one, to the others."""
        workers = self.manager._book.workers
        silent = [rank for rank in self.senders if rank != OTHERS][:-1]  # the last has just come
        gone = (rank for rank in silent if rank not in workers or workers[rank].state != "present")
        about = self.senders.pop(next(gone, silent[0]))
        others = self.senders.setdefault(OTHERS, dict.fromkeys(_OF_A_SENDER, 0))
        for name, n in about.items():
            others[name] = added(others.get(name, 0), n)

    # -- the work on one container

    def keep(self, packed: Packed, sender: int) -> Outcome:
        """Store a container, or let it pass; count every item."""
        with self.manager._timing.phase("store"):
            if self.manager.store_locally and not packed.scoring_only:
                outcome = self.store.add(packed)
            else:
                outcome = Outcome(np.zeros(packed.n, bool), np.full(packed.n, -1), passed=packed.n)
        counts = self.counts
        counts["offered"] += packed.n
        counts["containers"] += 1
        counts["evicted"] += outcome.evicted
        counts["removed"] += outcome.removed
        counts["passed"] += outcome.passed
        for reason, n in outcome.rejected.items():
            if n:
                self.rejected[reason] += n
        self.about(sender)["items"] += packed.n
        return outcome

    def score(self, packed: Packed, outcome: Outcome, sender: int) -> dict[str, float]:
        """Score a container and add the baseline; ScoringError says what was kept."""
        scored = Scored(self.items, packed, outcome.kept, outcome.row)
        with self.manager._timing.phase("score"):
            try:
                scores = call_scoring(self.manager.scoring_function, scored, sender)
            except ScoringError as error:
                self.counts["scoring_errors"] += 1
                error.kept = int(outcome.kept.sum())
                raise
        with self.manager._timing.phase("baseline"):
            self.manager._inject_baseline_log_reward(scores, packed)
        return scores

    # -- baseline

    def is_full(self) -> bool:
        return self.manager.store_locally and len(self.buffer) == self.buffer.capacity

    def next_baseline(self, log_rewards: Any) -> tuple[int | None, float] | None:
        """Take a batch into the average; return (epoch, baseline), None if there is none yet."""
        self.ema = next_ema(self.ema, log_rewards, self.manager.baseline_ema_alpha)
        agreed = self._agreed()
        if agreed is not None:
            return agreed
        value = self._own_baseline()
        return None if value is None else (None, value)

    def _agreed(self) -> tuple[int, float] | None:
        agreed = None if self.agreement is None else self.agreement.current(monotonic())
        return None if agreed is None or agreed[1] is None else (agreed[0], agreed[1])

    def _own_baseline(self) -> float | None:
        manager = self.manager
        ranking = self.store.ranking if manager.store_locally else None
        found = from_buffer(manager.baseline_strategy, manager.baseline_percentile, ranking, self.is_full())
        return self.ema if found is None else found

    def baseline(self) -> float | None:
        """The baseline as the next answer would have it, without a batch."""
        if self._at_close is not None:
            return self._at_close[1]
        agreed = self._agreed()
        return self._own_baseline() if agreed is None else agreed[1]

    def summary(self) -> Summary:
        """What other managers need to know of this shard."""
        ranking = self.store.ranking if self.manager.store_locally else None
        values = np.empty(0)
        if ranking is not None and self.manager.baseline_strategy == "percentile":
            values = ranking.finite()
        lowest = None if ranking is None else ranking.lowest()
        return Summary(lowest, self.is_full(), self.ema, self.counts["containers"], values)

    # -- drawing

    def draw(self, n: Any, by: str, replace: bool, most_nbytes: int | None = None) -> Packed:
        """Draw n items; EmptyError if none can be drawn, BudgetError if they have more than `most_nbytes`."""
        check_draw(n, by)
        if not self.manager.store_locally:
            raise EmptyError("sample: this manager stores nothing; ask the one it forwards to")
        return self.store.read(self._drawn(int(n), by, replace), most_nbytes)

    def _drawn(self, n: int, by: str, replace: bool) -> Array:
        if by == "uniform":
            size = len(self.store)
            _check_drawable(n, size, replace)
            return self.stream.indices(size, n) if replace else self.stream.choice(size, n)
        if self.store.ranking is None:
            raise ValueError("by: 'log_reward' needs items that have one; draw uniformly")
        index, mass = self.store.weights()
        _check_drawable(n, len(index), replace)
        if replace:
            at = np.searchsorted(mass, self.stream.uniform(n) * (mass[-1] if n else 1.0), side="right")
            return index[np.minimum(at, len(index) - 1)]
        # The largest of log weight + Gumbel noise are a draw without replacement, one after the other.
        weight = self.store.log_rewards()[index]
        uniform = np.maximum(self.stream.uniform(len(index)), np.finfo(float).tiny)
        return index[np.argsort(np.log(-np.log(uniform)) - weight, kind="stable")[:n]]

    # -- figures

    def live(self) -> int:
        """Items held now."""
        if self._at_close is not None:
            return self._at_close[0]
        return len(self.buffer) if self.manager.store_locally else 0

    def metadata(self) -> dict[str, Any]:
        """Plain values about what is here and who was here."""
        ranking = self.store.ranking if self.manager.store_locally else None
        finite = ranking.values[np.isfinite(ranking.values)] if ranking is not None else np.empty(0)
        some = len(finite) > 0
        return {
            "length": self.live(),
            "capacity": self.manager.capacity,
            "log_reward_min": float(finite.min()) if some else None,
            "log_reward_max": float(finite.max()) if some else None,
            "log_reward_mean": float(finite.mean()) if some else None,
            "baseline_log_reward": self.baseline(),
            "n_requests": {str(rank): about["requests"] for rank, about in self.senders.items()},
            "n_items": {str(rank): about["items"] for rank, about in self.senders.items()},
            "n_present": self.manager._book.n_present,
            "n_left": self.manager._book.n_left,
        }

    def comm_stats(self) -> dict[int, dict[str, Any]]:
        """What came from each sender, and its state."""
        states = self.manager._book.states() | {OTHERS: "left"}
        return {rank: {**about, "state": states.get(rank, "")} for rank, about in self.senders.items()}

    def stats(self, **more: Any) -> ManagerStats:
        """A frozen record of all this; `more` is what others know."""
        senders = {rank: Sender(**about) for rank, about in self.comm_stats().items()}
        counts: dict[str, Any] = dict(self.counts)
        return ManagerStats(
            live=self.live(), rejected=dict(self.rejected), baseline=self.baseline(), senders=senders,
            exit_counter=self.manager._book.n_left, **counts, **more,
        )  # fmt: skip

    def close(self) -> None:
        """Give up the buffer; the figures stay."""
        if self._at_close is None:
            self._at_close = (self.live(), self.baseline())
            self.buffer.close()


def added(total: int, n: int) -> int:
    """Add what a peer says: a number that no record could hold would end the next dump, so the sum stops before."""
    return min(total + n, _MOST_COUNTED)


def check_draw(n: Any, by: Any) -> None:
    """Raise ValueError unless so many items can be asked for in such a way."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ValueError(f"n: must be an int of at least 0, got {n!r}")
    if by not in ("uniform", "log_reward"):
        raise ValueError(f"by: must be 'uniform' or 'log_reward', got {by!r}")


def _check_drawable(n: int, size: int, replace: bool) -> None:
    if n and not size:
        raise EmptyError("sample: nothing can be drawn, the buffer holds no such item; add some first")
    if not replace and n > size:
        raise ValueError(
            f"n: must be at most {size} without replacement, got {n}; draw with replacement or fewer"
        )


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

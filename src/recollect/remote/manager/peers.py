"""Peers: what a manager knows of those that send to it.

`Workers`: which workers are expected, present or gone; here a dead one is noticed. `Writers`: what each client sent
last, by which a duplicate is recognised, so that a container is stored once. `Senders`: how much came from each rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from recollect import _core
from recollect.remote import config
from recollect.remote.config import Limits
from recollect.remote.messages import Id
from recollect.remote.ranks import is_seen
from recollect.remote.stats import OTHERS

_MOST_COUNTED = 2**62
_OF_A_SENDER = ("requests", "items", "nbytes", "malformed", "undelivered")


@dataclass(slots=True)
class WorkerRecord:
    state: str
    host: str = ""
    process: int = 0
    heard: float = 0.0
    lost_since: float | None = None


class Workers:
    """Which workers a manager expects, which are present and which have left, each by its own number.

    Where no number is expected, those that left are forgotten once there are too many, but still counted.
    """

    def __init__(self, n_expected: int | None, worker_ranks: Iterable[int] | None, limits: Limits) -> None:
        self.n_expected, self.limits = n_expected, limits
        self.fixed = None if worker_ranks is None else frozenset(worker_ranks)
        self.by_rank: dict[int, WorkerRecord] = {
            rank: WorkerRecord("expected") for rank in sorted(self.fixed or ())
        }
        self.has_seen_any = False
        self._began: float | None = None
        self._is_late = False  # `join_s` is over
        self._n_forgotten = 0

    def begin(self, now: float) -> None:
        """Start to wait for workers."""
        self._began = now

    @property
    def n_missing(self) -> int:
        """Places that no worker took in time; one that comes late takes such a place."""
        if not self._is_late or self.n_expected is None:
            return 0
        return max(0, self.n_expected - len(self.by_rank))

    @property
    def none_came(self) -> bool:
        """Whether all of `join_s` was waited in vain; not if the wait was cut short."""
        return self._is_late and not self.has_seen_any

    @property
    def n_left(self) -> int:
        return self.n_missing + self._n_forgotten + self._count("left")

    @property
    def n_present(self) -> int:
        return self._count("present")

    def _count(self, state: str) -> int:
        """How many are in a state; also for threads that look while another comes."""
        return sum(worker.state == state for worker in tuple(self.by_rank.values()))

    @property
    def is_over(self) -> bool:
        return self.n_expected is not None and self.n_left >= self.n_expected

    def admit(self, rank: int, host: str, process: int, now: float) -> str | None:
        """Take a worker in; otherwise say why not."""
        worker = self.by_rank.get(rank)
        if worker is None:
            if self.fixed is not None:
                return f"this manager serves the ranks {sorted(self.fixed)}"
            if self.n_expected is not None and len(self.by_rank) >= self.n_expected:
                return f"this manager serves {self.n_expected} workers, and has them"
            worker = self._enter(rank)
        worker.state, worker.host, worker.process = "present", host, process
        worker.heard, worker.lost_since = now, None
        self.has_seen_any = True
        return None

    def allows(self, rank: int) -> bool:
        """Whether containers of this rank are taken."""
        return rank in self.by_rank

    def leave(self, rank: int) -> None:
        """This worker has left; a second time is harmless."""
        worker = self.by_rank.get(rank)
        if worker is None:
            if self.fixed is not None or (
                self.n_expected is not None and len(self.by_rank) >= self.n_expected
            ):
                return
            worker = self._enter(rank)
        worker.state = "left"
        self.has_seen_any = True

    def _enter(self, rank: int) -> WorkerRecord:
        worker = self.by_rank[rank] = WorkerRecord("expected")
        if self.n_expected is None and self.fixed is None and len(self.by_rank) > config.MOST_CLIENTS:
            gone = next((r for r, w in self.by_rank.items() if w.state == "left"), None)
            if gone is not None:
                del self.by_rank[gone]
                self._n_forgotten += 1
        return worker

    def note_message(self, rank: int, now: float) -> None:
        """Something came from this rank."""
        worker = self.by_rank.get(rank)
        if worker is not None:
            worker.heard = now

    def tick(self, now: float, alive: frozenset[int], sees_death: bool) -> None:
        """Mark the workers that are gone by now: dead, silent or not back in time."""
        for rank, worker in self.by_rank.items():
            if worker.state == "present" and self._is_gone(rank, worker, now, alive, sees_death):
                worker.state = "left"
        if self._began is None or now - self._began < self.limits.join_s:
            return
        self._is_late = True
        for worker in self.by_rank.values():
            if worker.state == "expected":
                worker.state = "left"

    def _is_gone(
        self, rank: int, worker: WorkerRecord, now: float, alive: frozenset[int], sees_death: bool
    ) -> bool:
        is_seen_here = is_seen(worker.host, worker.process)
        if is_seen_here and worker.process and _core.is_dead(worker.process):
            return True
        if not sees_death:
            return not is_seen_here and now - worker.heard > self.limits.silence_s
        if rank in alive:
            worker.lost_since = None
            return False
        if worker.lost_since is None:
            worker.lost_since = now
        return now - worker.lost_since > self.limits.rejoin_s

    def states(self) -> dict[int, str]:
        """The state of each rank."""
        return {rank: worker.state for rank, worker in self.by_rank.items()}


@dataclass(slots=True)
class Writer:
    """One client: its rank, the last container it sent, and the answers it may still ask for."""

    rank: int
    last_seq: int = 0
    answers: OrderedDict[int, bytes | Callable[[], bytes]] = field(default_factory=OrderedDict)
    gap_told: int = -1  # after which seq a gap was already answered
    has_left: bool = False

    def remember(self, seq: int, answer: bytes | Callable[[], bytes], most: int) -> None:
        """Keep the answer to the container that was just stored, or what makes it: it is rarely asked for."""
        self.last_seq = seq
        self.answers[seq] = answer
        while len(self.answers) > most:
            self.answers.popitem(last=False)

    def answer(self, seq: int) -> bytes | None:
        """The answer to a container, if it is kept."""
        found = self.answers.get(seq)
        return found() if callable(found) else found

    def kept_answers(self) -> list[tuple[int, bytes]]:
        return [(seq, found() if callable(found) else found) for seq, found in self.answers.items()]


class Writers:
    """All writers by id. When there are too many, one that said Exit is forgotten first, the longest silent of them.

    Such a client sends nothing again, so that a container is still stored once; others go only if none has left.
    """

    def __init__(self) -> None:
        self.by_id: OrderedDict[Id, Writer] = OrderedDict()

    def get(self, writer: Id) -> Writer | None:
        return self.by_id.get(writer)

    def enter(self, writer: Id, rank: int) -> Writer:
        """Return the record of a writer; a new one of a rank ends the answers kept for its earlier ones."""
        found = self.by_id.get(writer)
        if found is None:
            for other in self.by_id.values():
                if other.rank == rank:
                    other.answers.clear()
            found = self.by_id[writer] = Writer(rank)
            while len(self.by_id) > config.MOST_CLIENTS:
                del self.by_id[next((i for i, w in self.by_id.items() if w.has_left), next(iter(self.by_id)))]
        self.by_id.move_to_end(writer)
        return found


class Senders:
    """What is counted of each rank that sent something, the latest last.

    Of too many, one that is not present is counted among the others.
    """

    def __init__(self, workers: Workers) -> None:
        self.by_rank: OrderedDict[int, dict[str, int]] = OrderedDict()
        self._workers = workers

    def about(self, rank: int) -> dict[str, int]:
        """The counts of one sender, to be added to."""
        found = self.by_rank.get(rank)
        if found is None:
            found = self.by_rank[rank] = dict.fromkeys(_OF_A_SENDER, 0)
            if len(self.by_rank) - (OTHERS in self.by_rank) > config.MOST_CLIENTS:
                self._fold()
        self.by_rank.move_to_end(rank)
        return found

    def _fold(self) -> None:
        """Add the counts of the sender that was silent longest, one that has left if there is one, to the others."""
        workers = self._workers.by_rank
        silent = [rank for rank in self.by_rank if rank != OTHERS][:-1]  # the last has just come
        gone = (rank for rank in silent if rank not in workers or workers[rank].state != "present")
        about = self.by_rank.pop(next(gone, silent[0]))
        others = self.by_rank.setdefault(OTHERS, dict.fromkeys(_OF_A_SENDER, 0))
        for name, n in about.items():
            others[name] = bounded_sum(others.get(name, 0), n)

    def with_states(self) -> dict[int, dict[str, Any]]:
        """What came from each sender, and its state."""
        states = self._workers.states() | {OTHERS: "left"}
        return {rank: {**about, "state": states.get(rank, "")} for rank, about in self.by_rank.items()}


def bounded_sum(total: int, n: int) -> int:
    """Add what a peer says: a number that no record could hold would end the next dump, so the sum stops before."""
    return min(total + n, _MOST_COUNTED)

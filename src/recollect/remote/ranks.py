"""Ranks: who works, who manages, and which workers are expected, present or gone."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from recollect import _core
from recollect.remote import records
from recollect.remote.records import Limits
from recollect.system.processes import boot_id


def _host() -> str:
    """Name this machine: host names are given twice, so with the id of its boot where that can be read."""
    return f"{socket.gethostname()[:200]} {boot_id()}".rstrip()


HOST = _host()


def is_seen(host: str, process: int) -> bool:
    """Whether a process could be looked up from here: it is of this machine and of this pid namespace."""
    return host == HOST and _core.is_near(process)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which ranks work and which manage; make it with `rank_layout`."""

    workers: tuple[int, ...]
    managers: tuple[int, ...]

    def manager_of(self, worker: int) -> int:
        """The manager that a worker sends to."""
        return self.managers[worker % len(self.managers)]

    def workers_of(self, manager: int) -> tuple[int, ...]:
        """The workers that send to a manager."""
        return tuple(worker for worker in self.workers if self.manager_of(worker) == manager)


def rank_layout(size: int, n_managers: int = 1) -> RankLayout:
    """Return which of `size` ranks manage (the last ones), and which work.

    >>> layout = rank_layout(5, 2)
    >>> layout.workers, layout.managers, layout.manager_of(2)
    ((0, 1, 2), (3, 4), 3)
    """
    if n_managers < 1 or size <= n_managers:
        raise ValueError(f"size: must be above n_managers, and that at least 1, got {size} and {n_managers}")
    n = size - n_managers
    return RankLayout(tuple(range(n)), tuple(range(n, size)))


@dataclass(slots=True)
class _Worker:
    state: str
    host: str = ""
    process: int = 0
    heard: float = 0.0
    lost_since: float | None = None


class RankBook:
    """Which workers a manager expects, which are present and which have left, each by its own number.

    Where no number is expected, those that left are forgotten once there are too many, but still counted.
    """

    def __init__(self, n_expected: int | None, worker_ranks: Iterable[int] | None, limits: Limits) -> None:
        self.n_expected, self.limits = n_expected, limits
        self.fixed = None if worker_ranks is None else frozenset(worker_ranks)
        self.workers: dict[int, _Worker] = {rank: _Worker("expected") for rank in sorted(self.fixed or ())}
        self.anybody = False
        self._began: float | None = None
        self._is_late = False  # `join_s` is over
        self._n_forgotten = 0

    def begin(self, now: float) -> None:
        """Start to wait for workers."""
        self._began = now

    @property
    def n_missing(self) -> int:
        """Places that nobody took in time; one who comes late takes such a place."""
        if not self._is_late or self.n_expected is None:
            return 0
        return max(0, self.n_expected - len(self.workers))

    @property
    def nobody_came(self) -> bool:
        """Whether all of `join_s` was waited in vain; not if the wait was cut short."""
        return self._is_late and not self.anybody

    @property
    def n_left(self) -> int:
        return self.n_missing + self._n_forgotten + self._count("left")

    @property
    def n_present(self) -> int:
        return self._count("present")

    def _count(self, state: str) -> int:
        """How many are in a state; also for threads that look while another comes."""
        return sum(worker.state == state for worker in tuple(self.workers.values()))

    @property
    def is_over(self) -> bool:
        return self.n_expected is not None and self.n_left >= self.n_expected

    def admit(self, rank: int, host: str, process: int, now: float) -> str | None:
        """Take a worker in; otherwise say why not."""
        worker = self.workers.get(rank)
        if worker is None:
            if self.fixed is not None:
                return f"this manager serves the ranks {sorted(self.fixed)}"
            if self.n_expected is not None and len(self.workers) >= self.n_expected:
                return f"this manager serves {self.n_expected} workers, and has them"
            worker = self._enter(rank)
        worker.state, worker.host, worker.process = "present", host, process
        worker.heard, worker.lost_since = now, None
        self.anybody = True
        return None

    def allows(self, rank: int) -> bool:
        """Whether containers of this rank are taken."""
        return rank in self.workers

    def leave(self, rank: int) -> None:
        """This worker has left; a second time is harmless."""
        worker = self.workers.get(rank)
        if worker is None:
            if self.fixed is not None or (
                self.n_expected is not None and len(self.workers) >= self.n_expected
            ):
                return
            worker = self._enter(rank)
        worker.state = "left"
        self.anybody = True

    def _enter(self, rank: int) -> _Worker:
        worker = self.workers[rank] = _Worker("expected")
        if self.n_expected is None and self.fixed is None and len(self.workers) > records.MOST_CLIENTS:
            gone = next((r for r, w in self.workers.items() if w.state == "left"), None)
            if gone is not None:
                del self.workers[gone]
                self._n_forgotten += 1
        return worker

    def heard(self, rank: int, now: float) -> None:
        """Something came from this rank."""
        worker = self.workers.get(rank)
        if worker is not None:
            worker.heard = now

    def tick(self, now: float, alive: frozenset[int], sees_death: bool) -> None:
        """Look who is gone by now."""
        for rank, worker in self.workers.items():
            if worker.state == "present" and self._is_gone(rank, worker, now, alive, sees_death):
                worker.state = "left"
        if self._began is None or now - self._began < self.limits.join_s:
            return
        self._is_late = True
        for worker in self.workers.values():
            if worker.state == "expected":
                worker.state = "left"

    def _is_gone(
        self, rank: int, worker: _Worker, now: float, alive: frozenset[int], sees_death: bool
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
        return {rank: worker.state for rank, worker in self.workers.items()}

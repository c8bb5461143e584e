"""Ranks: which of them work and which manage, and on which machine this one is."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from recollect import _core
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

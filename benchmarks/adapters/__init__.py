"""Who takes part: ours, the peers, and the baselines, each behind the same few methods.

An adapter is one class in one module. Its package is imported in that module only, and each runs in a process
of its own, so peers cannot disturb one another's imports, threads or memory. Only the baselines are guests in
Recollect's process: they read and write the very rows of its buffer.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, repeat
from typing import Any, Literal, Protocol, cast

from works import Block, Work

Turn = Callable[[int], float]
"""Makes that many calls and returns the seconds they took together."""


class Adapter(Protocol):
    """A buffer in its fastest normal use. A kind of work (`draw`, `add`, ...) is a method: Work -> Turn."""

    def create(self, work: Work) -> None:
        """Make an empty buffer for this work."""

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        """Fill it; never timed."""

    def look(self, n: int) -> Block | None:
        """A random batch of n rows with all that a draw delivers, as numpy; None if there is none."""


Role = Literal["ours", "peer", "baseline", "note"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an adapter is, which package it needs, what it counts as, and in whose process it runs.

    A `note` is timed and printed but is not one of the peers that goals speak of, because its work differs.
    """

    name: str
    role: Role
    module: str
    cls: str
    package: str | None
    host: str | None = None


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("recollect", "ours", "adapters.recollect", "Recollect", "recollect"),
        Entry("cpprb", "peer", "adapters.cpprb", "Cpprb", "cpprb"),
        Entry("torchrl", "peer", "adapters.torchrl", "TorchRL", "torchrl"),
        Entry("sb3", "peer", "adapters.sb3", "StableBaselines3", "stable-baselines3"),
        Entry("tianshou", "peer", "adapters.tianshou", "Tianshou", "tianshou"),
        Entry("flashbax", "peer", "adapters.flashbax", "Flashbax", "flashbax"),
        Entry("flashbax-scan", "note", "adapters.flashbax", "FlashbaxScan", "flashbax"),
        Entry("memcpy", "baseline", "adapters.c", "Memcpy", None, "recollect"),
        Entry("C packed", "baseline", "adapters.c", "CPacked", None, "recollect"),
        Entry("C leaves", "baseline", "adapters.c", "CLeaves", None, "recollect"),
    )
}
ENTRIES |= {
    name: Entry(name, "baseline", "adapters.sequences_recollect", cls, None, "recollect")
    for name, cls in (("1M rows", "Million"), ("gather", "Gather"))
}
# Who does some kinds of works by another class than the others.
SEQUENCES = {
    "recollect": ("adapters.sequences_recollect", "Windows"),
    "torchrl": ("adapters.sequences_torchrl", "Slices"),
    "flashbax": ("adapters.sequences_flashbax", "Trajectories"),
}
BY_KIND = dict.fromkeys(("sequence", "flat", "stack"), SEQUENCES)
C_GATHERS = ("C packed", "C leaves")


def load(name: str, kind: str = "") -> Adapter:
    entry = ENTRIES[name]
    module, cls = BY_KIND.get(kind, {}).get(name, (entry.module, entry.cls))
    return cast(Adapter, getattr(importlib.import_module(module), cls)())


def turn_of(call: Callable[[], Any]) -> Turn:
    """A turn that makes the same call again and again."""

    def turn(calls: int) -> float:
        start = time.perf_counter()
        for _ in repeat(None, calls):
            call()
        return time.perf_counter() - start

    return turn


def turn_over(call: Callable[..., Any], pool: Sequence[tuple[Any, ...]]) -> Turn:
    """A turn that calls with one tuple of arguments after another, round the pool."""
    arguments: Iterator[tuple[Any, ...]] = cycle(pool)

    def turn(calls: int) -> float:
        start = time.perf_counter()
        for args in islice(arguments, calls):
            call(*args)
        return time.perf_counter() - start

    return turn


def with_best_threads(turn: Turn) -> Turn:
    """Leave torch on one thread or on all of them, whichever needs less time in a few turns side by side."""
    import torch

    choices = (1, os.cpu_count() or 1)
    seconds = dict.fromkeys(choices, 0.0)
    for n_threads in choices * 8:
        torch.set_num_threads(n_threads)
        turn(1)
        seconds[n_threads] += turn(5)
    torch.set_num_threads(min(choices, key=seconds.__getitem__))
    return turn

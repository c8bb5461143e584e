"""Rates of one buffer's work beside memcpy of the same bytes, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

_ROUNDS = 15
_ROUND_S = 0.01


@dataclass(frozen=True, slots=True)
class Rate:
    """One work: samples a second, bytes a second, and its time over that of memcpy of the same bytes."""

    work: str
    us: float
    samples_per_s: float
    gb_per_s: float
    times_memcpy: float


def measure(buffer: Any, batch: int, seed: int) -> list[Rate]:
    """Time adding to and drawing from a RAM copy of the buffer, each interleaved with memcpy."""
    import recollect as rc

    copy = rc.ReplayBuffer.create(rc.MemoryStorage, buffer.single_space, capacity=max(len(buffer), 1))
    with copy:
        copy.extend(buffer[:])
        one, block = copy[0], copy[np.arange(4096) % len(copy)]
        few = copy[np.arange(batch) % len(copy)]
        sampler, big = rc.StepSampler(copy, batch, seed=seed), rc.StepSampler(copy, 4096, seed=seed)
        works: list[tuple[str, int, Callable[[], Any]]] = [
            ("append one", 1, lambda: copy.append(one)),
            (f"extend {batch}", batch, lambda: copy.extend(few)),
            ("extend 4096", 4096, lambda: copy.extend(block)),
            (f"draw {batch}", batch, sampler.sample),
            ("draw 4096", 4096, big.sample),
        ]
        nbytes = copy.storage.layout.row_nbytes
        return [_rate(name, n, nbytes, work) for name, n, work in works]


def _rate(name: str, n: int, row_nbytes: int, work: Callable[[], Any]) -> Rate:
    source = np.ones(n * row_nbytes, np.uint8)
    target = np.empty(max(64 << 20, source.size), np.uint8)
    places = iter(np.random.default_rng(0).integers(0, target.size - source.size + 1, 1 << 20))

    def memcpy() -> None:
        at = next(places)
        target[at : at + source.size] = source

    calls = max(1, int(_ROUND_S / max(_seconds(work, 3), 1e-7)))
    pairs = [(_seconds(work, calls), _seconds(memcpy, calls)) for _ in range(_ROUNDS)]
    seconds, floor = median(p[0] for p in pairs), median(p[1] for p in pairs)
    return Rate(name, seconds * 1e6, n / seconds, n * row_nbytes / seconds / 1e9, seconds / floor)


def _seconds(work: Callable[[], Any], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - start) / calls


def place_of(buffer: Any) -> dict[str, Any]:
    """Where the data lies: the parts of the segment, and each leaf's place in a row."""
    rows = buffer.storage.rows
    g = rows.geometry
    return {
        "kind": "memfd" if rows.is_shared else "private memory",
        "nbytes": g.nbytes,
        "header": g.header_nbytes,
        "stamps": g.words_nbytes,
        "segments": 2 * g.words_nbytes if g.tagged else 0,
        "rows": g.nbytes - g.rows_at,
        "row_nbytes": g.row_nbytes,
        "lanes": g.n_lanes,
        "leaves": [
            {
                "name": f.name,
                "dtype": str(f.dtype),
                "shape": list(f.shape),
                "offset": f.offset,
                "nbytes": f.nbytes,
            }
            for f in rows.layout.fields
        ],
    }

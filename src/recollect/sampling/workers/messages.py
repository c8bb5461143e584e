"""What a parent asks of its workers: draw by yourself from number j on, or gather these samples.

Requests travel through a ring of their own for each worker: the parent writes, the worker reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.memory.ring import Ring, Taken
from recollect.sampling.stream import mix

DRAW, GATHER, REST = 0, 1, 2
_PLACES = ("index", "row", "generation")


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """Draws from `number` on (DRAW), the samples at `places` once (GATHER), or nothing until the next one (REST).

    What comes of it carries `run`. `key` and `number` decide all that is random about it.
    """

    kind: int
    run: int
    key: int = 0
    number: int = 0
    metadata: bool = False
    places: dict[str, Any] | None = None


def make_ring(batch_size: int, num_slots: int) -> Ring:
    """The ring of requests of one worker that may have `num_slots` under way.

    A new run makes the requests before it void, so the oldest may go when there are more: the parent never waits.
    """
    slot = dict.fromkeys(_PLACES, ((batch_size,), "int64"))
    return Ring.create({**slot, "key": ((), "uint64")}, num_slots + 3, policy="drop_oldest")


def send(ring: Ring, request: WorkRequest) -> None:
    """Hand a request over."""
    views = ring.claim(5.0)
    views["key"][...] = np.uint64(request.key)
    places = request.places or {}
    for name, array in places.items():
        views[name][: len(array)] = array
    n = len(next(iter(places.values()))) if places else 0
    flags = request.metadata | ("row" in places) << 1
    ring.commit(request.run, request.kind, request.number, n, flags)


def read(taken: Taken) -> WorkRequest:
    """What `send` wrote, as the worker's own."""
    run, kind, number, n, flags, _ = taken.info
    names = _PLACES if flags & 2 else _PLACES[:1]
    places = {name: taken.values[name][:n].copy() for name in names} if kind == GATHER else None
    return WorkRequest(kind, run, int(taken.values["key"]), number, bool(flags & 1), places)


def key_of(seed: int, worker: int) -> int:
    """The key of a worker's stream of draws."""
    return mix(mix(seed) ^ mix(worker + 1))

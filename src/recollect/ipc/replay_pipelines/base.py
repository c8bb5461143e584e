"""What a replay pipeline is: batches drawn, packed and brought to the device one tick ahead of the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from recollect import checks
from recollect.sampling.stream import mix

SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class ReplayTickMetadata:
    """What was packed for one tick, not what was asked for.

    `snapshot_ptr` counts the rows ever added when the snapshot was taken, `snapshot_size` those that were drawn from.
    `batch_gpu_slot` is None where the learner reads the host slot itself.
    """

    tick_id: int
    snapshot_ptr: int
    snapshot_size: int
    sample_seed: int
    sample_count: int
    batch_host_slot: int | None = None
    batch_gpu_slot: int | None = None


@runtime_checkable
class ReplayPipeline(Protocol):
    """Batches by tick. One is hot (the learner's); at most one is cold (being prepared, or ready).

    In a tick: `sample_large_batch(t)`, `start_prepare(t + 1)`, use the batch, `after_tick()`.
    """

    def start_prepare(self, tick_id: int, sample_count: int, min_snapshot_ptr: int | None = None) -> bool:
        """Start a tick; False if it is already pending, ready or hot."""
        ...

    def batch_ready(self, tick_id: int, sample_count: int) -> bool:
        """Whether the data of this tick is there, its copy finished. Never waits."""
        ...

    def wait_ready(self) -> None:
        """Wait for whatever is pending; DeadlineError when that takes too long."""
        ...

    def wait_until_ready(self, tick_id: int, sample_count: int) -> bool:
        """Wait for this tick, starting it if nothing is cold; False when that takes too long."""
        ...

    def sample_large_batch(self, tick_id: int, sample_count: int) -> dict[str, Any]:
        """Make this tick hot and return its batch, valid until `after_tick()`."""
        ...

    def after_tick(self) -> None:
        """Give the hot batch back; nothing happens without one."""
        ...

    def close(self) -> None:
        """End it; whoever waits gets ClosedError. May be called twice."""
        ...


def sample_seed(base_seed: int, tick_id: int) -> int:
    """Return the seed of a tick: no two pairs of numbers in [0, 2**32) share one.

    >>> sample_seed(0, 1) != sample_seed(1, 0)
    True
    """
    return mix(
        checks.seed("base_seed", base_seed, below=SEEDS) * SEEDS
        + checks.seed("tick_id", tick_id, below=SEEDS)
    )

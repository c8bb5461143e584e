"""UniLab's `unilab.ipc` on Recollect: its names, read as its own code reads them. The package itself is not needed.

What is in `recollect.ipc` answers as the API page says; two things that UniLab's collectors rely on are otherwise
there. Here `SharedObsNormStats.get()` gives the newest statistics at every call, and the counts of a
`ReplayBuffer` can be read as `size[0]` and `ptr[0]` as well. A runner starts a collector by its old signature.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import recollect.ipc as ipc
from recollect.ipc.shared_obs_stats import Pair

__all__ = ["AsyncRunner", "ReplayBuffer", "RolloutRingBuffer", "SharedObsNormStats", "SharedWeightSync"]


class Count(int):
    """A count that is also read as UniLab's, which is a tensor of one number: `count[0]`."""

    __slots__ = ()

    def __getitem__(self, index: int) -> int:
        if index != 0:
            raise IndexError(f"count: has one number, got index {index}")
        return int(self)


class SharedWeightSync(ipc.SharedWeightSync):
    """`recollect.ipc.SharedWeightSync`; the lock that UniLab hands to its collector is None, as none is taken."""

    _lock = None


class RolloutRingBuffer(ipc.RolloutRingBuffer):
    """`recollect.ipc.RolloutRingBuffer`; the pointers that UniLab hands to its worker are None: they are inside."""

    _write_ptr = _read_ptr = None


class ReplayBuffer(ipc.ReplayBuffer):
    """`recollect.ipc.ReplayBuffer`, whose counts are ints that `[0]` can be taken of.

    >>> buf = ReplayBuffer(1000, 3, 2, "numpy")
    >>> buf.size, buf.ptr[0]
    (0, 0)
    >>> buf.cleanup()
    """

    @property
    def size(self) -> Count:
        """Rows held now."""
        return Count(super().size)

    @property
    def ptr(self) -> Count:
        """Rows ever added."""
        return Count(super().ptr)


class SharedObsNormStats(ipc.SharedObsNormStats):
    """`recollect.ipc.SharedObsNormStats`, whose `get` repeats the newest pair, as UniLab's does.

    >>> import numpy as np
    >>> stats = SharedObsNormStats(None)
    >>> stats.put((np.zeros(2, "float32"), np.ones(2, "float32")))
    >>> stats.get() is None, stats.get() is None
    (False, False)
    >>> stats.cleanup()
    """

    def get(self) -> Pair | None:
        """Return the newest pair at every call; None before the first."""
        return self.latest()


class AsyncRunner(ipc.AsyncRunner, ABC):
    """`recollect.ipc.AsyncRunner` for runners written on UniLab's, which start one collector by `_start_collector`."""

    _stop_event = None  # a collector gets one of its own
    _collector_process = None

    @property
    def _shared_resources(self) -> Any:
        return _Owned(self)

    def _start_collector(self, target_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "stop_event"}
        self.start_collectors(_collect, {"target_fn": target_fn, **rest})

    def _check_collector_alive(self) -> bool:
        """True while it lives; CollectorDiedError says why it does not."""
        self.check_collectors()
        return True


class _Owned:
    """What a runner closes: UniLab appends to a list."""

    def __init__(self, runner: ipc.AsyncRunner) -> None:
        self._runner = runner

    def append(self, resource: Any) -> None:
        self._runner.own(resource)

    def extend(self, resources: Iterable[Any]) -> None:
        for resource in resources:
            self._runner.own(resource)


class StopEvent:
    """The stop word of a runner as an Event; asking it is a sign of life."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def is_set(self) -> bool:
        self._ctx.beat()
        return bool(self._ctx.stopping())


def _collect(ctx: Any, target_fn: Callable[..., Any], **kwargs: Any) -> None:
    target_fn(stop_event=StopEvent(ctx), **kwargs)

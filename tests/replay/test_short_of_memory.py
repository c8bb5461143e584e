"""A change in place that finds no memory: it raises, and the buffer is as before."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import recollect as rc

N = 300_000
M_MMAP_THRESHOLD = -3
ENDS = [0, 1, N - 1]


def short_of_memory(work: Callable[[], object], check: Callable[[], object]) -> None:
    """Do `work` with more and more room until it succeeds, and `check` after each failure."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what was freed goes back to the kernel
    for failures, room in enumerate(range(0, 128 << 20, 1 << 20)):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
        try:
            work()
        except MemoryError:
            pass
        else:
            assert failures > 0
            return
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        check()
    raise AssertionError("it never succeeded")


def remove_every_second() -> None:
    buffer = rc.ReplayBuffer.create("memory", ((), "int32"), capacity=N, maintain_segment_metadata=True)
    buffer.extend(np.arange(N, dtype=np.int32))
    odd = np.arange(1, N - 1, 2)

    def check() -> None:
        assert (len(buffer), buffer.get_at(ENDS).tolist()) == (N, ENDS)
        assert len(np.unique(buffer.locate(ENDS).segment)) == 1

    short_of_memory(lambda: buffer.remove_at(odd), check)
    np.testing.assert_array_equal(buffer.get_at(slice(None)), np.delete(np.arange(N), odd))


def displace_all() -> None:
    buffer = rc.ReplayBuffer.create("memory", {"x": ((), "int32")}, capacity=N, evict="lowest", evict_key="x")
    values = np.arange(N, dtype=np.int32)
    buffer.extend({"x": values})

    def check() -> None:
        assert (len(buffer), buffer.get_at(ENDS)["x"].tolist()) == (N, ENDS)

    short_of_memory(lambda: buffer.extend({"x": values + N}), check)
    np.testing.assert_array_equal(np.sort(buffer.get_at(slice(None))["x"]), values + N)


@pytest.mark.parametrize("change", [remove_every_second, displace_all])
def test_a_change_that_lacks_memory_can_be_made_later(change: Callable[[], None]) -> None:
    """In a fresh process: this one's allocator has memory at rest."""
    code = f"import {__name__} as t; t.{change.__name__}()"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)

"""A stopwatch that stops while the machine is busy with something else.

A bound such as "within a second of its death" is about the code under test. A moment in which some process waits for a
core, or in which the machine itself is stopped by its host, says nothing about that code, so it does not count.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Measures from its making: `wall_s` by the clock, `s` without the time in which cores were lacking."""

    def __init__(self) -> None:
        self._start, self._lost = time.monotonic(), _lost_s()

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def s(self) -> float:
        return self.wall_s - (_lost_s() - self._lost)


def _lost_s() -> float:
    """Seconds since boot in which a runnable process had no core, or a core was taken away by the host."""
    try:
        waited = int(_PRESSURE.read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):  # a kernel without pressure figures
        waited = 0.0
    stolen = int(_STAT.read_text().split(maxsplit=9)[8]) / _TICKS
    return waited + stolen

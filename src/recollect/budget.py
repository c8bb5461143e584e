"""How much memory is left, and refusing in good time what would not fit."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from recollect.errors import BudgetError
from recollect.system import is_portable

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def available_nbytes() -> int | None:
    """Return the least of what the system, `ulimit -v` and each enclosing cgroup still allow, None if unknown."""
    known = [n for n in (_system_nbytes(), _address_nbytes(), *_cgroup_nbytes()) if n is not None]
    return min(known, default=None)


def cgroup_left_nbytes() -> int | None:
    """Return the least that the enclosing cgroups still allow, None if they set no limit."""
    return min(_cgroup_nbytes(), default=None)


def check_fits(nbytes: int, what: str, advice: str, when: str = " when full") -> None:
    """Raise BudgetError, with advice, if `nbytes` of new memory are more than there is."""
    available = available_nbytes()
    if available is not None and nbytes > available:
        raise BudgetError(
            f"{what}: needs {human_nbytes(nbytes)}{when}, {human_nbytes(available)} are available; {advice}"
        )


def human_nbytes(n: float) -> str:
    """Return a size as people write it: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _system_nbytes() -> int | None:
    if is_portable():  # not what is free, but no more than there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _address_nbytes() -> int | None:
    """What the limit of this process's address space leaves."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    if is_portable():
        return most
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return max(0, most - pages * resource.getpagesize())


def _cgroup_nbytes() -> list[int]:
    """What each cgroup around this process still allows; droppable file cache counts as free."""
    if is_portable():
        return []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = root / path.lstrip("/")
        left += [n for place in (here, *here.parents) if (n := _left_in(place, *names)) is not None]
    return left


def _left_in(place: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = int((place / limit_name).read_text())
        usage = int((place / usage_name).read_text())
        stat = (place / "memory.stat").read_text()
    except (OSError, ValueError):  # no such file, or "max"
        return None
    if limit >= _UNLIMITED:
        return None
    found = re.search(rf"^{cache_name} (\d+)", stat, re.MULTILINE)
    return max(0, limit - usage + (int(found[1]) if found else 0))

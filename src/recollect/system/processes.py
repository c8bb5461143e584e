"""Processes: their number of cores, their end, and where they are."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from recollect.system.directory import directory_id
from recollect.system.switch import is_portable

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1


def usable_cores() -> int:
    """Cores that this process may run on."""
    if is_portable():
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def end_descriptor(pid: int) -> int | None:
    """A new descriptor that a poll finds readable when a process has ended; None where there are none."""
    if is_portable() or not hasattr(os, "pidfd_open"):
        return None
    return os.pidfd_open(pid)


def die_with_parent() -> None:
    """Have this process killed when its parent dies, or, with Linux, the thread that started it."""
    if not is_portable():
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            threading.Event().wait(_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="recollect-parent", daemon=True).start()


def has_ended(pid: int) -> bool:
    """Whether a child has ended; whoever waits for it still finds it. False where that cannot be told."""
    with suppress(ChildProcessError, AttributeError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


@cache
def pid_space() -> str:
    """What tells the processes that can be looked up from here from those of another container."""
    return f"portable:{directory_id():016x}" if is_portable() else os.readlink("/proc/self/ns/pid")


def boot_id() -> str:
    """What tells this machine, since it was started, from others; empty where that cannot be read."""
    if is_portable():
        return f"{directory_id():016x}"
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def own_name() -> str:
    """The name of this process, as tools show it."""
    if is_portable():
        return Path(sys.argv[0] if sys.argv and sys.argv[0] else sys.executable).name
    return Path("/proc/self/comm").read_text().strip()

"""Threads that sleep until a word of a mapping is woken at, and have nothing else to wake them."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import Any

from recollect.system import is_portable

SYS_FUTEX = {"x86_64": "202", "aarch64": "98"}[platform.machine()]


def asleep_at(mapping: Any, at: int) -> threading.Thread:
    """Start a thread that sleeps as long as the word there is what it is now; return when the kernel says it does."""
    word = mapping.load(at) & 0xFFFFFFFF
    sleeper = threading.Thread(target=mapping.wait, args=(at, word, 10.0))
    sleeper.start()
    calls, address = Path(f"/proc/self/task/{sleeper.native_id}/syscall"), mapping.view(at, 4).ctypes.data
    while not is_portable() and not is_sleeping(calls.read_text().split(), address):
        os.sched_yield()
    return sleeper


def is_sleeping(call: list[str], address: int) -> bool:
    return call[0] == SYS_FUTEX and int(call[1], 16) == address

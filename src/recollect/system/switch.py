"""Whether the means of Linux are used."""

from __future__ import annotations

import os
import select
import sys

_has_linux = sys.platform == "linux" and all(
    hasattr(module, name)
    for module, name in ((os, "memfd_create"), (os, "pidfd_open"), (os, "eventfd"), (select, "epoll"))
)
_portable = not _has_linux or os.environ.get("RECOLLECT_PORTABLE", "") not in ("", "0")


def is_portable() -> bool:
    """Whether this process does with what POSIX has. Its children find the same in their environment."""
    return _portable


def be_portable() -> None:
    """Say that the core was built without the means of Linux. Before anything is made."""
    global _portable
    _portable = True

"""Locks of open files (flock): the kernel drops them with the last process that has the file open.

A descriptor that a forked child inherits counts for the child too. Whoever unlinks a file takes the exclusive lock of
it first, and whoever writes one holds a shared one, so that nobody goes on to write to a file that has no name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

from recollect.system import is_portable

_UNLOCKABLE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
UNKNOWN = "another process"
_HOLDER = re.compile(r"FLOCK +\S+ +\S+ +(\d+) +\S+:(\d+) ")


def lock_file(fd: int, file: Path, *, shared: bool = False) -> bool:
    """Lock an open file at once; False if another has it. OSError says what to do where there are no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNLOCKABLE:
            raise
        raise OSError(
            error.errno,
            f"cannot be locked on this file system ({error.strerror}), so a second writer would not be "
            "noticed; use a local disk or a mount with locks",
            str(file),
        ) from None
    return True


def holder_of(fd: int) -> str:
    """Which process has an open file locked, `UNKNOWN` if the kernel does not tell."""
    if is_portable():
        return UNKNOWN
    number = os.fstat(fd).st_ino
    with suppress(OSError):
        for pid, inode in _HOLDER.findall(Path("/proc/locks").read_text()):
            if int(inode) == number and int(pid) > 0:
                return f"process {int(pid)}"
    return UNKNOWN

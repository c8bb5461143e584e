"""A directory that only this user can enter, for what has no name where the means of Linux are used.

In it lie, each under a number that nobody else gives: `memory-…` (shared memory), `socket-…` (an end of a group on one
machine), `process-…` (a process that holds its file locked as long as it lives). A process that ends in order removes
its own. What killed ones left is removed by `sweep()`, which each process calls when it begins and whenever it makes
shared memory: a file that nobody holds locked, or a socket where nobody listens.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_ID = "directory"  # the file that has its number
_LONGEST_SOCKET = 100  # bytes that a socket's path may have everywhere


def private(path: Path, advice: str) -> Path:
    """Make a directory for this user alone if it is not there; PermissionError if it is not private."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path}: must be a directory that only this user can write to; remove it or {advice}"
        )
    return path


@cache
def shared_directory() -> Path:
    """RECOLLECT_PORTABLE_DIR if that is set, else `recollect-portable-UID` in /tmp. Chosen once."""
    chosen = os.environ.get("RECOLLECT_PORTABLE_DIR")
    path = Path(chosen).absolute() if chosen else Path("/tmp") / f"recollect-portable-{os.getuid()}"
    if len(os.fsencode(path)) + len("/socket-") + 32 > _LONGEST_SOCKET:
        raise OSError(
            errno.ENAMETOOLONG, "must be shorter, for sockets in it; set RECOLLECT_PORTABLE_DIR", str(path)
        )
    found = private(path, "set RECOLLECT_PORTABLE_DIR")
    if found.lstat().st_mode & 0o077:
        os.chmod(found, 0o700)
    return found


def directory_id() -> int:
    """A random number that tells this directory from any other of its path, 62 bits."""
    file = shared_directory() / _ID
    while True:
        with suppress(OSError, ValueError):
            return int(file.read_text(), 16)
        hidden = file.with_name(f"{_ID}.{secrets.token_hex(8)}")
        try:
            hidden.write_text(f"{secrets.randbits(62):016x}")
            with suppress(FileExistsError):
                os.link(hidden, file)  # the first one's stays
        finally:
            hidden.unlink(missing_ok=True)


@contextmanager
def turn() -> Iterator[None]:
    """One process at a time, to take a name or to remove one that is left."""
    fd = os.open(shared_directory() / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # whoever is killed gives it up
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        os.close(fd)


def sweep() -> None:
    """Remove what killed processes left."""
    here = shared_directory()
    for name in os.listdir(here):
        kind, _, rest = name.partition("-")
        with suppress(OSError):
            if kind == "memory":
                _sweep_memory(here / name)
            elif kind == "process" and not rest.startswith(
                f"{os.getpid()}-"
            ):  # to open our own gives up its lock
                _sweep_process(here / name)
            elif kind == "socket":
                with turn():
                    remove_if_deserted(here / name)


def _sweep_memory(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(file)
    finally:
        os.close(fd)


def _sweep_process(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(file)
    finally:
        os.close(fd)


def remove_if_deserted(file: Path) -> bool:
    """Remove a socket where nobody listens; whether it is gone. In one's `turn()`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(os.fspath(file))
        except ConnectionRefusedError:
            file.unlink(missing_ok=True)
            return True
        except FileNotFoundError:
            return True
        except OSError:  # its queue is full: somebody listens
            return False
    return False

"""Memory that processes share, as a descriptor: a memfd, or where there is none a file in a private directory.

A memfd has no name in any file system: the kernel frees it with its last user, whatever that user died of. Another
process of the same user opens the descriptor of one that lives.

A file has a name, made of the memory's nonce, until its last user closes it. Each user holds it locked (flock, shared);
who closes it and can then lock it alone is the last, and removes it. A user that was killed has given up its lock, and
what it left is removed by the next process (`recollect.system.directory`).
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from recollect import _core
from recollect.budget import check_fits, human_nbytes
from recollect.errors import AttachError, BudgetError
from recollect.system import is_portable
from recollect.system.directory import shared_directory, sweep

_PREFIX = "recollect"
_nonces: dict[int, bytes] = {}  # of the files that this process has open, by descriptor


def make_memory(nbytes: int, nonce: bytes, what: str, advice: str = "make it smaller") -> int:
    """Return the descriptor of new memory, zeros; BudgetError if there is not enough. Nobody can resize a memfd."""
    check_fits(nbytes, what, advice)
    if is_portable():
        return _make_file(nbytes, nonce, what, advice)
    fd = os.memfd_create(_PREFIX, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memory(pid: int, fd: int, nonce: bytes, what: str) -> int:
    """Return an own descriptor of another process's memory; AttachError if it is gone or is something else."""
    if is_portable():
        return _open_file(nonce, what)
    target = f"/proc/{pid}/fd/{fd}"
    try:
        if not (found := os.readlink(target)).startswith(f"/memfd:{_PREFIX}"):
            if os.path.basename(found).startswith("memory-"):
                raise AttachError(f"{what}: is of a portable process; set RECOLLECT_PORTABLE=1 in both")
            raise AttachError(f"{what}: its owner is gone and the descriptor was reused; create it again")
        return os.open(target, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror
        raise AttachError(f"{what}: its owner is gone or closed it ({reason}); create it again") from None


def close_memory(fd: int) -> None:
    """Close the descriptor of shared memory, or of a file."""
    nonce = _nonces.pop(fd, None)
    if nonce is not None:
        with suppress(OSError):  # others use it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(_file_of(nonce))
    os.close(fd)


def _file_of(nonce: bytes) -> Path:
    return shared_directory() / f"memory-{nonce.hex()}"


def _make_file(nbytes: int, nonce: bytes, what: str, advice: str) -> int:
    sweep()
    file = _file_of(nonce)
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _is_used(fd):  # else another process took it for one that was left
                _core.reserve_file(fd, 0, nbytes)
                _nonces[fd] = nonce
                return fd
        except BaseException as error:
            os.close(fd)
            file.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise BudgetError(
                    f"{what}: needs {human_nbytes(nbytes)} in {file.parent}, which are not free; "
                    f"{advice}, or set RECOLLECT_PORTABLE_DIR"
                ) from None
            raise
        os.close(fd)


def _open_file(nonce: bytes, what: str) -> int:
    file = _file_of(nonce)
    try:
        fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _gone(what, error.strerror) from None
    try:
        if _is_left(fd, file) or not _is_used(fd):
            raise _gone(what, "nobody has it")
    except BaseException:
        os.close(fd)
        raise
    _nonces[fd] = nonce
    return fd


def _gone(what: str, reason: str | None) -> AttachError:
    return AttachError(
        f"{what}: its owner is gone or closed it ({reason}), or RECOLLECT_PORTABLE is set in one of the two "
        "processes alone; create it again"
    )


def _is_left(fd: int, file: Path) -> bool:
    """Whether no process uses a file; then it is removed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.unlink(file)
    return True


def _is_used(fd: int) -> bool:
    """Lock a file as one of its users; False if its last user has removed it, or is about to."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _lock_own_copies() -> None:
    """In a forked child: use each file by a lock of its own, so that it stays when the parent closes it."""
    for fd, nonce in list(_nonces.items()):
        try:
            own = os.open(_file_of(nonce), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # its parent has just closed it: the memory stays, the name is gone
            del _nonces[fd]
            continue
        with suppress(OSError):
            if not _is_used(own):
                del _nonces[fd]
        os.dup2(own, fd, inheritable=False)
        os.close(own)


os.register_at_fork(after_in_child=_lock_own_copies)

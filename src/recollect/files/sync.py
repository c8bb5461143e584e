"""Whole writes: what a crash or a power loss leaves is the old or the new, never a part.

`replace_file` writes one file; `seal` ends a file that something else will name, once it is on disk; `move_directory`
puts a directory that is complete to its place. All writes of files that must survive go through these.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from recollect import _core, interrupts
from recollect.files.names import open_inside

About = dict[str, Any]  # size and checksum of a file
_PART = 1 << 22
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def make_directory(path: Path) -> list[Path]:
    """Make a directory and its parents, and return the new ones, innermost last.

    Each new name is synced, so that a power loss cannot take it back.
    """
    if path.is_dir():
        return []
    made = make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
    except BaseException:
        remove_empty(made)
        raise
    return [*made, path]


def remove_empty(directories: list[Path]) -> None:
    """Take back what `make_directory` made, as far as nobody put anything there."""
    for path in reversed(directories):
        with suppress(OSError):
            path.rmdir()


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss."""
    with interrupts.deferred(*interrupts.ASKING):  # a descriptor that is open is closed
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(
    file: Path,
    write: Callable[[BinaryIO], Any],
    *,
    note: Callable[[str], Any] | None = None,
    mode: int = 0o644,
) -> None:
    """Write a file whole, or leave the old one: a new name beside it, synced, then renamed over it.

    A link of that name is replaced, not followed. `note` is told the new name before it is made.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    if note is not None:
        note(temporary.name)
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as f:
            _core.fault_point()
            write(f)
            sync_file(f)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _core.fault_point()
    sync_directory(file.parent)
    _core.fault_point()


def sync_file(f: BinaryIO) -> None:
    """Bring all that was written to an open file to the disk."""
    f.flush()
    _core.fault_point()
    os.fsync(f.fileno())
    _core.fault_point()


def seal(f: BinaryIO) -> About:
    """Bring an open file that is complete to the disk, and return its size and checksum."""
    sync_file(f)
    return about_file(f)


def seal_file(file: Path) -> About:
    """Bring a file that is complete to the disk, and return its size and checksum; FormatError for a link."""
    with open_inside(file.parent, file.name, os.O_RDWR) as f:
        return seal(f)


def about_file(f: BinaryIO) -> About:
    """The size and the checksum of an open file."""
    return {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)}


def file_crc(f: BinaryIO) -> str:
    """Return the crc32c of a whole open file as 8 hex digits."""
    crc, part = 0, np.empty(_PART, np.uint8)
    f.seek(0)
    while n := f.readinto(part):  # type: ignore[attr-defined]
        crc = _core.crc32c(part[:n], crc)
    return f"{crc:08x}"


def move_directory(source: Path, target: Path) -> None:
    """Give a directory its place in one step; OSError if anything but an empty directory is there."""
    os.rename(source, target)
    _core.fault_point()
    sync_directory(target.parent)
    _core.fault_point()


def exchange_directories(one: Path, other: Path) -> None:
    """Let two directories change places in one step; OSError where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, f"{other}: cannot be replaced ({os.strerror(code)}); remove it first")
    _core.fault_point()
    sync_directory(other.parent)
    _core.fault_point()


def write_at(fd: int, view: memoryview, at: int) -> None:
    """Write all bytes of a view at a place in a file; OSError if the disk does not take them."""
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done

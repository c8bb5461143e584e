"""Whole writes: directories whose names survive a power loss, and files that are replaced in one step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from recollect import _core, interrupts


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
            f.flush()
            _core.fault_point()
            os.fsync(f.fileno())
        _core.fault_point()
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _core.fault_point()
    sync_directory(file.parent)
    _core.fault_point()


def write_at(fd: int, view: memoryview, at: int) -> None:
    """Write all bytes of a view at a place in a file; OSError if the disk does not take them."""
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done

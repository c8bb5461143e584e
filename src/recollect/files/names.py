"""Names inside a directory: checked before they are used, and opened without following a link.

A name comes out of a file that another program may have written. Every part of it below the directory must be a real
directory, and the last one a plain file, so nothing outside is ever read, written, cut or removed, and a FIFO cannot
hold anybody up. The directory itself is the caller's: it may be reached through a link.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from recollect import interrupts
from recollect.errors import FormatError
from recollect.system import is_portable

_DIRECTORY = (os.O_RDONLY if is_portable() else os.O_PATH) | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST = 255  # bytes that one part of a name may have on any file system of Linux
_NOT_INSIDE = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK, errno.ENXIO)


def check_name(where: Path, name: object) -> str:
    """Return a name that stays inside a directory; FormatError for any other."""
    if (
        not isinstance(name, str)
        or not name
        or not _is_possible(name)
        or any(p in ("", ".", "..") for p in name.split("/"))
    ):
        raise FormatError(
            f"{where}: names a file outside itself, {str(name)[:300]!r}; it is damaged or forged"
        )
    return name


def _is_possible(name: str) -> bool:
    """Whether a file can have a name."""
    try:
        parts = os.fsencode(name).split(b"/")
        return all(len(part) <= _LONGEST and b"\0" not in part for part in parts)
    except UnicodeEncodeError:  # a lone surrogate
        return False


@contextmanager
def parent_of(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """The descriptor of the directory that holds a named file, reached without links, and the last part of the name."""
    *parents, last = check_name(path, name).split("/")
    with interrupts.deferred(*interrupts.ASKING):  # a descriptor that is open is closed, once
        fd = os.open(path, _DIRECTORY)
        try:
            for part in parents:
                inner = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd, last
        except OSError as error:
            if error.errno in _NOT_INSIDE:
                raise _linked(path, name) from None
            if error.filename is not None:
                error.filename = str(path / name)
            raise
        finally:
            os.close(fd)


def open_inside(
    path: Path, name: str, flags: int = os.O_RDONLY, mode: int = 0o644, *, follow: bool = False
) -> BinaryIO:
    """Open a plain file below a directory, to read it or with O_RDWR to write it; FormatError for a link or the like.

    To write, the file must have this one name: another (a hard link) may lie outside. With `follow` the last part of
    the name may be a link to a plain file anywhere, to read it.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO opens at once, and is refused
    flags |= 0 if follow else os.O_NOFOLLOW
    file = None
    try:
        with interrupts.deferred(*interrupts.ASKING):  # until an object closes it
            with parent_of(path, name) as (parent, last):
                fd = os.open(last, flags, mode, dir_fd=parent)
            file = _file_of(fd, flags, path, name)
    except BaseException:
        if file is not None:
            file.close()
        raise
    return file


def _file_of(fd: int, flags: int, path: Path, name: str) -> BinaryIO:
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _linked(path, name)
        if flags & os.O_RDWR and found.st_nlink > 1:
            raise FormatError(
                f"{path / name}: must have one name, got a file with {found.st_nlink} (hard links); copy it first"
            )
        return open(fd, "rb+" if flags & os.O_RDWR else "rb")
    except BaseException:
        os.close(fd)
        raise


def check_plain(file: Path) -> None:
    """Raise FormatError for what is no plain file, nor a link to one: a FIFO holds up whoever opens it by its path."""
    with suppress(FileNotFoundError):  # who opens it says so
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise FormatError(f"{file}: must be a plain file, got something else; it is damaged or forged")


def open_named(path: Path, name: str, mode: str = "rb") -> BinaryIO:
    """Open a file that a manifest names; if a newer commit deleted it meanwhile, say so.

    Modes: "rb", "rb+", and "xb+" for a new file.
    """
    flags = {"rb": os.O_RDONLY, "rb+": os.O_RDWR, "xb+": os.O_RDWR | os.O_CREAT | os.O_EXCL}[mode]
    try:
        return open_inside(path, name, flags)
    except FileNotFoundError:
        raise FormatError(
            f"{path / name}: is gone; the dump was replaced or damaged meanwhile: load again"
        ) from None


def has_name(path: Path, name: str) -> bool:
    """Whether anything at all has this name, a link that leads nowhere included."""
    try:
        with parent_of(path, name) as (parent, last):
            os.stat(last, dir_fd=parent, follow_symlinks=False)
            return True
    except FileNotFoundError:
        return False


def files_below(path: Path) -> Iterator[str]:
    """The names of all that is below a directory and is none itself; a link is a name, and is not followed."""
    for place, directories, files in os.walk(path):
        links = [name for name in directories if os.path.islink(os.path.join(place, name))]
        yield from (os.path.relpath(os.path.join(place, name), path) for name in (*files, *links))


def make_inside(path: Path, name: str) -> list[Path]:
    """Make a directory below another, with its parents, and return the new ones, innermost last."""
    parts = check_name(path, name).split("/")
    made = []
    for n in range(1, len(parts) + 1):
        with parent_of(path, "/".join(parts[:n])) as (parent, last):
            try:
                os.mkdir(last, dir_fd=parent)
            except FileExistsError:
                if not stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                    raise _linked(path, "/".join(parts[:n])) from None
                continue
            made.append(path.joinpath(*parts[:n]))
            _sync(parent)
    return made


def remove_inside(path: Path, name: str) -> None:
    """Remove a file below a directory, or with a "/" at its end all that is in a directory; nothing there: nothing.

    A link is removed, never what it points to.
    """
    is_tree = name.endswith("/")
    with suppress(FileNotFoundError, FormatError), parent_of(path, name.removesuffix("/")) as (parent, last):
        if is_tree:
            shutil.rmtree(last, onerror=_raise_unless_gone, dir_fd=parent)
        else:
            with suppress(IsADirectoryError):
                os.unlink(last, dir_fd=parent)


def _raise_unless_gone(function: object, path: str, info: Any) -> None:
    """Go on where another removed it, or where it is no directory; what the disk refuses is not removed, and told."""
    if getattr(info[1], "errno", None) not in (None, errno.ENOENT, errno.ENOTDIR):
        raise info[1]


def _sync(parent: int) -> None:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _linked(path: Path, name: str) -> FormatError:
    return FormatError(
        f"{path / name}: must be a plain file inside {path}, got a link or something else; it is damaged or forged"
    )

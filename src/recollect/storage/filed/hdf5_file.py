"""HDF5File: the file below the HDF5 library, which never sees a write fail.

After a write that failed the library can neither go on nor close: its tables in memory and in the file differ, and a
later call may end the process. So it is given a file whose writes all succeed: what the disk refuses (no space, a
quota, an error) waits in memory, reads see it, and `settle` writes it or raises. A write that is not settled is none
that was promised, since rows count once they are committed.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any

from recollect import _core, interrupts
from recollect.budget import check_fits
from recollect.errors import FormatError
from recollect.files import write_at
from recollect.spaces.json import MOST_NBYTES

_PART = 1 << 22


class HDF5File:
    """A file object for `h5py.File`; its owner calls `settle` before it goes on.

    Ownership: owns the descriptor.
    Concurrency: the storage's lock is held in every call.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._nbytes = os.fstat(fd).st_size
        self._waiting: list[tuple[int, bytes]] = []  # where, and what; the later ones lie over the earlier
        self._error: BaseException | None = None  # what the last write raised, if it was no OSError

    # -- what the library calls

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self._waiting:
                self._waiting.append((self._at, bytes(view)))
            else:
                write_at(self._fd, view, self._at)
        except BaseException as error:
            self._waiting.append((self._at, bytes(view)))
            if not isinstance(error, OSError):
                self._error = error
        self._at += view.nbytes
        self._nbytes = max(self._nbytes, self._at)
        return view.nbytes

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        n = max(0, min(view.nbytes, self._nbytes - self._at))
        there = os.pread(self._fd, n, self._at)
        view[: len(there)] = there
        view[len(there) : n] = bytes(n - len(there))
        for at, data in self._waiting:
            first, end = max(at, self._at), min(at + len(data), self._at + n)
            if first < end:
                view[first - self._at : end - self._at] = data[first - at : end - at]
        self._at += n
        return n

    def read(self, n: int = -1) -> bytes:
        out = bytearray(max(0, self._nbytes - self._at) if n < 0 else n)
        return bytes(out[: self.readinto(out)])

    def truncate(self, nbytes: int | None = None) -> int:
        self._nbytes = self._at if nbytes is None else nbytes
        try:
            os.ftruncate(self._fd, self._nbytes)
        except BaseException as error:  # `settle` does it again
            if not isinstance(error, OSError):
                self._error = error
        self._waiting = [(at, data[: self._nbytes - at]) for at, data in self._waiting if at < self._nbytes]
        return self._nbytes

    def flush(self) -> None:
        """Nothing: `settle` does more."""

    # -- what the owner calls

    def settle(self) -> None:
        """Write what waits; OSError if the disk still does not take it: then it waits on."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._waiting:
            at, data = self._waiting[0]
            write_at(self._fd, memoryview(data), at)
            del self._waiting[0]
        if os.fstat(self._fd).st_size != self._nbytes:
            os.ftruncate(self._fd, self._nbytes)

    def take_all(self, source: Any) -> str:
        """Copy another file into this one, which is new; return its crc32c. OSError if the disk does not take it."""
        source.seek(0)
        crc = 0
        while part := source.read(_PART):
            self.write(part)
            self.settle()
            crc = _core.crc32c(part, crc)
        return f"{crc:08x}"

    def close(self) -> None:
        """Give up the descriptor and what waits; may be called twice."""
        fd, self._fd = self._fd, -1
        self._waiting = []
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # one that was cut short before its owner knew it
        self.close()


@interrupts.undivided  # inside of h5py it would leave the file open
def own_node(f: Any, name: str, where: Any) -> Any:
    """The dataset or group of this name, if it lies in the file itself; FormatError otherwise.

    Links, virtual datasets and external storage make a file read others, any that the user may read.
    """
    from h5py import HardLink

    node = f
    for part in name.split("/"):
        try:
            link = node.get(part, getlink=True)
            node = node.get(part) if isinstance(link, HardLink) else None
        except (OSError, KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise FormatError(f"{where}: {name}: cannot be read ({error}); it is damaged") from None
        if node is None:
            what = "none" if link is None else f"a {type(link).__name__}, which leads elsewhere"
            raise FormatError(
                f"{where}: {name}: must be in the file itself, got {what}; copy it into the file"
            )
    if hasattr(node, "is_virtual"):
        _check_own(node, f"{where}: {name}")
    return node


def _check_own(dataset: Any, where: str) -> None:
    """FormatError for a dataset whose rows lie in other files, or whose chunks have no measure."""
    if dataset.is_virtual or dataset.external:
        what = "a virtual dataset" if dataset.is_virtual else "external storage"
        raise FormatError(f"{where}: must be in the file itself, got {what}; copy it into the file")
    nbytes = prod(dataset.chunks or ()) * dataset.dtype.itemsize
    if nbytes > max(MOST_NBYTES, dataset.nbytes):
        raise FormatError(
            f"{where}: a chunk must have at most {MOST_NBYTES} bytes, got {nbytes}; it is damaged or forged"
        )
    if nbytes > 1 << 20:
        check_fits(nbytes, f"{where}: a chunk", "free memory", when=" to be read")

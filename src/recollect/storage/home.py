"""Home: the directory of a live file storage, immutable files and the manifest that names them.

A commit writes new files, syncs them, and renames a new manifest over the old one, as `dump.py` does for a dump; but
it knows what changed, so that its cost is that of the new files and not of all. What a killed writer left is swept
when the next one opens the directory.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from recollect import _core
from recollect.errors import FormatError, LaneBusyError
from recollect.storage.dump import (
    MANIFEST,
    STORAGE,
    TEMPORARY,
    About,
    file_crc,
    last_commit,
    make_directory,
    remove_empty,
    sync_directory,
    write_manifest,
)


class Home:
    """A directory that one process may write and any may read.

    Ownership: the files below `storage/` are its own; the lock of the directory is held until `close()`.
    Concurrency: one writer (a second raises LaneBusyError; the lock dies with its process); callers take turns.
    """

    def __init__(self, path: Path, files: dict[str, About], commit: int, base: str, lock: int | None) -> None:
        self.path, self.files, self.commit, self.base = path, files, commit, base
        self._lock = lock
        self._fresh: set[str] = set()  # sealed since the last commit
        self._dropped: set[str] = set()  # committed, but not to be named by the next
        self._directories: set[Path] = {path / STORAGE}
        self._serial = 0
        self._made: list[Path] = []

    @classmethod
    def create(cls, path: Path, overwrite: bool) -> Self:
        """Make a directory for a new storage; one with a manifest is refused unless `overwrite`."""
        if (path / MANIFEST).exists() and not overwrite:
            raise FileExistsError(
                f"{path}: holds a dump already; load it with load_from, or pass overwrite=True"
            )
        made = make_directory(path / STORAGE)
        try:
            commit = last_commit(path)
            home = cls(path, {}, commit, f"{STORAGE}/part-{commit + 1}" if commit else STORAGE, _locked(path))
        except BaseException:
            remove_empty(made)
            raise
        home._made = made
        home._forget_all_others()
        return home

    def give_up(self) -> None:
        """Take back what `create` made, when no commit came of it."""
        self.close()
        for key in self._fresh:
            (self.path / key).unlink(missing_ok=True)
        remove_empty(self._made)

    @classmethod
    def open(cls, path: Path, manifest: dict[str, Any], writable: bool) -> Self:
        """Open the directory of a manifest; to write means to lock it."""
        lock = _locked(path) if writable else None
        base = manifest["storage_path_relative"]
        return cls(path, dict(manifest["files"]), manifest["commit"], base, lock)

    @property
    def is_writable(self) -> bool:
        """Whether this object may commit."""
        return self._lock is not None

    # -- files, named relative to the base directory of the storage

    def place(self, name: str) -> Path:
        """The path of a file; its directory is made if need be."""
        full = self.path / self.base / name
        if not full.parent.is_dir():
            make_directory(full.parent)
        self._directories.add(full.parent)
        return full

    def new_name(self, stem: str, ext: str) -> str:
        """A name that no file here has or had since this object was opened."""
        while True:
            name = f"{stem}{self._serial}{ext}"
            self._serial += 1
            if not (self.path / self.base / name).exists():
                return name

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Write a new file by its path; then it is synced and named by the next commit, or taken back if it fails."""
        full = self.place(name)
        try:
            _core.fault_point()
            yield full
            _core.fault_point()
            self.files[self._key(name)] = seal(full)
        except BaseException:
            with suppress(OSError):
                full.unlink(missing_ok=True)
            raise
        self._fresh.add(self._key(name))

    def adopt(self, name: str) -> None:
        """Sync a file that was made by `place_new`, and let the next commit name it; if that fails, it stays as it is."""
        self.files[self._key(name)] = seal(self.place(name))
        self._fresh.add(self._key(name))

    def place_new(self, name: str) -> Path:
        """The path of a file that is about to be made."""
        return self.place(name)

    def take_back(self, name: str) -> None:
        """Remove a file that was made since the last commit."""
        with suppress(OSError):
            (self.path / self._key(name)).unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        """Do not name a file in the next commit, which deletes it; one never committed is deleted now."""
        key = self._key(name)
        if self.files.pop(key, None) is None:
            return
        if key in self._fresh:
            self._fresh.discard(key)
            (self.path / key).unlink(missing_ok=True)
        else:
            self._dropped.add(key)

    def drop_later(self, name: str) -> None:
        """Delete, after the next commit, a file that the manifest does not name itself."""
        self._dropped.add(self._key(name))

    def about(self, name: str) -> About:
        """Size and checksum of a named file; FormatError if the manifest does not name it."""
        try:
            return self.files[self._key(name)]
        except KeyError:
            raise FormatError(f"{self.path}: must name the file {name!r}, got none; it is damaged") from None

    def open_file(self, name: str) -> BinaryIO:
        """Open a named file; FormatError, "load again", if it is gone. (Its name was checked with the manifest.)"""
        try:
            return open(f"{self.path}/{self.base}/{name}", "rb")
        except FileNotFoundError:
            raise FormatError(
                f"{self.path / self.base / name}: is gone; it was replaced or damaged meanwhile: load again"
            ) from None

    def _key(self, name: str) -> str:
        return f"{self.base}/{name}"

    # -- commits

    def finish(self, manifest: dict[str, Any]) -> None:
        """Commit: the manifest names what is here; then what it no longer names is deleted."""
        for directory in sorted(self._directories):
            sync_directory(directory)
        _core.fault_point()
        number = self.commit + 1
        record = {**manifest, "storage_path_relative": self.base, "commit": number, "files": self.files}
        try:
            write_manifest(self.path, record)
        except BaseException:
            with suppress(OSError):
                (self.path / TEMPORARY).unlink(missing_ok=True)
            if last_commit(self.path) != number:
                raise
        self.commit = number
        self._directories = {self.path / STORAGE}
        self._fresh.clear()
        gone, self._dropped = self._dropped, set()
        for key in gone:
            _core.fault_point()
            (self.path / key).unlink(missing_ok=True)
        for directory in {(self.path / key).parent for key in gone}:
            if directory != self.path / STORAGE:
                remove_empty([directory])

    def close(self) -> None:
        """Give the directory back to other writers; may be called twice."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _forget_all_others(self) -> None:
        """A new storage over an old dump: the old files go with the first commit."""
        self._dropped = {str(f.relative_to(self.path)) for f in self._there()}

    def sweep(self, others: Collection[str] = ()) -> None:
        """Delete what no manifest names; `others` are files that named files name."""
        keep = {*self.files, *(self._key(name) for name in others)}
        for file in self._there():
            if str(file.relative_to(self.path)) not in keep:
                file.unlink(missing_ok=True)

    def _there(self) -> list[Path]:
        return [f for f in (self.path / STORAGE).rglob("*") if f.is_file()]


def seal(full: Path) -> About:
    """Sync a file that is complete, and return its size and checksum."""
    with open(full, "rb+") as f:
        os.fsync(f.fileno())
        _core.fault_point()
        return {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)}


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LaneBusyError(
            f"{path}: must have one writer, got a second beside {_writer(path)}; open it with read_only=True, "
            "or close the other"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _writer(path: Path) -> str:
    """Who holds the lock of a directory, as far as the system tells."""
    inode = str(path.stat().st_ino)
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF
            if fields[1] == "FLOCK" and fields[5].rsplit(":")[-1] == inode:
                return f"process {fields[4]}"
    return "another process"

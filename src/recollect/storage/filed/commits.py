"""The directory of a storage that keeps files, and its commits: immutable files and the manifest that names them.

A storage that keeps files writes them below one `StorageDirectory`. Storages nest (a wrapper over a storage, a dict of
storages, a buffer over all of them), but there is one manifest and one commit: that of the outermost, which `Commits`
knows.

A commit writes new files, syncs them, and renames a new manifest over the old one, as a dump does; but it knows what
changed, so that its cost is that of the new files and not of all. What a killed writer left is swept when the next one
opens the directory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from recollect import _core, interrupts
from recollect.errors import FormatError, LaneBusyError, ReadOnlyError
from recollect.files import (
    About,
    OwnedDirectory,
    check_name,
    make_directory,
    make_inside,
    open_named,
    remove_empty,
    remove_inside,
    seal_file,
    sync_directory,
)
from recollect.spaces import space_to_json
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.dump import DumpWriter, check_owned, claim_live, named_files, remove_unnamed
from recollect.storage.manifest import MANIFEST, STORAGE, is_committed, last_commit, write_manifest


class StorageDirectory:
    """A directory that one process may write and any may read.

    Ownership: of the files that it made or that a manifest of ours names; the directory is locked until `close()`.
    Concurrency: one writer (a second raises LaneBusyError; the lock dies with its process); callers take turns.
    """

    def __init__(
        self, path: Path, files: dict[str, About], commit: int, base: str, owned: OwnedDirectory | None
    ) -> None:
        self.path, self.files, self.commit, self.base = path, files, commit, base
        path = path.absolute()  # this process may change its directory
        self._owned = owned
        self._fresh: set[str] = set()  # sealed since the last commit
        self._dropped: set[str] = set()  # committed, but not to be named by the next
        self._directories: set[Path] = {path / STORAGE}
        self._serial = 0
        self._open: set[str] = set()  # made, and not sealed yet
        self._made: list[Path] = []  # new directories
        self._old: dict[str, Any] | None = None  # the manifest that the first commit of `create` replaces

    @classmethod
    def create(cls, path: Path, overwrite: bool) -> Self:
        """Make a directory for a new storage; one with a manifest is refused unless `overwrite`."""
        refuse_dump(path, overwrite)
        made = make_directory(path)
        try:
            owned = OwnedDirectory.take(path)
        except BaseException:
            remove_empty(made)
            raise
        try:
            refuse_dump(path, overwrite)
            old = check_owned(owned)
            claim_live(owned, old)
            made += make_inside(path, STORAGE)
            commit = old.get("commit", 0)
            directory = cls(path, {}, commit, f"{STORAGE}/part-{commit + 1}" if commit else STORAGE, owned)
            directory._dropped = {*named_files(path, old)}  # they go with the first commit
            directory._old = old
        except BaseException:
            owned.release()
            remove_empty(made)
            raise
        directory._made = made
        return directory

    def give_up(self) -> None:
        """Take back what `create` made, unless a commit came of it."""
        old = self._old if self._old is not None and self.commit == self._old.get("commit", 0) else None
        try:
            if old is not None and self._owned is not None and self._owned.is_held:
                remove_unnamed(self._owned, old)
        finally:
            self.close()
            remove_empty(self._made if old is not None else [])

    @classmethod
    def open(cls, path: Path, manifest: dict[str, Any], writable: bool) -> Self:
        """Open the directory of a manifest; to write means to lock it."""
        owned = OwnedDirectory.take(path) if writable else None
        try:
            if owned is not None and last_commit(path) != manifest["commit"]:
                raise FormatError(f"{path}: was replaced meanwhile; load again")
            base = check_name(path, manifest["storage_path_relative"])
            return cls(path, dict(manifest["files"]), manifest["commit"], base, owned)
        except BaseException:
            if owned is not None:
                owned.release()
            raise

    @property
    def is_writable(self) -> bool:
        """Whether this object may commit."""
        return self._owned is not None and self._owned.is_held

    def check(self) -> None:
        """Raise unless this object may write here: LaneBusyError in a forked child."""
        if self._owned is not None:
            self._owned.check()

    def check_place(self) -> None:
        """Raise if the directory that this object writes is no longer at its path: another's files may be there."""
        if self._owned is not None and self._owned.is_held:
            self._owned.check()

    # -- files, named relative to the base directory of the storage

    def place(self, name: str) -> Path:
        """The path of a file; its directory is made if need be."""
        full = self.path / self.base / name
        if full.parent not in self._directories:
            self.check()
            make_inside(self.path, self._key(name).rpartition("/")[0])
            self._directories.add(full.parent)
        return full

    def place_new(self, name: str) -> Path:
        """The path of a file that is about to be made; should this process be killed, the next writer removes it."""
        full = self.place(name)
        self._writer().note_new(self._key(name))
        self._open.add(self._key(name))
        return full

    def note_new(self, names: Collection[str]) -> None:
        """Say that files are about to be made that the next commit names by other files."""
        self._writer().note(map(self._key, names))

    def make(self, name: str) -> BinaryIO:
        """Make a file that was noted and open it; FileExistsError if anything has its name, a link too."""
        self.place(name)
        return open_named(self.path, self._key(name), "xb+")

    def _writer(self) -> OwnedDirectory:
        if self._owned is None:
            raise ReadOnlyError(
                f"{self.path}: was opened for reading, got a write; load it with read_only=False"
            )
        return self._owned

    def new_name(self, stem: str, ext: str) -> str:
        """A name that no file here has or had since this object was opened."""
        while True:
            name = f"{stem}{self._serial}{ext}"
            self._serial += 1
            if not self.has(name):
                return name

    def has(self, name: str) -> bool:
        """Whether there is anything of this name."""
        # Not by has_name: it is asked for every image. A link on the way is refused when the file is made.
        return os.path.lexists(f"{self.path}/{self._key(name)}")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Write a new file by its path; then it is synced and named by the next commit, or taken back if it fails."""
        full = self.place(name)
        self._writer().note([self._key(name)])
        try:
            _core.fault_point()
            yield full
            _core.fault_point()
            self.files[self._key(name)] = seal_file(full)
        except BaseException:
            self.take_back(name)
            raise
        self._open.discard(self._key(name))
        self._fresh.add(self._key(name))

    def make_scratch(self, name: str) -> int:
        """Make a file without a name, for what need not outlive this process; return its descriptor."""
        self.place(name)
        with self._writer().make(
            self._key(name)
        ) as f:  # noted: should this process die here, the next one removes it
            remove_inside(self.path, self._key(name))
            return os.dup(f.fileno())

    def adopt(self, name: str) -> None:
        """Sync a file of `place_new`, and let the next commit name it; where that fails, the file stays as it is."""
        key = self._key(name)
        self.files[key] = seal_file(self.path / key)
        self._open.discard(key)
        self._fresh.add(key)

    def take_back(self, name: str) -> None:
        """Remove a file that was made since the last commit."""
        key = self._key(name)
        self._open.discard(key)
        self._fresh.discard(key)
        self.files.pop(key, None)
        if self.is_writable:
            with suppress(OSError):
                remove_inside(self.path, key)

    def drop(self, name: str) -> None:
        """Do not name a file in the next commit, which deletes it; one never committed is deleted now."""
        key = self._key(name)
        if self.files.pop(key, None) is None:
            return
        if key in self._fresh:
            self._fresh.discard(key)
            self.take_back(name)
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
        """Open a named file; FormatError, "load again", if it is gone or has another size."""
        self.check_place()
        key = self._key(name)
        f, about = open_named(self.path, key), self.files.get(key)
        nbytes = os.fstat(f.fileno()).st_size
        if about is not None and nbytes != about["bytes"]:
            f.close()
            raise FormatError(
                f"{self.path / key}: must have {about['bytes']} bytes, got {nbytes}; the dump was replaced or damaged "
                "meanwhile: load again"
            )
        return f

    def _key(self, name: str) -> str:
        return f"{self.base}/{name}"

    # -- commits

    def finish(self, manifest: dict[str, Any]) -> None:
        """Commit: the manifest names what is here; then what it no longer names is deleted."""
        owned = self._writer()
        owned.check()
        for directory in sorted(self._directories):
            sync_directory(directory)
        _core.fault_point()
        number = self.commit + 1
        record = {**manifest, "storage_path_relative": self.base, "commit": number, "files": self.files}
        owned.note(self._dropped)
        with interrupts.deferred():  # the rename and what is known of it are one step
            self._commit(record, owned)

    def _commit(self, record: dict[str, Any], owned: OwnedDirectory) -> None:
        try:
            write_manifest(self.path, record, owned)
        except BaseException:
            # What it names may not be removed by anything but a commit.
            if is_committed(self.path, record["commit"]) is not False:
                self.commit = record["commit"]
                self._fresh.clear()
            raise
        self.commit = record["commit"]
        self._directories = {self.path / STORAGE}
        self._fresh.clear()
        with suppress(OSError):  # it is committed; the next one tries again
            self._remove_dropped(owned)

    def _remove_dropped(self, owned: OwnedDirectory) -> None:
        for key in sorted(self._dropped):
            _core.fault_point()
            owned.remove([key])
            self._dropped.discard(key)
        owned.forget()
        owned.note(self._open)

    def close(self) -> None:
        """Give the directory back to other writers; may be called twice."""
        if self._owned is not None:
            self._owned.release()

    def sweep(self, others: Collection[str] = ()) -> None:
        """Delete what a killed writer left, and no manifest names; `others` are files that named files name."""
        self._writer().remove_noted({*self.files, *(self._key(name) for name in others)})


def refuse_dump(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError for a directory that holds a dump, unless it may be overwritten."""
    if os.path.lexists(path / MANIFEST) and not overwrite:
        raise FileExistsError(f"{path}: holds a dump already; load it with load_from, or pass overwrite=True")


# What brings a commit about, from the least to the most urgent. A storage says from which on it takes part.
PIECE, SEGMENT, FLUSH = 0, 1, 2

Owner = Callable[[int], dict[str, Any]]


class Commits:
    """The commits of a directory: which storage is outermost, and what its owner adds to the manifest.

    Ownership: owns the `StorageDirectory`.
    Concurrency: one lock for all storages below one roof.
    """

    def __init__(self, directory: StorageDirectory) -> None:
        self.directory = directory
        self.root: SpaceStorage | None = None
        self.owner: Owner | None = None  # a buffer: counters and segments for so many stored rows
        self.mend: Callable[[], None] | None = None  # of the owner: what an interrupt left unfinished
        self.is_busy: Callable[[], bool] | None = None  # of the owner: whether it writes, in this very thread
        self.lock = threading.RLock()
        self._due = -1
        # For a long copy: only `flush()` and `close()` commit; full pieces are still written.
        self.waits_for_flush = False

    def due(self, urgency: int) -> None:
        """Ask for a commit; without an owner it is made at once, else when the owner has counted and settles."""
        self._due = max(self._due, urgency)
        if self.owner is None:
            self.settle()

    def settle(self) -> None:
        """Make the commit that was asked for."""
        urgency, self._due = self._due, -1
        if urgency >= 0 and not self.waits_for_flush:
            self._commit(urgency)
        elif urgency == PIECE and self.root is not None and self.root.commits_from == PIECE:
            with self.lock:
                self.root.write_out(PIECE)

    def check_free(self) -> None:
        """Raise LaneBusyError within a write or commit of this thread: then a signal handler calls."""
        if self.lock._is_owned() or (self.is_busy is not None and self.is_busy()):  # type: ignore[attr-defined]
            raise LaneBusyError(
                f"{self.directory.path}: a write or commit of this thread is under way, got a call in the midst of it; "
                "let a signal handler set a flag, and save or close after the call"
            )

    def commit(self, urgency: int = FLUSH) -> None:
        """Write out what is pending and name it; less urgent than what the storages take part in: nothing."""
        self.check_free()
        if self.mend is not None:
            self.mend()
        self._commit(urgency)

    def _commit(self, urgency: int) -> None:
        with self.lock:
            root = self.root
            if root is None or not self.directory.is_writable or urgency < root.commits_from:
                return
            self._due = -1
            root.write_out(urgency)
            self.directory.finish(self.manifest(root))

    def close(self) -> None:
        """Commit all, once, and give the directory back."""
        self.check_free()
        try:
            self.commit()
        finally:
            self.directory.close()

    def manifest(self, root: SpaceStorage) -> dict[str, Any]:
        """What the manifest of this moment says, but for its files."""
        return manifest_of(root, self.owner)

    def copy_to(self, writer: DumpWriter) -> str:
        """Copy all files into a dump, but those that are there already; return the directory that they are in."""
        root = self.root
        if root is None:
            raise FormatError(f"{self.directory.path}: holds no storage")
        names = {key[len(self.directory.base) + 1 :]: about for key, about in self.directory.files.items()}
        more = root.more_files()
        base = writer.base_for(names, more)
        for name, about in (names | more).items():
            source = self.directory.path / self.directory.base / name
            writer.copy(source, f"{base}/{name}", about, named=name not in more)
        return base


def manifest_of(root: SpaceStorage, owner: Owner | None = None) -> dict[str, Any]:
    """What a manifest says of a storage of any kind, and of its owner's counters."""
    n = root.stored_length()
    layout = root.layout
    record: dict[str, Any] = {
        "format": "recollect.storage",
        "storage": root.describe(),
        "space": space_to_json(root.single_instance_space),
        "max_lengths": dict(layout.max_lengths),
        "layout_hash": layout.hash,
        "count": n,
        "offset": 0,
        "capacity": root.capacity,
        "lanes": [{"start": 0, "capacity": root.capacity, "count": n, "offset": 0}],
        "segments": None,
        "live": False,
    }
    return record if owner is None else {**record, **owner(n)}


def dump_storage(storage: SpaceStorage, path: PathName) -> None:
    """Do `dumps(path)` of a storage that describes itself."""
    commits = commits_of(storage)
    if commits is not None and commits.directory.is_writable:
        commits.commit()
    if commits is not None and is_same(commits.directory.path, path):
        return
    with DumpWriter(Path(path)) as writer:
        base = save(storage, writer)
        writer.finish({**manifest_of(storage), "storage_path_relative": base})


def save(storage: SpaceStorage, writer: DumpWriter) -> str:
    """Write the files of a storage into a dump; return the directory that they are in."""
    commits = commits_of(storage)
    if commits is not None:
        return commits.copy_to(writer)
    base = writer.begin_part()
    storage.save_parts(writer.path / base)
    writer.adopt_all(base)
    return base


def commits_of(storage: SpaceStorage) -> Commits | None:
    """The commits that a storage takes part in; None for one that keeps no files of its own."""
    found: Commits | None = getattr(storage, "commits", None)
    return found


def is_same(a: Path, b: PathName) -> bool:
    """Whether two paths are one directory."""
    return a.resolve() == Path(b).resolve()

"""Live: what makes a file storage, or several under one roof, a directory that is committed as one.

A storage that keeps files writes them below one `Home`. Storages nest (a wrapper over a storage, a dict of storages,
a buffer over all of them), but there is one manifest and one commit: that of the outermost, which `Live` knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recollect.errors import FormatError, LaneBusyError
from recollect.spaces import space_to_json
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.dump import DumpWriter
from recollect.storage.filed.directory import Home

FORMATS = ("recollect.storage", "recollect.replay")
# What brings a commit about, from the least to the most urgent. A storage says from which on it takes part.
PIECE, SEGMENT, FLUSH = 0, 1, 2

Owner = Callable[[int], dict[str, Any]]


class Live:
    """The commits of a directory: which storage is outermost, and what its owner adds to the manifest.

    Ownership: owns the `Home`.
    Concurrency: one lock for all storages below one roof.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.root: SpaceStorage | None = None
        self.owner: Owner | None = None  # a buffer: counters and segments for so many stored rows
        self.mend: Callable[[], None] | None = None  # of the owner: what an interrupt left unfinished
        self.is_busy: Callable[[], bool] | None = None  # of the owner: whether it writes, in this very thread
        self.lock = threading.RLock()
        self._due = -1
        self.waits_for_flush = (
            False  # a long copy: only `flush()` and `close()` commit; full pieces are still written
        )

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
                f"{self.home.path}: a write or commit of this thread is under way, got a call in the midst of it; let "
                "a signal handler set a flag, and save or close after the call"
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
            if root is None or not self.home.is_writable or urgency < root.commits_from:
                return
            self._due = -1
            root.write_out(urgency)
            self.home.finish(self.manifest(root))

    def close(self) -> None:
        """Commit all, once, and give the directory back."""
        self.check_free()
        try:
            self.commit()
        finally:
            self.home.close()

    def manifest(self, root: SpaceStorage) -> dict[str, Any]:
        """What the manifest of this moment says, but for its files."""
        return manifest_of(root, self.owner)

    def copy_to(self, writer: DumpWriter) -> str:
        """Copy all files into a dump, but those that are there already; return the directory that they are in."""
        root = self.root
        if root is None:
            raise FormatError(f"{self.home.path}: holds no storage")
        names = {key[len(self.home.base) + 1 :]: about for key, about in self.home.files.items()}
        more = root.more_files()
        base = writer.base_for(names, more)
        for name, about in (names | more).items():
            source = self.home.path / self.home.base / name
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
    live = live_of(storage)
    if live is not None and live.home.is_writable:
        live.commit()
    if live is not None and is_same(live.home.path, path):
        return
    with DumpWriter(Path(path)) as writer:
        base = save(storage, writer)
        writer.finish({**manifest_of(storage), "storage_path_relative": base})


def save(storage: SpaceStorage, writer: DumpWriter) -> str:
    """Write the files of a storage into a dump; return the directory that they are in."""
    live = live_of(storage)
    if live is not None:
        return live.copy_to(writer)
    base = writer.begin_part()
    storage.save_parts(writer.path / base)
    writer.adopt_all(base)
    return base


def live_of(storage: SpaceStorage) -> Live | None:
    """The commits that a storage takes part in; None for one that keeps no files of its own."""
    found: Live | None = getattr(storage, "live", None)
    return found


def is_same(a: Path, b: PathName) -> bool:
    """Whether two paths are one directory."""
    return a.resolve() == Path(b).resolve()

"""`NAME.partial`, the directory in which a copy grows beside its place: one writer, and nothing of anybody else's."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from recollect.files import OwnedDirectory, make_directory, remove_empty
from recollect.files.directory import NAME as WRITER
from recollect.files.names import files_below
from recollect.storage.manifest import MANIFEST


def stage_of(path: Path) -> Path:
    """Where a copy that is to be at `path` grows."""
    return path.with_name(path.name + ".partial")


def take_stage(path: Path, record: str) -> OwnedDirectory:
    """Lock the directory in which a copy grows, made if need be; LaneBusyError if another process copies there.

    It must be empty, hold the `record` of a copy that was begun, or nothing but what a killed copy had noted;
    FileExistsError if not.
    """
    stage = stage_of(path)
    while True:
        if os.path.lexists(stage) and (stage.is_symlink() or not stage.is_dir()):
            raise _foreign(stage, "no directory")
        made = make_directory(stage)
        try:
            if not os.path.lexists(stage / WRITER):
                _check_ours(stage, record, ())  # before a lock is put into it
            owned = OwnedDirectory.take(stage)
            break
        except FileNotFoundError:  # another copy was renamed to its place just now
            continue
        except BaseException:
            remove_empty(made)
            raise
    try:
        _check_ours(stage, record, owned.left)
        if os.path.lexists(path):
            raise FileExistsError(f"{path}: is there already; remove it or choose another path")
    except BaseException:
        owned.release()
        remove_empty(made)
        raise
    return owned


def _check_ours(stage: Path, record: str, noted: Collection[str]) -> None:
    if os.path.lexists(stage / record) and not os.path.lexists(stage / MANIFEST):  # which is a dump's own
        return
    trees = tuple(name for name in noted if name.endswith("/"))
    for name in files_below(stage):
        if name != WRITER and name not in noted and not name.startswith(trees):
            raise _foreign(stage, f"another directory with {name!r}")


def _foreign(stage: Path, found: str) -> FileExistsError:
    return FileExistsError(
        f"{stage}: must be new or a half-made copy, got {found}; remove it or choose another path"
    )

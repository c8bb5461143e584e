"""A directory belongs to one writer, and nothing of anybody else's is removed, written or followed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interruption import interrupted

import recollect as rc
from recollect.errors import FormatError, LaneBusyError
from recollect.files import OwnedDirectory, open_inside
from recollect.files.record import signed_json
from recollect.learners.checkpoint import load_checkpoint, remove_checkpoint, save_checkpoint
from recollect.storage.manifest import FORMATS, read_manifest

SPACE = {"x": ((), "int64")}
LIVE = ("parquet", "hdf5", "memmap")


def buffer(kind: str = "memory", path: Path | None = None, **kw: Any) -> rc.ReplayBuffer:
    if kind in ("memory", "memmap"):
        kw.setdefault("capacity", 8)
    made = rc.ReplayBuffer.create(kind, SPACE, cache_path=path, **kw)
    for i in range(3):
        made.append({"x": i})
    return made


def in_child(work: Callable[[], Any]) -> int:
    """Do something in a forked child; its exit status, 7 for LaneBusyError."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except LaneBusyError:
            os._exit(7)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_one_writer_and_the_error_names_it(tmp_path: Path) -> None:
    with OwnedDirectory.take(tmp_path):
        with pytest.raises(LaneBusyError, match=f"process {os.getpid()};"):
            OwnedDirectory.take(tmp_path)
        assert in_child(lambda: OwnedDirectory.take(tmp_path)) == 7
    assert os.listdir(tmp_path) == []
    OwnedDirectory.take(tmp_path).release()


@pytest.mark.parametrize("head", [b"", b"recollect writer, process %10d\n" % (2**22 - 1)])
def test_the_error_names_a_writer_that_is_not_at_the_head_of_its_list_yet(
    head: bytes, tmp_path: Path
) -> None:
    """A list is locked first; what a killed writer put at its head stays until then."""
    with open(tmp_path / ".recollect-writer", "xb") as file:
        file.write(head)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with buffer() as made, pytest.raises(LaneBusyError, match=f"second beside process {os.getpid()};"):
            made.dumps(tmp_path)


def test_ctrl_c_leaves_no_lock_though_its_traceback_is_kept(tmp_path: Path) -> None:
    n, came = 0, True
    while came:
        taken: list[OwnedDirectory] = []
        kept: list[BaseException] = []

        def take(taken: list[OwnedDirectory] = taken, kept: list[BaseException] = kept) -> None:
            try:
                taken.append(OwnedDirectory.take(tmp_path))
            except KeyboardInterrupt as error:
                kept.append(error)

        came = interrupted(take, n)
        for owned in taken:
            owned.release()
        OwnedDirectory.take(tmp_path).release()
        assert os.listdir(tmp_path) == []
        n += 1
    assert n > 20, "are the points still there?"


def test_a_killed_writer_keeps_no_lock_even_if_its_child_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        owned = OwnedDirectory.take(tmp_path)
        owned.note(["a"])
        if os.fork() == 0:
            os.write(writer, f"{os.getpid()}\n".encode())
            signal.pause()
        signal.pause()
    grandchild = int(os.read(reader, 100))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with OwnedDirectory.take(tmp_path) as owned:
            assert owned.left == ["a"]
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_forked_child_may_not_write(tmp_path: Path) -> None:
    with OwnedDirectory.take(tmp_path) as owned:
        assert in_child(lambda: owned.note(["a"])) == 7
        owned.note(["b"])
        owned.forget()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="second writer would not be noticed"):
        buffer().dumps(tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


@pytest.mark.timeout(60)  # an empty file could be taken for a new list, again and again
@pytest.mark.parametrize("text", ["mine", ""])
@pytest.mark.parametrize("make", ["link", "hard link", "fifo", "text"])
def test_a_lock_that_is_another_programs_is_refused(tmp_path: Path, make: str, text: str) -> None:
    lock, other = tmp_path / "dump" / ".recollect-writer", tmp_path / "other"
    lock.parent.mkdir()
    other.write_text(text)
    if make == "link":
        lock.symlink_to(other)
    elif make == "hard link":
        os.link(other, lock)
    elif make == "fifo":
        os.mkfifo(lock)
    else:
        lock.write_text("mine")
    with pytest.raises(FormatError, match="must be the list of a writer|is no directory") as caught:
        buffer().dumps(lock.parent)
    assert "link" in str(caught.value) or make != "link"
    assert other.read_text() == text and os.listdir(lock.parent) == [lock.name]


def test_a_directory_that_was_moved_is_not_written(tmp_path: Path) -> None:
    live = buffer("parquet", tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="moved or removed"):
        live.flush() if hasattr(live, "flush") else live.storage.flush()
    assert os.listdir(tmp_path / "a") == []
    os.rmdir(tmp_path / "a")
    os.rename(tmp_path / "b", tmp_path / "a")
    live.close()
    assert len(rc.ReplayBuffer.load_from(tmp_path / "a")) == 3


@pytest.mark.parametrize("how", ["moved", "removed"])
@pytest.mark.parametrize("kind", LIVE)
def test_a_directory_that_another_made_anew_is_neither_read_nor_written(
    tmp_path: Path, kind: str, how: str
) -> None:
    """Another program made a buffer in its place, with files of the same names."""
    path = tmp_path / "a"
    live = buffer(kind, path)
    live.dumps(path)
    os.rename(path, tmp_path / "b") if how == "moved" else shutil.rmtree(path)
    with rc.ReplayBuffer.create(kind, {"x": ((), "float32")}, capacity=live.capacity, cache_path=path) as new:
        new.extend({"x": [7.0] * 5})
    if kind == "memmap":
        assert live[...]["x"].tolist() == [0, 1, 2]  # its file stays mapped
        with pytest.raises(FormatError, match="replaced meanwhile"):
            live.dumps(path)
    else:
        with pytest.raises(OSError, match="moved or removed"):
            live[...]
        with pytest.raises(OSError, match="moved or removed"):
            live.dumps(path)
    with contextlib.suppress(OSError):
        live.close()
    with rc.ReplayBuffer.load_from(path, verify=True) as new:
        assert new[...]["x"].tolist() == [7.0] * 5
    if how == "moved":
        with rc.ReplayBuffer.load_from(tmp_path / "b", verify=True) as old:
            assert old[...]["x"].tolist() == [0, 1, 2]


def test_a_column_of_a_directory_that_another_made_anew_is_not_read(tmp_path: Path) -> None:
    with buffer("parquet", tmp_path / "a"):
        pass
    with rc.ReplayBuffer.load_from(tmp_path / "a") as reader:
        shutil.rmtree(tmp_path / "a")
        with buffer("parquet", tmp_path / "a") as new:
            new.extend({"x": np.arange(100, 500)})
        with pytest.raises(FormatError, match="load again"):
            reader.get_column("x")[...]


@pytest.mark.parametrize("verb", ["dumps", "create"])
def test_empty_directories_of_a_killed_writer_are_no_obstacle(tmp_path: Path, verb: str) -> None:
    """A writer of several parts was killed when it had made the directory of a part, and no file in it."""
    path = tmp_path / "dump"
    (path / "storage" / "0-x").mkdir(parents=True)
    parts: Any = {"storages": {"x": "parquet"}}
    if verb == "dumps":
        with rc.ReplayBuffer.create("dict", SPACE, cache_path=tmp_path / "live", **parts) as made:
            made.extend({"x": [1, 2, 3]})
            made.dumps(path)
    else:
        with rc.ReplayBuffer.create("dict", SPACE, cache_path=path, **parts) as made:
            made.extend({"x": [1, 2, 3]})
    with rc.ReplayBuffer.load_from(path, verify=True) as loaded:
        assert loaded[...]["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["memory", *LIVE])
@pytest.mark.parametrize("foreign", ["storage", "manifest", "link"])
def test_a_directory_that_was_never_ours_is_refused(tmp_path: Path, kind: str, foreign: str) -> None:
    path, other = tmp_path / "dump", tmp_path / "other"
    other.mkdir()
    (other / "rows-1.bin").write_text("mine")
    path.mkdir()
    if foreign == "storage":
        (path / "storage").mkdir()
        (path / "storage" / "rows-1.bin").write_text("mine")
    elif foreign == "manifest":
        (path / "manifest.json").write_text('{"name": "a web app"}')
    else:
        (path / "storage").symlink_to(other)
    before = {f: f.read_text() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(FileExistsError):
        buffer().dumps(path) if kind == "memory" else buffer(kind, path, overwrite=True)
    assert {f: f.read_text() for f in tmp_path.rglob("*") if f.is_file()} == before


@pytest.mark.parametrize("kind", ["memory", *LIVE])
def test_foreign_files_in_our_directories_stay(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "dump"
    with buffer(kind, None if kind == "memory" else path) as made:
        if kind == "memory":
            made.dumps(path)
    for name in ("notes.txt", "storage/notes.txt", "storage/rows-2.bin", "storage/part-0.x", "log-7.bin"):
        (path / name).write_text("mine")
    with rc.ReplayBuffer.load_from(path, read_only=False) as made:
        made.append({"x": 9})
    if kind != "memmap":
        with buffer() as made:
            if kind == "memory":
                made.dumps(path)
    with buffer("parquet", path, overwrite=True):
        pass
    for name in ("notes.txt", "storage/notes.txt", "storage/rows-2.bin", "storage/part-0.x", "log-7.bin"):
        assert (path / name).read_text() == "mine"
    assert len(rc.ReplayBuffer.load_from(path)) == 3


@pytest.mark.parametrize("kind", LIVE)
def test_a_dump_over_a_live_buffer_is_refused(tmp_path: Path, kind: str) -> None:
    with buffer(kind, tmp_path / "live") as live:
        with pytest.raises((LaneBusyError, FileExistsError)):
            buffer().dumps(tmp_path / "live")
        live.append({"x": 3})
    assert len(rc.ReplayBuffer.load_from(tmp_path / "live")) == 4


@pytest.mark.parametrize("verb", ["create", "thaw", "dumps", "load"])
def test_a_second_process_is_refused_while_one_writes(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "dump"
    with buffer() as made:
        made.dumps(path)
        with OwnedDirectory.take(path):  # as another writer would, at any step of its work
            work: dict[str, Callable[[], Any]] = {
                "create": lambda: buffer("memmap", path, overwrite=True),
                "thaw": lambda: rc.ReplayBuffer.load_from(path, read_only=False, storage="memmap"),
                "dumps": lambda: made.dumps(path),
                "load": lambda: buffer("parquet", path, overwrite=True),
            }
            assert in_child(work[verb]) == 7
    assert len(rc.ReplayBuffer.load_from(path)) == 3


@pytest.mark.parametrize("name", ["/etc/x", "../x", "storage/../../x", "a\0b", "", "."])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="outside itself"):
        open_inside(tmp_path, name)


def test_links_and_pipes_inside_are_refused(tmp_path: Path) -> None:
    with buffer() as made:
        made.dumps(tmp_path / "dump")
    rows = tmp_path / "dump" / "storage" / "rows-1.bin"
    data = rows.read_bytes()
    rows.rename(tmp_path / "rows")
    rows.symlink_to(tmp_path / "rows")
    with pytest.raises(FormatError):
        rc.ReplayBuffer.load_from(tmp_path / "dump")
    rows.unlink()
    os.mkfifo(rows)
    with pytest.raises(FormatError):
        rc.ReplayBuffer.load_from(tmp_path / "dump", verify=True)
    rows.unlink()
    rows.write_bytes(data)
    storage = tmp_path / "dump" / "storage"
    storage.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    storage.symlink_to(tmp_path / "elsewhere")
    for read_only in (True, False):
        with pytest.raises((FormatError, FileExistsError)):
            rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=read_only, storage="memmap")
    with pytest.raises((FormatError, FileExistsError)):
        buffer().dumps(tmp_path / "dump")
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["mine", "rows-1.bin", "stamps-1.bin"]


def test_a_learners_checkpoint_leaves_foreign_directories(tmp_path: Path) -> None:
    for name in (".m.tmp-1", ".removed-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    path = save_checkpoint(tmp_path / "m", {"iteration": 1})
    save_checkpoint(path, {"iteration": 2})
    assert load_checkpoint(path) == {"iteration": 2}
    assert sorted(os.listdir(tmp_path)) == [".m.tmp-1", ".removed-x", "m"]
    (path / "notes").write_text("mine")
    for work in (lambda: save_checkpoint(path, {}), lambda: remove_checkpoint(path)):
        with pytest.raises(FileExistsError, match="notes"):
            work()
    assert json.dumps(sorted(os.listdir(path))) == '["manifest.json", "notes", "tensors.bin"]'


@pytest.mark.parametrize("verb", ["create", "other kind", "forked", "sent"])
def test_a_live_memmap_that_a_process_writes_is_not_replaced(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "live"
    live = buffer("memmap", path)
    kind = "parquet" if verb == "other kind" else "memmap"
    if verb == "forked":  # the child has it open, though the parent closed it
        (reader, writer), (hears, tells) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            os.close(tells)
            os.read(hears, 1)
            live.append({"x": 7})
            os._exit(0)
        live.close()
    elif verb == "sent":
        live, first = pickle.loads(pickle.dumps(live)), live
        first.close()
    with pytest.raises(LaneBusyError, match=r"live-1.bin: must not be in use, got process \d+, or a child"):
        buffer(kind, path, overwrite=True)
    assert in_child(lambda: buffer(kind, path, overwrite=True)) == 7
    assert sorted(os.listdir(path)) == ["manifest.json", "storage"] and os.listdir(path / "storage") == [
        "live-1.bin"
    ]
    if verb == "forked":
        for fd in (tells, hears, reader, writer):
            os.close(fd)
        assert os.waitpid(pid, 0)[1] == 0
    else:
        live.append({"x": 7})
        live.close()
    assert rc.ReplayBuffer.load_from(path)[:]["x"].tolist() == [0, 1, 2, 7]
    with buffer(kind, path, overwrite=True):
        pass
    assert len(rc.ReplayBuffer.load_from(path)) == 3


def image_buffer(path: Path, **kw: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create("image", ((4, 4), "uint8"), capacity=8, cache_path=path, **kw)


def test_images_are_not_written_through_a_link(tmp_path: Path) -> None:
    path, other = tmp_path / "d", tmp_path / "other"
    frame = np.full((4, 4, 3), 7, "uint8")
    with rc.ReplayBuffer.create("image", ((4, 4, 3), "uint8"), capacity=8, cache_path=path) as buffer:
        buffer.append(frame)
        (path / "storage").rename(other)
        (path / "storage").symlink_to(other)
        there = sorted(os.listdir(other))
        with pytest.raises(FormatError, match="got a link"):
            buffer.append(frame)
        assert sorted(os.listdir(other)) == there
        (path / "storage").unlink()
        other.rename(path / "storage")
        buffer.append(frame + 1)
    with rc.ReplayBuffer.load_from(path, verify=True) as buffer:
        assert buffer[:][:, 0, 0, 0].tolist() == [7, 8]


def test_a_dump_over_a_live_image_buffer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with image_buffer(tmp_path / "live") as live:
        live.append(np.full((4, 4), 7, "uint8"))
        for work in (
            lambda: buffer().dumps(tmp_path / "live"),
            lambda: image_buffer(tmp_path / "live", overwrite=True),
        ):
            with pytest.raises(LaneBusyError, match=f"process {os.getpid()};"):
                work()
        live.append(np.full((4, 4), 8, "uint8"))
    assert rc.ReplayBuffer.load_from(tmp_path / "live", verify=True)[:].max(axis=(1, 2)).tolist() == [7, 8]


def together(*works: Callable[[], Any]) -> list[int]:
    """Do things in forked children at the same time; their exit statuses."""
    reader, writer = os.pipe()
    pids = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # returns when all are there
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    os.close(writer)
    os.close(reader)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_processes_that_dump_a_live_memmap_at_once_take_turns(tmp_path: Path) -> None:
    with buffer("memmap", tmp_path / "live") as live:
        assert together(*[lambda: [live.dumps(tmp_path / "live") for _ in range(10)]] * 3) == [0, 0, 0]
        live.append({"x": 3})
        assert read_manifest(tmp_path / "live", FORMATS)["commit"] >= 30
    assert rc.ReplayBuffer.load_from(tmp_path / "live")[:]["x"].tolist() == [0, 1, 2, 3]
    assert sorted(os.listdir(tmp_path / "live")) == ["manifest.json", "storage"]
    assert os.listdir(tmp_path / "live" / "storage") == ["live-1.bin"]


def test_learners_that_save_one_checkpoint_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    def save(number: int) -> None:
        for i in range(10):
            save_checkpoint(tmp_path / "m", {"iteration": 100 * number + i, "x": np.full(1000, number)})

    assert together(*[partial(save, n) for n in range(3)]) == [0, 0, 0]
    state = load_checkpoint(tmp_path / "m")
    assert (state["x"] == state["iteration"] // 100).all() and state["iteration"] % 100 == 9
    assert os.listdir(tmp_path) == ["m"]
    assert sorted(os.listdir(tmp_path / "m")) == ["manifest.json", "tensors.bin"]


@pytest.mark.parametrize("kind", ["memory", *LIVE])
@pytest.mark.parametrize("base", ["../other/storage", "storage/../../other/storage", "/other/storage"])
def test_a_manifest_that_leads_outside_is_refused(tmp_path: Path, kind: str, base: str) -> None:
    """Nothing outside is read, written or removed, whatever a forged manifest says."""
    for name in ("dump", "other"):
        with buffer(kind, None if kind == "memory" else tmp_path / name) as made:
            if kind == "memory":
                made.dumps(tmp_path / name)
    manifest = read_manifest(tmp_path / "dump", FORMATS)
    if base.startswith("/"):
        base = f"{tmp_path}{base}"
    files = {name.replace("storage/", f"{base}/"): about for name, about in manifest["files"].items()}
    other = {
        f: (f.read_bytes(), f.stat().st_mtime_ns) for f in (tmp_path / "other").rglob("*") if f.is_file()
    }
    forged = [
        {**manifest, "storage_path_relative": base},
        {**manifest, "files": files or {f"{base}/x": {"bytes": 1, "crc32c": "0"}}},
        {**manifest, "storage_path_relative": base, "files": files},
        {**manifest, "log": f"{base}/log-1.bin"},
    ]
    if kind == "memmap":
        options = {**manifest["storage"]["options"], "file": f"../{base}/live-1.bin"}
        forged.append({**manifest, "storage": {**manifest["storage"], "options": options}})
    for record in forged:
        (tmp_path / "dump" / "manifest.json").write_text(signed_json({"format_version": 1, **record}))
        for read_only in (True, False):
            with pytest.raises(FormatError):
                rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=read_only)
        with pytest.raises((FormatError, FileExistsError)):
            buffer().dumps(tmp_path / "dump")
        with pytest.raises((FormatError, FileExistsError)):
            buffer("memmap", tmp_path / "dump", overwrite=True)
    found = {
        f: (f.read_bytes(), f.stat().st_mtime_ns) for f in (tmp_path / "other").rglob("*") if f.is_file()
    }
    assert found == other


@pytest.mark.parametrize("kind", ["memmap", "parquet"])
def test_parts_that_keep_files_are_not_written_in_place(tmp_path: Path, kind: str) -> None:
    """A dump has the checksums of its parts: opened for writing, they would no longer match."""
    space = {"x": ((), "int64"), "y": ((), "int64")}
    parts = {"x": (kind, {"cache_path": tmp_path / "own"}), "*": "memory"}
    capacity = 8 if kind == "memmap" else None
    with rc.ReplayBuffer.create("dict", space, parts, capacity=capacity) as made:
        made.append({"x": 1, "y": 2})
        made.dumps(tmp_path / "dump")
    with pytest.raises(rc.ReadOnlyError, match="0-x: is a part of a dump"):
        rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False)
    with rc.ReplayBuffer.load_from(tmp_path / "dump", verify=True) as read:
        assert read[0]["x"].item() == 1
    [part] = (tmp_path / "dump" / "storage").glob("part-*/0-x")
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError):
        rc.ReplayBuffer.load_from(tmp_path / "dump")


def test_a_full_disk_leaves_no_list_and_no_directory(small_disk: Path) -> None:
    with buffer() as made:
        made.dumps(small_disk / "old")
        before = sorted(small_disk.rglob("*"))
        with open(small_disk / "full", "wb", buffering=0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(bytes(4096))
        for name in ("old", "new"):
            with pytest.raises(OSError, match="No space"):
                made.dumps(small_disk / name)
        os.unlink(small_disk / "full")
        assert sorted(small_disk.rglob("*")) == before
        made.dumps(small_disk / "new")

"""`dumps` killed at every write, sync and rename: the old dump or the new one opens whole, and nothing stays behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.killing import in_child, killed_at, steps
from tests.replay import make as _registers_test_list  # noqa: F401

import recollect as rc
from recollect.memory.rows import Rows

pytestmark = pytest.mark.process

SPACE = {"id": ((), "int64"), "words": ((3,), "float64")}
KINDS = ["memory", "shared", "memmap"]


def block(first: int, n: int) -> dict[str, Any]:
    ids = np.arange(first, first + n)
    return {"id": ids, "words": ids[:, None] * np.array([1.0, -2.0, 0.5])}


def make(kind: str, tmp_path: Path, first: int, **kwargs: Any) -> rc.ReplayBuffer:
    """A full ring of 12 in four segments, the oldest clipped."""
    path = {"cache_path": tmp_path / f"live-{first}"} if kind == "memmap" else {}
    buffer = rc.ReplayBuffer.create(
        kind, SPACE, capacity=12, maintain_segment_metadata=True, **path, **kwargs
    )
    for start in range(first, first + 15, 5):
        buffer.extend(block(start, 5), ends=np.isin(np.arange(5), [2, 4]))
    return buffer


def contents(buffer: rc.ReplayBuffer) -> Any:
    """All that a dump must keep."""
    batch, where = buffer[...], buffer.locate(...)
    assert np.array_equal(batch["words"], batch["id"][:, None] * np.array([1.0, -2.0, 0.5]))
    place = [a.tolist() for a in (where.row, where.generation, where.segment, where.step)]
    return batch["id"].tolist(), buffer.get_segments(), place, buffer.offset


def loaded(path: Path, read_only: bool = True, **kwargs: Any) -> Any:
    with rc.ReplayBuffer.load_from(path, verify=True, **kwargs) as buffer:
        return contents(buffer)


def files_under(path: Path) -> set[str]:
    return {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}


def check_tidy(path: Path) -> None:
    """Only the manifest and the files that it names are there."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert files_under(path) == {"manifest.json", *manifest["files"]}
    assert sorted(os.listdir(path)) == ["manifest.json", "storage"]


@pytest.mark.parametrize("over", ["nothing", "an older dump"])
@pytest.mark.parametrize("kind", KINDS)
def test_dump_killed_at_every_step(kind: str, over: str, tmp_path: Path) -> None:
    with make(kind, tmp_path, 0) as old, make(kind, tmp_path, 100) as new:
        was, will_be = contents(old), contents(new)
        seen = []
        for step in steps():
            path = tmp_path / f"dump-{step}"
            if over != "nothing":
                old.dumps(path)
            killed = killed_at(step, lambda: new.dumps(path))  # noqa: B023
            if over == "nothing" and not rc.ReplayBuffer.is_loadable_from(path):
                seen.append("none")
                with pytest.raises(rc.FormatError):
                    rc.ReplayBuffer.load_from(path)
            else:
                found = loaded(path)
                assert found in ((will_be,) if over == "nothing" else (was, will_be))
                seen.append("new" if found == will_be else "old")
            new.dumps(path)
            assert loaded(path) == will_be
            check_tidy(path)
            if not killed:
                break
        assert step >= 12, f"only {step} steps: are the fault points still there?"
        assert seen == sorted(seen, key=["none", "old", "new"].index), (
            "the rename is the only moment of change"
        )
        assert seen[0] != "new" and seen[-1] == "new"


def test_live_memmap_flush_killed_at_every_step(tmp_path: Path) -> None:
    for step in steps():
        path = tmp_path / f"live-{step}"
        with rc.ReplayBuffer.create("memmap", SPACE, capacity=8, cache_path=path) as buffer:
            buffer.extend(block(0, 3))
            before = contents(buffer)

        def flush() -> None:
            with rc.ReplayBuffer.load_from(path, read_only=False) as buffer:  # noqa: B023
                buffer.dumps(path)  # noqa: B023

        killed = killed_at(step, flush)
        assert loaded(path) == before
        if not killed:
            break
    assert step >= 4


def test_create_over_a_dump_killed_at_every_step(tmp_path: Path) -> None:
    """`overwrite=True` keeps the old dump until the new buffer is there."""
    with make("memory", tmp_path, 0) as old:
        was = contents(old)
        for step in steps():
            path = tmp_path / f"dump-{step}"
            old.dumps(path)

            def create() -> None:
                rc.ReplayBuffer.create("memmap", SPACE, capacity=8, cache_path=path, overwrite=True)  # noqa: B023

            killed = killed_at(step, create)
            found = loaded(path)
            assert found[0] in (was[0], [])
            if not killed:
                break
        assert step >= 4 and found[0] == []


def test_thawing_a_dump_killed_at_every_step(tmp_path: Path) -> None:
    """Loading a row dump as a live memmap copies it; killed at any step, the samples are there."""
    with make("memory", tmp_path, 0) as old:
        was = contents(old)
        for step in steps():
            path = tmp_path / f"dump-{step}"
            old.dumps(path)

            def thaw() -> None:
                rc.ReplayBuffer.load_from(path, storage="memmap", read_only=False)  # noqa: B023

            killed = killed_at(step, thaw)
            assert loaded(path) == was
            if not killed:
                break
        assert step >= 4


def test_dump_after_a_writer_was_killed_in_place(tmp_path: Path) -> None:
    """What a dead writer left half done is ended before it is saved."""
    for step in steps():
        with make("shared", tmp_path, 0, multiprocessing=True) as buffer:
            with buffer.on_lane(0):
                pass  # give the lane back
            killed = killed_at(step, lambda: buffer.remove_at([2, 7]))
            buffer.dumps(tmp_path / f"dump-{step}")
            assert loaded(tmp_path / f"dump-{step}") == contents(buffer)
        if not killed:
            break
    assert step > 6


Log = list[tuple[str, str]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What is synced (in word only, which is quicker), renamed and deleted, in order."""
    found: Log = []
    real_replace, real_unlink = os.replace, os.unlink

    def fsync(fd: int) -> None:
        found.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    def replace(a: Any, b: Any) -> None:
        found.append(("rename", str(b)))
        real_replace(a, b)

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if Path(path).name != ".recollect-writer":  # the lock, which goes when the writer does
            found.append(("unlink", str(path)))
        real_unlink(path, dir_fd=dir_fd)

    def sync(self: Rows) -> None:
        found.append(("sync", str(self.path)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(Rows, "sync", sync)
    return found


def check_order(log: Log, path: Path, new: set[str]) -> None:
    """Power loss: what the manifest names is on disk before the rename that commits it; the rename itself after."""
    renamed = log.index(("rename", str(path / "manifest.json")))
    before, after = log[:renamed], log[renamed + 1 :]
    for name in new:
        assert ("sync", str(path / name)) in before, name
    assert before[-1][0] == "sync" and Path(before[-1][1]).match(f"{path}/.manifest.json.*.tmp")
    for name in new:  # its name too, in every directory that leads to it
        named = before[before.index(("sync", str(path / name))) :]
        for directory in (d for d in Path(name).parents if d != Path(".")):
            assert ("sync", str(path / directory)) in named, directory
    assert after[0] == ("sync", str(path))
    assert all(call[0] == "unlink" for call in after[1:])
    assert not any(call[0] == "unlink" for call in before)


def test_every_file_is_synced_before_the_rename_and_the_names_after(tmp_path: Path, log: Log) -> None:
    path = tmp_path / "a" / "dump"
    with make("memory", tmp_path, 0) as buffer:
        for commit in (1, 2):
            log.clear()
            buffer.dumps(path)
            check_order(log, path, {f"storage/rows-{commit}.bin", f"storage/stamps-{commit}.bin"})
            if commit == 1:  # new directories too
                assert {str(tmp_path), str(tmp_path / "a"), str(path)} <= {p for _, p in log}


FILED = ["parquet", "hdf5", "image", "dict", "test-list"]
FRAMES = {"id": ((), "int64"), "frame": ((2, 2), "uint8")}


def filed(kind: str, path: Path) -> Any:
    """A buffer over files, and one sample for it."""
    if kind == "image":
        return rc.ReplayBuffer.create(kind, FRAMES["frame"], cache_path=path), np.zeros((2, 2), np.uint8)
    if kind == "dict":
        parts = {"frame": rc.ImageStorage, "*": rc.ParquetStorage}
        sample = {"id": 1, "frame": np.zeros((2, 2), np.uint8)}
        return rc.ReplayBuffer.create(kind, FRAMES, parts, cache_path=path), sample
    where = {"capacity": 4} if kind == "test-list" else {"cache_path": path}
    return rc.ReplayBuffer.create(kind, SPACE, **where), {"id": 1, "words": np.zeros(3)}


@pytest.mark.parametrize("kind", FILED)
def test_every_file_of_other_storages_is_synced_before_the_rename(
    kind: str, tmp_path: Path, log: Log
) -> None:
    live, path = tmp_path / "live", tmp_path / "dump"
    buffer, sample = filed(kind, live)
    with buffer:
        for place in (path, path) if kind == "test-list" else (live, live, path, path):
            was = files_under(place)
            buffer.append(sample)
            log.clear()
            buffer.dumps(place)
            new = files_under(place) - was - {"manifest.json"}
            assert new
            here = [call for call in log if Path(call[1]).is_relative_to(place)]  # not the live files' commit
            check_order(here, place, new)


@pytest.mark.parametrize("dumps", [lambda b, path: b.dumps(path), lambda b, path: b.storage.dumps(path)])
def test_a_live_memmap_is_synced_by_dumps_before_the_rename(dumps: Any, tmp_path: Path, log: Log) -> None:
    with make("memmap", tmp_path, 0) as buffer:
        path = tmp_path / "live-0"
        (name,) = files_under(path) - {"manifest.json"}
        log.clear()
        dumps(buffer, path)
        check_order(log, path, {name})


def test_dump_of_a_forked_childs_inheritance_is_whole(tmp_path: Path) -> None:
    with make("memory", tmp_path, 0) as buffer:
        in_child(lambda: buffer.dumps(tmp_path / "dump"))
        assert loaded(tmp_path / "dump") == contents(buffer)

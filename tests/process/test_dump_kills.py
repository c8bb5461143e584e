"""`dumps` killed at every write, sync and rename: the old dump or the new one opens whole, and nothing stays behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.killing import in_child, killed_at, steps

import recollect as rc
from recollect.storage import dump

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
        buffer.extend(block(start, 5), ends=np.arange(5) == 2)
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


def test_every_file_is_synced_before_the_rename_and_the_names_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power loss: what the manifest names is on disk before the rename that commits it; the rename itself after."""
    log: list[tuple[str, str]] = []
    real_fsync, real_replace, real_unlink = os.fsync, os.replace, Path.unlink

    def fsync(fd: int) -> None:
        log.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def replace(a: Any, b: Any) -> None:
        log.append(("rename", str(b)))
        real_replace(a, b)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        log.append(("unlink", str(self)))
        real_unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(dump.os, "fsync", fsync)
    monkeypatch.setattr(dump.os, "replace", replace)
    monkeypatch.setattr(Path, "unlink", unlink)
    path = tmp_path / "a" / "dump"
    with make("memory", tmp_path, 0) as buffer:
        buffer.dumps(path)
        first = list(log)
        log.clear()
        buffer.dumps(path)
    for calls, commit in ((first, 1), (log, 2)):
        renamed = calls.index(("rename", str(path / "manifest.json")))
        before, after = calls[:renamed], calls[renamed + 1 :]
        for name in (
            f"storage/rows-{commit}.bin",
            f"storage/stamps-{commit}.bin",
            "storage",
            ".manifest.json.tmp",
        ):
            assert ("sync", str(path / name)) in before, name
        assert after[0] == ("sync", str(path))
        assert all(call[0] == "unlink" for call in after[1:])
        assert not any(call[0] == "unlink" for call in before)
    assert {str(tmp_path), str(tmp_path / "a"), str(path)} <= {p for _, p in first}  # new directories too


def test_dump_of_a_forked_childs_inheritance_is_whole(tmp_path: Path) -> None:
    with make("memory", tmp_path, 0) as buffer:
        in_child(lambda: buffer.dumps(tmp_path / "dump"))
        assert loaded(tmp_path / "dump") == contents(buffer)

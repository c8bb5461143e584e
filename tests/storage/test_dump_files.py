"""Dumps on disk: what the manifest says, what damage is called, and what a full or forbidden disk leaves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.disk import between

import recollect as rc
from recollect import budget as limits
from recollect._core import crc32c

SPACE = {"id": ((), "int64"), "obs": ((4,), "float32")}
KINDS = ["memory", "shared", "memmap"]


def block(first: int, n: int) -> dict[str, Any]:
    return {"id": np.arange(first, first + n), "obs": np.full((n, 4), first, np.float32)}


def make(kind: str, tmp_path: Path, capacity: int | None = 8, **kwargs: Any) -> rc.ReplayBuffer:
    """Two segments, the older one clipped at its head."""
    path = {"cache_path": tmp_path / f"live-{kind}"} if kind == "memmap" else {}
    buffer = rc.ReplayBuffer.create(
        kind, SPACE, capacity=capacity, maintain_segment_metadata=True, **path, **kwargs
    )
    for first in (0, 4, 8):
        buffer.extend(block(first, 4 if first < 8 else 3))
    return buffer


def contents(buffer: rc.ReplayBuffer) -> Any:
    where = buffer.locate(...)
    places = [a.tolist() for a in (where.row, where.generation, where.segment, where.step)]
    return buffer[...]["id"].tolist(), buffer.get_segments(), places, buffer.offset, buffer.capacity


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a manifest, with the right checksum; None takes one out."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("crc32c")
    manifest = {k: v for k, v in {**manifest, **changes}.items() if v is not None}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["crc32c"] = f"{crc32c(text.encode()):08x}"
    (path / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    with make("memory", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
    return tmp_path / "dump"


# -- every kind as every other


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_row_dumps_load_as_one_another(source: str, target: str, read_only: bool, tmp_path: Path) -> None:
    with make(source, tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
        expected = contents(buffer)
    with rc.ReplayBuffer.load_from(tmp_path / "dump", storage=target, read_only=read_only) as loaded:
        assert contents(loaded) == expected
        assert loaded.storage.short_name == target and loaded.is_mutable is not read_only
        if not read_only:
            loaded.extend(block(100, 2))
            assert loaded[-1]["id"] == 101
            assert max(loaded.locate(...).segment) > max(expected[2][2])  # ids are never used twice
        else:
            with pytest.raises(rc.ReadOnlyError):
                loaded.append({"id": 1, "obs": np.zeros(4, np.float32)})
            assert contents(loaded) == expected


@pytest.mark.parametrize("target", KINDS)
def test_live_memmap_loads_as_any(target: str, tmp_path: Path) -> None:
    path = tmp_path / "live-memmap"
    with make("memmap", tmp_path) as buffer, rc.ReplayBuffer.load_from(path, storage=target) as loaded:
        assert contents(loaded) == contents(buffer)
        assert rc.ReplayBuffer.get_length_from_path(path) == 8


@pytest.mark.parametrize(
    ("source", "target"), [("memory", "memmap"), ("memmap", "memory"), ("memory", "memory")]
)
def test_unbounded_dumps(source: str, target: str, tmp_path: Path) -> None:
    with make(source, tmp_path, capacity=None) as buffer:
        buffer.extend(block(11, 3000))
        buffer.remove_at([0])
        buffer.dumps(tmp_path / "dump")
        with rc.ReplayBuffer.load_from(
            tmp_path / "dump", storage=target, read_only=False, verify=True
        ) as loaded:
            assert contents(loaded) == contents(buffer)
            loaded.append({"id": 5000, "obs": np.zeros(4, np.float32)})
            assert len(loaded) == len(buffer) + 1
        assert rc.ReplayBuffer.get_capacity_from_path(tmp_path / "dump") is None
    with pytest.raises(ValueError, match="capacity"):
        rc.ReplayBuffer.load_from(tmp_path / "dump", storage="shared")


def test_multiprocessing_makes_shared_of_memory(dumped: Path) -> None:
    with rc.ReplayBuffer.load_from(dumped, multiprocessing=True) as loaded:
        assert loaded.storage.short_name == "shared" and loaded.storage.is_multiprocessing_safe


def test_another_backend_wraps(dumped: Path) -> None:
    torch = pytest.importorskip("torch")
    with rc.ReplayBuffer.load_from(dumped, backend="torch") as loaded:
        assert isinstance(loaded[...]["obs"], torch.Tensor)


def test_lanes_survive(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create(
        "shared", SPACE, capacity=12, num_lanes=3, maintain_segment_metadata=True
    ) as buffer:
        for lane in (0, 2):
            with buffer.on_lane(lane) as out:
                out.extend(block(100 * lane, 3))
                out.extend(block(100 * lane + 3, 3))
        buffer.dumps(tmp_path / "dump")
        with rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as loaded:
            assert contents(loaded) == contents(buffer)
            with loaded.on_lane(1) as out:
                out.extend(block(50, 1))
            assert loaded[4]["id"] == 50


# -- the manifest


def test_manifest_fields(dumped: Path) -> None:
    text = (dumped / "manifest.json").read_text()
    manifest = json.loads(text)
    assert text == json.dumps(manifest, sort_keys=True, separators=(",", ":"))  # canonical
    table = {
        "format", "format_version", "crc32c", "commit", "live", "storage", "storage_path_relative", "space",
        "layout_hash", "count", "offset", "capacity", "lanes", "evict", "segments", "files",
    }  # fmt: skip
    assert table <= set(manifest)
    assert (manifest["format"], manifest["format_version"], manifest["commit"]) == ("recollect.replay", 1, 1)
    assert manifest["live"] is False and manifest["storage_path_relative"] == "storage"
    assert manifest["storage"] == {"name": "memory", "options": {}, "children": {}}
    assert (manifest["count"], manifest["offset"], manifest["capacity"]) == (8, 3, 8)
    assert manifest["lanes"] == [{"start": 0, "capacity": 8, "count": 8, "offset": 3}]
    assert manifest["evict"] == {"by": "oldest", "key": None}
    assert [s[1:] for s in manifest["segments"]] == [[0, 3, 1, 3], [0, 4, 4, 0], [0, 0, 3, 0]]
    assert set(manifest["files"]) == {"storage/rows-1.bin", "storage/stamps-1.bin"}
    for name, about in manifest["files"].items():
        data = (dumped / name).read_bytes()
        assert about == {"bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
    crc = manifest.pop("crc32c")
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert crc == f"{crc32c(body.encode()):08x}"


def test_untracked_and_live_manifests(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=4) as buffer:
        buffer.extend(block(0, 2))
        buffer.dumps(tmp_path / "dump")
    assert json.loads((tmp_path / "dump/manifest.json").read_text())["segments"] is None
    with rc.ReplayBuffer.load_from(tmp_path / "dump") as loaded:
        assert loaded.get_segments() is None
    with make("memmap", tmp_path):
        manifest = json.loads((tmp_path / "live-memmap/manifest.json").read_text())
    assert manifest["live"] is True and manifest["files"] == {}


def test_newer_version_names_what_it_needs(dumped: Path) -> None:
    rewrite(dumped, format_version=2)
    with pytest.raises(rc.FormatError, match="version 2 .*newer"):
        rc.ReplayBuffer.load_from(dumped)
    assert not rc.ReplayBuffer.is_loadable_from(dumped)


@pytest.mark.parametrize(
    "field", "storage space layout_hash count capacity lanes segments files commit evict".split()
)
def test_missing_or_garbled_fields(dumped: Path, field: str) -> None:
    original = (dumped / "manifest.json").read_text()
    for value in ([], "x", {"a": 1}, -1):
        (dumped / "manifest.json").write_text(original)
        manifest = json.loads(original)
        if field in ("segments", "files") and value == []:
            continue
        if type(manifest[field]) is type(value) and field not in ("count", "capacity", "commit"):
            continue
        rewrite(dumped, **{field: value})
        with pytest.raises(ValueError):
            rc.ReplayBuffer.load_from(dumped)
        with pytest.raises(ValueError):
            rc.ReplayBuffer.load_from(dumped, storage="memmap")
    (dumped / "manifest.json").write_text(original)
    rewrite(dumped, **{field: None})
    if field not in ("capacity", "segments"):  # null is a value of these
        with pytest.raises(rc.FormatError):
            rc.ReplayBuffer.load_from(dumped)


def test_names_that_lead_outside_are_refused(dumped: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 10)
    rewrite(dumped, files={"../secret": {"bytes": 10, "crc32c": f"{crc32c(b'x' * 10):08x}"}})
    with pytest.raises(rc.FormatError):
        rc.ReplayBuffer.load_from(dumped)


def test_unknown_storage_is_not_imported(dumped: Path) -> None:
    rewrite(dumped, storage={"name": "os:system", "options": {}, "children": {}})
    with pytest.raises(rc.FormatError, match="register_storage"):
        rc.ReplayBuffer.load_from(dumped)


# -- damage


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', "\x00\xff", "{}"])
def test_foreign_manifest(dumped: Path, text: str) -> None:
    (dumped / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(rc.FormatError, match="manifest.json"):
        rc.ReplayBuffer.load_from(dumped)
    assert not rc.ReplayBuffer.is_loadable_from(dumped)


def test_asking_a_path_reads_no_rows(dumped: Path) -> None:
    for file in (dumped / "storage").iterdir():
        file.unlink()
    assert rc.ReplayBuffer.is_loadable_from(dumped)
    assert rc.ReplayBuffer.get_length_from_path(dumped) == 8
    assert rc.ReplayBuffer.get_capacity_from_path(dumped) == 8
    assert rc.ReplayBuffer.get_space_from_path(dumped) == rc.as_space(SPACE)


def test_no_dump_is_none(tmp_path: Path) -> None:
    assert rc.ReplayBuffer.get_length_from_path(tmp_path) is None
    assert rc.ReplayBuffer.get_capacity_from_path(tmp_path) is None
    assert rc.ReplayBuffer.get_space_from_path(tmp_path) is None
    with pytest.raises(rc.FormatError, match="no dump"):
        rc.ReplayBuffer.load_from(tmp_path)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_every_flipped_byte_of_the_manifest_is_seen(dumped: Path) -> None:
    file = dumped / "manifest.json"
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        flip(file, at)
        with pytest.raises(rc.FormatError):
            rc.ReplayBuffer.load_from(dumped)
        file.write_bytes(whole)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("name", ["rows-1.bin", "stamps-1.bin"])
def test_damaged_files_are_named(dumped: Path, name: str, target: str) -> None:
    file = dumped / "storage" / name
    whole = file.read_bytes()
    flip(file, len(whole) // 2)
    with pytest.raises(rc.FormatError, match=name):
        rc.ReplayBuffer.load_from(dumped, storage=target, verify=True)
    if target != "memmap":  # read whole anyway: checked without being asked
        with pytest.raises(rc.FormatError, match=name):
            rc.ReplayBuffer.load_from(dumped, storage=target)
    for damaged in (whole[:-1], b"", whole + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(rc.FormatError, match=f"{name}.*bytes"):
            rc.ReplayBuffer.load_from(dumped, storage=target)
    file.unlink()
    with pytest.raises(rc.FormatError, match=f"{name}.*load again"):
        rc.ReplayBuffer.load_from(dumped, storage=target)


def live_file(path: Path) -> Path:
    return next((path / "storage").glob("live-*.bin"))


@pytest.mark.parametrize("read_only", [True, False])
def test_damaged_live_file(tmp_path: Path, read_only: bool) -> None:
    make("memmap", tmp_path).close()
    path = tmp_path / "live-memmap"
    file = live_file(path)
    whole = file.read_bytes()
    for at in range(0, 96, 5):  # every part of the header
        flip(file, at)
        with pytest.raises(rc.FormatError, match=file.name):
            rc.ReplayBuffer.load_from(path, read_only=read_only)
        file.write_bytes(whole)
    for damaged in (b"", whole[:100], whole[:-4096], b"x" * len(whole)):
        file.write_bytes(damaged)
        with pytest.raises(rc.FormatError, match=file.name):
            rc.ReplayBuffer.load_from(path, read_only=read_only)
    file.write_bytes(whole)
    rc.ReplayBuffer.load_from(path, read_only=read_only).close()
    # Another buffer's file under this name.
    with rc.ReplayBuffer.create("memmap", SPACE, capacity=4, cache_path=tmp_path / "other"):
        shutil.copy(live_file(tmp_path / "other"), file)
    with pytest.raises(rc.FormatError, match=file.name):
        rc.ReplayBuffer.load_from(path, read_only=read_only)
    file.unlink()
    with pytest.raises(rc.FormatError, match="load again"):
        rc.ReplayBuffer.load_from(path, read_only=read_only)


def test_truncated_unbounded_live_file_is_never_zeros(tmp_path: Path) -> None:
    with make("memmap", tmp_path, capacity=None) as buffer:
        buffer.extend(block(11, 5000))
    file = live_file(tmp_path / "live-memmap")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(rc.FormatError, match=f"{file.name}.*truncated"):
        rc.ReplayBuffer.load_from(tmp_path / "live-memmap")


@pytest.mark.parametrize("target", ["memory", "memmap"])
def test_replaced_while_a_reader_opens_its_files(target: str, tmp_path: Path) -> None:
    """A dump that is replaced between any two steps of a reader is read whole, or the reader is told to load again."""
    lowest = {"evict": "lowest", "evict_key": "id"}  # it has all kinds of files
    told = wrong = 0
    with rc.ReplayBuffer.create("memory", SPACE, capacity=8, **lowest) as buffer:
        buffer.extend(block(0, 4))
        buffer.dumps(tmp_path)
        for step in itertools.count():
            with between(lambda: buffer.dumps(tmp_path), step) as acted:
                try:
                    with rc.ReplayBuffer.load_from(tmp_path, storage=target) as loaded:
                        assert sorted(loaded[...]["id"].tolist()) == [0, 1, 2, 3]
                except rc.FormatError as error:
                    told += "load again" in str(error)
                    wrong += "load again" not in str(error)
            if not acted:
                break
        assert told > 1 and not wrong
        rc.ReplayBuffer.load_from(tmp_path, storage=target, verify=True).close()


def test_open_reader_keeps_its_rows_when_the_dump_is_replaced(dumped: Path, tmp_path: Path) -> None:
    with rc.ReplayBuffer.load_from(dumped, storage="memmap") as reader, make("memory", tmp_path) as buffer:
        before = contents(reader)
        buffer.clear()
        buffer.dumps(dumped)
        assert contents(reader) == before


# -- arguments


def test_create_refusals(tmp_path: Path) -> None:
    create = rc.ReplayBuffer.create
    for kind in ("memory", "shared"):
        with pytest.raises(ValueError, match="dumps"):
            create(kind, SPACE, capacity=4, cache_path=tmp_path / "x")
    with pytest.raises(ValueError, match="cache_path"):
        create("memmap", SPACE, capacity=4)
    for kind in KINDS:
        path = {"cache_path": tmp_path / "y"} if kind == "memmap" else {}
        with pytest.raises(TypeError, match="no_such"):
            create(kind, SPACE, capacity=4, no_such=1, **path)
        for capacity in (0, -1, 2.5, "4", True):
            with pytest.raises(ValueError, match="capacity"):
                create(kind, SPACE, capacity=capacity, **path)  # type: ignore[arg-type]
        for lanes in (0, -1, 3, 5):
            with pytest.raises(ValueError, match="num_lanes"):
                create(kind, SPACE, capacity=4, num_lanes=lanes, **path)
    with pytest.raises(ValueError, match="num_lanes"):
        create("memory", SPACE, num_lanes=2)
    with pytest.raises(ValueError, match="capacity"):
        create("shared", SPACE)
    with pytest.raises(ValueError, match="multiprocessing.*SharedMemoryStorage"):
        create("memory", SPACE, capacity=4, multiprocessing=True)
    with pytest.raises(ValueError, match="nothing-such"):
        create("nothing-such", SPACE, capacity=4)
    assert os.listdir(tmp_path) == []  # refused before anything was made


def test_existing_dump_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        before = contents(buffer)
    path = tmp_path / "live-memmap"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        rc.ReplayBuffer.create("memmap", SPACE, capacity=4, cache_path=path)
    with rc.ReplayBuffer.load_from(path) as loaded:
        assert contents(loaded) == before
    with rc.ReplayBuffer.create("memmap", SPACE, capacity=4, cache_path=path, overwrite=True) as buffer:
        assert len(buffer) == 0 and buffer.capacity == 4
    assert len(list((path / "storage").iterdir())) == 1


def test_load_refusals(dumped: Path) -> None:
    with pytest.raises(ValueError, match="obs"):
        rc.ReplayBuffer.load_from(
            dumped, single_instance_space={"id": ((), "int64"), "obs": ((5,), "float32")}
        )
    with pytest.raises(TypeError, match="no_such"):
        rc.ReplayBuffer.load_from(dumped, no_such=1)


def test_budget_error_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch, dumped: Path) -> None:
    for kind in ("memory", "shared"):
        with pytest.raises(rc.BudgetError, match=r"TiB when full.*available.*MemmapStorage"):
            rc.ReplayBuffer.create(kind, SPACE, capacity=10**12)
    monkeypatch.setattr(limits, "available_nbytes", lambda: 1000)
    with pytest.raises(rc.BudgetError, match="1000 B are available"):
        rc.ReplayBuffer.load_from(dumped)
    rc.ReplayBuffer.load_from(dumped, storage="memmap").close()  # maps it instead


# -- the disk


def test_full_disk_at_create_leaves_nothing(small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"needs .*MiB of disk"):
        rc.ReplayBuffer.create("memmap", SPACE, capacity=100_000, cache_path=small_disk / "a" / "b")
    assert [p for p in small_disk.rglob("*") if p.is_file()] == []
    rc.ReplayBuffer.create("memmap", SPACE, capacity=1000, cache_path=small_disk / "a" / "b").close()


def test_full_disk_at_the_manifest_leaves_nothing(small_disk: Path) -> None:
    """Room for the rows but not for the manifest."""
    (small_disk / "filler").write_bytes(b"x" * (1 << 19))
    free = os.statvfs(small_disk)
    row_nbytes, overhead = 24 + 24, 4 * 4096
    capacity = (free.f_bavail * free.f_bsize - overhead) // row_nbytes
    before = len(os.listdir("/proc/self/fd"))
    for extra in range(0, 1200, 80):
        try:
            rc.ReplayBuffer.create(
                "memmap", SPACE, capacity=capacity - 600 + extra, cache_path=small_disk / "a"
            ).close()
        except OSError:
            assert [p.name for p in small_disk.rglob("*") if p.is_file()] == ["filler"]
            assert len(os.listdir("/proc/self/fd")) == before
        else:
            shutil.rmtree(small_disk / "a")


@pytest.mark.parametrize("kind", ["memory", "shared"])
def test_full_disk_at_dumps_keeps_the_old_dump(small_disk: Path, tmp_path: Path, kind: str) -> None:
    path = small_disk / "dump"
    with make(kind, tmp_path) as old:
        old.dumps(path)
        was = contents(old)
    with rc.ReplayBuffer.create(kind, SPACE, capacity=60_000) as large:
        large.extend(block(0, 60_000))
        with pytest.raises(OSError):
            large.dumps(path)
    with rc.ReplayBuffer.load_from(path, verify=True) as loaded:
        assert contents(loaded) == was
    with make(kind, tmp_path) as old:  # and there is room to dump again
        old.dumps(path)
    assert len(list((path / "storage").iterdir())) == 2


def test_growing_file_on_a_full_disk(small_disk: Path) -> None:
    """An unbounded file that cannot grow: an error, not a bus error; what was committed stays."""
    with rc.ReplayBuffer.create("memmap", SPACE, cache_path=small_disk / "a") as buffer:
        n = 0
        with pytest.raises(OSError):
            for _ in range(1000):
                buffer.extend(block(n, 1000))
                n += 1000
        assert len(buffer) == n > 0 and buffer[-1]["id"] == n - 1
    with rc.ReplayBuffer.load_from(small_disk / "a") as loaded:
        assert len(loaded) == n


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/self/uid_map").exists(), reason="needs mount or a user"
)
def test_read_only_place(small_disk: Path, tmp_path: Path) -> None:
    """A file system for reading only: dumps says so, loading works."""
    with make("memory", tmp_path) as buffer:
        buffer.dumps(small_disk / "dump")
        with rc.ReplayBuffer.create("memmap", SPACE, capacity=8, cache_path=small_disk / "live") as live:
            live.extend(block(0, 3))
        if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
            pytest.skip("may not remount")
        with pytest.raises(OSError):
            buffer.dumps(small_disk / "dump")
        with pytest.raises(OSError):
            buffer.dumps(small_disk / "other")
        with rc.ReplayBuffer.load_from(small_disk / "dump", verify=True) as loaded:
            assert contents(loaded) == contents(buffer)
        with rc.ReplayBuffer.load_from(small_disk / "live") as loaded:
            assert loaded[...]["id"].tolist() == [0, 1, 2]
        with pytest.raises(OSError):
            rc.ReplayBuffer.load_from(small_disk / "live", read_only=False)


# -- open segments, live writers, memory


@pytest.mark.parametrize("kind", KINDS)
def test_open_segment_needs_a_word(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.append({"id": 100, "obs": np.zeros(4, np.float32)})
        with pytest.raises(rc.SegmentOpenError, match=r"mark_segment_end\(\).*cut_open=True"):
            buffer.dumps(tmp_path / "dump")
        assert not (tmp_path / "dump" / "manifest.json").exists()
        buffer.dumps(tmp_path / "dump", cut_open=True)
        assert buffer.open_segment == (7, 8)  # the live one is still open
        buffer.append({"id": 101, "obs": np.zeros(4, np.float32)})
        assert buffer.open_segment == (6, 8)
        saved = json.loads((tmp_path / "dump/manifest.json").read_text())["segments"]
        with rc.ReplayBuffer.load_from(tmp_path / "dump") as loaded:
            assert loaded[-1]["id"] == 100
            assert loaded.get_segments()[-1] == (7, 8)  # type: ignore[index]
            assert len(saved) == len(loaded.get_segments())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.process
def test_dump_beside_a_live_writer(kind: str, tmp_path: Path) -> None:
    """It holds the samples that outlive it: one stretch, whole, segments that fit."""
    path = {"cache_path": tmp_path / "live"} if kind == "memmap" else {}
    with rc.ReplayBuffer.create(kind, SPACE, capacity=60_000, maintain_segment_metadata=True, multiprocessing=True,
                                **path) as buffer:  # fmt: skip
        orders, order = os.pipe()
        pid = os.fork()
        if pid == 0:  # a third of the ring for every order, at full speed
            n = 0
            while os.read(orders, 1):
                for _ in range(2000):
                    buffer.extend(block(n, 10))
                    n += 10
        try:
            sizes = []
            os.write(order, b"....")
            while buffer.stats().evicted < 20_000:
                os.sched_yield()
            for i in range(3):
                os.write(order, b".")
                buffer.dumps(tmp_path / "dump", cut_open=True)
                with rc.ReplayBuffer.load_from(tmp_path / "dump", verify=True) as loaded:
                    batch = loaded[...]
                    sizes.append(len(loaded))
                    ids = batch["id"]
                    assert (np.diff(ids) == 1).all()
                    assert (batch["obs"] == (ids // 10 * 10).astype(np.float32)[:, None]).all()
                    segments = loaded.get_segments()
                    assert segments is not None and sum(end - start for start, end in segments) == len(ids)
                    for start, end in segments:
                        assert len(set((ids[start:end] // 10).tolist())) == 1, (i, ids[start:end])
            assert min(sizes) > 0, sizes
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(orders)
            os.close(order)


@pytest.mark.parametrize("kind", ["memory", "memmap"])
def test_dumps_takes_little_memory(kind: str, tmp_path: Path) -> None:
    """However large the buffer: chunks of 4 MiB, not copies of it."""
    space = {"x": ((), "int64")}  # small rows: what is kept per row weighs most
    path = {"cache_path": tmp_path / "live"} if kind == "memmap" else {}
    n = 4_000_000
    with rc.ReplayBuffer.create(kind, space, capacity=n, **path) as buffer:
        for first in range(0, n, 500_000):
            buffer.extend({"x": np.arange(first, first + 500_000)})
        tracemalloc.start()
        try:
            buffer.dumps(tmp_path / "dump")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 24 << 20, f"{peak >> 20} MiB for a dump of {n * 16 >> 20} MiB"

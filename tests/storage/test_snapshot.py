"""Dumps and loads beside live writers, what they cost, and what forged or damaged ones are called."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.disk import between, file_size
from tests.storage.rows import (
    KINDS,
    SPACE,
    block,
    contents,
    files_under,
    forge,
    ids,
    make,
    manifest_of,
    sample,
)

import recollect as rc
from recollect.errors import FormatError

FIELDS = """capacity commit count crc32c evict files format format_version lanes layout_hash live max_lengths offset
segment_counter segments space storage storage_path_relative""".split()


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    with make("memory", tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
    return tmp_path / "dump"


# -- the manifest


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_those_of_the_table(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.dumps(tmp_path / "dump")
        buffer.dumps(tmp_path / "dump")
        manifest = manifest_of(tmp_path / "dump")
        assert sorted(manifest) == FIELDS
        assert manifest["commit"] == 2 and manifest["storage"]["name"] == kind
        assert manifest["layout_hash"] == buffer.storage.layout.hash  # type: ignore[attr-defined]
        assert manifest["space"] == json.loads(json.dumps(manifest["space"], allow_nan=False)), (
            "standard JSON"
        )
        assert manifest["segments"] == [[1, 0, 3, 2, 3], [2, 0, 5, 5, 0], [3, 0, 10, 5, 0]]
        stamps = np.fromfile(tmp_path / "dump/storage/stamps-2.bin", "<i8")
        assert stamps[buffer.locate(...).row].tolist() == buffer.locate(...).generation.tolist()
        packed = np.fromfile(tmp_path / "dump/storage/rows-2.bin", np.uint8).reshape(12, -1)
        assert np.array_equal(packed[buffer.locate(...).row], buffer.get_packed_at(...))


def test_what_lanes_and_eviction_are_called(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=6, num_lanes=2) as buffer:
        with buffer.on_lane(1) as one:
            one.extend(block(0, 2))
            one.extend(block(2, 2))
        buffer.dumps(tmp_path / "lanes")
    manifest = manifest_of(tmp_path / "lanes")
    assert manifest["lanes"] == [
        {"start": 0, "capacity": 3, "count": 0, "offset": 0},
        {"start": 3, "capacity": 3, "count": 3, "offset": 1},
    ]
    assert (manifest["count"], manifest["offset"], manifest["capacity"]) == (3, 0, 6)
    assert manifest["segments"] is None
    with rc.ReplayBuffer.create("memory", SPACE, capacity=2, evict="lowest", evict_key="id") as buffer:
        buffer.dumps(tmp_path / "lowest")
    assert manifest_of(tmp_path / "lowest")["evict"] == {"by": "lowest", "key": "id"}


def test_a_ring_that_is_not_full_is_dumped_as_far_as_it_goes(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=1000) as buffer:
        buffer.extend(block(0, 3))
        buffer.dumps(tmp_path)
        nbytes = buffer.storage.layout.row_nbytes
    assert (tmp_path / "storage/rows-1.bin").stat().st_size == 3 * nbytes
    assert (tmp_path / "storage/stamps-1.bin").stat().st_size == 3 * 8


def test_a_storage_on_its_own_is_no_buffer(tmp_path: Path) -> None:
    with rc.MemoryStorage.create(SPACE, capacity=4) as storage:
        storage.set([0, 1], block(7, 2))
        storage.dumps(tmp_path / "dump")
    assert manifest_of(tmp_path / "dump")["format"] == "recollect.storage"
    with pytest.raises(FormatError, match="recollect.replay"):
        rc.ReplayBuffer.load_from(tmp_path / "dump")
    with rc.MemmapStorage.load_from(tmp_path / "dump", SPACE) as loaded:
        assert ids(loaded.get([1, 0])) == [8, 7]


# -- forged and damaged


def garble(field: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.__setitem__(field, value)


FORGED = {
    "no files": garble("files", {}),
    "commit leads outside": garble("commit", "1/../../../other"),
    "file leads outside": lambda m: m["files"].__setitem__("../other", {"bytes": 0, "crc32c": "0" * 8}),
    "absolute file": lambda m: m["files"].__setitem__("/etc/hostname", {"bytes": 0, "crc32c": "0" * 8}),
    "more rows than the file has": lambda m: (m.update(capacity=9999), m["lanes"][0].update(capacity=9999, count=9999)),
    "more samples than rows": lambda m: m["lanes"][0].update(count=13),
    "offset outside": lambda m: m["lanes"][0].update(offset=12),
    "negative count": lambda m: m["lanes"][0].update(count=-1),
    "lanes overlap": lambda m: m.update(lanes=[m["lanes"][0], m["lanes"][0]]),
    "no lanes": garble("lanes", []),
    "segment outside": lambda m: m["segments"].append([9, 0, 5000, 2, 0]),
    "segment of words": lambda m: m["segments"].append(["a", 0, 1, 2, 0]),
    "another layout": garble("layout_hash", "0" * 16),
    "no space": lambda m: m.pop("space"),
    "space of another kind": garble("space", {"type": "os.system"}),
    "no storage": lambda m: m.pop("storage"),
    "unknown storage": lambda m: m["storage"].update(name="os:system"),
}  # fmt: skip


@pytest.mark.parametrize("storage", ["memory", "memmap"])
@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests(name: str, storage: str, dumped: Path) -> None:
    (dumped.parent / "other").write_bytes(b"")
    forge(dumped, FORGED[name])
    with pytest.raises(FormatError, match="dump"):
        rc.ReplayBuffer.load_from(dumped, storage=None if name == "unknown storage" else storage)


def test_forged_live_manifest(tmp_path: Path) -> None:
    make("memmap", tmp_path).close()
    forge(tmp_path / "live", lambda m: m["storage"]["options"].update(file="../../other.bin"))
    (tmp_path / "other.bin").write_bytes(b"x" * 9999)
    with pytest.raises(FormatError, match="outside"):
        rc.ReplayBuffer.load_from(tmp_path / "live")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_a_file_that_is_read_whole_is_always_checked(dumped: Path) -> None:
    """A mapped dump reads its stamps; one that becomes live reads everything."""
    flip(dumped / "storage/stamps-1.bin")
    with pytest.raises(FormatError, match="stamps-1.bin.*checksum"):
        rc.ReplayBuffer.load_from(dumped, storage="memmap")
    flip(dumped / "storage/stamps-1.bin")
    flip(dumped / "storage/rows-1.bin")
    rc.ReplayBuffer.load_from(dumped, storage="memmap").close()  # maps its rows: sizes only
    before = files_under(dumped)
    with pytest.raises(FormatError, match="rows-1.bin.*checksum"):
        rc.ReplayBuffer.load_from(dumped, storage="memmap", read_only=False)
    assert files_under(dumped) == before


def test_orders_of_arrival_are_always_checked(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=4, evict="lowest", evict_key="id") as buffer:
        buffer.extend(block(0, 4))
        buffer.dumps(tmp_path / "dump")
    flip(tmp_path / "dump/storage/orders-1.bin")
    with pytest.raises(FormatError, match="orders-1.bin"):
        rc.ReplayBuffer.load_from(tmp_path / "dump", storage="memmap")


def test_nothing_is_unpickled(dumped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    for kind in KINDS:
        rc.ReplayBuffer.load_from(dumped, storage=kind, verify=True).close()


# -- what fails is taken back


@pytest.mark.parametrize(
    "most", [0, 100, 600]
)  # too small for all files, for the rows, and for the manifest alone
def test_a_failed_dump_frees_what_it_wrote(most: int, dumped: Path, tmp_path: Path) -> None:
    before = files_under(dumped)
    with make("memory", tmp_path) as buffer:
        for path in (dumped, tmp_path / "new/dump"):
            for dumps in (buffer.dumps, buffer.storage.dumps):  # type: ignore[attr-defined]
                with file_size(most), pytest.raises(OSError, match="File too large"):
                    dumps(path)
    assert files_under(dumped) == before
    assert not (tmp_path / "new").exists()


# -- beside writers


def check_outlived(loaded: rc.ReplayBuffer, before: list[int], after: list[int], length: int) -> None:
    """Exactly the samples of one moment, or of both, in segments of `length` as they were appended."""
    found = ids(loaded[...])
    assert found in (before, [i for i in before if i in after], after)
    step = loaded.locate(...).step.tolist()
    assert step == [i % length for i in found]
    segments = loaded.get_segments() or []
    assert [i for a, b in segments for i in range(a, b)] == list(range(len(found))), "every sample is in one"
    for a, b in segments:
        assert len({i // length for i in found[a:b]}) == 1


@pytest.mark.parametrize("n_before", [7, 12, 29])
@pytest.mark.parametrize("n_meanwhile", [1, 3, 6, 11, 12, 30])
def test_a_dump_holds_what_outlives_it(n_before: int, n_meanwhile: int, tmp_path: Path) -> None:
    for step in itertools.count():
        with rc.ReplayBuffer.create("memory", SPACE, capacity=12, maintain_segment_metadata=True) as buffer:
            number = itertools.count()

            def append(n: int) -> None:
                for _ in range(n):
                    buffer.append(sample(i := next(number)))  # noqa: B023
                    if i % 5 == 4:
                        buffer.mark_segment_end()

            append(n_before)
            before = ids(buffer[...])
            with between(lambda: append(n_meanwhile), step) as acted:
                buffer.dumps(tmp_path / f"dump-{step}", cut_open=True)
            if not acted:
                assert step > 10
                return
            after = ids(buffer[...])
            with rc.ReplayBuffer.load_from(tmp_path / f"dump-{step}", verify=True) as loaded:
                check_outlived(loaded, before, after, 5)


@pytest.mark.parametrize("n_meanwhile", [1, 6, 12, 30])
def test_loading_a_live_memmap_holds_what_outlives_it(n_meanwhile: int, tmp_path: Path) -> None:
    for step in itertools.count():
        with rc.ReplayBuffer.create(
            "memmap", SPACE, capacity=12, maintain_segment_metadata=True, cache_path=tmp_path / f"live-{step}"
        ) as buffer:
            for first in range(0, 30, 5):
                buffer.extend(block(first, 5))
            before = ids(buffer[...])

            def extend() -> None:
                for first in range(30, 30 + 5 * n_meanwhile, 5):
                    buffer.extend(block(first, 5))

            with (
                between(extend, step) as acted,
                rc.ReplayBuffer.load_from(tmp_path / f"live-{step}", storage="memory") as loaded,
            ):
                if not acted:
                    assert step > 1
                    return
                check_outlived(loaded, before, ids(buffer[...]), 5)


def test_a_dump_begins_again_when_rows_change_in_place(tmp_path: Path) -> None:
    with make("memory", tmp_path) as buffer:
        changes = iter([lambda: buffer.set_at(4, sample(70)), lambda: buffer.remove_at([2])])
        with between(lambda: next(changes, lambda: None)(), None):
            buffer.dumps(tmp_path / "dump")
        with rc.ReplayBuffer.load_from(tmp_path / "dump") as loaded:
            assert contents(loaded) == contents(buffer)


@pytest.mark.parametrize("kind", KINDS)
def test_dump_beside_an_appending_thread(kind: str, tmp_path: Path) -> None:
    place = {"cache_path": tmp_path / "live"} if kind == "memmap" else {}
    stop = threading.Event()
    with rc.ReplayBuffer.create(
        kind, SPACE, capacity=2000, maintain_segment_metadata=True, **place
    ) as buffer:

        def write() -> None:
            n = 0
            while not stop.is_set():
                for i in range(n, n + 50):
                    buffer.append(sample(i))
                buffer.mark_segment_end()
                n += 50

        thread = threading.Thread(target=write)
        thread.start()
        try:
            while len(buffer) < 2000:
                stop.wait(0.001)
            for _ in range(5):
                before = ids(buffer[...])
                buffer.dumps(tmp_path / "dump", cut_open=True)
                after = ids(buffer[...])
                with rc.ReplayBuffer.load_from(tmp_path / "dump", verify=True) as loaded:
                    found = ids(loaded[...])
                    step, segments = loaded.locate(...).step.tolist(), loaded.get_segments() or []
                assert found == list(range(found[0], found[0] + len(found))) if found else True
                assert set(before) & set(after) <= set(found), "what was there all the time is in it"
                assert step == [i % 50 for i in found]
                assert [i for a, b in segments for i in range(a, b)] == list(range(len(found)))
        finally:
            stop.set()
            thread.join()


# -- what it costs


def peak_nbytes(work: Callable[[], Any]) -> tuple[int, Any]:
    """How much the resident memory of this process rises at most while `work` is done; native memory counts."""

    def resident(field: str) -> int:
        return int(
            next(
                x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)
            ).split()[1]
        )

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("the peak cannot be reset here")
    before = resident("VmRSS")
    found = work()
    return (resident("VmHWM") - before) * 1024, found


# Loading in memory needs the rows, and touches as much of the mapped file, which the kernel can take back at any time.
@pytest.mark.parametrize(("kind", "times"), [("memory", 2), ("shared", 2), ("memmap", 0)])
def test_dumping_and_loading_take_no_copy_of_the_rows(kind: str, times: int, tmp_path: Path) -> None:
    n, size, spare = 200_000, 400, 24 << 20
    space = {"x": ((size - 8,), "uint8"), "i": ((), "int64")}
    with rc.ReplayBuffer.create("memory", space, capacity=n, maintain_segment_metadata=True) as buffer:
        for first in range(0, n, 20_000):
            rows = np.arange(first, first + 20_000)
            buffer.extend({"x": np.repeat(rows.astype(np.uint8)[:, None], size - 8, 1), "i": rows})
        peak, _ = peak_nbytes(lambda: buffer.dumps(tmp_path / "dump"))
        assert peak < spare, f"{peak >> 20} MiB for a dump of {n * size >> 20} MiB"
    peak, loaded = peak_nbytes(lambda: rc.ReplayBuffer.load_from(tmp_path / "dump", storage=kind))
    with loaded:
        assert len(loaded) == n and loaded[-1]["i"] == n - 1
        assert peak < times * n * size + spare, f"{peak >> 20} MiB to load {n * size >> 20} MiB"


@pytest.mark.parametrize("kind", ["buffer", "storage"])
def test_a_directory_that_another_buffer_lives_in_is_refused(kind: str, tmp_path: Path) -> None:
    """A dump there would delete the file under it."""
    space = {"x": ((), "int64")}
    with (
        rc.ReplayBuffer.create("memmap", space, capacity=8, cache_path=tmp_path) as live,
        rc.ReplayBuffer.create("memory", space, capacity=8) as other,
    ):
        live.append({"x": 1})
        other.append({"x": 2})
        with pytest.raises(FileExistsError, match="where another buffer lives"):
            (other if kind == "buffer" else other.storage).dumps(tmp_path)
        live.append({"x": 3})
        live.dumps(tmp_path)
    with rc.ReplayBuffer.load_from(tmp_path) as loaded:
        assert loaded[:]["x"].tolist() == [1, 3]

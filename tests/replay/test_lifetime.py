"""close(), pickled handles, and who owns what a read returns."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import KINDS, ROW_KINDS, block, create, numbers, sample

import recollect
from recollect import _core
from recollect.errors import ClosedError
from recollect.replay import ReplayBuffer
from recollect.sampling import IndexStream

SHARED = ("shared", "memmap")


def uses(buffer: ReplayBuffer, tmp_path: Path) -> dict[str, Any]:
    place = buffer.locate([0])
    found: dict[str, Any] = {
        "len": lambda: len(buffer),
        "count": lambda: buffer.count,
        "offset": lambda: buffer.offset,
        "stats": buffer.stats,
        "get_at": lambda: buffer.get_at(0),
        "slice": lambda: buffer[:],
        "get_flattened_at": lambda: buffer.get_flattened_at(0),
        "get_packed_at": lambda: buffer.get_packed_at(0),
        "get_column_at": lambda: buffer.get_column_at(("x",), 0),
        "column view": lambda: buffer.get_column("x")[0],
        "slice view": lambda: buffer.get_slice([0])[0],
        "draw_at": lambda: buffer.draw_at(IndexStream(0), 2),
        "draw_column_at": lambda: buffer.draw_column_at(("x",), IndexStream(0), 2),
        "locate": lambda: buffer.locate(0),
        "is_current": lambda: buffer.is_current(place),
        "append": lambda: buffer.append(sample(1)),
        "append wrong": lambda: buffer.append(None),
        "extend": lambda: buffer.extend(block([1])),
        "extend_from": lambda: create_and_copy(buffer),
        "set_at": lambda: buffer.set_at(0, sample(1)),
        "remove_at": lambda: buffer.remove_at(0),
        "clear": buffer.clear,
        "mark_segment_end": buffer.mark_segment_end,
        "open_segment": lambda: buffer.open_segment,
        "get_segments": buffer.get_segments,
        "on_lane": lambda: buffer.on_lane(0),
        "dumps": lambda: buffer.dumps(tmp_path / "no"),
        "dumps cut": lambda: buffer.dumps(tmp_path / "no", cut_open=True),
        "iter": lambda: list(buffer),
    }
    if buffer.inner_storage.is_multiprocessing_safe:
        found["pickle"] = lambda: pickle.dumps(buffer)
    return found


def create_and_copy(buffer: ReplayBuffer) -> None:
    with create("memory", directory="") as other:
        other.append(sample(1))
        buffer.extend_from(other)


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_use_after_close_raises(kind: str, twin: bool, tmp_path: Path) -> None:
    if twin and kind not in SHARED:
        pytest.skip("cannot be pickled")
    buffer = create(kind, directory=tmp_path, maintain_segment_metadata=True)
    buffer.extend(block([1, 2]))
    other = pickle.loads(pickle.dumps(buffer)) if twin else None
    lane = buffer.on_lane(0) if kind in ROW_KINDS else None
    calls = uses(buffer, tmp_path)
    buffer.close()
    buffer.close()
    for name, call in calls.items():
        with pytest.raises(ClosedError):
            call()
            pytest.fail(f"{name} worked after close()")
    if lane is not None:
        for write in (lambda: lane.append(sample(1)), lane.mark_segment_end, lambda: lane.open_segment):
            with pytest.raises(ClosedError):
                write()
        lane.close()
        lane.close()
    assert not (tmp_path / "no").exists() and "ReplayBuffer" in repr(buffer)
    if other is not None:
        assert numbers(other) == [1, 2] and other.stats().rejected == 0
        other.close()


def test_a_closed_lane_handle_raises() -> None:
    with create("memory", directory="", num_lanes=2) as buffer:
        with buffer.on_lane(1) as lane:
            lane.append(sample(1))
        lane.close()
        for write in (lambda: lane.append(sample(1)), lambda: lane.extend(block([1])), lane.mark_segment_end):
            with pytest.raises(ClosedError, match="on_lane\\(1\\)"):
                write()
        with pytest.raises(IndexError, match="lane 2"):
            buffer.on_lane(2)
        assert numbers(buffer) == [1]


@pytest.mark.parametrize("kind", SHARED)
def test_an_unpickled_buffer_has_the_same_rows(kind: str, tmp_path: Path) -> None:
    buffer = create(
        kind, directory=tmp_path, capacity=10_000, multiprocessing=True, maintain_segment_metadata=True
    )
    handle = pickle.dumps(buffer)
    assert len(handle) < 4_096  # however many rows there are
    twin, third = pickle.loads(handle), pickle.loads(handle)
    buffer.append(sample(1))
    twin.append(sample(2))
    assert numbers(buffer) == numbers(twin) == numbers(third) == [1, 2]
    assert buffer.open_segment == twin.open_segment == (0, 2)
    with pytest.raises(ValueError, match="another batch"):
        twin.extend_from(buffer)
    assert (
        twin.stats() == buffer.stats()
        and twin.capacity == 10_000
        and twin.single_space == buffer.single_space
    )
    buffer.close()
    twin.append(sample(3))
    assert numbers(twin) == numbers(third) == [1, 2, 3]
    twin.close()
    assert numbers(third) == [1, 2, 3]
    third.close()


def test_a_handle_to_nothing_says_so() -> None:
    with create("shared", directory="") as buffer:
        handle = pickle.dumps(buffer)
    with pytest.raises(ValueError, match="closed it|gone"):
        pickle.loads(handle)


@pytest.mark.parametrize("kind", ["memory", "test-list"])
def test_memory_of_one_process_is_not_pickled(kind: str) -> None:
    with create(kind, directory="") as buffer, pytest.raises(TypeError, match="SharedMemoryStorage"):
        pickle.dumps(buffer)


def test_a_ring_of_one_process_is_not_pickled_though_its_rows_are_shared(tmp_path: Path) -> None:
    """Two rings over the same rows would write over one another."""
    with create("flattened", directory="", inner="shared", maintain_segment_metadata=True) as buffer:
        buffer.extend(block([1, 2, 3]))
        assert buffer.storage.is_multiprocessing_safe and not buffer.is_multiprocessing_safe
        with pytest.raises(TypeError, match="FlattenedStorage.*SharedMemoryStorage"):
            pickle.dumps(buffer)
        buffer.dumps(tmp_path / "dump")
    with (
        ReplayBuffer.load_from(tmp_path / "dump", multiprocessing=True) as reader,
        pickle.loads(pickle.dumps(reader)) as other,
    ):
        assert numbers(other) == [1, 2, 3] and other.get_segments() == [(0, 3)]


def test_settings_travel_with_the_handle() -> None:
    buffer = create("shared", directory="", cast=True, num_lanes=2, maintain_segment_metadata=True)
    with buffer, pickle.loads(pickle.dumps(buffer)) as twin:
        twin.append({"x": np.int32(3), "y": np.zeros(2)})
        assert twin.get_segments() == [] and twin.open_segment == (0, 1)


@pytest.mark.parametrize("kind", SHARED)
def test_closing_gives_up_the_lanes(kind: str, tmp_path: Path) -> None:
    """This process lives on; without that it would keep the lane from everybody else."""
    writer = create(
        kind, directory=tmp_path, capacity=4, maintain_segment_metadata=True, multiprocessing=True
    )
    with open(
        writer.inner_storage.rows.path or f"/proc/self/fd/{writer.inner_storage.rows._segment.fd}", "rb"
    ) as f:
        header_fd = os.dup(f.fileno())
    writer.append(sample(1))
    owner = writer.inner_storage.rows.native.owner(0)
    assert _core.pid_of(owner) == os.getpid()
    writer.close()
    # 256 bytes of header, then the lane: reserved, cursor, tail, epoch, owner
    word = int.from_bytes(os.pread(header_fd, 8, 256 + 4 * 8), "little")
    os.close(header_fd)
    assert word == 0
    if kind == "memmap":
        with ReplayBuffer.load_from(next(tmp_path.glob("live-*")), read_only=False) as again:
            assert again.get_segments() == [(0, 1)] and again.open_segment is None
            again.extend(block([2]))


@pytest.mark.process
def test_a_process_that_saw_errors_ends_well() -> None:
    code = """
import recollect as rc
buffer = rc.ReplayBuffer.create("memory", {"x": ((), "int8")}, capacity=4, maintain_segment_metadata=True)
buffer.append({"x": 1})
for call in (lambda: buffer.remove_at(0), lambda: buffer.extend({"x": [1, 2]})):
    try:
        call()
    except rc.SegmentOpenError:
        print("refused")
"""
    path = str(Path(recollect.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused"]), done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_writes_copy(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=3) as buffer:
        given = block([1, 2, 3])
        buffer.extend(given)
        one = sample(4)
        buffer.append(one)
        given["x"][:], one["y"][:] = 99, 99
        assert numbers(buffer) == [2, 3, 4]
        reads = [buffer[:], buffer[0], buffer.get_column_at(("y",), [0]), buffer.get_flattened_at(0)]
        if kind in ROW_KINDS:
            reads.append(buffer.get_packed_at([0]))
        kept = pickle.dumps(reads)
        buffer.extend(block([7, 8, 9]))
        buffer.set_at(0, sample(5))
        assert pickle.dumps(reads) == kept
        reads[0]["x"][:] = -1
        reads[3][:] = -1
        assert numbers(buffer) == [5, 8, 9]
        for array in (reads[0]["x"], reads[0]["y"], reads[1]["y"]):
            assert array.flags.writeable

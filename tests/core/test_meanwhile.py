"""What other threads and processes change meanwhile: arrays, indices, and the words of shared memory."""

from __future__ import annotations

import os
import random
import resource
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.core.make import codec_of, index_of, make_rows
from tests.process.killing import in_child

from recollect import _core
from recollect.errors import AttachError, FormatError, LaneBusyError, RecollectError
from recollect.memory.latest import Latest
from recollect.memory.ring import Ring
from recollect.memory.rows import Rows
from recollect.spaces import compile_layout

LAYOUT = compile_layout({"x": ((2,), "int64")})
LANE_AT = _core.HEADER_NBYTES
CURSOR, EPOCH, OWNER, OP, JOURNAL = 8, 24, 32, 72, 80
INSTALL, DOWN, UP = 5, 3, 4


class Key(str):
    """A key whose comparison runs `meanwhile`, as that of a caller's own class may."""

    meanwhile: Callable[[], None]

    def __eq__(self, other: object) -> bool:
        self.meanwhile()
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_an_array_that_is_resized_while_its_batch_is_looked_at_is_refused() -> None:
    rows = make_rows(16, 1024)
    fields = [(0, np.dtype(np.int64), (), False), (8, np.dtype(np.int64), (), False)]
    codec = _core.Codec(fields, ("dict", (("a", ("leaf", 0)), ("b", ("leaf", 1)))), 16)
    first, last = np.arange(512), Key("b")
    last.meanwhile = lambda: first.resize(1, refcheck=False)
    with pytest.raises(ValueError, match="keep their memory"):
        rows.extend(codec, {"a": first, last: np.arange(512)})
    assert rows.count() == 0


def test_flags_and_indices_of_odd_bytes_are_read_as_numpy_reads_them() -> None:
    rows, codec = make_rows(8, 16, tagged=True), codec_of(np.int64)
    ends = np.array([2, 0, 255, 0], np.uint8).view(bool)
    rows.write(codec, [np.arange(4)], 4, 0, ends)
    assert rows.segments()[3].tolist() == [1, 2, 1]
    unaligned = np.frombuffer(b"\0" + struct.pack("<2q", 3, 1), np.uint8)[1:].view(np.int64)
    assert rows.read(codec, unaligned).tolist() == [3, 1]
    with pytest.raises(TypeError):
        rows.read(codec, np.array([1], ">i8"))


def test_a_removal_beyond_2_to_the_32_moves_the_rows_behind_it() -> None:
    n, at = 2**32 + 100, 2**32 + 10
    with tempfile.TemporaryFile() as file:
        header, words = 4096, -(-8 * n // 4096) * 4096
        os.ftruncate(file.fileno(), header + words + n)
        mapping = _core.Mapping(file.fileno(), 0, header + words + n, True)
        rows = _core.Rows(
            mapping,
            n,
            1,
            1,
            False,
            True,
            False,
            -1,
            ((mapping, header), None, None, (mapping, header + words)),
        )
        for offset in (0, CURSOR):
            mapping.store(LANE_AT + offset, n)
        mapping.view(header + words + at, 90)[:] = np.arange(90)
        rows.remove(index_of(at))
        assert mapping.view(header + words + at, 89).tolist() == list(range(1, 90))
        assert rows.count() == n - 1
        rows.close()


@pytest.mark.parametrize("op", [INSTALL, DOWN, UP])
@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("writable", [True, False])
def test_a_file_with_a_damaged_change_under_way_is_a_format_error_and_does_not_grow(
    tmp_path: Path, op: int, capacity: int | None, writable: bool
) -> None:
    path = tmp_path / "rows"
    rows = Rows.in_file(path, LAYOUT, capacity)
    rows.native.write(codec_of(np.int64, (2,)), [np.zeros((8, 2), np.int64)], 8)
    rows.close()
    nbytes = path.stat().st_size
    with path.open("r+b") as file:
        for offset, value in ((EPOCH, 1), (OWNER, 0), (OP, op)):
            file.seek(LANE_AT + offset)
            file.write(struct.pack("<Q", value))
        file.seek(LANE_AT + JOURNAL)
        file.write(struct.pack("<5Q", 2**40, 2**50, 2**41, 7, 2**51))

    def open_it() -> None:
        # If it grows, then not until the disk is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
        with pytest.raises(FormatError, match="damaged"):
            Rows.open_file(path, LAYOUT, writable=writable).native.count()

    in_child(open_it)
    assert path.stat().st_size == nbytes


def test_a_mailbox_whose_word_names_no_slot_is_an_attach_error() -> None:
    box = Latest.create([8])
    box.publish([np.zeros(1)])
    box._segment.mapping.store(256, 1 << 2 | 3)  # type: ignore[union-attr]
    with pytest.raises(AttachError):
        box.latest([np.zeros(1)])
    box.cleanup()


def test_a_ring_whose_lane_was_given_to_a_process_that_nobody_can_look_up_is_busy() -> None:
    ring = Ring.create({"x": ((2,), "int64")}, 2)
    ring.claim()
    mapping = ring._segment.mapping  # type: ignore[union-attr]
    me = _core.own_word()
    for at in range(256, 256 + _core.ring_control_nbytes(1, 2), 8):
        if mapping.load(at) == me:
            mapping.store(at, me ^ 1 << 50)  # of another pid namespace
    with pytest.raises(LaneBusyError):
        ring.claim(0.0)
    ring.cleanup()


def _scribble(mapping: _core.Mapping, rng: random.Random, first: int, last: int) -> None:
    words = (0, 1, 2, 3, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, rng.getrandbits(64), rng.getrandbits(8))
    for _ in range(rng.randint(1, 4)):
        mapping.store(rng.randrange(first, last, 8), rng.choice(words))


def _attempt(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with suppress(RecollectError, IndexError, ValueError, OSError):
            call()


def _scribbled_rows(seed: int, capacity: int | None, tagged: bool) -> None:
    rng = random.Random(seed)
    codec = codec_of(np.int64, (2,))
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "rows"
        rows = Rows.in_file(path, LAYOUT, capacity, 2 if capacity else 1, tagged)
        n, nbytes = rows.native, path.stat().st_size
        block = [np.zeros((20, 2), np.int64)]
        n.write(codec, block, 20)
        stream = _core.Stream()
        _scribble(rows.header, rng, LANE_AT, LANE_AT + 128 * rows.geometry.n_lanes)
        _attempt(
            n.count,
            lambda: n.read(codec, index_of(0, 5, 19)),
            lambda: n.draw(codec, stream, 32),
            n.segments,
            lambda: n.write(codec, block, 20),
            lambda: n.append(codec, np.zeros(2, np.int64)),
            lambda: n.remove(index_of(3, 7)),
            lambda: n.overwrite(codec, index_of(2), [np.zeros((1, 2), np.int64)]),
            n.counters,
            n.clear,
        )
        assert path.stat().st_size <= max(nbytes * 64, 1 << 20)
        rows.close()


def _scribbled_ring(seed: int) -> None:
    rng = random.Random(seed)
    ring = Ring.create({"x": ((2,), "int64")}, 2, policy=rng.choice(("block", "drop_oldest", "drop_newest")))
    ring.claim()
    ring.commit(1)
    ring.claim()
    mapping = ring._segment.mapping  # type: ignore[union-attr]
    _scribble(mapping, rng, 256, 256 + _core.ring_control_nbytes(1, 2))
    _attempt(
        lambda: ring.commit(2),
        lambda: ring.claim(0.0),
        lambda: ring.take(0.0),
        ring.release,
        ring.stats,
        ring.available,
    )
    ring.cleanup()


@pytest.mark.parametrize("n", [60, pytest.param(100_000, marks=pytest.mark.soak)])
def test_scribbled_words_crash_nobody(n: int) -> None:
    """Each call ends with a value or an error of ours; in a child, so that a crash is its alone."""

    def all_of_them() -> None:
        for seed in range(n):
            if seed % 3 == 0:
                _scribbled_ring(seed)
            else:
                _scribbled_rows(seed, None if seed % 3 == 1 else 64, seed % 2 == 0)

    in_child(all_of_them)


def _forged_removal(to: int, from_: int, base: int, moved: int) -> None:
    """A removal of the two oldest of 2**31 + 100 rows of a byte, killed when it had moved `moved` of the last 101."""
    half = 2**31
    n, header = half + 100, 4096
    words = -(-8 * n // 4096) * 4096
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), header + words + n)
        mapping = _core.Mapping(file.fileno(), 0, header + words + n, True)
        sections = ((mapping, header), None, None, (mapping, header + words))
        rows = _core.Rows(mapping, n, 1, 1, False, True, False, -1, sections)
        for offset, value in ((0, n), (CURSOR, n), (EPOCH, 1), (OP, DOWN)):
            mapping.store(LANE_AT + offset, value)
        for i, value in enumerate((to << 32 | from_, base, 2, 2, n)):
            mapping.store(LANE_AT + JOURNAL + 8 * i, value)
        mapping.store(header + 8 * (half + 50), 1 << 63)  # one more to be removed
        last = np.arange(1, 102, dtype=np.uint8)
        mapping.view(header + words + half - 1, 101)[:] = last
        mapping.view(header + words + half - 3, moved)[:] = last[:moved]
        assert rows.count() == n - 3
        left = np.delete(last, 51).tolist()
        assert mapping.view(header + words + half - 3, 100).tolist() == left
        codec = _core.Codec([(0, np.dtype(np.uint8), (), False)], ("leaf", 0), 1)
        assert rows.read(codec, np.arange(n - 103, n - 3)).tolist() == left
        assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 26
        rows.close()


@pytest.mark.parametrize(
    ("to", "from_", "base", "moved"),
    [
        (2**31 - 3, 2**31 - 1, 0, 0),
        (2**31, 2**31 + 2, 0, 3),
        (2**31, 2**31 + 2, 2**31 | 2**63, 3),  # the base has moved on, and the counts have not
        (0, 2, 2**31 | 2**63, 3),  # they have
        (0, 2, 2**31, 3),
    ],
)
def test_a_removal_that_was_killed_at_2_to_the_31_is_finished(
    to: int, from_: int, base: int, moved: int
) -> None:
    in_child(lambda: _forged_removal(to, from_, base, moved))


def test_a_window_that_changes_while_rows_are_removed_is_read_once() -> None:
    def remove() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))  # not for ever, if it follows the new cursor
        rows = Rows.in_shared(LAYOUT, 64, 1, True)
        rows.native.write(codec_of(np.int64, (2,)), [np.zeros((64, 2), np.int64)], 64)
        _core.arm_moment(0, lambda: rows.header.store(LANE_AT + CURSOR, 2**61))
        rows.native.remove(index_of(50, 60))
        assert rows.native.count() == 62
        assert rows.native.segments()[3].tolist() == [50, 9, 3]

    in_child(remove)


def test_an_array_below_a_memoryview_is_not_resized_while_it_is_filled() -> None:
    def fill() -> None:
        rows, codec = make_rows(16, 64, 2), codec_of(np.int64, (2,))
        rows.write(codec, [np.ones((4, 2), np.int64)], 4)
        below = np.zeros((8192, 2), np.int64)
        out = np.asarray(memoryview(below))  # type: ignore[arg-type]
        refused = []

        def resize() -> None:
            try:
                below.resize((1, 2), refcheck=False)
            except ValueError as error:
                refused.append(error)

        _core.arm_moment(0, resize)
        rows.read(codec, np.zeros(8192, np.int64), out=out)
        assert len(refused) == 1
        assert below.all()

    in_child(fill)


@pytest.mark.parametrize("call", ["read", "draw"])
def test_an_array_that_is_resized_while_a_read_waits_is_refused(call: str) -> None:
    """A moment stands for the wait for a lane, in which other threads run."""

    def fill() -> None:
        rows, codec = make_rows(16, 64, 2), codec_of(np.int64, (2,))
        rows.write(codec, [np.ones((4, 2), np.int64)], 4)
        out = np.zeros((3, 2), np.int64)
        _core.arm_moment(0, lambda: out.resize((100_000, 2), refcheck=False))
        with pytest.raises(ValueError, match="keep their memory"):
            if call == "read":
                rows.read(codec, index_of(0, 1, 2), out=out)
            else:
                rows.draw(codec, _core.Stream(), 3, out)

    in_child(fill)


def test_a_lane_that_another_process_has_now_is_not_written_to() -> None:
    codec = codec_of(np.int64, (2,))
    rows = Rows.in_shared(LAYOUT, 64)
    n, one = rows.native, np.ones(2, np.int64)
    n.append(codec, one)
    rows.header.store(LANE_AT + OWNER, _core.process_word(os.getppid()))
    for write in (
        lambda: n.append(codec, one),
        lambda: n.extend(codec, np.ones((3, 2), np.int64)),
        lambda: n.extend_lanes(codec, np.ones((1, 2), np.int64), index_of(0)),
        lambda: n.overwrite(codec, index_of(0), [np.zeros((1, 2), np.int64)]),
        lambda: n.remove(index_of(0)),
    ):
        with pytest.raises(LaneBusyError):
            write()
    assert n.read(codec, index_of(0)).tolist() == [[1, 1]]
    assert n.count() == 1
    rows.header.store(LANE_AT + OWNER, 0)
    n.append(codec, one)
    assert n.count() == 2
    rows.close()


def test_a_lane_is_not_released_by_an_object_that_only_reads(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = Rows.in_file(path, LAYOUT, 64, tagged=True)
    rows.native.append(codec_of(np.int64, (2,)), np.ones(2, np.int64))
    reader = Rows.open_file(path, LAYOUT, writable=False)
    reader.native.release(0)
    assert rows.native.owner(0) == _core.own_word()
    assert rows.native.has_open(0)
    reader.close()
    rows.native.release(0)
    assert rows.native.owner(0) == 0
    rows.close()


def test_a_view_of_an_array_that_was_resized_is_refused() -> None:
    def write() -> None:
        rows, codec = make_rows(16, 1024), codec_of(np.int64, (2,))
        below = np.ones((512, 2), np.int64)
        view = below[:4]
        seen = np.asarray(memoryview(below))  # type: ignore[arg-type]
        rows.extend(codec, view)
        rows.extend(codec, seen)
        below.resize((2, 2), refcheck=False)
        for gone in (view, seen):
            with pytest.raises(ValueError, match="keep their memory"):
                rows.extend(codec, gone)
        assert rows.count() == 516

    in_child(write)

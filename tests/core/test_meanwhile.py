"""What other threads and processes change meanwhile: arrays, indices, and the words of shared memory."""

from __future__ import annotations

import os
import random
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
from recollect.errors import AttachError, FormatError, RecollectError
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

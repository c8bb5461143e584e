"""Words of shared memory and of live files that no writer of ours left: an error of ours or data, and no crash."""

from __future__ import annotations

import os
import random
import resource
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.core.make import codec_of, index_of
from tests.process.killing import in_child

from recollect import _core
from recollect.errors import AttachError, FormatError, RecollectError
from recollect.ipc import SharedObsNormStats
from recollect.ipc.replay_pipelines.slots import PackSlots
from recollect.memory.latest import Latest
from recollect.memory.rows import Rows
from recollect.memory.segment import WORDS_AT
from recollect.spaces import compile_layout

LAYOUT = compile_layout({"x": ((2,), "int64")})
CODEC = codec_of(np.int64, (2,))
LANES_AT = _core.HEADER_NBYTES
EVIL = (0, 3, 2**32, 2**61, 2**63, 2**64 - 1)
CAPACITY_AT, CRC_AT = 64, 96


def attempt(*calls: Callable[[], Any]) -> None:
    for call in calls:
        with suppress(RecollectError, IndexError, OSError):
            call()


def uses(rows: Rows) -> list[Callable[[], Any]]:
    """Everything that goes by the words of lanes, stamps and tags."""
    n, stream, some = rows.native, _core.Stream(), index_of(0, 5, 19)
    block = [np.zeros((20, 2), np.int64)]
    frames = index_of(-1, 0, 1)
    return [
        n.count, n.segments, n.windows, n.counters, lambda: n.open_segment(0),
        lambda: n.read(CODEC, some), lambda: n.draw(CODEC, stream, 32), lambda: n.locate(some),
        lambda: n.index_of(some, some), lambda: n.read_rows(CODEC, some),
        lambda: _core.read_frames(n, CODEC, some, None, frames, True),
        lambda: _core.draw_frames(n, CODEC, 1, 0, 16, frames, True, 3, True),
        lambda: _core.runs_at(n, some, True), lambda: _core.window_starts(n, True, 3, True),
        lambda: _core.Priorities(n.share(), 0.6, 0.0).draw(CODEC, 1, 0, 16, 0.4),
        lambda: n.write(CODEC, block, 20), lambda: n.append(CODEC, np.zeros(2, np.int64)),
        lambda: n.overwrite(CODEC, some, [np.zeros((3, 2), np.int64)]), lambda: n.remove(index_of(3, 7)), n.clear,
    ]  # fmt: skip


@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("writable", [True, False])
def test_a_file_with_any_word_of_its_lanes_wrong_is_refused_or_read(
    tmp_path: Path, capacity: int | None, writable: bool
) -> None:
    path = tmp_path / "rows"
    rows = Rows.in_file(path, LAYOUT, capacity, tagged=True)
    rows.native.write(CODEC, [np.zeros((20, 2), np.int64)], 20)
    rows.close()
    good = path.read_bytes()

    def all_of_them() -> None:
        # If it grows, then not until the disk is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
        for word in range(16):
            for value in EVIL:
                path.write_bytes(good)
                with path.open("r+b") as file:
                    file.seek(LANES_AT + 8 * word)
                    file.write(struct.pack("<Q", value))
                with suppress(FormatError):
                    opened = Rows.open_file(path, LAYOUT, writable=writable)
                    attempt(*uses(opened))
                    opened.close()
                assert path.stat().st_size <= 4 * len(good)

    in_child(all_of_them)


def test_a_header_that_is_signed_but_wrong_is_a_format_error(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    Rows.in_file(path, LAYOUT, 64, 2).close()
    good = path.read_bytes()

    def all_of_them() -> None:
        for word in range(3):
            for value in EVIL:
                head = bytearray(good[: CRC_AT + 4])
                struct.pack_into("<Q", head, CAPACITY_AT + 8 * word, value)
                struct.pack_into("<I", head, CRC_AT, _core.crc32c(bytes(head[:CRC_AT])))
                path.write_bytes(bytes(head) + good[len(head) :])
                with pytest.raises(FormatError):
                    Rows.open_file(path, LAYOUT, writable=True)
                assert path.stat().st_size == len(good)

    in_child(all_of_them)


def scribble_beside(mapping: _core.Mapping, places: range, seed: int, work: Callable[[], None]) -> None:
    """Let a second process write odd words into the memory all the time, while this one works."""
    pid = os.fork()
    if pid == 0:
        rng = random.Random(seed)
        for _ in range(10_000_000):  # it is killed long before
            mapping.store(rng.choice(places), rng.choice((*EVIL, rng.getrandbits(64), rng.getrandbits(6))))
        os._exit(0)
    try:
        work()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("n", [6, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_process_that_overwrites_shared_rows_crashes_no_other(n: int, tagged: bool) -> None:
    def beside() -> None:
        rows = Rows.in_shared(LAYOUT, 64, 2, tagged)
        g = rows.geometry
        places = range(LANES_AT, g.rows_at, 8)

        def work() -> None:
            for _ in range(n):
                attempt(*uses(rows))

        scribble_beside(rows.header, places, n, work)

    in_child(beside)


@pytest.mark.parametrize("n", [20, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_process_that_overwrites_a_mailbox_crashes_no_other(n: int) -> None:
    def beside() -> None:
        box, got = Latest.create([4096]), np.zeros(512)
        mapping = box.segment().mapping

        def work() -> None:
            for _ in range(n):
                attempt(lambda: box.publish([np.ones(512)]), lambda: box.version, lambda: box.stats())
                if mapping.load(WORDS_AT) & 3 == 3:
                    attempt(lambda: box.latest([got]))

        scribble_beside(mapping, range(WORDS_AT, WORDS_AT + _core.LATEST_WORDS_NBYTES, 8), n, work)

    in_child(beside)


def test_statistics_with_a_wrong_head_are_an_attach_error() -> None:
    for head in (b"\xff" * 24, b"float99".ljust(24, b"\0"), b"float32".ljust(24, b"\0")):
        stats = SharedObsNormStats(None, max_bytes=1024)
        block = np.zeros(128, np.uint8)
        block[:] = np.frombuffer(struct.pack("<24sQ12Q", head, 2, 2**40, 2**40, *[0] * 10), np.uint8)
        stats._box.publish_at([block], [0])
        with pytest.raises(AttachError):
            stats.latest()
        stats.cleanup()


def test_slots_with_a_request_that_cannot_be_are_an_attach_error() -> None:
    slots = PackSlots(4, 8)
    assert slots.ask(1, 0, 0, 7) == 1
    with pytest.raises(AttachError):
        slots.request()
    for word in (0x1FF, 2**64 - 1):
        slots.mapping.store(WORDS_AT, word)
        for call in (slots.stats, slots.claim, slots.request):
            with pytest.raises(AttachError):
                call()
    slots.cleanup()

"""Shared segments: names, the checks of attaching, closing for everybody. For any kind of primitive."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.means import needs_linux
from tests.process.killing import in_child

import recollect as rc
from recollect.memory import segment as segments
from recollect.memory.segment import WORDS_AT, Name, SharedSegment, registry

pytestmark = pytest.mark.process
WORDS = 64


class Core:
    """The native object of a primitive that does nothing."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def make(schema: Any = None, kind: str = "thing", data_nbytes: int = 5000) -> SharedSegment:
    return segments.create(kind, schema or {"a": [1, "x"]}, WORDS, data_nbytes, "test").hold(lambda s: Core())


def test_layout_of_a_segment() -> None:
    segment = make()
    assert segment.data_at == 8192 and segment.nbytes == 16384
    assert os.fstat(segment.fd).st_size == segment.nbytes
    assert segment.nbytes == segments.segment_nbytes({"a": [1, "x"]}, WORDS, 5000)
    assert segment.is_owner and not segment.is_closed
    segment.release()


def test_a_schema_of_many_pages() -> None:
    schema = {"names": [f"layer.{i}.weight" for i in range(2000)]}
    segment = make(schema)
    again = segments.attach(segment.name, "thing", WORDS)
    assert again.schema == schema and len(segment.name) < 150
    assert segment.nbytes == segments.segment_nbytes(schema, WORDS, 5000) > 4096 * 8
    segment.release()


@needs_linux
def test_it_is_sealed_against_resizing() -> None:
    segment = make()
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == 7
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.release()


def test_another_process_attaches_by_name() -> None:
    segment = make()
    segment.mapping.store(segment.data_at, 77)
    name = segment.name

    def work() -> None:
        registry.clear()  # as in a process that was not forked from the owner
        here = segments.attach(name, "thing", WORDS).hold(lambda s: Core())
        assert here is not segment and here.schema == segment.schema and not here.is_owner
        assert here.mapping.load(here.data_at) == 77
        here.mapping.store(here.data_at, 78)
        assert here.name != name  # its own descriptor

    in_child(work)
    assert segment.mapping.load(segment.data_at) == 78
    segment.release()


def test_one_process_has_one_segment_and_one_core() -> None:
    segment = make()
    again = segments.attach(segment.name, "thing", WORDS).hold(lambda s: Core())
    assert again is segment
    core = segment.core
    segment.release()
    assert not core.is_closed and segment.fd >= 0
    again.release()
    assert core.is_closed and segment.fd == -1


@pytest.mark.parametrize("text", ["", "x", "recollect-thing-1-2", "recollect-thing-x-1-00-ab", None, 3])
def test_what_is_no_name(text: Any) -> None:
    with pytest.raises(rc.AttachError, match="must be the `name`"):
        segments.attach(text, "thing", WORDS)


@needs_linux
def test_each_difference_is_named() -> None:
    segment = make()
    name = Name.parse(segment.name, "thing")
    registry.clear()

    def attach(changed: Name, kind: str = "thing", words: int = WORDS) -> None:
        segments.attach(str(changed), kind, words)

    with pytest.raises(rc.AttachError, match="kind must be other, found thing"):
        attach(name, "other")
    with pytest.raises(rc.AttachError, match="kind must be other, found thing"):
        attach(replace(name, kind="other"), "other")
    with pytest.raises(rc.AttachError, match=r"layout hash must be 00, found [0-9a-f]{32}"):
        attach(replace(name, schema_hash="00"))
    with pytest.raises(rc.AttachError, match="words must be 128, found 64"):
        attach(name, words=128)
    with pytest.raises(rc.AttachError, match="gone and the descriptor was reused"):
        attach(replace(name, nonce=bytes(16)))
    with pytest.raises(rc.AttachError, match="gone or closed it"):
        attach(replace(name, pid=2**22 + 1))
    segment.release()


def damage(segment: SharedSegment, at: int, data: bytes) -> None:
    segment.mapping.view(at, len(data))[:] = np.frombuffer(data, np.uint8)


@pytest.mark.parametrize(
    ("at", "data", "text"),
    [
        (0, b"RECOLROW", "magic must be b'RECOLSHM', found b'RECOLROW'"),
        (8, struct.pack("<I", 9), "version must be 1, found 9"),
        (80, b"\xff", "checksum of its header"),
        (4096, b"!", "schema does not have the hash"),
    ],
)
def test_damage_is_noticed(at: int, data: bytes, text: str) -> None:
    segment = make()
    damage(segment, at, data)
    name = segment.name
    registry.clear()
    with pytest.raises(rc.AttachError, match=text):
        segments.attach(name, "thing", WORDS)
    segment.release()


@needs_linux
def test_a_descriptor_that_was_reused() -> None:
    segment = make()
    name = Name.parse(segment.name, "thing")
    segment.release()
    with tempfile.TemporaryFile() as other, pytest.raises(rc.AttachError, match="reused"):
        segments.attach(str(replace(name, fd=other.fileno())), "thing", WORDS)
    fd = os.memfd_create("recollect")
    try:
        with pytest.raises(rc.AttachError, match="size must be at least 4096, found 0"):
            segments.attach(str(replace(name, fd=fd)), "thing", WORDS)
    finally:
        os.close(fd)


@needs_linux
@pytest.mark.parametrize("more", [-4096, 4096])
def test_a_file_of_another_size_than_its_header_says(more: int) -> None:
    segment = make()
    name, nbytes = Name.parse(segment.name, "thing"), segment.nbytes + more
    fd = os.memfd_create("recollect")
    try:
        os.write(fd, segment.mapping.view(0, segment.nbytes).tobytes())
        os.ftruncate(fd, nbytes)
        registry.clear()
        with pytest.raises(rc.AttachError, match=f"size must be {segment.nbytes}, found {nbytes}"):
            segments.attach(str(replace(name, fd=fd)), "thing", WORDS)
    finally:
        os.close(fd)
        segment.release()


def test_marking_closed_is_seen_and_wakes() -> None:
    segment = make()

    def work() -> None:
        assert segment.mapping.wait(WORDS_AT, 0, 10) and segment.is_closed
        assert not segment.is_owner

    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    while (
        Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S"
    ):  # asleep, and not just woken
        os.sched_yield()
    start = time.monotonic()
    segment.mark_closed([WORDS_AT])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and time.monotonic() - start < 5
    segment.release()


def test_nobody_released_it() -> None:
    make()
    gc.collect()  # the fixture finds no descriptor left


def test_what_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(rc.BudgetError, match="needs .*; make it smaller"):
        make(data_nbytes=1 << 50)

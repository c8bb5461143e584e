"""Segments of rows: one per process, whatever other threads close meanwhile."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.killing import in_child

from recollect import _core
from recollect.errors import ClosedError
from recollect.memory import rows as memory_rows
from recollect.memory.latest import Latest
from recollect.memory.ring import Ring
from recollect.memory.rows import Rows
from recollect.memory.segment import SharedSegment, registry
from recollect.spaces import compile_layout

LAYOUT = compile_layout({"x": ((2,), "int64")})


def test_a_reader_that_closes_leaves_the_writers_of_its_process_their_locks(tmp_path: Path) -> None:
    """Two objects of one process that mean the same rows share them natively: else their threads take no turns."""
    writer = Rows.in_file(tmp_path / "rows", LAYOUT, 8)
    Rows.open_file(tmp_path / "rows", LAYOUT, writable=False).close()
    again = pickle.loads(pickle.dumps(writer))
    assert again.native is writer.native
    again.close()
    writer.close()


def test_what_is_closed_as_it_is_attached_to_says_so() -> None:
    rows = Rows.in_shared(LAYOUT, 8)
    found = memory_rows.attach(rows.segment().handle())
    rows.close()
    with pytest.raises(ClosedError, match="was closed"):
        Rows(found, LAYOUT)


def test_a_segment_that_was_not_made_closes_no_descriptor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its number may be another file's."""
    rows, made = Rows.in_shared(LAYOUT, 8), []

    class Refused:
        def __init__(self, *args: Any) -> None:
            raise MemoryError

    registry.clear()  # as in another process
    monkeypatch.setattr(_core, "Rows", Refused)
    monkeypatch.setattr(os, "close", lambda fd, close=os.close: (made.append(fd), close(fd)))
    with pytest.raises(MemoryError):
        pickle.loads(pickle.dumps(rows))
    gc.collect()
    assert len(made) == 1
    monkeypatch.undo()
    rows.close()


def closed_meanwhile(monkeypatch: pytest.MonkeyPatch, box: Any) -> None:
    """Let another thread close it between the look whether it is open and its use."""
    look = SharedSegment.is_closed.fget

    def late(segment: SharedSegment) -> bool:
        is_closed = bool(look(segment))  # type: ignore[misc]
        box.close()
        return is_closed

    monkeypatch.setattr(SharedSegment, "is_closed", property(late))


@pytest.mark.parametrize("use", [lambda box: box.name, lambda box: box.wait_newer(0, 5.0)])
def test_a_mailbox_closed_in_the_middle_of_a_call_says_so(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Latest], Any]
) -> None:
    box = Latest.create([8])
    closed_meanwhile(monkeypatch, box)
    with pytest.raises(ClosedError, match="was closed"):
        use(box)


def test_memory_that_was_given_up_says_so() -> None:
    """To a thread that had it in hand."""
    ring = Ring.create({"x": ((2,), "int64")})
    slots = ring.segment()
    ring.close()
    with pytest.raises(ClosedError, match="was closed"):
        slots.mapping.view(0, 8)
    with pytest.raises(ClosedError, match="was closed"):
        slots.name
    rows = Rows.in_shared(LAYOUT, 8)
    segment = rows.segment()
    rows.close()
    with pytest.raises(ClosedError, match="was closed"):
        segment.mapping.load(0)
    with pytest.raises(ClosedError, match="was closed"):
        segment.handle()


@pytest.mark.process
def test_a_child_forked_while_a_thread_attaches_can_attach_too() -> None:
    rows, box = Rows.in_shared(LAYOUT, 8), Latest.create([8])
    handle, name = pickle.dumps(rows), box.name
    held, forked = threading.Event(), threading.Event()

    def attach() -> None:
        with registry.lock:
            held.set()
            forked.wait(0.1)  # the fork waits for this thread

    def work() -> None:
        registry.clear()
        pickle.loads(handle).close()
        Latest.attach(name).close()

    thread = threading.Thread(target=attach)
    thread.start()
    assert held.wait(5.0)
    in_child(work)
    forked.set()
    thread.join()
    assert not registry.lock.locked()
    rows.close()
    box.cleanup()

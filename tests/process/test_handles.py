"""Handles: another process attaches by a few bytes, however it was started; a stale one is refused with a reason."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.means import needs_linux
from tests.process.killing import in_child

import recollect as rc
from recollect.memory import rows as memory_rows
from recollect.memory.segment import registry

pytestmark = pytest.mark.process
SPACE = {"id": ((), "int64"), "words": ((3,), "float32")}


def block(first: int, n: int) -> dict[str, Any]:
    return {"id": np.arange(first, first + n), "words": np.ones((n, 3), np.float32)}


def make(kind: str, tmp_path: Path, **kwargs: Any) -> rc.ReplayBuffer:
    path = {"cache_path": tmp_path / "live"} if kind == "memmap" else {}
    return rc.ReplayBuffer.create(
        kind, SPACE, capacity=8, multiprocessing=True, num_lanes=2, **path, **kwargs
    )


def work(buffer: rc.ReplayBuffer, first: int) -> None:
    """In another process: read what is there, write beside it."""
    with buffer, buffer.on_lane(1) as lane:
        assert buffer[...]["id"].tolist() == [1, 2]
        lane.extend(block(first, 2))


@pytest.mark.parametrize("kind", ["shared", "memmap"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_attach_from(method: str, kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(block(1, 2))
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=work, args=(buffer, 50), daemon=True)
        child.start()
        child.join(40)
        assert child.exitcode == 0
        child.close()
        assert buffer[...]["id"].tolist() == [1, 2, 50, 51]


@pytest.mark.parametrize("kind", ["shared", "memmap"])
def test_attach_from_an_unrelated_process(kind: str, tmp_path: Path) -> None:
    script = (
        "import pickle, sys; b = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(b[...]['id'].tolist()); b.on_lane(1).append({'id': 9, 'words': [0.0, 0.0, 0.0]})"
    )
    with make(kind, tmp_path) as buffer:
        buffer.extend(block(1, 2))
        handle = pickle.dumps(buffer)
        assert len(handle) < 4096  # a handle, no data
        done = subprocess.run(
            [sys.executable, "-c", script, handle.hex()],
            capture_output=True,
            text=True,
            timeout=40,
            check=True,
        )
        assert done.stdout.strip() == "[1, 2]"
        assert buffer[...]["id"].tolist() == [1, 2, 9]


def test_attaching_at_home_is_the_same_segment(tmp_path: Path) -> None:
    with make("shared", tmp_path) as buffer, pickle.loads(pickle.dumps(buffer)) as again:
        again.extend(block(1, 2))
        assert buffer[...]["id"].tolist() == [1, 2]
        again.close()
        buffer.extend(block(3, 1))  # closing one handle leaves the other's memory alone
        assert len(buffer) == 3


def test_owner_that_closed_or_is_gone(tmp_path: Path) -> None:
    buffer = make("shared", tmp_path)
    handle = pickle.dumps(buffer)
    buffer.close()
    with pytest.raises(rc.AttachError, match="gone|closed"):
        pickle.loads(handle)

    def send(pipe: int) -> None:
        os.write(pipe, pickle.dumps(make("shared", tmp_path)))

    ours, theirs = os.pipe()
    in_child(lambda: send(theirs))
    dead = os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    with pytest.raises(rc.AttachError, match="gone or closed it"):
        pickle.loads(dead)


def test_attached_process_outlives_the_owner(tmp_path: Path) -> None:
    """The memory goes with its last user, not with its maker."""
    buffer = make("shared", tmp_path)
    buffer.extend(block(1, 2))
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        ok = buffer[...]["id"].tolist() == [1, 2]
        os._exit(0 if ok else 1)
    os.read(ready[0], 1)
    buffer.close()
    os.write(go[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (*ready, *go):
        os.close(fd)


def handle_of(buffer: rc.ReplayBuffer) -> Any:
    storage: Any = buffer.storage
    return storage.rows.segment().handle()


@needs_linux
def test_descriptor_that_was_reused(tmp_path: Path) -> None:
    buffer = make("shared", tmp_path)
    handle = handle_of(buffer)
    buffer.close()
    # The number now means another file, a pipe, or another buffer: each is noticed.
    for other in (tempfile.TemporaryFile, os.pipe, lambda: make("shared", tmp_path)):
        thing: Any = other()
        fds = thing if isinstance(thing, tuple) else ()
        try:
            fd = (
                handle_of(thing).fd
                if isinstance(thing, rc.ReplayBuffer)
                else fds[0]
                if fds
                else thing.fileno()
            )
            with pytest.raises(rc.AttachError, match="reused"):
                memory_rows.attach(replace(handle, fd=fd))
        finally:
            for f in fds:
                os.close(f)
            if not fds:
                thing.close()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    def attach_wrong(handle: Any) -> None:
        registry.clear()  # as if this process had never seen it
        for field, value in (
            ("row_nbytes", 16),
            ("capacity", 4),
            ("n_lanes", 1),
            ("tagged", True),
            ("layout_hash", "0" * 32),
        ):
            wrong = replace(handle, geometry=replace(handle.geometry, **{field: value}))
            with pytest.raises(rc.AttachError, match=field):
                memory_rows.attach(wrong)

    with make("shared", tmp_path) as buffer:
        in_child(lambda: attach_wrong(handle_of(buffer)))


@pytest.mark.parametrize(
    ("at", "data", "text"),
    [
        (0, b"RECOLSHM", "must begin with b'RECOLROW', got b'RECOLSHM'"),
        (8, b"\x09", "version"),
        (80, b"\xff\xff", "checksum"),
    ],
)
def test_a_damaged_header_is_refused(at: int, data: bytes, text: str, tmp_path: Path) -> None:
    with make("shared", tmp_path) as buffer:
        handle = handle_of(buffer)
        rows: Any = buffer.storage
        rows.rows.header.view(at, len(data))[:] = np.frombuffer(data, np.uint8)
        registry.clear()
        with pytest.raises(rc.AttachError, match=text):
            memory_rows.attach(handle)


@needs_linux
def test_a_memory_that_was_cut_is_refused(tmp_path: Path) -> None:
    with make("shared", tmp_path) as buffer:
        handle = handle_of(buffer)
        fd = os.memfd_create("recollect")
        try:
            for nbytes in (100, 4096):
                os.pwrite(fd, os.pread(handle.fd, nbytes, 0), 0)
                registry.clear()
                with pytest.raises(rc.AttachError, match=f"got {nbytes}.*truncated"):
                    memory_rows.attach(replace(handle, fd=fd))
        finally:
            os.close(fd)


def test_file_that_was_replaced(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        handle = pickle.dumps(buffer)
    # Another buffer at the same place: other rows, another file.
    make("memmap", tmp_path, overwrite=True).close()
    with pytest.raises(rc.AttachError, match="gone"):
        pickle.loads(handle)


def test_read_only_stays_read_only_elsewhere(tmp_path: Path) -> None:
    """A live file loaded for reading refuses writes, beside a writer of the same process and in a child."""
    with make("memmap", tmp_path) as writer, rc.ReplayBuffer.load_from(tmp_path / "live") as reader:
        writer.extend(block(1, 2))
        assert reader[...]["id"].tolist() == [1, 2]
        sent = pickle.loads(pickle.dumps(reader))
        for buffer in (reader, sent):
            for call in (
                lambda b: b.append({"id": 1, "words": [0.0, 0.0, 0.0]}),
                lambda b: b.extend(block(0, 1)),
                lambda b: b.set_at(0, {"id": 1, "words": [0.0, 0.0, 0.0]}),
                lambda b: b.remove_at(0),
                lambda b: b.clear(),
            ):
                with pytest.raises(rc.ReadOnlyError):
                    call(buffer)
        sent.close()
        assert writer[...]["id"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["shared", "memmap"])
def test_dropped_without_close_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """The descriptor, and with it the memory, goes with the last reference."""
    before = set(os.listdir("/proc/self/fd"))
    buffer = make(kind, tmp_path)
    assert set(os.listdir("/proc/self/fd")) - before
    del buffer
    gc.collect()
    assert not set(os.listdir("/proc/self/fd")) - before


def test_one_descriptor_per_buffer(tmp_path: Path) -> None:
    """However many leaves a space has."""
    before = len(os.listdir("/proc/self/fd"))
    space = {f"leaf{i}": ((2,), "float32") for i in range(100)}
    with rc.ReplayBuffer.create("shared", space, capacity=8, multiprocessing=True, num_lanes=4):
        assert len(os.listdir("/proc/self/fd")) == before + 1


def test_forked_child_reads_memory_but_may_not_write(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=8) as buffer:
        buffer.extend(block(1, 2))

        def child() -> None:
            assert buffer[...]["id"].tolist() == [1, 2]
            with pytest.raises(rc.ReadOnlyError):
                buffer.extend(block(5, 1))

        in_child(child)
        with pytest.raises(TypeError, match="SharedMemoryStorage"):
            pickle.dumps(buffer)
        buffer.extend(block(3, 1))
        assert len(buffer) == 3

"""Whether a process lives, where that cannot be seen: no descriptor, another pid namespace, no /proc, another boot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.means import needs_linux
from tests.process.test_lanes import until

import recollect as rc
from recollect import _core
from recollect.memory.latest import Latest
from recollect.memory.ring import Ring

pytestmark = pytest.mark.process
SPACE = ((), "int64")
NEW_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
OWN_BOOT = (  # as systemd-nspawn and LXC give their containers
    'f=$(mktemp) && echo 01234567-89ab-4cde-8f01-23456789abcd > "$f" && '
    'mount --bind "$f" /proc/sys/kernel/random/boot_id && rm "$f" && exec "$@"'
)
# How a process can be unable to look another up. One of them sees /proc of the namespace that it came from.
BLIND = {
    "no descriptor": [],
    "other pids": NEW_PIDS,
    "no proc": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"],
    "other pids, proc of the first": ["unshare", "--pid", "--fork", "--kill-child"],
    "a boot id of its own": ["unshare", "--mount", "sh", "-c", OWN_BOOT, "sh"],
    "other pids and a boot id of its own": [*NEW_PIDS, "sh", "-c", OWN_BOOT, "sh"],
}
START = """
import json, os, resource, sys
import recollect as rc
from recollect import _core
from recollect.errors import RecollectError
from recollect.memory.latest import Latest
from recollect.memory.ring import Ring
def say(**facts):
    print(json.dumps(facts), flush=True)
def fill_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
def outcome(work):
    try:
        return repr(work())
    except (RecollectError, OSError) as error:
        return type(error).__name__ + ": " + str(error)
"""


@cache
def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*BLIND["no proc"], "true"], capture_output=True)
    return done.returncode == 0 and subprocess.run([*NEW_PIDS, "true"], capture_output=True).returncode == 0


@contextmanager
def program(code: str, *args: object, how: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A Python program started in some way; it ends with its standard input."""
    if how and not can_unshare():
        pytest.skip("may not make namespaces here")
    command = [*how, sys.executable, "-c", START + code, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def is_busy(buffer: rc.ReplayBuffer) -> bool:
    try:
        buffer.append(1)
    except rc.errors.LaneBusyError:
        return True
    return False


def make(path: Path, **kwargs: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create(
        "memmap", SPACE, capacity=16, cache_path=path, multiprocessing=True, **kwargs
    )


APPEND = """
buffer = rc.ReplayBuffer.load_from(sys.argv[1], read_only=False)
if sys.argv[2] == "no descriptor":
    fill_descriptors()
say(outcome=outcome(lambda: buffer.append(-1)))
sys.stdin.read()
"""


@pytest.mark.parametrize("how", BLIND)
def test_a_live_writer_that_cannot_be_looked_up_keeps_its_lane(how: str, tmp_path: Path) -> None:
    with make(tmp_path / "live") as buffer:
        for n in range(4):
            buffer.append(n)
        with program(APPEND, tmp_path / "live", how, how=BLIND[how]) as other:
            said = heard(other)["outcome"]
            assert said.startswith("LaneBusyError") or (
                how == "no descriptor" and said.startswith("OSError")
            ), said
            for n in range(4, 8):
                buffer.append(n)
        assert [buffer[i] for i in range(len(buffer))] == list(range(8))


@needs_linux
def test_the_error_says_that_the_owner_is_in_another_namespace(tmp_path: Path) -> None:
    with make(tmp_path / "live") as buffer:
        buffer.append(0)
        with program(APPEND, tmp_path / "live", "", how=NEW_PIDS) as other:
            said = heard(other)["outcome"]
            assert f"process {os.getpid()} of another pid namespace" in said and "close it there" in said


@needs_linux
@pytest.mark.parametrize("how", ["other pids", "other pids and a boot id of its own"])
def test_the_lane_of_a_writer_in_another_namespace_is_free_once_it_was_killed(
    how: str, tmp_path: Path
) -> None:
    """A container that is started again finds its file as the one before left it."""
    with make(tmp_path / "live") as buffer:
        with program(APPEND, tmp_path / "live", "", how=BLIND[how]) as other:
            assert heard(other)["outcome"] == "None"
            with pytest.raises(rc.errors.LaneBusyError, match="container"):
                buffer.append(1)
        until(lambda: not is_busy(buffer))  # the end of a namespace takes a moment
        assert [buffer[i] for i in range(len(buffer))] == [-1, 1]


LOOK = """
ring, box = Ring.attach(sys.argv[1]), Latest.attach(sys.argv[2])
if sys.argv[4] == "no descriptor":
    _core.own_word()
    fill_descriptors()
import numpy as np
say(
    dead=_core.is_dead(int(sys.argv[3])),
    ring=outcome(lambda: ring.take(0.0)),
    writer=outcome(lambda: ring.claim(0.0)),
    box=outcome(lambda: box.publish([np.zeros(8, np.uint8)])),
    wait=outcome(lambda: box.wait_newer(9, 0.3)),
)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["no descriptor", "a boot id of its own"])
def test_roles_in_rings_and_boxes_are_not_taken_from_who_cannot_be_looked_up(how: str) -> None:
    ring, box = Ring.create({"n": SPACE}, 2), Latest.create([8])
    ring.claim()["n"][...] = 1
    ring.commit(0)
    ring.take()
    ring.claim()
    box.publish([memoryview(bytes(8))])  # type: ignore[list-item]
    me = _core.own_word()
    with program(LOOK, ring.name, box.name, me, how, how=BLIND[how]) as other:
        said = heard(other)
    assert said["dead"] is False
    assert all(said[k].startswith("LaneBusyError") for k in ("ring", "writer", "box")), said
    assert said["wait"] == "False"
    ring.cleanup()
    box.cleanup()


LIFE = """
if sys.argv[2] == "no descriptor":
    fill_descriptors()
word = int(sys.argv[1])
say(
    dead=_core.is_dead(word), text=_core.describe_process(word),
    own=_core.own_word() if sys.argv[2] != "no descriptor" else 0,
)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", BLIND)
def test_unknown_is_not_dead_on_either_side(how: str) -> None:
    with program(LIFE, _core.own_word(), how, how=BLIND[how]) as other:
        said = heard(other)
        assert not said["dead"] and f"process {os.getpid()}" in said["text"]
        assert not _core.is_dead(said["own"]) or not said["own"]
    if how == "other pids":
        assert not _core.is_dead(said["own"])  # it is, but nobody here can know


def other_boot(word: int) -> int:
    return word ^ (1 << 22) if word >> 22 & 1023 not in (1, 2) else word ^ (1 << 24)


def test_a_process_of_another_boot_is_unknown_to_peers_and_dead_to_a_disk_of_this_machine(
    tmp_path: Path,
) -> None:
    word = other_boot(_core.own_word())
    assert not _core.is_dead(word) and "restarted" in _core.describe_process(word)
    with make(tmp_path / "live") as buffer:
        buffer.append(1)
        buffer.inner_storage.rows.native.release(0)  # type: ignore[attr-defined]
        buffer.inner_storage.rows.header.store(_core.HEADER_NBYTES + 32, word)  # type: ignore[attr-defined]
        buffer.append(2)
        assert len(buffer) == 2


@needs_linux
def test_a_word_of_an_earlier_release_is_still_understood() -> None:
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    word = start << 32 | os.getpid()
    assert not _core.is_dead(word) and _core.is_dead(word + (1 << 32)) and _core.pid_of(word) == os.getpid()


def test_a_file_that_grows_needs_a_descriptor(tmp_path: Path) -> None:
    """Without one an unbounded file must not go on in memory of one process alone."""
    with make(tmp_path / "live"):
        pass
    code = """
buffer = rc.ReplayBuffer.create("memmap", ((), "int64"), capacity=None, cache_path=sys.argv[1])
rows = buffer.inner_storage.rows
mapping, g, fd = rows.header, rows.geometry, rows.segment().fd
fill_descriptors()
say(outcome=outcome(lambda: _core.Rows(mapping, 0, 1, g.row_nbytes, g.tagged, True, False, fd, None)))
"""
    with program(code, tmp_path / "grows", how=[]) as other:
        assert heard(other)["outcome"].startswith("OSError")

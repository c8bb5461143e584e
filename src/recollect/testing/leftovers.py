"""What a piece of work must not leave behind: children, descriptors, shared memory.

Reads /proc, so it is for Linux. Use it round anything that starts processes or maps memory::

    with leaves_nothing():
        run_the_actors()
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from recollect.system import is_portable
from recollect.system.directory import shared_directory


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds now: descendants, open descriptors, mappings of shared memory.

    Names in /dev/shm are not counted: nothing tells which process made one, and other programs make theirs there.
    """

    children: frozenset[str]
    descriptors: frozenset[str]
    mappings: Counter[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(_children(), _descriptors(), _mappings())


def leftovers(before: Holdings, after: Holdings) -> list[str]:
    """One sentence for each thing that `after` holds and `before` did not."""
    return [
        *(f"child process {pid} ({_command(pid)})" for pid in sorted(after.children - before.children)),
        *(f"descriptor {descriptor}" for descriptor in sorted(after.descriptors - before.descriptors)),
        *(f"{n} more mapping(s) of {name}" for name, n in sorted((after.mappings - before.mappings).items())),
    ]


@contextmanager
def leaves_nothing() -> Iterator[None]:
    """Raise AssertionError if the block leaves a child, a descriptor or shared memory behind.

    Concurrency: looks at the whole process, so nothing else should open or close things meanwhile.
    """
    # multiprocessing starts these helpers with the first child and keeps them: Python's own, no leak.
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    gc.collect()
    before = Holdings.now()
    yield
    gc.collect()  # what only a reference cycle still holds is not a leak
    left = leftovers(before, Holdings.now())
    if left:
        raise AssertionError("left behind: " + "; ".join(left))


def _children(parent: str = "self") -> frozenset[str]:
    """Children and their children: a worker of the fork server is no direct child."""
    found = set()
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:  # a thread that ended meanwhile
            continue
        for pid in pids:
            found |= {pid} | _children(pid)
    return frozenset(found)


def _command(pid: str) -> str:
    """The command line of `pid`; empty for a zombie or one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _descriptors() -> frozenset[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if f"/process-{os.getpid()}-" not in name:  # which says that this process lives
                found.add(f"{fd} -> {name}")
        except OSError:  # the one that listed the directory is closed by now
            continue
    return frozenset(found)


def _mappings() -> Counter[str]:
    # address perms offset dev inode path: the inode tells two segments of one name apart
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    shared = f"{shared_directory()}/memory-" if is_portable() else "memfd:"
    return Counter(
        f"{fields[5]} (inode {fields[4]})" for fields in lines if len(fields) == 6 and shared in fields[5]
    )

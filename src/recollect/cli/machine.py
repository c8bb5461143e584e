"""What this machine offers, looked at piece by piece: each with what was found and what to do about it."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Literal

from recollect.budget import available_nbytes, cgroup_left_nbytes, human_nbytes
from recollect.system import is_portable
from recollect.system.directory import shared_directory
from recollect.system.processes import usable_cores

GIB = 1 << 30
Level = Literal["ok", "note", "warning", "error"]

# What each extra of pyproject.toml brings that can be missing; tests hold the two equal.
EXTRAS = {
    "torch": ("torch",),
    "jax": ("jax", "ml_dtypes"),
    "ml-dtypes": ("ml_dtypes",),
    "cli": ("tyro", "rich"),
    "progress": ("tqdm",),
    "hdf5": ("h5py",),
    "parquet": ("pyarrow",),
    "video": ("av",),
    "images": ("pillow",),
    "mpi": ("mpi4py", "mpich"),
    "ray": ("ray",),
    "http": ("httpx",),
    "tensorboard": ("tensorboard",),
    "web": ("starlette", "uvicorn"),
    "plot": ("matplotlib",),
    "sb3": ("stable-baselines3",),
    "torchrl": ("torchrl", "tensordict"),
    "trinity": ("trinity-rft",),
}
REQUIRED = ("numpy", "gymnasium", "msgspec")
THP = Path("/sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was looked at."""

    level: Level
    name: str
    found: str
    remedy: str = ""


def look() -> Iterator[Fact]:
    """Yield every fact about the machine, one by one; a check that itself fails is a warning, not the end."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:  # a strange /proc must not hide the other facts
            name = check.__name__.replace("_", " ").strip()
            yield Fact("warning", name, f"could not be looked at: {error}", "look at it by hand")


def shared_memory() -> Fact:
    if is_portable():
        here = shared_directory()
        place = os.statvfs(here)
        size, free = place.f_frsize * place.f_blocks, place.f_frsize * place.f_bavail
        return Fact(
            "note", "shared memory", f"files in {here}: {human_nbytes(free)} free of {human_nbytes(size)}",
            "slower than Linux's own means, which are not here or switched off (RECOLLECT_PORTABLE)",
        )  # fmt: skip
    place = os.statvfs("/dev/shm")
    size, free = place.f_frsize * place.f_blocks, place.f_frsize * place.f_bavail
    found = f"{human_nbytes(free)} free of {human_nbytes(size)}"
    if free < GIB // 4:
        return Fact(
            "warning", "/dev/shm", found,
            "torch's loaders and AsyncVectorEnv need it (Recollect itself does not): docker run --shm-size=2g, or "
            "sudo mount -o remount,size=2G /dev/shm",
        )  # fmt: skip
    return Fact("ok", "/dev/shm", found)


def memory() -> Fact:
    available = available_nbytes()
    if available is None:
        return Fact(
            "note", "memory", "unknown", "buffers are not checked before they are made: mind their size"
        )
    remedy = "keep buffers below this, or use MemmapStorage, which may be larger than memory"
    return Fact("warning" if available < GIB else "ok", "memory", f"{human_nbytes(available)} available",
                remedy if available < GIB else "")  # fmt: skip


def cgroup() -> Fact:
    left = cgroup_left_nbytes()
    if left is None:
        return Fact("ok", "cgroup memory limit", "none")
    remedy = "raise the container's limit (docker run --memory=..., or the pod's) for larger buffers"
    return Fact("warning" if left < GIB else "ok", "cgroup memory limit", f"{human_nbytes(left)} left in it",
                remedy if left < GIB else "")  # fmt: skip


def cores() -> Fact:
    usable, there = usable_cores(), os.cpu_count() or 1
    quota = _cpu_quota()
    found = f"{usable} usable of {there}" + (f", cgroup quota {quota:.1f}" if quota else "")
    if min(usable, quota or usable) < 2:
        return Fact(
            "warning", "cores", found, "actors and learner take turns on one: give the process two or more"
        )
    return Fact("ok", "cores", found)


def _cpu_quota() -> float | None:
    """The most cores that a cgroup (v2) lets this process use."""
    found = None
    if is_portable():
        return None
    with open("/proc/self/cgroup") as file:
        paths = [line.split(":", 2)[2].strip() for line in file if line.startswith("0::")]
    for path in paths:
        here = Path("/sys/fs/cgroup") / path.lstrip("/")
        for place in (here, *here.parents):
            limit = place / "cpu.max"
            if limit.is_file() and (parts := limit.read_text().split())[0] != "max":
                cores = int(parts[0]) / int(parts[1])
                found = cores if found is None else min(found, cores)
    return found


def huge_pages() -> Fact:
    chosen = _chosen("enabled")
    if chosen in ("always", "madvise"):
        return Fact("ok", "huge pages", chosen)
    remedy = f"2 MB pages make draws from large buffers faster: echo madvise | sudo tee {THP}/enabled"
    return Fact("note", "huge pages", chosen or "unknown", remedy)


def huge_shared_pages() -> Fact:
    chosen = _chosen("shmem_enabled")
    if chosen in ("always", "advise", "within_size", "force"):
        return Fact("ok", "huge pages, shared", chosen)
    remedy = f"2 MB pages for SharedMemoryStorage too: echo advise | sudo tee {THP}/shmem_enabled"
    return Fact("note", "huge pages, shared", chosen or "unknown", remedy)


def _chosen(name: str) -> str | None:
    try:
        found = re.search(r"\[(\w+)\]", (THP / name).read_text())
    except OSError:
        return None
    return found[1] if found else None


def memfd() -> Fact:
    if is_portable():
        return Fact("ok", "memfd", "not used")
    try:
        fd = os.memfd_create("recollect-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, 4096)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        remedy = (
            "SharedMemoryStorage needs Linux 3.17 and a sandbox that allows memfd_create; use MemmapStorage"
        )
        return Fact("error", "memfd", f"fails: {error}", remedy)
    return Fact("ok", "memfd", "works")


def futex() -> Fact:
    from recollect import _core

    word = _core.Mapping(-1, 0, 4096, True)
    woken: list[float] = []

    def wait() -> None:
        if word.wait(0, 0, 2.0):
            woken.append(perf_counter())

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.02)  # let it fall asleep
    start = perf_counter()
    word.store(0, 1)
    word.wake(0)
    waiter.join(5.0)
    if not woken:
        return Fact("error", "futex", "a waiting thread was not woken",
                    "waits between processes would end by their deadlines: run outside of this sandbox")  # fmt: skip
    return Fact("ok", "futex", f"works, wakes in {(woken[0] - start) * 1e6:.0f} µs")


def open_files() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} (at most {'any' if hard == resource.RLIM_INFINITY else f'{hard:,}'})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Fact("warning", "open files, ulimit -n", found, "ulimit -n 4096 before starting many actors")
    return Fact("ok", "open files, ulimit -n", found)


CHECKS: tuple[Callable[[], Fact], ...] = (
    shared_memory, memory, cgroup, cores, huge_pages, huge_shared_pages, memfd, futex, open_files,
)  # fmt: skip


def packages() -> list[Fact]:
    """Return the packages that are needed or of use, with their versions, or the command that installs them."""
    facts = [Fact("ok", name, found) if (found := _version(name)) else _needed(name) for name in REQUIRED]
    for extra, names in EXTRAS.items():
        for name in names:
            if name in {fact.name for fact in facts}:
                continue
            version = _version(name)
            remedy = "" if version else f'pip install "recollect[{extra}]"'
            facts.append(Fact("ok" if version else "note", name, version or "not installed", remedy))
    return facts


def _needed(name: str) -> Fact:
    return Fact("error", name, "not installed", f"pip install {name}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

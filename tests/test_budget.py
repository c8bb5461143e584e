"""How much memory is left: the least of the system's and of every cgroup around the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from recollect import budget as limits

KIB = 1024


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with /proc and /sys of our own; the system has 1000 KiB."""
    monkeypatch.setattr(limits, "Path", lambda text: tmp_path / text.lstrip("/"))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    1000 kB\n")
    return tmp_path


def group(place: Path, limit: str, used: int, cache: int, old: bool = False) -> None:
    place.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    (place / names[0]).write_text(limit + "\n")
    (place / names[1]).write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 1\n{'total_' if old else ''}inactive_file {cache}\n")


def test_without_cgroups_it_is_the_systems(machine: Path) -> None:
    assert limits.available_nbytes() == 1000 * KIB and limits.cgroup_left_nbytes() is None


def test_an_enclosing_cgroup_may_allow_less_and_its_file_cache_is_free(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/outer/inner\n")
    root = machine / "sys/fs/cgroup"
    group(root / "outer/inner", "max", 100, 0)
    assert limits.available_nbytes() == 1000 * KIB
    group(root / "outer", str(500 * KIB), 450 * KIB, 30 * KIB)
    assert limits.available_nbytes() == limits.cgroup_left_nbytes() == 80 * KIB
    group(root / "outer", str(500 * KIB), 600 * KIB, 0)
    assert limits.available_nbytes() == 0


def test_cgroups_of_the_first_kind(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("7:cpu,cpuacct:/job\n5:memory:/job\n")
    place = machine / "sys/fs/cgroup/memory/job"
    group(place, str(1 << 62), 0, 0, old=True)
    assert limits.available_nbytes() == 1000 * KIB
    group(place, str(300 * KIB), 200 * KIB, 10 * KIB, old=True)
    assert limits.available_nbytes() == 110 * KIB


def test_a_machine_that_does_not_say_is_unknown(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    assert limits.available_nbytes() is None
    limits.check_fits(1 << 60, "anything", "buy more")  # nothing is known, so nothing is refused

"""The doctor says what is wrong with a machine or an environment, and what to do about each thing."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recollect import _core
from recollect.cli import machine
from recollect.cli.doctor import show
from recollect.cli.machine import EXTRAS, REQUIRED, Fact, look, packages
from recollect.collect import Finding

ROOT = Path(__file__).parents[2]
BAD = """
import gymnasium, numpy as np
class Bad(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}
    def step(self, action):
        return np.full(3, 7, np.float32), 0.0, False, False, {}
gymnasium.register("Bad-v0", entry_point=Bad, disable_env_checker=True)
"""


def run(*args: str, path: Path | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "COLUMNS": str(columns),
        "PYTHONPATH": os.pathsep.join([str(path or ""), str(ROOT / "src")]),
    }
    return subprocess.run(
        [sys.executable, "-m", "recollect", "doctor", *args], capture_output=True, text=True, timeout=50, check=False,
        env=env,
    )  # fmt: skip


# -- the machine


def test_every_fact_is_found_here() -> None:
    facts = {fact.name: fact for fact in look()}
    assert set(facts) >= {
        "/dev/shm",
        "memory",
        "cgroup memory limit",
        "cores",
        "memfd",
        "futex",
        "open files, ulimit -n",
    }
    assert facts["memfd"].level == facts["futex"].level == "ok"
    assert re.search(r"wakes in \d+ µs", facts["futex"].found)
    assert all(fact.remedy for fact in facts.values() if fact.level != "ok")


Disk = namedtuple("Disk", "f_frsize f_blocks f_bavail")


def small_disk(patch: Any, tmp_path: Path) -> None:
    patch.setattr(os, "statvfs", lambda path: Disk(4096, 16384, 100))


def little_memory(patch: Any, tmp_path: Path) -> None:
    patch.setattr(machine, "available_nbytes", lambda: 10 << 20)


def small_cgroup(patch: Any, tmp_path: Path) -> None:
    patch.setattr(machine, "cgroup_left_nbytes", lambda: 10 << 20)


def one_core(patch: Any, tmp_path: Path) -> None:
    patch.setattr(os, "sched_getaffinity", lambda pid: {3})


def small_quota(patch: Any, tmp_path: Path) -> None:
    patch.setattr(machine, "_cpu_quota", lambda: 0.5)


def no_huge_pages(patch: Any, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    patch.setattr(machine, "THP", tmp_path)


def no_memfd(patch: Any, tmp_path: Path) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError("not allowed")

    patch.setattr(os, "memfd_create", refuse)


def no_futex(patch: Any, tmp_path: Path) -> None:
    class Deaf:
        def __init__(self, *args: Any) -> None: ...
        def wait(self, *args: Any) -> bool:
            return False

        def store(self, *args: Any) -> None: ...
        def wake(self, *args: Any) -> None: ...

    patch.setattr(_core, "Mapping", Deaf)


def few_files(patch: Any, tmp_path: Path) -> None:
    patch.setattr(resource, "getrlimit", lambda which: (256, 4096))


@pytest.mark.parametrize(
    ("spoil", "name", "level", "found", "remedy"),
    [
        (small_disk, "/dev/shm", "warning", "400.0 KiB free of 64.0 MiB", "--shm-size=2g"),
        (little_memory, "memory", "warning", "10.0 MiB available", "MemmapStorage"),
        (small_cgroup, "cgroup memory limit", "warning", "10.0 MiB left in it", "--memory="),
        (one_core, "cores", "warning", "1 usable of", "two or more"),
        (small_quota, "cores", "warning", "cgroup quota 0.5", "two or more"),
        (no_huge_pages, "huge pages", "note", "never", "echo madvise | sudo tee"),
        (no_memfd, "memfd", "error", "fails: not allowed", "MemmapStorage"),
        (no_futex, "futex", "error", "was not woken", "sandbox"),
        (few_files, "open files, ulimit -n", "warning", "256 (at most 4,096)", "ulimit -n 4096"),
    ],
)
def test_what_is_missing_is_said_with_a_remedy(
    spoil: Any,
    name: str,
    level: str,
    found: str,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(monkeypatch, tmp_path)
    fact = {fact.name: fact for fact in look()}[name]
    assert fact.level == level
    assert found in fact.found and remedy in fact.remedy


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", broken)
    facts = list(look())
    assert len(facts) == len(machine.CHECKS)
    assert facts[0].level == "warning" and "could not be looked at" in facts[0].found


# -- packages


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = lambda needs: tuple(re.split(r"[<>=!~\[ ]", need)[0] for need in needs)  # noqa: E731
    theirs = {
        k: names(v)
        for k, v in project["optional-dependencies"].items()
        if k not in ("test", "docs", "dev") and names(v) != ("recollect",)  # those are made of others
    }
    assert theirs == EXTRAS
    assert names(project["dependencies"]) == REQUIRED


def test_a_missing_package_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("pyarrow", "msgspec"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = {fact.name: fact for fact in packages()}
    assert found["pyarrow"] == Fact("note", "pyarrow", "not installed", 'pip install "recollect[parquet]"')
    assert found["msgspec"] == Fact("error", "msgspec", "not installed", "pip install msgspec")
    assert found["numpy"].found == real("numpy")
    assert len({fact.name for fact in packages()}) == len(packages())


# -- what is shown


@pytest.mark.parametrize("width", [80, 120])
def test_commands_are_shown_whole(width: int) -> None:
    out = io.StringIO()
    command = "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    facts = [Fact("note", "huge pages", "never", f"do this, which is a long way to say it: {command}")]
    findings = [Finding("error", "obs", "a problem [with brackets]", "a remedy")]
    show(facts, [Fact("ok", "numpy", "2.0")], "Env-v0", findings, Console(file=out, width=width))
    text = out.getvalue()
    assert command in text
    assert "[with brackets]" in text and "a remedy" in text and "1 error." in text
    assert max(len(line) for line in text.splitlines() if command not in line) <= width


# -- the command


def test_without_an_env() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert "This machine" in done.stdout and "numpy" in done.stdout


def test_json_of_a_good_env() -> None:
    done = run("--env", "CartPole-v1", "--num-envs", "2", "--steps", "50", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["env"] == {"id": "CartPole-v1", "num_envs": 2, "steps": 50, "findings": []}
    assert {"level", "name", "found", "remedy"} == set(report["machine"][0]) == set(report["packages"][0])


def test_a_bad_env_ends_with_status_1(tmp_path: Path) -> None:
    (tmp_path / "worlds_of_mine.py").write_text(BAD)
    done = run("--env", "worlds_of_mine:Bad-v0", "--steps", "50", path=tmp_path, columns=120)
    assert done.returncode == 1
    assert "error" in done.stdout and "within [-1.0, 1.0]" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--env", "NoSuch-v9"), "NoSuch"),
        (("--env", "no_such_module:Env-v0"), "no_such_module"),
        (("--env", "CartPole-v1", "--num-envs", "2", "--autoreset", "never"), "--autoreset: must be one of"),
    ],
)
def test_what_cannot_be_made_is_one_line(args: tuple[str, ...], text: str) -> None:
    done = run(*args)
    assert done.returncode == 1
    assert text in done.stderr and "Traceback" not in done.stderr


def test_help_has_an_example() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "Example: recollect doctor --env" in done.stdout

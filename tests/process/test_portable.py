"""With what POSIX has in place of the means of Linux, contracts and kill tests pass, in child processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a name short enough for sockets in it."""
    place = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    yield place
    shutil.rmtree(place)


def portable(home: Path) -> dict[str, str]:
    return {**os.environ, "RECOLLECT_PORTABLE": "1", "RECOLLECT_PORTABLE_DIR": str(home)}


def names(home: Path) -> list[str]:
    return sorted(name for name in os.listdir(home) if name not in ("directory", "turn"))


def left_after_a_sweep(home: Path) -> list[str]:
    """What is in a directory once another process has begun there and ended."""
    subprocess.run([sys.executable, "-c", "import recollect.memory.segment"], env=portable(home), check=True)
    return names(home)


SUITES = {
    "storage contract": ["tests/storage/test_storage_contract.py", "-k", "TestShared"],
    "carrier contract": ["tests/remote/test_carriers.py", "-k", "Local"],
    "waits and processes": ["tests/core/test_process.py"],
    "killed publishers and readers": ["tests/process/test_latest.py"],
    "killed packers": ["tests/process/test_pipeline.py", "-k", "kill or dead or dies or leaves"],
    "killed collectors": ["tests/ipc/test_collector.py"],
}


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_suite_passes_without_the_means_of_linux(suite: list[str], home: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *suite]
    done = subprocess.run(command, cwd=ROOT, env=portable(home), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert left_after_a_sweep(home) == []


HOLD = """
import sys
import numpy as np
import recollect as rc
buffer = rc.ReplayBuffer.create("shared", {"x": ((), "int64")}, capacity=8, multiprocessing=True, num_lanes=2)
buffer.extend({"x": np.arange(3)})
from recollect import _core
print(_core.own_word(), flush=True)
sys.stdin.read()
"""
LOOK = """
import sys
from recollect import _core
print(_core.is_dead(int(sys.argv[1])))
"""


def holder(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], env=portable(home), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def is_dead(word: str, home: Path) -> bool:
    command = [sys.executable, "-c", LOOK, word]
    return subprocess.run(command, env=portable(home), capture_output=True, text=True, check=True).stdout == (
        "True\n"
    )


def test_a_process_that_ends_leaves_no_name(home: Path) -> None:
    with holder(home) as process:
        assert process.stdout is not None
        word = process.stdout.readline().strip()
        assert [name.partition("-")[0] for name in names(home)] == ["memory", "process"]
        assert not is_dead(word, home)
        process.communicate()
    assert process.returncode == 0
    assert names(home) == []


def test_what_a_killed_process_left_goes_with_the_next_one(home: Path) -> None:
    with holder(home) as process:
        assert process.stdout is not None
        word = process.stdout.readline().strip()
        process.send_signal(signal.SIGSTOP)
        assert not is_dead(word, home), "it is stopped"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [name.partition("-")[0] for name in names(home)] == ["memory", "process"]
        assert is_dead(word, home), "it is a zombie"
        assert names(home) == []
        process.communicate()


def test_both_sides_must_agree(home: Path) -> None:
    make = HOLD.replace("print(_core.own_word(), flush=True)", "print(make_handle(buffer), flush=True)")
    make = make.replace("import sys\n", "import base64, pickle, sys\n", 1).replace(
        "print(make",
        "make_handle = lambda b: base64.b64encode(pickle.dumps(b)).decode()\nprint(make",
    )
    load = "import base64, pickle, sys; pickle.loads(base64.b64decode(sys.argv[1]))"
    with subprocess.Popen(
        [sys.executable, "-c", make], env=portable(home), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        handle = process.stdout.readline().strip()
        ours = {name: value for name, value in os.environ.items() if name != "RECOLLECT_PORTABLE"}
        done = subprocess.run(
            [sys.executable, "-c", load, handle], env=ours, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "AttachError" in done.stderr
        process.communicate()
    assert process.returncode == 0

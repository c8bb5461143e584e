"""The leak check itself: each kind of leftover is seen, and clean work passes."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from recollect.testing.leftovers import leaves_nothing


def test_clean_work_passes() -> None:
    with leaves_nothing():
        subprocess.run([sys.executable, "-c", ""], check=True)
        with open(os.devnull):
            pass


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_child_that_ended_passes(method: str) -> None:
    with leaves_nothing():
        child: Any = multiprocessing.get_context(method).Process(target=int)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        child.close()


def test_child_is_seen() -> None:
    with pytest.raises(AssertionError, match="child process .*stdin"), leaves_nothing():
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
    child.communicate()


def test_child_of_the_fork_server_is_seen() -> None:
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=reader.recv)
    with pytest.raises(AssertionError, match="child process"), leaves_nothing():
        child.start()
    writer.send(None)
    child.join(30)
    assert child.exitcode == 0


def test_zombie_is_seen() -> None:
    with pytest.raises(AssertionError, match="child process"), leaves_nothing():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
    os.waitpid(pid, 0)


def test_descriptor_is_seen() -> None:
    with pytest.raises(AssertionError, match="descriptor .*null"), leaves_nothing():
        fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)


def test_mapping_without_descriptor_is_seen() -> None:
    with pytest.raises(AssertionError, match="mapping.*memfd:forgotten"), leaves_nothing():
        fd = os.memfd_create("forgotten")
        os.ftruncate(fd, 4096)
        mapped = mmap.mmap(fd, 4096)
        os.close(fd)
    mapped.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_names_that_other_programs_make_are_none_of_ours() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        name = Path(f"{folder}-of-another")
        try:
            with leaves_nothing():
                subprocess.run(["touch", name], check=True)
        finally:
            name.unlink()


def test_process_marker_applies_the_check(pytester: pytest.Pytester) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    pytester.makeconftest(conftest.read_text())
    pytester.makepyfile(
        """
        import os, pytest

        @pytest.mark.process
        def test_leaks():
            os.open(os.devnull, os.O_RDONLY)

        def test_not_marked():
            os.open(os.devnull, os.O_RDONLY)
        """
    )
    result = pytester.runpytest("-p", "no:cacheprovider", "--override-ini=markers=process: x")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*left behind: descriptor*"])

"""The command line as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import recollect.cli as cli


def test_every_command_is_listed_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and all(f"• {name}" in text for name in cli._COMMANDS)
    for name in cli._COMMANDS:
        if name not in ("demo", "train"):  # these list others
            assert "Example: recollect " + name in cli._command(name).__doc__


def test_a_command_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["nonsense"])
    assert ended.value.code == 2 and "convert" in capsys.readouterr().err


def test_a_command_imports_only_itself(tmp_path: Path) -> None:
    code = "import sys, recollect.cli as c\ntry: c.run(['view', sys.argv[1]])\nexcept SystemExit: print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "recollect.cli.view" in found.stdout.split()
    assert not {"recollect.cli.doctor", "recollect.cli.train", "recollect.cli.rollout", "torch"} & set(
        found.stdout.split()
    )


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `recollect inspect --help | head -0` does
    command = [sys.executable, "-m", "recollect", "inspect", "--help"]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, "")

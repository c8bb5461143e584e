"""The command line as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recollect as rc
import recollect.cli as cli


def test_help_is_one_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--help"])
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == list(cli._COMMANDS)
    assert all(len(line) <= 80 for line in text.splitlines())
    with pytest.raises(SystemExit) as ended:
        cli.run([])
    assert ended.value.code == 2 and capsys.readouterr().err == text


def test_every_command_has_an_example() -> None:
    for name in cli._COMMANDS:
        if name not in ("demo", "train"):  # these list others
            assert "Example: recollect " + name in cli._command(name).__doc__


def test_a_command_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["nonsense"])
    assert ended.value.code == 2 and "convert" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.run(["veiw", "runs/demo"])
    assert capsys.readouterr().err == "recollect: must be given a command, got 'veiw'; did you mean 'view'?\n"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["--version"])
    assert capsys.readouterr().out == f"recollect {rc.__version__}\n"


def test_positions_are_named_as_in_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["convert", "--help"])
    assert "[OPTIONS] SRC DST" in capsys.readouterr().out


def saved(path: Path) -> str:
    buf = rc.ReplayBuffer.create("memory", {"x": ((), "float32")}, capacity=4, maintain_segment_metadata=True)
    buf.extend({"x": np.ones(3, "float32")})
    buf.dumps(path)
    return str(path)


def test_messages_name_flags(tmp_path: Path) -> None:
    run, copy = saved(tmp_path / "run"), str(tmp_path / "copy")
    for args, says in (
        (["dash", "--port", "80000"], r"dash: --port: must be an int in \[0, 65535\], got 80000"),
        (["view", run, "--port", "-1"], r"view: --port: must be an int in \[0, 65535\], got -1"),
        (["view", run, "--reward", "return"], "--reward: must be a leaf of one number"),
        (["convert", run, copy, "--to", "lerobot"], "--fps: must be .* got None; pass --fps"),
        (["convert", run, copy, "--chunk", "0"], "--chunk: must be an int of at least 1, got 0"),
        (
            ["train", "sac", "--env", "Pendulum-v1", "--collectors", "0"],
            "--collectors: must be an int of at least 1",
        ),
    ):
        with pytest.raises(SystemExit, match=says):
            cli.run(args)


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

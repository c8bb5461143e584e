"""`recollect view` as a user starts and stops it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recollect as rc
from recollect.cli import run

httpx = pytest.importorskip("httpx")


@pytest.mark.process
def test_it_serves_a_set_until_interrupted(tmp_path: Path) -> None:
    buf = rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=3, maintain_segment_metadata=True)
    buf.extend({"x": np.arange(3)})
    buf.dumps(tmp_path / "run")
    command = [sys.executable, "-m", "recollect", "view", str(tmp_path / "run"), "--json", "--reward", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["episodes"] == 1 and told["samples"] == 3 and told["reward"] == "x"
            with httpx.Client(trust_env=False, verify=False) as client:
                assert client.get(told["url"] + "about").json()["name"] == "run"
                assert client.get(told["url"].rstrip("/")[:-1] + "/about").status_code == 403
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()


@pytest.mark.process
@pytest.mark.parametrize("command", ["view", "dash"])
def test_the_secret_is_in_no_argument_of_the_browser(tmp_path: Path, command: str) -> None:
    """Every user of a machine reads them; the browser of this test tells what it was given."""
    rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=3).dumps(tmp_path / "run")
    given, browser = tmp_path / "given", tmp_path / "browser"
    os.mkfifo(given)
    browser.write_text(f"#!/bin/sh\nprintf '%s ' \"$@\" > '{given}'\n")
    browser.chmod(0o700)
    arguments = [sys.executable, "-m", "recollect", command, *([str(tmp_path / "run")] * (command == "view"))]
    env = os.environ | {"BROWSER": str(browser), "HOME": str(tmp_path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            address = next(line.split()[0] for line in process.stdout if line.startswith("http"))
            secret = address.rstrip("/").rpartition("/")[2]
            seen = given.read_text()
            assert len(secret) > 16 and seen and secret not in seen
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)


def test_what_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"recollect: .*must hold manifest.json"):
        run(["view", str(tmp_path)])
    buf = rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=3)
    buf.dumps(tmp_path / "run")
    with pytest.raises(SystemExit, match=r"reward: must be a leaf of one number, one of \['x'\], got 'y'"):
        run(["view", str(tmp_path / "run"), "--reward", "y"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"--port {port}: Address already in use; leave it out"):
            run(["view", str(tmp_path / "run"), "--port", port])


def test_a_missing_extra_is_told_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("recollect.observe.web", "recollect.observe.view"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    buf = rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=3)
    buf.dumps(tmp_path / "run")
    with pytest.raises(SystemExit, match=r'pip install "recollect\[web\]"'):
        run(["view", str(tmp_path / "run")])

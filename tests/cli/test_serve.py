"""`recollect serve`: a manager on TCP that says who is connected, and stops cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.cli import run
from recollect.errors import AuthError
from recollect.observe import find_jobs
from recollect.spaces import space_to_json
from recollect.testing.carrier_contract import eventually

SPACE = rc.as_space({"id": ((), "int64"), "log_reward": ((), "float64")})


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "recollect", "serve", *args]


@pytest.fixture
def space_file(tmp_path: Path) -> Path:
    path = tmp_path / "space.json"
    path.write_text(json.dumps(space_to_json(SPACE)))
    return path


def lines_until(server: subprocess.Popen[str], ready: Any) -> list[dict[str, Any]]:
    got = []
    for line in server.stdout or ():
        got.append(json.loads(line))
        if ready(got[-1]):
            break
    return got


@pytest.mark.process
@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_is_served_seen_and_the_end_is_clean(
    space_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    token, save = tmp_path / "token", tmp_path / "save"
    options = ("--space", str(space_file), "--token-file", str(token), "--json", "--every", "0.1")
    with subprocess.Popen(
        command(*options, "--checkpoint", str(save), "--capacity", "50"), stdout=subprocess.PIPE, text=True
    ) as server:
        address = lines_until(server, lambda line: "address" in line)[-1]["address"]
        assert token.stat().st_mode & 0o777 == 0o600
        carrier = rc.remote.TcpCarrier.join([address], token=token.read_text())
        with carrier, rc.remote.RemoteReplay(SPACE, 0, carrier) as replay:
            replay.add({"id": np.arange(20), "log_reward": np.arange(20.0)})
            seen = lines_until(server, lambda line: line.get("offered") == 20 and line["senders"])[-1]
            (sender,) = seen["senders"].values()
            assert sender["state"] == "present" and seen["live"] == 20
            shown = next(job for job in find_jobs("serve") if job.title == address)
            eventually(lambda: shown.snapshot().figures.get("items/live") == 20)
            assert [row["state"] for row in shown.snapshot().tables["workers"]] == ["present"]
            shown.close()
            server.send_signal(number)
            rest = lines_until(server, lambda line: "stats" in line)
        assert rest[-1]["stats"]["offered"] == 20
        assert server.wait(30) == 0
    with rc.ReplayBuffer.load_from(save) as held:
        assert sorted(held[:]["id"].tolist()) == list(range(20))


@pytest.mark.process
@pytest.mark.timeout(90)
def test_it_ends_with_its_workers_and_prints_a_summary(space_file: Path) -> None:
    secret = "0123456789abcdef0123"
    env = {**os.environ, "RECOLLECT_TOKEN": secret}
    with subprocess.Popen(
        command("--space", str(space_file), "--workers", "1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    ) as server:  # fmt: skip
        first = (server.stdout or pytest.fail("no output")).readline()
        address = first.split()[-1]
        assert address.startswith("127.0.0.1:")
        with pytest.raises(AuthError):
            rc.remote.TcpCarrier.join([address], token="another token, but long", timeout=10.0)
        with (
            rc.remote.TcpCarrier.join([address], token=secret) as carrier,
            rc.remote.RemoteReplay(SPACE, 0, carrier) as replay,
        ):
            replay.add({"id": np.arange(5), "log_reward": np.zeros(5)})
        text, _ = server.communicate(timeout=200)
        assert server.returncode == 0
    assert "items offered 5" in text and secret not in text


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    """What the command says as it ends at once, in this process."""
    monkeypatch.setattr(sys, "argv", ["recollect", "serve", *args])
    with pytest.raises(SystemExit) as ended:
        run(["serve", *args])
    said = capsys.readouterr()
    return said.out + said.err + (ended.value.code if isinstance(ended.value.code, str) else "")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Example: recollect serve" in refused(capsys, monkeypatch, "--help")


def test_what_is_missing_is_said_in_one_line(
    space_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECOLLECT_TOKEN", raising=False)
    opened, short = tmp_path / "open", tmp_path / "short"
    opened.write_text("x" * 20)
    opened.chmod(0o644)
    short.write_text("x" * 15)
    short.chmod(0o600)
    space = ("--space", str(space_file))
    assert "RECOLLECT_TOKEN" in refused(capsys, monkeypatch, *space)
    assert "chmod 600" in refused(capsys, monkeypatch, *space, "--token-file", str(opened))
    assert "at least 16 bytes" in refused(capsys, monkeypatch, *space, "--token-file", str(short))
    monkeypatch.setenv("RECOLLECT_TOKEN", "x" * 20)
    for args, text in (
        ((), "--env or --space"),
        (("--space", str(tmp_path / "none.json")), "none.json"),
        ((*space, "--every", "0"), "--every"),
        ((*space, "--capacity", "0"), "capacity"),
        ((*space, "--address", "nowhere"), "address"),
        ((*space, "--address", "192.0.2.1:1"), "cannot listen"),
    ):
        said = refused(capsys, monkeypatch, *args)
        assert text in said and len(said.splitlines()) == 1, said

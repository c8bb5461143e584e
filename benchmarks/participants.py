"""The parent's side of worker.py: start participants, ask them one at a time, always end them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adapters import ENTRIES, Entry

WORKER = Path(__file__).with_name("worker.py")
DEADLINE_S = 600.0
QUIET = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


class Skipped(Exception):
    """The participant cannot do this; the message says why."""


def python_for(entry: Entry, env: Path) -> Path:
    """Ours and the baselines run in this interpreter, peers in the benchmark environment if there is one."""
    candidate = env / "bin" / "python"
    return candidate if entry.role in ("peer", "note") and candidate.exists() else Path(sys.executable)


class Participant:
    """A worker process, or a guest in that of another participant.

    Ownership: ends the process in `close()`; it also ends by itself when the pipe closes.
    """

    process: subprocess.Popen[str]

    def __init__(self, name: str, env: Path, host: Participant | None = None) -> None:
        self.name, self.entry, self.env = name, ENTRIES[name], env
        self.host = host or self
        if host is None:
            self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(python_for(self.entry, self.env)), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | QUIET,
        )

    def revive(self) -> None:
        """Start again if it crashed: a crash costs one work, not all that follow."""
        if self.host.process.poll() is not None:
            self.close()
            self.host.process = self.host.start()

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Send one request and wait for its reply; raises Skipped."""
        process = self.host.process
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps({"who": self.name, "do": do, **details}), file=process.stdin, flush=True)
            ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            line = process.stdout.readline() if ready else ""
        except (BrokenPipeError, ValueError):  # it is gone, or was closed after an earlier failure
            line = ""
        if not line:
            self.close()
            raise Skipped(f"no answer to {do!r} (exit status {process.returncode})")
        reply: dict[str, Any] = json.loads(line)
        if "skip" in reply:
            raise Skipped(reply["skip"])
        return reply

    def close(self) -> None:
        process = self.host.process
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

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
    """A worker process. Ownership: ends it in `close()`; it also ends by itself when the pipe closes."""

    def __init__(self, name: str, env: Path) -> None:
        self.name, self.entry, self.env = name, ENTRIES[name], env
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(python_for(self.entry, self.env)), str(WORKER), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | QUIET,
        )

    def revive(self) -> None:
        """Start again if it crashed: a crash costs one work, not all that follow."""
        if self.process.poll() is not None:
            self.close()
            self.process = self.start()

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Send one request and wait for its reply; raises Skipped."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps({"do": do, **details}), file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
            line = self.process.stdout.readline() if ready else ""
        except (BrokenPipeError, ValueError):  # it is gone, or was closed after an earlier failure
            line = ""
        if not line:
            self.close()
            raise Skipped(f"no answer to {do!r} (exit status {self.process.returncode})")
        reply: dict[str, Any] = json.loads(line)
        if "skip" in reply:
            raise Skipped(reply["skip"])
        return reply

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

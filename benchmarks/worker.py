"""A participant, with its guests, in a process: reads one JSON request a line, answers one JSON line.

Started by compare.py. It computes only between a request and its answer, so of all participants one runs at a
time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from adapters import ENTRIES, Adapter, Turn, load
from prioritized import WORKS as PRIORITIZED
from works import WORKS, Work, blocks, check_added, check_batch

WORKS |= {work.name: work for work in PRIORITIZED}
Reply = dict[str, Any]
WARM_SHARE = 20
CHECK_ROWS = 2048
SMALL_ROWS = 1024


class Skip(Exception):
    """This participant cannot take part, and the message says why."""


class Session:
    """The buffer that is open now, and how many calls it has had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.adapter: Adapter | None = None

    def hello(self) -> Reply:
        try:
            load(self.name)
        except ModuleNotFoundError as error:
            raise Skip(f"not installed ({error.name} is missing)") from error
        return {"version": version_of(ENTRIES[self.name].package)}

    def can(self, kind: str) -> Reply:
        return {"can": hasattr(load(self.name, kind), kind)}

    def open(self, work: Work, turn_s: float) -> Reply:
        self.adapter, self.work, self.n_calls = load(self.name, work.kind), work, 0
        start = getattr(self.adapter, work.kind, None)
        if start is None:
            raise Skip(f"has no {work.kind}")
        self.adapter.create(work)
        self.adapter.fill(blocks(work))
        self.timed: Turn = start(work)
        self.calls = self.calibrate(turn_s)
        gc.collect()
        gc.freeze()
        return {"calls": self.calls, "nbytes": self.check() or work.call_nbytes}

    def run(self, calls: int) -> float:
        self.n_calls += calls
        return self.timed(calls)

    def calibrate(self, turn_s: float) -> int:
        """How many calls fill one turn."""
        calls = 1
        self.run(calls)
        while (seconds := self.run(calls)) < turn_s / 2:
            calls *= 2
        return max(1, round(calls * turn_s / seconds))

    def check(self) -> int:
        """Look at what it does; the bytes of a batch, or 0 when there is none to see."""
        assert self.adapter is not None
        adding = self.work.kind == "add"
        batch = self.adapter.look(min(CHECK_ROWS, self.work.rows) if adding else self.work.batch)
        if batch is None:
            return 0
        if adding:
            check_added(self.work, batch, self.n_calls * self.work.batch)
            return 0
        check_batch(self.work, batch, self.work.batch)
        return sum(array.nbytes for array in batch.values())

    def turn(self) -> Reply:
        """A few calls to warm the caches that the others have emptied, then the timed ones."""
        self.run(self.calls // WARM_SHARE + 1)
        return {"us": self.run(self.calls) / self.calls * 1e6}

    def close(self) -> Reply:
        if self.work.kind == "add" and ENTRIES[self.name].role == "ours":
            self.run(self.work.rows // self.work.batch + 1)  # memcpy has written into the same rows meanwhile
        self.check()
        self.drop()
        return {}

    def drop(self) -> None:
        self.__dict__ = {"name": self.name, "adapter": None}
        gc.unfreeze()
        gc.collect()

    def memory(self, work: Work) -> Reply:
        """Highest resident memory while a buffer is made and filled, less what was there before.

        A small buffer goes first, so that modules loaded at first use are not counted; nor is the block
        that the rows come from.
        """
        first, adapter = load(self.name), load(self.name)
        small = work.resized(SMALL_ROWS)
        first.create(small)
        first.fill(blocks(small))
        rows = blocks(work)
        head = next(rows)
        before = reset_high_water()
        adapter.create(work)
        created = high_water() - before
        adapter.fill(chain([head], rows))
        return {"created_nbytes": created, "filled_nbytes": high_water() - before}


def version_of(package: str | None) -> str:
    """Of the distribution, or of the module when it is on the path without being installed; "" for C."""
    if package is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[package], "__version__", "unknown"))


def status_nbytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def high_water() -> int:
    return status_nbytes("VmHWM:")


def reset_high_water() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status_nbytes("VmRSS:")


def answer(session: Session, request: dict[str, Any]) -> Reply:
    """One reply; a failure becomes a reply too, and frees the buffer."""
    do = request.pop("do")
    if "work" in request:
        request["work"] = WORKS[request["work"]].resized(request.pop("rows"))
    try:
        method: Callable[..., Reply] = getattr(session, do)
        return method(**request)
    except Skip as skip:
        return {"skip": str(skip)}
    except Exception as error:
        session.drop()
        return {"skip": f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def main() -> None:
    """Answer until the parent closes the pipe or dies. What libraries print goes to stderr instead."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        sessions: dict[str, Session] = {}
        for line in sys.stdin:
            request = json.loads(line)
            session = sessions.setdefault(request["who"], Session(request.pop("who")))
            print(json.dumps(answer(session, request)), file=replies, flush=True)


if __name__ == "__main__":
    main()

"""`recollect verify`: which files of a dump or data set are damaged, and what can still be read."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from recollect.cli.progress import bar
from recollect.errors import FormatError, RecollectError


@dataclass
class Verify:
    """Check every file of a dump against its size and checksum; say which is damaged and what is still readable.

    Data sets of LeRobot, Minari and Hugging Face have no checksums: all their samples are read. Ends with status 1 if
    anything is damaged.

    Example: recollect verify runs/demo
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to check."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Check and report; exit with status 1 if something is damaged."""
        from recollect.datasets.opening import kind_of

        kind = kind_of(self.path)
        report: dict[str, Any] = {"path": str(self.path), "kind": kind, "files": 0, "damaged": []}
        if kind == "recollect":
            report |= self._check_dump()
        if kind != "recollect" or report["damaged"]:
            report |= self._read_all(report["damaged"])
        report["ok"] = not report["damaged"]
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            from recollect.cli.data_tables import show_verification

            show_verification(report)
        if not report["ok"]:
            sys.exit(1)

    def _check_dump(self) -> dict[str, Any]:
        from recollect.replay import ReplayBuffer
        from recollect.storage.dump import check_files, read_manifest

        try:
            manifest = read_manifest(self.path, ("recollect.replay", "recollect.storage"))
        except FormatError as error:
            return {
                "damaged": [{"file": "manifest.json", "problem": str(error)}],
                "samples": None,
                "readable": [],
            }
        damaged = []
        with bar("checking", len(manifest["files"]), self.json) as advance:
            for name, about in manifest["files"].items():
                try:
                    check_files(self.path, {"files": {name: about}}, verify=True)
                except (FormatError, OSError) as error:
                    damaged.append({"file": name, "problem": str(error)})
                advance(1)
        if not damaged:  # files that the storage's own files name
            try:
                ReplayBuffer.load_from(self.path, verify=True).close()
            except RecollectError as error:
                damaged.append({"file": "", "problem": str(error)})
        n = int(manifest["count"])
        return {
            "files": len(manifest["files"]),
            "damaged": damaged,
            "samples": n,
            "readable": [] if damaged else [[0, n]],
        }

    def _read_all(self, damaged: list[dict[str, str]]) -> dict[str, Any]:
        """Try every sample, and note which runs of them can be read."""
        from recollect.datasets.opening import open_dataset

        try:
            batch: Any = open_dataset(self.path, split=self.split)
        except RecollectError as error:
            known = damaged or [{"file": "", "problem": str(error)}]
            return {"damaged": known, "readable": [], "reason": str(error)}
        problems: dict[str, None] = {}
        with batch:
            with bar("reading", len(batch), self.json) as advance:
                good = readable(batch, problems, advance)
            n = len(batch)
        if not damaged:
            damaged = [{"file": problem.split(": ")[0], "problem": problem} for problem in problems]
        return {"damaged": damaged, "samples": n, "readable": good}


def readable(batch: Any, problems: dict[str, None], advance: Any, chunk: int = 256) -> list[list[int]]:
    """The runs of samples that can be read; what is wrong with the others goes to `problems`."""
    good: list[list[int]] = []
    todo = [(a, min(a + chunk, len(batch))) for a in range(0, len(batch), chunk)][::-1]
    while todo:
        a, b = todo.pop()
        try:
            batch.get_at(np.arange(a, b))
        except (RecollectError, OSError) as error:
            if b - a > 1:  # halves: the bad ones are few
                middle = (a + b) // 2
                todo += [(middle, b), (a, middle)]
                continue
            problems[str(error)] = None
        else:
            if good and good[-1][1] == a:
                good[-1][1] = b
            else:
                good.append([a, b])
        advance(b - a)
    return good

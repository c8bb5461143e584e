"""`recollect verify`: which files of a dump or data set are damaged, and what can still be read."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from recollect.cli.terminal import bar, words


@dataclass
class Verify:
    """Check every file against its size and checksum; say which is damaged and what is still readable.

    Dumps, and LeRobot sets that Recollect wrote, have a checksum for every file. Data sets of others have none: all
    their samples are read. Ends with status 1 if anything is damaged.

    Example: recollect verify runs/demo/model_6000/replay
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to check."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Check and report; exit with status 1 if something is damaged."""
        from recollect.datasets.verify import verify

        report = verify(self.path, split=self.split, bar=lambda what, total: bar(what, total, self.json))
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            show_verification(report)
        if not report["ok"]:
            sys.exit(1)


def show_verification(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what is damaged and what can still be read."""
    console = console or Console()
    if report["ok"]:
        told = f", {report['files']:,} files with their checksums" if report["files"] else ""
        console.print(words(f"{report['path']}: whole, {report['samples']:,} samples{told}"))
        if report["unchecked"]:
            console.print(f"Files without a checksum: {len(report['unchecked']):,}; their samples were read")
        return
    console.print(words((f"{report['path']}: damaged", "bold red")))
    for found in report["damaged"]:
        console.print(words(f"  {found['file']}: {found['problem']}"), soft_wrap=True)
    if report["readable"]:
        console.print(f"Still readable: {_counted(report['readable'])} of {report['samples']:,} samples")
    if report["unsure"]:
        console.print(
            f"Can be read, but some of them may be wrong: {_counted(report['unsure'])} of {report['samples']:,} samples"
        )
    if report["leaves"]:
        each = ", ".join(f"{key} {_n(runs):,}" for key, runs in report["leaves"].items())
        told = f"Leaves that can be read alone, of {report['samples']:,} samples: {each}"
        console.print(words(f"{told}; what is in a damaged file may be wrong"))
    if not report["readable"] and not report["unsure"]:
        console.print("No whole sample can be read." if report["leaves"] else "Nothing of it can be read.")


def _n(runs: list[list[int]]) -> int:
    return sum(b - a for a, b in runs)


def _counted(runs: list[list[int]]) -> str:
    shown = ", ".join(f"{a}..{b - 1}" for a, b in runs[:20])
    return f"{_n(runs):,} ({shown}{', ...' if len(runs) > 20 else ''})"

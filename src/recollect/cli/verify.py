"""`recollect verify`: which files of a dump or data set are damaged, and what can still be read."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recollect.cli.progress import bar


@dataclass
class Verify:
    """Check every file against its size and checksum; say which is damaged and what is still readable.

    Dumps, and LeRobot sets that Recollect wrote, have a checksum for every file. Data sets of others have none: all
    their samples are read. Ends with status 1 if anything is damaged.

    Example: recollect verify runs/rates
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to check."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Check and report; exit with status 1 if something is damaged."""
        from recollect.datasets.verifying import verify

        report = verify(self.path, split=self.split, bar=lambda what, total: bar(what, total, self.json))
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            from recollect.cli.data_tables import show_verification

            show_verification(report)
        if not report["ok"]:
            sys.exit(1)

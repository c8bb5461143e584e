"""Examples that a demo runs: beside the package where it is installed, else in the source tree."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import recollect


def run_example(name: str, *args: str) -> None:
    """Run an example as its own command would."""
    package = Path(recollect.__file__).parent
    places = [package / "examples" / name, package.parents[1] / "examples" / name]
    found = [place for place in places if place.exists()]
    if not found:
        sys.exit(f"recollect demo: {name} is not where it was installed; install recollect again")
    before, sys.argv = sys.argv, [name, *args]
    try:
        runpy.run_path(str(found[0]), run_name="__main__")
    finally:
        sys.argv = before

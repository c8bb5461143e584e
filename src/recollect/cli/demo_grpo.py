"""`recollect demo grpo`: a transformer learns to copy digits through the rollout coordinator."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import recollect

EXAMPLE = "grpo_copy.py"


@dataclass
class DemoGrpo:
    """Train a small transformer from random weights by GRPO, rollouts, rewards, weights and replay included.

    It copies 4 digits exactly after about 30 steps, in a minute or two on two cores; `sum` takes longer.

    Example: recollect demo grpo --seed 1
    """

    task: Literal["copy", "sum"] = "copy"
    """Copy 4 digits, or say the last digit of a sum."""
    seed: int = 0
    """Seed of weights, tasks and samples."""

    def run(self) -> None:
        """Run the example, which asserts what it reaches."""
        try:
            import torch  # noqa: F401
        except ImportError:
            sys.exit('recollect demo grpo: needs torch; pip install "recollect[torch]"')
        sys.argv = [EXAMPLE, "--task", self.task, "--seed", str(self.seed)]
        runpy.run_path(str(example()), run_name="__main__")


def example() -> Path:
    """The example's file: beside the package where it is installed, else in the source tree."""
    package = Path(recollect.__file__).parent
    places = [package / "examples" / EXAMPLE, package.parents[1] / "examples" / EXAMPLE]
    found = [place for place in places if place.exists()]
    if not found:
        sys.exit(f"recollect demo grpo: {EXAMPLE} is not where it was installed; install recollect again")
    return found[0]

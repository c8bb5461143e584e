"""`recollect demo grpo`: a transformer learns to copy digits through the rollout coordinator."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from recollect.cli.demo.examples import run_example


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
        run_example("grpo_copy.py", "--task", self.task, "--seed", str(self.seed))

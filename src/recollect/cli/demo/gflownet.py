"""`recollect demo gflownet`: two workers learn a distribution through one remote replay manager."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recollect.cli.demo.examples import run_example


@dataclass
class DemoGflownet:
    """Train a GFlowNet on a HyperGrid: two workers share what they found through one replay manager.

    The exact L1 distance to the true distribution falls from 1.40 below 0.05, in about 15 seconds on two cores.

    Example: recollect demo gflownet --carrier tcp
    """

    carrier: Literal["local", "tcp", "ray"] = "local"
    """What joins workers and manager; under mpiexec run the example itself."""
    updates: int = 1000
    """Updates of each worker; below 1000 the distance only has to fall."""
    plot: Path | None = None
    """Draw the distance and the modes found into this file, with and without baseline filtering."""

    def run(self) -> None:
        """Run the example, which asserts what it reaches."""
        args = ["--carrier", self.carrier, "--updates", str(self.updates)]
        run_example("gflownet_hypergrid.py", *args, *(["--plot", str(self.plot)] if self.plot else []))

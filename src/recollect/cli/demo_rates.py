"""`recollect demo rates`: record an environment into a shared buffer, kill a recorder, sample, measure, save."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from recollect.cli.recorders import Recorders


@dataclass
class DemoRates:
    """Record a gymnasium environment into a shared replay buffer and look at it.

    Recorders run in their own processes, one lane each, while this process samples. Half way one of them is killed
    with SIGKILL and replaced, which costs the samples of its current call and nothing else. At the end: the rates
    against memcpy on this machine, where the data lies, and a dump on disk that can be loaded again.

    Example: recollect demo rates --env Pendulum-v1 --seconds 10
    """

    env: str = "CartPole-v1"
    """A gymnasium environment id."""
    seconds: float = 6.0
    """How long to record."""
    recorders: int = 2
    """How many processes record, one lane each."""
    capacity: int = 200_000
    """Samples that the buffer holds; divides by the recorders."""
    batch: int = 256
    """Samples in a drawn batch."""
    out: Path = Path("runs/rates")
    """Where the buffer is dumped."""
    json: bool = False
    """Print one JSON object instead of tables."""
    seed: int = 0
    """Seed of environments and draws."""

    def run(self) -> None:
        """Record, sample, measure, dump and report."""
        import gymnasium

        import recollect as rc

        try:
            space = rc.transition_space(gymnasium.make(self.env))
        except gymnasium.error.Error as error:
            sys.exit(f"recollect demo rates: {error}")
        buffer = rc.ReplayBuffer.create(
            rc.SharedMemoryStorage,
            space,
            capacity=self.capacity,
            num_lanes=self.recorders,
            multiprocessing=True,
            maintain_segment_metadata=True,
        )
        with buffer:
            with Recorders(buffer, self.env, self.recorders, self.seed) as recorders:
                drawn = self._watch(buffer, recorders)
            self._report(buffer, recorders, drawn)

    def _watch(self, buffer: Any, recorders: Recorders) -> int:
        """Sample while others record, show progress, and kill one of them half way."""
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        import recollect as rc

        sampler = rc.StepSampler(buffer, self.batch, seed=self.seed)
        recorders.wait_for_rows(self.batch)
        start, drawn, killed = monotonic(), 0, False
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=self.json, transient=True) as progress:
            task = progress.add_task("recording")
            while (spent := monotonic() - start) < self.seconds:
                for _ in range(200):
                    sampler.sample()
                drawn += 200 * self.batch
                recorders.check()
                if spent > self.seconds / 2 and not killed:
                    killed = recorders.kill_one()
                stats = buffer.stats()
                recorded, per_s = stats.offered / max(spent, 1e-9), drawn / max(spent, 1e-9)
                progress.update(
                    task,
                    description=f"{stats.live:,} of {self.capacity:,} samples, {recorded:,.0f} recorded/s, "
                    f"{per_s:,.0f} drawn/s",
                )
        return drawn

    def _report(self, buffer: Any, recorders: Recorders, drawn: int) -> None:
        from recollect.cli.rates import measure, place_of
        from recollect.cli.tables import show

        stats = buffer.stats()
        segments = buffer.get_segments()
        lengths = [end - start for start, end in segments]
        buffer.dumps(self.out)
        report = {
            "env": self.env,
            "recorded": stats.offered,
            "drawn": drawn,
            "killed_and_replaced": recorders.n_killed,
            "episodes": len(segments),
            "mean_episode_length": sum(lengths) / max(len(lengths), 1),
            "stats": asdict(stats),
            "rates": [asdict(rate) for rate in measure(buffer, self.batch, self.seed)],
            "place": place_of(buffer),
            "dump": str(self.out),
        }
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            show(report)

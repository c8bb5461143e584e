"""TorchRL's buffer beside ours with TensorDicts: `extend` and `sample` of 256 rows, in turns of one run.

Needs torchrl beside recollect (`make bench` makes such an environment):

    python benchmarks/torchrl_adapter.py [--quick]

Rows are those of a collector: observation, action, flags and a nested `next`, 9 leaves. Each contestant takes a turn in
every round, so that what else the machine does hits all; medians of the rounds are told, and ratios, in
processor time, which does not count waits for a core.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

BATCH = 256


def rows(n: int) -> Any:
    import torch
    from tensordict import TensorDict

    def step() -> dict[str, Any]:
        flags = {key: torch.zeros(n, 1, dtype=torch.bool) for key in ("done", "terminated")}
        return {"observation": torch.randn(n, 17), **flags}

    return TensorDict(
        {**step(), "action": torch.randn(n, 6), "next": {**step(), "reward": torch.randn(n, 1)},
         "collector": {"traj_ids": torch.zeros(n, dtype=torch.int64)}},
        batch_size=[n],
    )  # fmt: skip


def contestants(capacity: int) -> dict[str, Any]:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    from recollect.adapters.torchrl import TorchRLReplayBuffer, TorchRLStorage

    return {
        "TorchRL": ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH),
        "TorchRL on TorchRLStorage": ReplayBuffer(storage=TorchRLStorage(capacity), batch_size=BATCH),
        "TorchRLReplayBuffer": TorchRLReplayBuffer(capacity, batch_size=BATCH),
    }


def timed(call: Callable[[], Any], n: int) -> float:
    """Microseconds of processor time a call; all of it is in one thread."""
    start = time.process_time()
    for _ in range(n):
        call()
    return (time.process_time() - start) / n * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    quick = parser.parse_args().quick
    try:
        import torch
        import torchrl  # noqa: F401
    except ImportError:
        print("torchrl is not installed: nothing was compared")
        return
    torch.set_num_threads(1)  # its better number for batches of this size
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffers = contestants(1_000 if quick else 50_000)
    block, filling = rows(BATCH), rows(1_000 if quick else 50_000)
    for buffer in buffers.values():
        buffer.extend(filling)
    rounds, calls = (3, 2) if quick else (20, 20)
    for work in ("extend", "sample"):
        found: dict[str, list[float]] = {name: [] for name in buffers}
        for _ in range(rounds):
            for name, buffer in buffers.items():
                call = (lambda b=buffer: b.extend(block)) if work == "extend" else buffer.sample
                found[name].append(timed(call, calls))
        medians = {name: statistics.median(times) for name, times in found.items()}
        for name, median in medians.items():
            print(
                f"{work} {BATCH}: {name:26} {median:8.1f} us  {medians['TorchRL'] / median:5.1f} times as fast"
            )
    if quick:
        print("these figures say only that everything runs")


if __name__ == "__main__":
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    main()

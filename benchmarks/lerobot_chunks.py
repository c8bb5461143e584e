"""Batches of 50-step action chunks from one LeRobot data set: LeRobot's loader beside ours, by turns.

    python benchmarks/lerobot_chunks.py [--quick] [--rounds 20]

LeRobot's own class takes part where `lerobot` is installed (Python 3.12 or newer). In each round every loader gives one
batch of 64 frames, shuffled, in this process; figures are medians, by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

import recollect as rc
from recollect.adapters.lerobot import LeRobotDataset

FPS, BATCH = 50, 64
DELTAS = {"action": [i / FPS for i in range(50)], "observation.state": [-1 / FPS, 0.0]}


def write(path: Path, n_episodes: int, length: int) -> None:
    """Write a data set of 14 joints, as an ALOHA has."""
    space = {"observation.state": ((14,), "float32"), "action": ((14,), "float32")}
    n = n_episodes * length
    buf = rc.ReplayBuffer.create("memory", space, capacity=n, maintain_segment_metadata=True)
    rng = np.random.default_rng(0)
    for _ in range(n_episodes):
        rows = rng.normal(size=(2, length, 14)).astype(np.float32)
        buf.extend({"observation.state": rows[0], "action": rows[1]})
    rc.datasets.to_lerobot(buf, path, fps=FPS, tasks="insert the peg")


def loaders(path: Path) -> dict[str, Any]:
    """What gives batches, by name; each is without end."""
    ours = LeRobotDataset("me/chunks", path, delta_timestamps=DELTAS)
    found = {
        "ours by batches()": epochs(lambda: ours.batches(BATCH)),
        "ours in a DataLoader": loader(ours),
    }
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset as Theirs
    except ImportError:
        print("lerobot is not installed: ours alone")
        return found
    return {"LeRobot's in a DataLoader": loader(Theirs("me/chunks", path, delta_timestamps=DELTAS)), **found}


def epochs(epoch: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from epoch()


def loader(dataset: Any) -> Iterator[Any]:
    """A plain DataLoader, epoch after epoch."""
    made = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return epochs(lambda: made)


def main() -> None:
    """Time every loader by turns and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: its figures mean nothing")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rounds, size = (2, (3, 60)) if options.quick else (options.rounds, (50, 400))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "chunks"
        write(path, *size)
        every = loaders(path)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in every}
        for turn in range(rounds + 1):
            for name, batches in every.items():
                clock, spent = perf_counter(), process_time()
                batch = next(batches)
                taken = perf_counter() - clock, process_time() - spent
                assert batch["action"].shape[1:] == (*batch["action_is_pad"].shape[1:], 14) == (50, 14)
                if turn:  # the first is untimed
                    times[name].append(taken)
        first = None
        for name, taken in times.items():
            clock, spent = (median(column) * 1e3 for column in zip(*taken))
            first = first or spent
            print(
                f"{name:28} {clock:9.2f} ms a batch, {spent:9.2f} ms of a processor, {first / spent:7.1f} times"
            )
    print("batches of 64 frames with 50 actions each")


if __name__ == "__main__":
    main()

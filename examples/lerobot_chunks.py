"""Action chunks from a LeRobot data set: a policy learns to say the next 50 actions at once, by imitation.

A pen follows circles of two sizes, each named by its task. The recording is written as a LeRobot data set and read back
in two ways: as LeRobot's own class gives it, and as a view over a buffer, which is what that class is made of.

    python examples/lerobot_chunks.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import recollect as rc
from recollect.adapters.lerobot import LeRobotDataset

FPS, CHUNK, EPISODES, STEPS, EPOCHS, BATCH = 20, 50, 12, 120, 30, 64
TASKS = {"draw a small circle": 0.5, "draw a large circle": 1.0}


def record(path: Path, seed: int) -> None:
    """Write episodes of a pen that turns about the origin, with a little noise in where it is seen."""
    rng = np.random.default_rng(seed)
    space = {"observation.state": ((2,), "float32"), "action": ((2,), "float32")}
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, space, capacity=EPISODES * STEPS, maintain_segment_metadata=True
    )
    tasks = []
    for episode in range(EPISODES):
        task = list(TASKS)[episode % 2]
        angle = rng.uniform(0, 2 * np.pi) + 0.1 * np.arange(STEPS + 1)
        pen = TASKS[task] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        seen = pen[:-1] + rng.normal(0, 0.01, (STEPS, 2))
        # A block is an episode. The action is where the pen shall be next.
        buf.extend({"observation.state": seen.astype(np.float32), "action": pen[1:].astype(np.float32)})
        tasks.append(task)
    rc.datasets.to_lerobot(buf, path, fps=FPS, tasks=tasks)


def by_lerobot(path: Path) -> LeRobotDataset:
    """As a training loop for LeRobot has it: offsets in seconds, `action_is_pad` past the end of an episode."""
    ahead = {"action": [i / FPS for i in range(CHUNK)], "observation.state": [-1 / FPS, 0.0]}
    return LeRobotDataset("me/circles", path, delta_timestamps=ahead)


def by_view(path: Path) -> rc.SliceStackedBatch:
    """The same without LeRobot's words: offsets in steps, `action_valid_mask` inside the episode."""
    with rc.datasets.from_lerobot(path) as data:
        buf = rc.ReplayBuffer.create(
            rc.MemoryStorage, data.single_space, capacity=len(data), maintain_segment_metadata=True
        )
        buf.extend_from(data)
    return rc.SliceStackedBatch(buf, {"action": range(CHUNK), "observation.state": [-1, 0]})


def compare(dataset: LeRobotDataset, chunks: rc.SliceStackedBatch) -> None:
    """Both ways show the same numbers at every step."""
    assert len(dataset) == len(chunks) == EPISODES * STEPS
    ours = chunks[:]
    [theirs] = dataset.batches(len(dataset), shuffle=False)
    for key in ("action", "observation.state"):
        np.testing.assert_array_equal(theirs[key], ours[key])
        np.testing.assert_array_equal(theirs[f"{key}_is_pad"], ~ours[f"{key}_valid_mask"])
    # At the last step of an episode one action is left.
    assert ours["action_valid_mask"][STEPS - 1].sum() == 1


def error_of(policy: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The squared error of the actions that were really taken; those past the end count for nothing."""
    said = policy(batch["observation.state"].flatten(1)).view(-1, CHUNK, 2)
    real = ~batch["action_is_pad"]
    return ((said - batch["action"]) ** 2)[real].mean()


def main(seed: int = 0) -> tuple[float, float]:
    """Train; return how far the policy is off on episodes that it learned from, and on those that it never saw."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "circles"
        record(path, seed)
        dataset = by_lerobot(path)
        compare(dataset, by_view(path))
        assert dataset[0]["task"] == "draw a small circle" and dataset.meta.stats["action"]["max"].max() <= 1

        ahead = dataset.delta_timestamps
        train = LeRobotDataset("me/circles", path, range(EPISODES - 2), delta_timestamps=ahead)
        test = LeRobotDataset("me/circles", path, [EPISODES - 2, EPISODES - 1], delta_timestamps=ahead)
    # Numbers are in memory from here on; only pictures and videos would stay in the files.
    policy = nn.Sequential(nn.Linear(2 * 2, 128), nn.ReLU(), nn.Linear(128, CHUNK * 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        for batch in train.batches(BATCH, seed=epoch):  # or a torch DataLoader over `train`
            error = error_of(policy, batch)
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
    with torch.no_grad():
        offs = [float(error_of(policy, next(data.batches(len(data))))) ** 0.5 for data in (train, test)]
    return offs[0], offs[1]


if __name__ == "__main__":
    learned, unseen = main()
    print(f"error of 50 actions ahead on unseen episodes: {unseen:.3f}, on learned ones: {learned:.3f}")
    assert unseen < 0.15  # who stays where the pen is would be off by more than 0.5

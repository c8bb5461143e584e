"""Action chunks from a Minari data set: a policy learns to say the next 50 actions at once, by imitation.

An expert pushes a cart to a goal and stops there. Its episodes are written as Minari lays them out, by h5py alone, and
read back by `from_minari`; one that `minari download` fetched is read by its name, `from_minari("D4RL/door/human-v2")`.

    python examples/minari_chunks.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

import recollect as rc

CHUNK, EPISODES, UPDATES, BATCH, DT = 50, 40, 600, 64, 0.1
BOX = {"type": "Box", "dtype": "float32"}
OBS = {**BOX, "shape": [2], "low": [-10.0, -10.0], "high": [10.0, 10.0]}  # place and speed; the goal is at 0
ACTION = {**BOX, "shape": [1], "low": [-1.0], "high": [1.0]}


def expert(obs: Any) -> Any:
    return np.clip(-1.0 * obs[..., :1] - 1.5 * obs[..., 1:], -1, 1)


def push(obs: Any, action: Any) -> Any:
    speed = obs[1] + DT * action[0]
    return np.array([obs[0] + DT * speed, speed], np.float32)


def record(path: Path, seed: int) -> int:
    """Write the expert's episodes as Minari does; return how many steps they have."""
    rng, n_steps = np.random.default_rng(seed), 0
    (path / "data").mkdir(parents=True)
    with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
        for episode in range(EPISODES):
            obs, actions = [np.array([rng.uniform(-2, 2), 0.0], np.float32)], []
            for _ in range(int(rng.integers(60, 100))):
                actions.append(expert(obs[-1]).astype(np.float32))
                obs.append(push(obs[-1], actions[-1]))
            n, group = len(actions), file.create_group(f"episode_{episode}")
            group.attrs.update(id=episode, total_steps=n)
            group["observations"], group["actions"] = np.stack(obs), np.stack(actions)  # n + 1, and n
            group["rewards"] = -np.abs(np.stack(obs)[1:, 0]).astype(np.float64)
            group["terminations"], group["truncations"] = np.zeros(n, bool), np.arange(n) == n - 1
            n_steps += n
    about = {"total_episodes": EPISODES, "total_steps": n_steps, "data_format": "hdf5"}
    about |= {"dataset_id": "cart/expert-v0", "minari_version": "0.5.3"}
    about |= {"observation_space": json.dumps(OBS), "action_space": json.dumps(ACTION)}
    (path / "data" / "metadata.json").write_text(json.dumps(about))
    return n_steps


def load(path: Path) -> rc.ReplayBuffer:
    """Bring all episodes into memory; each is a segment, and each step a transition with its `next_obs`."""
    with rc.datasets.from_minari(path) as data:
        buf = rc.ReplayBuffer.create(
            rc.MemoryStorage, data.single_space, capacity=len(data), maintain_segment_metadata=True
        )
        buf.extend_from(data)
    return buf


def drive(policy: nn.Module, place: float) -> float:
    """Play the first half of each chunk, then ask again; return how far from the goal the cart ends."""
    obs = before = np.array([place, 0.0], np.float32)
    for _ in range(4):
        with torch.no_grad():
            said = policy(torch.from_numpy(np.stack([before, obs]).reshape(1, 4))).view(CHUNK, 1).numpy()
        for action in np.clip(said[: CHUNK // 2], -1, 1):
            before, obs = obs, push(obs, action)
    return abs(float(obs[0]))


def main(seed: int = 0) -> float:
    """Train; return the largest distance from the goal after 100 steps, from five places."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        n_steps = record(Path(directory) / "cart" / "expert-v0", seed)
        buf = load(Path(directory) / "cart" / "expert-v0")
    segments = buf.get_segments()
    assert len(buf) == n_steps and segments is not None and len(segments) == EPISODES

    # The next 50 actions, the last two observations; past the edge of an episode its last row repeats, and is masked.
    chunks = rc.SliceStackedBatch(buf, {"action": range(CHUNK), "obs": [-1, 0]})
    sampler = rc.StepSampler(chunks, BATCH, seed=seed, backend="torch")
    _, end = segments[0]
    assert chunks[end - 10]["action_valid_mask"].sum() == 10  # no chunk goes on in the next episode

    policy = nn.Sequential(nn.Linear(2 * 2, 128), nn.ReLU(), nn.Linear(128, CHUNK))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(UPDATES):
        batch = sampler.sample()
        said = policy(batch["obs"].flatten(1)).view(-1, CHUNK, 1)
        error = ((said - batch["action"]) ** 2)[batch["action_valid_mask"]].mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return max(drive(policy, place) for place in (-1.8, -1.0, 0.3, 1.0, 1.8))


if __name__ == "__main__":
    off = main()
    print(f"farthest from the goal after 100 steps: {off:.3f}")
    assert off < 0.3  # the expert ends within 0.01

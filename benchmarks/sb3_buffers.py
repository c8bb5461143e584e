"""Stable-Baselines3's replay buffers beside ours that take their place, filled with the same steps, in one run.

    python benchmarks/sb3_buffers.py                   writes results/sb3_buffers.json
    python benchmarks/sb3_buffers.py --quick           a smoke test: few rows, figures without meaning

In each round both have one turn of about 5 ms, in an order that changes; figures are medians of processor time over the
rounds, so that other programs do not count, and the ratio is the median of the rounds' ratios. Both are called as SB3's
algorithms call them, and give equal batches. It needs `pip install "recollect[sb3]"`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from recollect.adapters.sb3 import SB3HerReplayBuffer, SB3ReplayBuffer
from report import number, table

HERE = Path(__file__).parent
EPISODE = 50
OBS, ACTION, GOAL = (spaces.Box(-1, 1, (n,), np.float32) for n in (17, 6, 3))
GOALS = spaces.Dict({"observation": OBS, "achieved_goal": GOAL, "desired_goal": GOAL})
Call = Callable[[], Any]


class Distance:
    """Stands for a VecEnv: it only computes rewards."""

    def env_method(self, name: str, achieved: Any, desired: Any, infos: Any, indices: Any) -> Any:
        return [-np.linalg.norm(achieved - desired, axis=-1)]


def made(rows: int, space: Any, kind: Any, **kwargs: Any) -> Any:
    return kind(rows, space, ACTION, device="cpu", **kwargs)


def fill(ours: Any, theirs: Any, rows: int) -> None:
    """The same steps into both, straight into their memory: through `add` this takes a minute."""
    rng = np.random.default_rng(0)

    def block(space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: block(part) for name, part in space.items()}
        return rng.random((rows, *space.shape), np.float32)

    obs, next_obs = block(ours.observation_space), block(ours.observation_space)
    action, reward = block(ACTION), rng.random(rows, np.float32)
    truncated = np.arange(rows) % EPISODE == EPISODE - 1
    sample = {"obs": obs, "next_obs": next_obs, "action": action, "reward": reward, "truncated": truncated}
    ours.data.extend({**sample, "terminated": np.zeros(rows, bool)}, ends=truncated)
    for name, values in (("observations", obs), ("next_observations", next_obs)):
        parts = values.items() if isinstance(values, dict) else [(None, values)]
        for key, value in parts:
            column = getattr(theirs, name) if key is None else getattr(theirs, name)[key]
            column[:, 0] = value
    theirs.actions[:, 0], theirs.rewards[:, 0] = action, reward
    theirs.dones[:, 0] = theirs.timeouts[:, 0] = truncated
    for buffer in (ours, theirs):
        buffer.full = True
        if isinstance(buffer, HerReplayBuffer):
            buffer.ep_start[:, 0] = np.arange(rows) // EPISODE * EPISODE
            buffer.ep_length[:] = EPISODE


def check_equal(ours: Any, theirs: Any) -> None:
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(0)  # noqa: NPY002
        batch = buffer.sample(256)
        batches.append(
            [*batch.observations.values()] if isinstance(batch.observations, dict) else [*batch[:5]]
        )
    assert all(bool((a == b).all()) for a, b in zip(*batches, strict=True))


def pairs(rows: int) -> dict[str, tuple[Call, Call]]:
    """What is timed: ours and theirs by the name of the work."""
    env: Any = Distance()
    box = made(rows, OBS, SB3ReplayBuffer), made(rows, OBS, ReplayBuffer)
    goals = made(rows, GOALS, SB3ReplayBuffer), made(rows, GOALS, DictReplayBuffer)
    her = made(rows, GOALS, SB3HerReplayBuffer, env=env), made(rows, GOALS, HerReplayBuffer, env=env)
    for ours, theirs in (box, goals, her):
        fill(ours, theirs, rows)
        check_equal(ours, theirs)
    step = {
        name: np.zeros((1, *space.shape), np.float32) for name, space in (("obs", OBS), ("action", ACTION))
    }
    args = step["obs"], step["obs"], step["action"], np.zeros(1), np.zeros(1, bool), [{}]
    return {
        "sample 256, Box": (lambda: box[0].sample(256), lambda: box[1].sample(256)),
        "sample 256, Dict": (lambda: goals[0].sample(256), lambda: goals[1].sample(256)),
        "sample 256, hindsight goals": (lambda: her[0].sample(256), lambda: her[1].sample(256)),
        "add 1, Box": (lambda: box[0].add(*args), lambda: box[1].add(*args)),
    }


def timed(call: Call, n: int) -> float:
    call()  # the other one has emptied the caches
    start = thread_time()
    for _ in range(n):
        call()
    return (thread_time() - start) / n * 1e6


def measure(ours: Call, theirs: Call, n_rounds: int, turn_s: float) -> dict[str, float]:
    calls = [ours, theirs]
    counts = [max(1, int(turn_s * 1e6 / timed(call, 3))) for call in calls]
    found = np.zeros((n_rounds, 2))
    for i in range(n_rounds):
        for j in (0, 1) if i % 2 else (1, 0):
            found[i, j] = timed(calls[j], counts[j])
    a, b = (median(found[:, j].tolist()) for j in (0, 1))
    return {"recollect_us": a, "sb3_us": b, "ratio": median((found[:, 1] / found[:, 0]).tolist())}


def main() -> None:
    """Run it all, print a table and write the figures down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows, n_rounds, turn_s = (5_000, 2, 0.0001) if options.quick else (options.rows, options.rounds, 0.005)
    figures = {name: measure(*pair, n_rounds, turn_s) for name, pair in pairs(rows).items()}
    lines = [
        [name, number(x["recollect_us"]), number(x["sb3_us"]), f"{x['ratio']:.1f}"]
        for name, x in figures.items()
    ]
    print(f"{rows:,} rows, {n_rounds} rounds, medians of processor time in µs a call")
    print(table(["work", "Recollect", "SB3", "SB3 / Recollect"], lines))
    if options.quick:
        print("these figures say only that everything runs")
    else:
        result = {"rows": rows, "rounds": n_rounds, "figures": figures}
        (HERE / "results" / "sb3_buffers.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Learning curves of Stable-Baselines3 with its own replay buffers and with ours, from the same seeds, in one run.

    python benchmarks/sb3_curves.py                    writes results/sb3_curves.json
    python benchmarks/sb3_curves.py --quick            a smoke test: too short to learn anything

SAC on Pendulum-v1, and DQN with hindsight goals on bits to flip (SB3's own environment), three seeds each. Every pair
of runs must be the same bit for bit: the return of every episode, and all weights at the end. It needs
`pip install "recollect[sb3]"`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN, SAC, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv

from recollect.adapters.sb3 import SB3HerReplayBuffer, SB3ReplayBuffer
from report import number, table

HERE = Path(__file__).parent
N_BITS = 10


class Returns(BaseCallback):
    """Keeps the return of every episode, in order."""

    def _on_training_start(self) -> None:
        self.found: list[float] = []

    def _on_step(self) -> bool:
        self.found += [float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info]
        return True


def sac(buffer: Any, seed: int) -> Any:
    """SAC on a pendulum, with SB3's defaults but one update every second step."""
    return SAC(
        "MlpPolicy", make_vec_env("Pendulum-v1", 1), seed=seed, device="cpu", learning_rate=1e-3, train_freq=2,
        policy_kwargs={"net_arch": [64, 64]}, replay_buffer_class=buffer,
    )  # fmt: skip


def hindsight(buffer: Any, seed: int) -> Any:
    """DQN with hindsight goals: an episode gets -1 a step until all bits are right."""
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=N_BITS, continuous=False), 1)
    return DQN(
        "MultiInputPolicy", env, seed=seed, device="cpu", learning_rate=1e-3, learning_starts=200, train_freq=2,
        target_update_interval=200, exploration_fraction=0.3, policy_kwargs={"net_arch": [128]},
        replay_buffer_class=buffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},
    )  # fmt: skip


def run(
    make: Callable[[Any, int], Any], buffer: Any, seed: int, n_steps: int
) -> tuple[list[float], Any, float]:
    """Returns of the episodes, weights at the end, seconds of processor time."""
    model, returns, start = make(buffer, seed), Returns(), process_time()
    model.learn(n_steps, callback=returns)
    return returns.found, model.policy.state_dict(), process_time() - start


def tenths(returns: list[float]) -> list[float]:
    """The mean return of each tenth of the episodes."""
    return [float(np.mean(part)) for part in np.array_split(returns, min(10, len(returns)))]


def main() -> None:
    """Train each pair, check that it is equal, print its curve and write all of them down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    works = {
        "SAC, Pendulum-v1": (sac, ReplayBuffer, SB3ReplayBuffer, 8_000),
        f"DQN and hindsight goals, {N_BITS} bits": (hindsight, HerReplayBuffer, SB3HerReplayBuffer, 20_000),
    }
    results, lines = [], []
    for name, (make, theirs, ours, n_steps) in works.items():
        for seed in range(1 if options.quick else options.seeds):
            n = 300 if options.quick else n_steps
            (their_returns, their_weights, their_s), (returns, weights, our_s) = (
                run(make, buffer, seed, n) for buffer in (theirs, ours)
            )
            same = returns == their_returns
            same &= all(torch.equal(weights[key], value) for key, value in their_weights.items())
            curve = tenths(returns)
            results.append({
                "work": name, "seed": seed, "steps": n, "episodes": len(returns), "same": same, "curve": curve,
                "sb3_curve": tenths(their_returns), "recollect_s": our_s, "sb3_s": their_s,
            })  # fmt: skip
            lines.append(
                [name, str(seed), *(number(x) for x in (curve[0], curve[len(curve) // 2], curve[-1])),
                 "bit for bit" if same else "differs", f"{their_s:.1f} s", f"{our_s:.1f} s"]
            )  # fmt: skip
            print(*lines[-1], flush=True)
    print(table(["work", "seed", "first", "middle", "last", "equal", "SB3", "Recollect"], lines))
    if options.quick:
        print("these figures say only that everything runs")
    else:
        (HERE / "results" / "sb3_curves.json").write_text(json.dumps(results, indent=1) + "\n")
    if not all(result["same"] for result in results):
        raise SystemExit("a run with our buffer differs from the run with SB3's")


if __name__ == "__main__":
    main()

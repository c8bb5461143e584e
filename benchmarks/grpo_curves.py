"""How fast the GRPO examples learn, over seeds: `python benchmarks/grpo_curves.py [--task sum] [--plot out.png]`.

Runs `examples/grpo_copy.py` seed after seed and prints one JSON line each: steps and seconds to the goal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def measure(task: str, seed: int) -> list[Any]:
    """Train one seed; return its curve."""
    import grpo_copy

    _, steps, goal = grpo_copy.TASKS[task]
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        curve: list[Any] = asyncio.run(grpo_copy.train(task, steps, seed, goal))
    step, reward, exact = curve[-1]
    row = {"task": task, "seed": seed, "steps": step, "reward": reward, "exact": exact, "goal": goal,
           "seconds": round(time.monotonic() - start, 1), "met": exact >= goal}  # fmt: skip
    print(json.dumps(row), flush=True)
    return curve


def plot(curves: dict[int, list[Any]], path: str) -> None:
    """Reward and exact accuracy over steps, one line per seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), sharex=True, layout="constrained")
    for axis, column, title in zip(axes, (1, 2), ("mean reward", "exact greedy accuracy")):
        for seed, curve in curves.items():
            axis.plot([p[0] for p in curve], [p[column] for p in curve], ".-", label=f"seed {seed}")
        axis.set(title=title, xlabel="step", ylim=(0, 1.02))
    axes[1].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="copy", choices=["copy", "sum"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", help="write the curves to this PNG")
    options = parser.parse_args()
    curves = {seed: measure(options.task, seed) for seed in options.seeds}
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()

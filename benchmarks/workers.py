"""Worker processes against drawing in the caller's own: what a batch costs, and what heavy transformations gain.

    python benchmarks/workers.py            # half a minute; --quick is a smoke test whose figures mean nothing

In each round every sampler has one turn in a tight loop, in an order that changes; figures are medians over the
rounds, ratios are of medians. Between turns the workers of the others are asleep: their rings are full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import recollect as rc

SPACE = {
    "obs": ((17,), "float32"),
    "action": ((6,), "float32"),
    "reward": ((), "float32"),
    "next_obs": ((17,), "float32"),
    "done": ((), "bool"),
}
BATCH = 256
HEAVY_S = 0.005
WORK_S = 200e-6


def filled(n_rows: int) -> rc.ReplayBuffer:
    buffer = rc.ReplayBuffer.create("shared", SPACE, capacity=n_rows, multiprocessing=True)
    rng = np.random.default_rng(0)
    while len(buffer) < n_rows:
        n = min(50_000, n_rows - len(buffer))
        buffer.extend({
            "obs": rng.random((n, 17), np.float32),
            "action": rng.random((n, 6), np.float32),
            "reward": rng.random(n, np.float32),
            "next_obs": rng.random((n, 17), np.float32),
            "done": rng.random(n) < 0.01,
        })  # fmt: skip
    return buffer


class Heavy(rc.DataTransformation):
    """Takes 5 ms: of the processor's time, or asleep (a decoder elsewhere, a disk)."""

    def __init__(self, is_busy: bool) -> None:
        self.is_busy = is_busy

    def get_target_space_from_source(self, space: Any) -> Any:
        return space

    def transform(self, space: Any, data: Any) -> Any:
        if not self.is_busy:
            time.sleep(HEAVY_S)
            return data
        end = time.thread_time() + HEAVY_S
        while time.thread_time() < end:
            pass
        return data


Draw = Callable[[], Any]


def seconds_of(draw: Draw, n_calls: int, work_s: float) -> float:
    """How long the calls take in all; between two of them the caller works for `work_s`, which does not count."""
    if not work_s:
        start = time.perf_counter()
        for _ in range(n_calls):
            draw()
        return time.perf_counter() - start
    total = 0.0
    for _ in range(n_calls):
        start = time.perf_counter()
        draw()
        ended = time.perf_counter()
        total += ended - start
        while time.perf_counter() < ended + work_s:
            pass
    return total


def turns(draws: dict[str, Draw], n_rounds: int, n_calls: int, work_s: float = 0.0) -> dict[str, list[float]]:
    """Seconds per call, one for each round."""
    names = list(draws)
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(n_rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            draw = draws[name]
            for _ in range(min(n_calls, 64)):  # the ring is full at first: those do not count
                draw()
            found[name].append(seconds_of(draw, n_calls, work_s) / n_calls)
    return found


def compare(
    title: str, source: Any, workers: list[tuple[int, int]], n_rounds: int, n_calls: int, work_s: float = 0.0
) -> dict[str, Any]:
    with ExitStack() as stack:
        draws: dict[str, Draw] = {"in-process": rc.StepSampler(source, BATCH, seed=0).sample}
        for n_workers, n_buffers in workers:
            inner = rc.StepSampler(source, BATCH, seed=0)
            sampler = rc.MultiprocessingSampler(inner, n_workers, n_buffers)
            draws[f"{n_workers} workers, {n_buffers} buffers"] = stack.enter_context(sampler).sample
        found = turns(draws, n_rounds, n_calls, work_s)
    base = statistics.median(found["in-process"])
    print(f"\n{title}")
    rows = {}
    for name, times in found.items():
        middle = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4)
        rows[name] = {
            "median_us": middle * 1e6,
            "quartiles_us": [low * 1e6, high * 1e6],
            "cost": middle / base,
        }
        print(f"  {name:24} {middle * 1e6:9.1f} µs ({low * 1e6:.1f} to {high * 1e6:.1f})   "
              f"cost {middle / base:5.2f} ×   rate {base / middle:5.2f} ×")  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: seconds, figures without meaning")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    quick = args.quick
    with filled(10_000 if quick else 1_000_000) as buffer:
        plain = compare(f"draw {BATCH} of {len(buffer)} transitions (165 B)", buffer, [(1, 8), (2, 8), (4, 8), (4, 32)],
                        3 if quick else 41, 50 if quick else 1000)  # fmt: skip
        title = (
            f"the same, for a caller that works for {WORK_S * 1e6:.0f} µs between draws: what a draw costs it"
        )
        learner = compare(title, buffer, [(1, 8), (2, 8), (4, 8), (4, 32)], 3 if quick else 41,
                          50 if quick else 300, WORK_S)  # fmt: skip
        busy = compare("the same, transformed for 5 ms of processor time", rc.TransformedBatch(buffer, Heavy(True)),
                       [(2, 8), (4, 8)], 2 if quick else 5, 5 if quick else 40)  # fmt: skip
        asleep = compare("the same, transformed for 5 ms asleep", rc.TransformedBatch(buffer, Heavy(False)),
                         [(2, 8), (4, 8)], 2 if quick else 5, 5 if quick else 40)  # fmt: skip
    goals = {
        f"{name}: a batch costs at most 1.2 × one in-process": row["cost"] <= 1.2
        for name, row in plain.items()
        if name != "in-process"
    } | {
        f"{name}, for a caller that works between draws: at most 1.2 ×": row["cost"] <= 1.2
        for name, row in learner.items()
        if name != "in-process"
    } | {
        "4 workers with 5 ms of work: at least 1.8 × the rate": 1 / busy["4 workers, 8 buffers"]["cost"] >= 1.8,
    }  # fmt: skip
    for goal, met in goals.items():
        print(f"{'PASS' if met else 'MISS'}  {goal}")
    if args.out:
        args.out.write_text(
            json.dumps(
                {"plain": plain, "learner": learner, "busy": busy, "asleep": asleep, "goals": goals}, indent=1
            )
        )
    if args.check and not all(goals.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

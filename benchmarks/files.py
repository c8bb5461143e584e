"""Shuffled epochs from Parquet files beside a plain pyarrow scan of the same files, in one run.

    python benchmarks/files.py [--rows 1000000] [--batch-size 256] [--repeats 3]

The scan decodes every file to Arrow and stops there; the epoch also shuffles, gathers and hands out numpy batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import recollect as rc

SPACE = {"obs": ((17,), "float32"), "action": ((6,), "float32")}
ROW_NBYTES = 23 * 4


def write(path: Path, n: int, compression: str) -> float:
    """Write `n` random rows; return the seconds it took, commits included."""
    rng = np.random.default_rng(0)
    obs, action = (rng.standard_normal((n, k)).astype(np.float32) for k in (17, 6))
    start = time.perf_counter()
    with rc.ReplayBuffer.create("parquet", SPACE, cache_path=path, compression=compression) as buffer:
        for first in range(0, n, 65536):
            part = slice(first, first + 65536)
            buffer.extend({"obs": obs[part], "action": action[part]})
    return time.perf_counter() - start


def scan(path: Path) -> int:
    """Read all files with pyarrow.dataset, its threads included."""
    import pyarrow.dataset

    files = sorted(map(str, (path / "storage").glob("*.parquet")))
    return sum(batch.num_rows for batch in pyarrow.dataset.dataset(files).to_batches())


def epoch(path: Path, batch_size: int, seed: int) -> int:
    """One shuffled epoch of a buffer that was just loaded."""
    with rc.ReplayBuffer.load_from(path) as buffer:
        sampler = rc.StepSampler(buffer, batch_size, seed=seed)
        return sum(len(batch["obs"]) for batch in sampler.epoch_iter())


def draws(path: Path, batch_size: int, n: int) -> int:
    """Uniform draws of single rows, through the cache of chunks."""
    with rc.ReplayBuffer.load_from(path) as buffer:
        sampler = rc.StepSampler(buffer, batch_size, seed=0)
        return sum(len(sampler.sample()["obs"]) for _ in range(n))


def timed(works: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[tuple[float, float, int]]]:
    """Seconds by the clock, seconds of processor time of all threads, and rows, of each work in each round."""
    seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():  # by turns: a slow moment of the machine is everybody's
            start, cpu = time.perf_counter(), time.process_time()
            n = work()
            seen[name].append((time.perf_counter() - start, time.process_time() - cpu, n))
    return seen


def run(rows: int, batch_size: int, repeats: int, compression: str = "zstd") -> dict[str, Any]:
    """Measure everything once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        seconds = write(path, rows, compression)
        found = timed(
            {
                "plain scan": lambda: scan(path),
                "shuffled epoch": lambda: epoch(path, batch_size, 0),
                "random draws": lambda: draws(path, batch_size, 20),
            },
            repeats,
        )
    out: dict[str, Any] = {"rows": rows, "batch_size": batch_size, "write rows/s": rows / seconds}
    for name, rounds in found.items():
        rates = [n / wall for wall, _, n in rounds]
        rate = statistics.median(rates)
        spread = (max(rates) - min(rates)) / rate
        out[name] = {"rows/s": rate, "MB/s": rate * ROW_NBYTES / 1e6, "spread": spread}
    pairs = list(zip(found["plain scan"], found["shuffled epoch"]))
    out["epoch / scan"] = statistics.median(a[0] / b[0] for a, b in pairs)
    # Where other programs run too, processor time tells more than the clock.
    out["epoch / scan, processor time"] = statistics.median(a[1] / b[1] for a, b in pairs)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compression", default="zstd")
    print(json.dumps(run(**vars(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()

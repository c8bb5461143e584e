"""How soon `recollect view` shows a set: from the command to the list, the returns and the first curves.

    python benchmarks/view.py [--rows 1000000] [--json FILE]

The set has HalfCheetah's rows (312 B) in episodes of 1,000. The last line is one plain read of the
files: what opening would cost if it read everything.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import recollect as rc

SPACE = {"obs": ((17,), "float64"), "action": ((6,), "float32"), "reward": ((), "float32"),
         "next_obs": ((17,), "float64"), "terminated": ((), "bool"), "truncated": ((), "bool")}  # fmt: skip


def write(path: Path, n: int) -> None:
    """Dump `n` rows in episodes of 1,000."""
    rng = np.random.default_rng(0)
    buf = rc.ReplayBuffer.create("memory", SPACE, capacity=n, maintain_segment_metadata=True)
    for first in range(0, n, 10_000):
        k = min(10_000, n - first)
        obs = rng.normal(size=(k + 1, 17))
        ends = np.arange(first + 1, first + k + 1) % 1000 == 0
        buf.extend({"obs": obs[:-1], "action": rng.normal(size=(k, 6)).astype("float32"),
                    "reward": rng.normal(size=k).astype("float32"), "next_obs": obs[1:],
                    "terminated": np.zeros(k, bool), "truncated": ends}, ends=ends)  # fmt: skip
    buf.dumps(path)


def ask(address: str) -> Any:
    """One question to the page."""
    with urllib.request.urlopen(address) as answer:
        return json.loads(answer.read())


def look(path: Path) -> dict[str, float]:
    """Start the command and ask as the page does; seconds since the start."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "recollect", "view", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            seen = {"command to address": time.perf_counter() - start}
            ask(url + "episodes?limit=200")
            seen["list"] = time.perf_counter() - start
            ask(url + "curves?episode=0&leaf=obs&width=800")
            seen["first curves"] = time.perf_counter() - start
            while ask(url + "episodes?limit=200")["progress"] < 1:
                time.sleep(0.01)
            seen["all returns"] = time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGINT)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "set")
        write(path, args.rows)
        found = look(path)
        start = time.perf_counter()
        nbytes = sum(len(file.read_bytes()) for file in (path / "storage").iterdir())
        found["one plain read"] = time.perf_counter() - start
    report = {"rows": args.rows, "bytes": nbytes, "seconds": found}
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

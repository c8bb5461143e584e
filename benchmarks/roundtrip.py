"""A recorded set through every form and back: nothing may change. Needs gymnasium[mujoco] for HalfCheetah.

    python benchmarks/roundtrip.py                                  a million steps of HalfCheetah-v5
    python benchmarks/roundtrip.py --env Pendulum-v1 --steps 2000   a smoke test

A random policy is recorded through ReplayBufferCollectionWrapper and dumped. `recollect convert` makes Parquet, HDF5
and LeRobot v3.0 of the dump, and of each of these a dump again; `recollect verify` reads every form. Then all of them
are compared with the samples in memory, leaf by leaf and bit by bit, segments included. LeRobot has neither scalars
nor leaves of leaves: there shape () is shape (1,), `obs/x` is `obs.x`, and columns of its own are added.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import recollect as rc
from recollect.batch.structure import pick
from recollect.cli import run as command
from recollect.datasets import open_dataset
from recollect.spaces.tree import leaf_paths

FORMS = ("parquet", "hdf5", "lerobot")
CHUNK = 65536


def record(env_id: str, n: int) -> rc.ReplayBuffer:
    """Record `n` transitions of a random policy."""
    env: Any = gymnasium.make(env_id)
    buffer = rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(env), capacity=n, maintain_segment_metadata=True
    )
    env = rc.ReplayBufferCollectionWrapper(env, buffer)
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(n):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()
    return buffer


def compare(whole: rc.ReplayBuffer, path: Path) -> None:
    """Raise AssertionError unless a path holds the same samples in the same segments."""
    with open_dataset(path) as found:  # type: ignore[attr-defined]
        assert len(found) == len(whole), f"{path}: {len(found)} samples, not {len(whole)}"
        assert found.get_segments() == whole.get_segments(), f"{path}: other segments"
        pairs = [(p, p) for p, _ in leaf_paths(whole.single_space)]
        if pairs[0][0] not in [p for p, _ in leaf_paths(found.single_space)] or "index" in found.single_space:
            pairs = [(p, (".".join(map(str, p)),)) for p, _ in pairs]
        for first in range(0, len(whole), CHUNK):
            rows = np.arange(first, min(first + CHUNK, len(whole)))
            want, got = whole.get_at(rows), found.get_at(rows)
            for mine, theirs in pairs:
                a, b = np.asarray(pick(want, mine)), np.asarray(pick(got, theirs))
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"{path}: {theirs} differs"


def run(env: str, steps: int, folder: Path) -> dict[str, Any]:
    """Do all of it; return how long each part took."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Any, *args: Any) -> Any:
        start = time.perf_counter()
        found = work(*args)
        seconds[name] = round(time.perf_counter() - start, 2)
        print(f"{name}: {seconds[name]} s", flush=True)
        return found

    whole = timed("record", record, env, steps)
    timed("dump", whole.dumps, folder / "dump")
    timed("dump: compare", compare, whole, folder / "dump")
    for form in FORMS:
        more = ["--fps", "20"] if form == "lerobot" else []
        there, back = folder / form, folder / f"{form}-back"
        timed(
            f"to {form}",
            command,
            ["convert", str(folder / "dump"), str(there), "--to", form, "--json", *more],
        )
        timed(f"{form}: verify", command, ["verify", str(there), "--json"])
        timed(f"{form}: compare", compare, whole, there)
        timed(f"{form} to memory", command, ["convert", str(there), str(back), "--to", "memory", "--json"])
        timed(f"{form} to memory: compare", compare, whole, back)
    segments = whole.get_segments() or []
    whole.close()
    return {"env": env, "steps": steps, "episodes": len(segments), "equal": [*FORMS], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(args.env, args.steps, Path(folder))
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What recording costs: the step of a vector CartPole with and without ReplayBufferCollectionWrapper, in one run.

    python benchmarks/recording.py                     1,024 slots, sync and native, every layout
    python benchmarks/recording.py --quick             a smoke test: few slots, figures without meaning
    python benchmarks/recording.py --envs sync --slots 64

Two environments of 1,024 slots are the yardstick. `sync` is gymnasium's SyncVectorEnv, which steps 1,024 CartPoles
in Python: what nearly every environment is run in. `native` is CartPoleVectorEnv, four lines of numpy for all
slots at once: as fast as an environment in Python gets. The goal, less than 5 % of a step, is meant for `sync`; the
other is there so that nobody has to guess.

Each layout has its own copy of the environment, all with the same seed and the same actions. In each round everybody
has one turn, in an order that changes. Two figures are given. `recorded / bare` is the ratio of whole steps in the same
round; on a step of 20 ms it is mostly noise. `recording` is the time spent in the wrapper's step outside of the
environment's own, timed inside the same calls; its share of the bare step is what the goal is about.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

import recollect as rc
from report import number, table

HERE = Path(__file__).parent
KINDS = {"sync": "sync", "native": "vector_entry_point"}
GOAL = 0.05
STEPS_KEPT = 100  # rows of each slot that a buffer holds


def _bare(envs: Any) -> Any:
    return envs


def _lanes(envs: Any, **kwargs: Any) -> Any:
    n = envs.num_envs
    space = rc.transition_space(envs)
    storage = kwargs.pop("storage", rc.MemoryStorage)
    buffer = rc.ReplayBuffer.create(storage, space, capacity=STEPS_KEPT * n, num_lanes=n, **kwargs)
    return rc.ReplayBufferCollectionWrapper(envs, buffer)


def _tracked_lanes(envs: Any) -> Any:
    return _lanes(envs, maintain_segment_metadata=True)


def _shared_lanes(envs: Any) -> Any:
    return _lanes(envs, maintain_segment_metadata=True, storage=rc.SharedMemoryStorage, multiprocessing=True)


def _block(envs: Any) -> Any:
    space = rc.transition_space(envs)
    buffer = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=STEPS_KEPT * envs.num_envs)
    return rc.ReplayBufferCollectionWrapper(envs, buffer)


def _per_env(envs: Any) -> Any:
    space = rc.transition_space(envs)
    buffers = [
        rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=STEPS_KEPT, maintain_segment_metadata=True)
        for _ in range(envs.num_envs)
    ]
    return rc.ReplayBufferCollectionWrapper(envs, buffers)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "bare": _bare,
    "one lane, untracked": _block,
    "a lane each, segments": _tracked_lanes,
    "a lane each, shared memory": _shared_lanes,
    "a buffer each, segments": _per_env,
}
IN_GOAL = ("one lane, untracked", "a lane each, segments", "a lane each, shared memory")


@dataclass
class Runner:
    """One environment and its turns, in µs a step."""

    envs: Any
    actions: np.ndarray[Any, Any]
    times_us: list[float] = field(default_factory=list)
    own_us: list[float] = field(default_factory=list)  # of it, outside of the environment's own step
    at: int = 0
    inner_s: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.envs, rc.ReplayBufferCollectionWrapper):
            step = self.envs.env.step

            def timed(action: Any) -> Any:
                start = perf_counter()
                result = step(action)
                self.inner_s += perf_counter() - start
                return result

            self.envs.env.step = timed

    def turn(self, steps: int, timed: bool = True) -> None:
        step, actions = self.envs.step, self.actions
        chosen = [actions[(self.at + k) % len(actions)] for k in range(steps)]
        self.at += steps
        self.inner_s = 0.0
        start = perf_counter()
        for action in chosen:
            step(action)
        spent = perf_counter() - start
        if timed:
            self.times_us.append(spent / steps * 1e6)
            self.own_us.append((spent - self.inner_s) / steps * 1e6)


def measure(kind: str, slots: int, rounds: int, turn_s: float) -> dict[str, Runner]:
    """Rounds in which every layout has one turn."""
    actions = np.random.default_rng(0).integers(0, 2, (256, slots))
    runners = {}
    for name, wrap in LAYOUTS.items():
        envs = gymnasium.make_vec("CartPole-v1", num_envs=slots, vectorization_mode=KINDS[kind])
        runners[name] = Runner(wrap(envs), actions)
        runners[name].envs.reset(seed=0)
        runners[name].turn(3, timed=False)
    start = perf_counter()
    runners["bare"].turn(1, timed=False)
    steps = max(1, int(turn_s / (perf_counter() - start)))
    for k in range(rounds):
        for name in random.Random(k).sample(list(runners), len(runners)):
            runners[name].turn(1, timed=False)  # the others have emptied the caches
            runners[name].turn(steps)
    for runner in runners.values():
        runner.envs.close()
    return runners


def lines(runners: dict[str, Runner]) -> list[dict[str, Any]]:
    """Every layout against the bare environment of the same round."""
    bare = runners["bare"].times_us
    found = []
    for name, runner in runners.items():
        own = runner.own_us if name != "bare" else [0.0] * len(bare)
        low, _, high = quantiles(own, n=4)
        found.append(
            {
                "layout": name,
                "us": median(runner.times_us),
                "ratio": median(ours / theirs for ours, theirs in zip(runner.times_us, bare)),
                "own_us": median(own),
                "own_q1_us": low,
                "own_q3_us": high,
                "share": median(own) / median(bare),
                "rounds_us": runner.times_us,
                "rounds_own_us": own,
            }
        )
    return found


def text_of(kind: str, slots: int, found: list[dict[str, Any]]) -> str:
    header = ("", "µs/step", "recorded / bare", "recording µs", "q1", "q3", "ns/slot", "of a bare step")
    rows = []
    for line in found:
        cells = [number(line[key]) for key in ("us", "ratio", "own_us", "own_q1_us", "own_q3_us")]
        cells += [number(line["own_us"] / slots * 1e3), f"{line['share'] * 100:.1f} %"]
        rows.append([line["layout"], *(cells if line["layout"] != "bare" else [cells[0], *(["-"] * 6)])])
    return f"{kind}: CartPole-v1, {slots:,} slots\n" + table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("recording.py", description=__doc__, formatter_class=usage)
    add = parser.add_argument
    add("--envs", default="sync,native", help="comma-separated, of sync and native; default both")
    add("--slots", type=int, default=None, help="slots of each; default 1,024, with --quick 8")
    add("--rounds", type=int, default=None, help="rounds; default 80, with --quick 3")
    add("--quick", action="store_true", help="few slots and short turns: does it run at all?")
    add("--json", type=Path, default=None, help="result file; default results/recording.json, if quick none")
    add("--check", action="store_true", help="exit with status 1 if recording sync costs 5 %% or more")
    options = parser.parse_args(argv)
    kinds = options.envs.split(",")
    if not set(kinds) <= set(KINDS):
        raise SystemExit(f"--envs: must be among {', '.join(KINDS)}; got {options.envs}")
    slots = options.slots or (8 if options.quick else 1024)
    rounds = options.rounds or (3 if options.quick else 80)
    results = {}
    for kind in kinds:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        results[kind] = lines(measure(kind, slots, rounds, 0.002 if options.quick else 0.01))
        print(text_of(kind, slots, results[kind]) + "\n")
    worst = max(
        (line["share"] for line in results.get("sync", []) if line["layout"] in IN_GOAL), default=None
    )
    if worst is not None:
        verdict = "PASS" if worst < GOAL else "MISS"
        print(
            f"{verdict}  recording costs less than {GOAL:.0%} of a sync step in every layout: {worst:.1%} at most"
        )
    if options.quick:
        print("\n--quick: few slots and short turns; these figures say only that everything runs.")
    target = options.json or (None if options.quick else HERE / "results" / "recording.json")
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        settings = {
            "slots": slots,
            "rounds": rounds,
            "quick": options.quick,
            "load_before": os.getloadavg()[0],
        }
        target.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    return 1 if options.check and worst is not None and worst >= GOAL else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Memory between processes, against memcpy and a C gather of the same bytes.

`python benchmarks/ipc.py [--quick] [--check] [--json FILE]`

In each round everybody has one short turn, in an order that changes; figures are medians over the rounds, with
quartiles. The references work on the same memory: memcpy writes into the three slots of the weights, and round the ring
of the transitions, as we do, and the C gather reads the very rows that are sampled. Other memory of the same kind may
be a quarter faster or slower, by where it happens to lie.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import recollect as rc
from adapters.c import CLeaves, address, compiled
from works import Leaf, Work

Turn = Callable[[int], float]
OBS, ACTION, ADD, DRAW = 48, 12, 4096, 8192
LEAVES = (
    Leaf("obs", (OBS,), "float32"), Leaf("next_obs", (OBS,), "float32"), Leaf("actions", (ACTION,), "float32"),
    Leaf("rewards", (), "float32"), Leaf("dones", (), "float32"), Leaf("truncated", (), "float32"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One bound of the contract and what was measured: a ratio to a reference, or microseconds."""

    name: str
    us: float
    quartiles_us: tuple[float, float]
    reference_us: float | None
    bound: float

    @property
    def value(self) -> float:
        return self.us if self.reference_us is None else self.us / self.reference_us

    @property
    def verdict(self) -> str:
        return "PASS" if self.value <= self.bound else "MISS"

    @property
    def line(self) -> str:
        low, high = self.quartiles_us
        if self.reference_us is None:
            told = f"{'':>12} {self.us:8.2f} µs   bound {self.bound:g} µs"
        else:
            told = f"{self.reference_us:9.1f} µs {self.value:8.2f} x    bound {self.bound:g} x"
        return f"{self.name:<34} {self.us:9.1f} µs [{low:.1f}, {high:.1f}] {told:<34} {self.verdict}"


def looped(call: Callable[[], Any]) -> Turn:
    """A turn that makes `calls` calls from Python, loop included."""

    def turn(calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            call()
        return perf_counter() - start

    return turn


def slots_of(sync: rc.ipc.SharedWeightSync, nbytes: int) -> Any:
    """The memory of the weights themselves."""
    segment: Any = sync._box._segment
    return segment.mapping.view(segment.data_at, nbytes)


class Memcpy:
    """memcpy, looped in C, from places to places."""

    def __init__(self, work: Work) -> None:
        self.lib = compiled(work)

    def turn(self, dst: Any, to: Any, src: Any, source: Any, nbytes: int) -> Turn:
        at, n = ctypes.c_size_t(0), ctypes.c_size_t(len(to))

        def turn(calls: int) -> float:
            ends = address(dst), address(to), address(src), address(source)
            sizes = ctypes.c_size_t(nbytes), ctypes.c_size_t(calls)
            return float(self.lib.time_memcpy(*ends, n, ctypes.byref(at), *sizes))

        return turn


def weights(memcpy: Memcpy, use_torch: bool) -> tuple[dict[str, Turn], list[Callable[..., Figure]]]:
    """A policy of three hidden layers of 512, written and read."""
    sizes = [OBS, 512, 512, 512, ACTION]
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        state |= {f"{i}.weight": rng.random((m, n), np.float32), f"{i}.bias": rng.random(m, np.float32)}
    if use_torch:
        import torch

        state = {name: torch.from_numpy(x) for name, x in state.items()}
    into = {name: x * 0 for name, x in state.items()}
    sync = rc.ipc.SharedWeightSync.from_state_dict(state)
    nbytes = sync.stats().param_nbytes
    stride = -(-nbytes // 4096) * 4096
    slots, private = slots_of(sync, 3 * stride), np.ones(nbytes, np.uint8)
    places = np.arange(3) * stride
    zero = np.zeros(3, np.int64)
    kind = "torch" if use_torch else "numpy"
    turns = {
        f"write {kind}": looped(partial(sync.write_weights, state)),
        f"read {kind}": looped(partial(sync.read_weights_into, into)),
        f"memcpy in {kind}": memcpy.turn(slots, places, private, zero, nbytes),
        f"memcpy out {kind}": memcpy.turn(np.ones(nbytes, np.uint8), zero, slots, zero, nbytes),
        f"version {kind}": looped(lambda: sync.version),
    }
    title = f"weights {kind}, {nbytes / 1e6:.1f} MB"
    return turns, [
        partial(ratio, f"write_weights ({title})", f"write {kind}", f"memcpy in {kind}", 1.2),
        partial(ratio, f"read_weights_into ({kind})", f"read {kind}", f"memcpy out {kind}", 1.3),
        partial(plain, f"version ({kind})", f"version {kind}", 1.0),
    ]


def statistics_of_obs() -> tuple[dict[str, Turn], list[Callable[..., Figure]]]:
    stats = rc.ipc.SharedObsNormStats(None)
    pair = np.zeros(OBS, np.float32), np.ones(OBS, np.float32)
    stats.put(pair)
    stats.get()
    reader = rc.ipc.SharedObsNormStats(None)
    reader.put(pair)
    reader.get()
    turns = {"put": looped(partial(stats.put, pair)), "get nothing": looped(reader.get)}
    return turns, [
        partial(plain, "SharedObsNormStats.put", "put", 10.0),
        partial(plain, "SharedObsNormStats.get, nothing new", "get nothing", 2.0),
    ]


def transitions(memcpy: Memcpy, work: Work) -> tuple[dict[str, Turn], list[Callable[..., Figure]]]:
    buf = rc.ipc.ReplayBuffer(work.rows, OBS, ACTION, "numpy", seed=0)
    rng = np.random.default_rng(0)
    pool = []
    for _ in range(8):
        done = rng.random(ADD) < 0.01
        obs, nxt = rng.random((2, ADD, OBS), np.float32)
        pool.append(
            (obs, rng.random((ADD, ACTION), np.float32), rng.random(ADD, np.float32), nxt, done, done & False)
        )
    while buf.ptr < work.rows:
        buf.add(*pool[0])
    kept = buf.sample(DRAW)
    turn_of = iter(range(1 << 62))

    def add(terminal: bool) -> None:
        block = pool[next(turn_of) % len(pool)]
        more = {"terminal_mask": block[4], "terminal_next_obs": block[3]} if terminal else {}
        buf.add(*block, **more)

    # The same bytes from a pool as large to the places of the same ring.
    nbytes, n = ADD * buf.row_nbytes, work.rows // ADD
    g, segment = buf._rows.geometry, buf._open()
    ring, source = segment.mapping.view(g.rows_at, work.rows * g.row_nbytes), np.ones(8 * nbytes, np.uint8)
    to, places = np.arange(n) * nbytes, np.arange(n) % 8 * nbytes
    gather = CLeaves()
    gather.lib, gather.at = compiled(work), ctypes.c_size_t(0)
    gather.rows = ring.view(work.row_dtype)
    turns = {
        "add": looped(partial(add, False)),
        "add terminal": looped(partial(add, True)),
        "memcpy add": memcpy.turn(ring, to, source, places, nbytes),
        "sample": looped(lambda: buf.sample(DRAW)),
        "sample out": looped(lambda: buf.sample(DRAW, out=kept)),
        "C gather": gather.draw(work),
    }
    return turns, [
        partial(ratio, f"add {ADD} rows of {buf.row_nbytes} B", "add", "memcpy add", 1.3),
        partial(ratio, "add, 1 % terminal rows", "add terminal", "memcpy add", 1.3),
        partial(ratio, f"sample {DRAW}, kept buffers", "sample out", "C gather", 1.3),
        # The contract speaks of kept buffers; here the pages of new memory come on top.
        partial(ratio, f"sample {DRAW}, new arrays", "sample", "C gather", 1.5),
    ]


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process on each core that never pauses, as environments of collectors are."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def ratio(name: str, ours: str, theirs: str, bound: float, rounds: dict[str, list[float]]) -> Figure:
    return Figure(name, *middle(rounds[ours]), statistics.median(rounds[theirs]), bound)


def plain(name: str, ours: str, bound: float, rounds: dict[str, list[float]]) -> Figure:
    return Figure(name, *middle(rounds[ours]), None, bound)


def middle(us: list[float]) -> tuple[float, tuple[float, float]]:
    low, _, high = statistics.quantiles(us, n=4, method="inclusive")
    return statistics.median(us), (low, high)


def measure(turns: dict[str, Turn], n_rounds: int, turn_s: float) -> dict[str, list[float]]:
    """Microseconds a call, round by round; a turn begins with untimed calls."""
    calls = {}
    for name, turn in turns.items():
        n = 1
        while (seconds := turn(n)) < turn_s / 2:
            n *= 2
        calls[name] = max(1, round(n * turn_s / seconds))
    rounds: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    shuffle = random.Random(0)
    for _ in range(n_rounds):
        shuffle.shuffle(order)
        for name in order:
            turns[name](calls[name] // 20 + 1)
            rounds[name].append(turns[name](calls[name]) / calls[name] * 1e6)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures without meaning")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a bound is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    work = Work("ipc", "draw", DRAW, 1 << (14 if args.quick else 18), LEAVES)
    memcpy = Memcpy(work)
    groups = [weights(memcpy, False), statistics_of_obs(), transitions(memcpy, work)]
    try:
        groups.insert(1, weights(memcpy, True))
    except ImportError:
        print("torch is not installed: its weights are left out")
    figures = []
    how = (2, 0.001) if args.quick else (60, 0.01)
    for turns, results in groups:
        rounds = measure(turns, *how)
        figures += [result(rounds) for result in results]
    turns = {name: groups[-1][0][name] for name in ("sample out", "C gather")}
    with busy_cores():
        rounds = measure(turns, *how)
    figures.append(ratio(f"sample {DRAW}, all cores busy", "sample out", "C gather", 2.0, rounds))
    for figure in figures:
        print(figure.line)
    if args.json:
        told = [asdict(f) | {"value": f.value, "verdict": f.verdict} for f in figures]
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(args.check and any(f.verdict == "MISS" for f in figures))


if __name__ == "__main__":
    sys.exit(main())

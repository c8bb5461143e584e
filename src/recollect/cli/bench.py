"""`recollect bench`: what this machine does with a replay buffer, beside its own memcpy."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from recollect.cli.terminal import bar

Block = dict[str, Any]
Calls = dict[int, Callable[[], Any]]  # by how many samples a call adds or draws
_TURN_S = 0.01
LEAVES = {"obs": (17,), "action": (6,), "reward": (), "next_obs": (17,), "done": ()}
ROW_NBYTES = 4 * sum(int(np.prod(shape)) for shape in LEAVES.values())


@dataclass
class Bench:
    """Time adding to and drawing from a buffer in memory, beside memcpy of the same bytes.

    Transitions are obs 17, action 6, reward, next_obs 17, done, in float32: 168 bytes. Both take turns of 10 ms in one
    run, so that a slow moment of the machine slows both; figures are medians. Nothing else should run meanwhile.
    Beside other libraries: `make bench` in a clone.

    Example: recollect bench --rows 1000000
    """

    rows: int = 200_000
    """Transitions that each buffer holds; it is full before the first turn."""
    batch: int = 256
    """Samples in the smaller of the two batches that are added and drawn; the other has 4,096."""
    rounds: int = 15
    """Turns of each at each work."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        """Measure and report."""
        if min(self.rows, self.batch, self.rounds) < 1:
            sys.exit("recollect bench: rows, batch and rounds must be at least 1")
        report = measure(self.rows, self.batch, self.rounds, self.json)
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            show(report)


def measure(rows: int, batch: int, rounds: int, quiet: bool) -> dict[str, Any]:
    """Time every work by both, in turns."""
    sizes = sorted({batch, 4096})
    blocks = {n: _block(n) for n in (1, *sizes)}
    calls: dict[str, tuple[Calls, Calls]] = {}
    with bar("making buffers", 2, quiet) as advance:
        for name, make in (("memcpy", memcpy), ("Recollect", recollect)):
            calls[name] = make(rows, blocks, sizes)
            advance(1)
    works = [("add", 0, n) for n in blocks] + [("draw", 1, n) for n in sizes]
    found = []
    with bar("timing", len(works) * rounds, quiet) as advance:
        for verb, which, n in works:
            turns = {name: both[which][n] for name, both in calls.items()}
            found.append({"work": f"{verb} {n}", "samples": n, **_timed(turns, n, rounds, advance)})
    return {"rows": rows, "row_nbytes": ROW_NBYTES, "cores": os.cpu_count(), "works": found}


def _timed(turns: dict[str, Callable[[], Any]], n: int, rounds: int, advance: Any) -> dict[str, Any]:
    """Median microseconds of each, taking turns, and what Recollect takes over memcpy."""
    n_calls = {name: max(1, int(_TURN_S / max(_seconds(call, 3), 1e-7))) for name, call in turns.items()}
    seen: dict[str, list[float]] = {name: [] for name in turns}
    for k in range(rounds):
        order = [*turns][k % len(turns) :] + [*turns][: k % len(turns)]
        for name in order:
            seen[name].append(_seconds(turns[name], n_calls[name]))
        advance(1)
    us = {name: median(values) * 1e6 for name, values in seen.items()}
    ours = us["Recollect"]
    return {"us": us, "gb_per_s": n * ROW_NBYTES / ours / 1e3, "times_memcpy": ours / us["memcpy"]}


def _seconds(work: Callable[[], Any], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        work()
    return (perf_counter() - start) / calls


def _block(n: int) -> Block:
    rng = np.random.default_rng(n)
    return {name: rng.standard_normal((n, *shape)).astype(np.float32) for name, shape in LEAVES.items()}


def recollect(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    """Plain `append`, `extend` and `sample`, all checks on."""
    import recollect as rc

    space = {name: (shape, "float32") for name, shape in LEAVES.items()}
    buffer = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=rows)
    largest = blocks[max(blocks)]
    while len(buffer) < rows:
        buffer.extend({name: array[: rows - len(buffer)] for name, array in largest.items()})
    one = {name: array[0] for name, array in blocks[1].items()}
    adders: Calls = {n: partial(buffer.extend, block) for n, block in blocks.items()}
    adders[1] = partial(buffer.append, one)
    return adders, {n: rc.StepSampler(buffer, n, seed=0).sample for n in draws}


def memcpy(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    """The same bytes in one piece: to the next place of a ring, or from a random place to a warm block."""
    ring = np.ones(max(rows, max(blocks)) * ROW_NBYTES, np.uint8)

    def adder(n: int) -> Callable[[], Any]:
        given, at = np.ones(n * ROW_NBYTES, np.uint8), [0]

        def add() -> None:
            start = at[0] if at[0] + given.size <= ring.size else 0
            ring[start : start + given.size] = given
            at[0] = start + given.size

        return add

    def drawer(n: int) -> Callable[[], Any]:
        size = n * ROW_NBYTES
        places = itertools.cycle(np.random.default_rng(n).integers(0, ring.size - size + 1, 4096).tolist())
        target = np.ones(size, np.uint8)

        def draw() -> None:
            at = next(places)
            target[:] = ring[at : at + size]

        return draw

    return {n: adder(n) for n in blocks}, {n: drawer(n) for n in draws}


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the times, and the ratios that travel between machines."""
    console = console or Console()
    works = report["works"]
    table = Table(
        title=f"{report['rows']:,} transitions of {report['row_nbytes']} bytes, {report['cores']} cores",
        title_justify="left",
    )
    table.add_column("")
    for work in works:
        table.add_column(work["work"], justify="right")
    for name in ("memcpy", "Recollect"):
        table.add_row(f"{name}, µs a call", *(f"{work['us'][name]:.2f}" for work in works))
    table.add_row("Recollect, GB/s", *(f"{work['gb_per_s']:.2f}" for work in works))
    table.add_row("Recollect over memcpy", *(f"{work['times_memcpy']:.2f}×" for work in works))
    console.print(table)

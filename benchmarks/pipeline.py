"""What a tick of the replay pipeline costs the learner, and what packing costs beside a C gather of the same rows.

`python benchmarks/pipeline.py [--quick] [--check] [--json FILE]`

A prefetched tick is all calls of one (`batch_ready`, `sample_large_batch`, `start_prepare`, `after_tick`) while the
batch is ready; the wait for the next one is not timed, since a learner trains meanwhile. A missed tick is the wait in
`sample_large_batch` without the pack itself, which the pipeline times: what is left is Python. The
C gather reads the very rows that are drawn from and writes to shared memory of the same kind; its indices are drawn
beforehand, and no Python runs between its calls. In each round everybody has one turn, in an order that changes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import numpy as np

import recollect as rc
from adapters.c import CPacked, address, compiled
from ipc import ACTION, ADD, LEAVES, OBS, Figure, Turn, looped, measure, plain, ratio
from recollect import _core
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline, packing
from recollect.ipc.replay_pipelines.slots import PackSlots
from works import Work

SIZES = (256, 8192, 32768)
PREFETCHED_US, MISSED_US, WAKE_US, PACK = 100.0, 200.0, 100.0, 1.3
Group = tuple[dict[str, Turn], list[Callable[..., Figure]]]


def filled(rows: int) -> Any:
    """A full buffer of `rows` rows, and a block to add."""
    buf = rc.ipc.ReplayBuffer(rows, OBS, ACTION, "numpy", seed=0)
    rng = np.random.default_rng(0)
    obs, nxt = rng.random((2, ADD, OBS), np.float32)
    no = np.zeros(ADD, bool)
    block = (obs, rng.random((ADD, ACTION), np.float32), rng.random(ADD, np.float32), nxt, no, no)
    while buf.ptr < rows:
        buf.add(*block)
    return buf, block


class Ticks:
    """A pipeline and the number of its next tick."""

    def __init__(self, buf: Any, n: int) -> None:
        self.pipe = CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=n)
        self.buf, self.n, self.tick = buf, n, 0

    def prefetched(self, calls: int) -> float:
        pipe, n, spent = self.pipe, self.n, 0.0
        for _ in range(calls):
            pipe.wait_until_ready(self.tick, n)
            start = perf_counter()
            pipe.batch_ready(self.tick, n)
            pipe.sample_large_batch(self.tick, n)
            pipe.start_prepare(self.tick + 1, n)
            pipe.after_tick()
            spent += perf_counter() - start
            self.tick += 1
        pipe.sample_large_batch(self.tick, n)
        pipe.after_tick()
        self.tick += 1
        return spent

    def missed(self, calls: int) -> float:
        before, start = self.pipe.stats().pack_us, perf_counter()
        for _ in range(calls):
            self.pipe.sample_large_batch(self.tick, self.n)
            self.pipe.after_tick()
            self.tick += 1
        return perf_counter() - start - (self.pipe.stats().pack_us - before) / 1e6


class WakeUp:
    """From the row that a packer waits for to the packer awake, in another thread while this one sleeps."""

    def __init__(self, buf: Any, block: Any) -> None:
        self.buf, self.one = buf, [x[:1] for x in block]
        self.slots = PackSlots(1, buf.row_nbytes)
        self.asked: SimpleQueue[int] = SimpleQueue()
        self.woken: SimpleQueue[float] = SimpleQueue()
        Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        while True:
            packing.wait_for_rows(self.buf, self.slots, self.asked.get(), 10.0)
            self.woken.put(perf_counter())

    def turn(self, calls: int) -> float:
        spent = 0.0
        for _ in range(calls):
            self.asked.put(self.buf.ptr + 1)
            while not self.buf._open().mapping.load(_core.SHARED_WORDS) >> 32:
                sleep(0.0001)  # until it sleeps on the word
            sleep(0.0003)
            start = perf_counter()
            self.buf.add(*self.one)
            spent += self.woken.get() - start
        return spent


def ticks(buf: Any, n: int) -> Group:
    run = Ticks(buf, n)
    turns: dict[str, Turn] = {f"prefetched {n}": run.prefetched, f"missed {n}": run.missed}
    return turns, [
        partial(plain, f"prefetched tick of {n}, all calls", f"prefetched {n}", PREFETCHED_US),
        partial(plain, f"missed tick of {n}, beside the pack", f"missed {n}", MISSED_US),
    ]


def packs(buf: Any, n: int) -> Group:
    """Packing into one slot against a C gather into the same slot."""
    work = Work("pipeline", "draw", n, buf.capacity, LEAVES)
    slots, seed = PackSlots(n, buf.row_nbytes), iter(range(1 << 62))
    slots.slot(0)[:] = 1
    gather = CPacked()
    gather.lib, gather.at = compiled(work), ctypes.c_size_t(0)
    g = buf._rows.geometry
    gather.rows = buf._open().mapping.view(g.rows_at, work.rows * g.row_nbytes).view(work.row_dtype)
    index, out = gather.random_rows(), slots.slot(0)

    def in_c(calls: int) -> float:
        where = address(gather.rows), address(index), ctypes.c_size_t(index.size), ctypes.byref(gather.at)
        return float(gather.lib.time_packed(*where, ctypes.c_size_t(n), ctypes.c_size_t(calls), address(out)))

    ours = looped(lambda: packing.pack(buf, slots, 0, next(seed), 0))
    return {f"pack {n}": ours, f"C {n}": in_c}, [
        partial(ratio, f"pack {n} rows of {buf.row_nbytes} B", f"pack {n}", f"C {n}", PACK)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures without meaning")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a bound is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    buf, block = filled(1 << (14 if args.quick else 18))
    groups = [packs(buf, n) for n in SIZES] + [ticks(buf, n) for n in SIZES]
    wake = WakeUp(buf, block)
    groups.append(({"wake": wake.turn}, [partial(plain, "row added to packer awake", "wake", WAKE_US)]))
    figures = []
    for turns, results in groups:
        rounds = measure(turns, 2 if args.quick else 40, 0.001 if args.quick else 0.01)
        figures += [result(rounds) for result in results]
    print("\n".join(figure.line for figure in figures))
    if args.json:
        told = [asdict(f) | {"value": f.value, "verdict": f.verdict} for f in figures]
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(args.check and any(f.verdict == "MISS" for f in figures))


if __name__ == "__main__":
    sys.exit(main())

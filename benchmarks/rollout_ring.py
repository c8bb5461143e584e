"""Rollouts of 24 × 1024 × 48 between two processes, against memcpy and against queues.

`python benchmarks/rollout_ring.py [--quick] [--check] [--json FILE]`

A writer process and this one go in step. In each round everybody has one turn, in an order that changes: the ring,
memcpy of the same bytes through shared memory as cold (both sides, each timed where it runs), and each queue. Figures
are medians over the rounds, with quartiles.

A hand-over begins when the collector's rollout is complete, where collectors build it, step by step: in a slot of the
ring; in one of four sets of shared tensors for torch's queue, which is kinder to it than new ones; in arrays of its own
for the others, which cannot do better. It ends when the learner has the rollout in memory of its own, on the clock that
both processes share. "ring, copied in" is the ring when the rollout was built elsewhere and must be copied in first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import random
import select
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # its reductions make queues carry tensors in shared memory

import recollect as rc
from ipc import Figure, middle
from recollect.memory import segment as segments

N, T, O, A = 1024, 24, 48, 12
SLOTS = 4
Ring = rc.ipc.RolloutRingBuffer


class Nothing:
    """A segment of plain bytes has no native object."""

    def close(self) -> None:
        pass


def rollout_of(ring: Ring) -> dict[str, Any]:
    """A rollout in memory of one's own."""
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in ring.slot_shapes.items()}


class Writer:
    """What the other process does in each turn; returns seconds, or the time at which it began."""

    def __init__(self, ring: Ring, block: Any, queues: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.ring, self.queues = ring, queues
        self.rollout = rollout_of(ring)
        shared_sets = [{k: torch.from_numpy(x.copy()) for k, x in self.rollout.items()} for _ in range(SLOTS)]
        self.tensors = [{k: x.share_memory_() for k, x in tensors.items()} for tensors in shared_sets]
        self.block, self.nbytes = block, sum(x.nbytes for x in self.rollout.values())
        self.source = np.ones(self.nbytes, np.uint8)
        self.turn = 0

    def memcpy(self) -> float:
        self.turn += 1
        to = self.block.ctypes.data + self.turn % SLOTS * self.nbytes
        start = perf_counter()
        ctypes.memmove(to, self.source.ctypes.data, self.nbytes)
        return perf_counter() - start

    def write(self) -> float:
        start = perf_counter()
        for name, array in self.ring.write_buffer.items():
            np.copyto(array, self.rollout[name])
        self.ring.signal_write_done(version=1)
        return perf_counter() - start

    def commit(self) -> float:
        """Publish a slot when the reader has surely gone to sleep."""
        _ = self.ring.write_buffer
        select.select([], [], [], 0.003)
        self.ring.signal_write_done()
        return 0.0

    def copy_and_send(self) -> float:
        start = perf_counter()
        self.write()
        return start

    def hand_over(self) -> float:
        for name, array in self.ring.write_buffer.items():
            np.copyto(array, self.rollout[name])
        start = perf_counter()
        self.ring.signal_write_done(version=1)
        return start

    def queue(self, kind: str) -> float:
        rollout: Any = self.rollout
        if kind == "torch":
            self.turn += 1
            rollout = self.tensors[self.turn % SLOTS]
            for name, x in self.rollout.items():
                np.copyto(rollout[name].numpy(), x)
        start = perf_counter()
        self.queues[kind].put(rollout)
        return start


def serve(pipe: Any, ring: Ring, name: str, queues: dict[str, Any]) -> None:
    segment = segments.attach(name, "bench")
    writer = Writer(ring, segment.mapping.view(segment.data_at, segment.data_nbytes), queues)
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        verb, *args = told
        pipe.send(getattr(writer, verb)(*args))
    for queue in queues.values():
        queue.cancel_join_thread()
    ring.close()


class Reader:
    """This process: its turns give microseconds."""

    def __init__(self, ring: Ring, block: Any, pipe: Any, queues: dict[str, Any]) -> None:
        self.ring, self.block, self.pipe, self.queues = ring, block, pipe, queues
        self.staging = {name: torch.zeros(shape) for name, shape in ring.slot_shapes.items()}
        self.nbytes = sum(x.nbytes for x in self.staging.values())
        self.target = torch.ones(
            self.nbytes, dtype=torch.uint8
        ).numpy()  # memory like that of the staging tensors
        self.turn = 0

    def ask(self, *told: Any) -> Any:
        self.pipe.send(told)
        return self.pipe.recv()

    def memcpy(self) -> dict[str, float]:
        written = self.ask("memcpy")
        self.turn += 1
        at = self.block.ctypes.data + self.turn % SLOTS * self.nbytes
        start = perf_counter()
        ctypes.memmove(self.target.ctypes.data, at, self.nbytes)
        read = perf_counter() - start
        return {"memcpy in": written, "memcpy out": read, "two memcpys": written + read}

    def copies(self) -> dict[str, float]:
        written = self.ask("write")
        start = perf_counter()
        self.ring.copy_read_slot_to_torch(self.staging)
        self.ring.advance_read()
        read = perf_counter() - start
        return {"write": written, "read": read, "write and read": written + read}

    def wake_up(self) -> dict[str, float]:
        self.pipe.send(("commit",))
        self.ring.wait_for_data(10.0)
        now = perf_counter_ns()
        took = now - self.ring.read_info.committed_ns
        self.ring.advance_read()
        self.pipe.recv()
        return {"wake-up": took / 1e9}

    def taken(self, verb: str, name: str) -> dict[str, float]:
        self.pipe.send((verb,))
        self.ring.wait_for_data(10.0)
        self.ring.copy_read_slot_to_torch(self.staging)
        self.ring.advance_read()
        end = perf_counter()
        return {name: end - self.pipe.recv()}

    def queued(self, kind: str) -> dict[str, float]:
        self.pipe.send(("queue", kind))
        found = self.queues[kind].get(timeout=10)
        if kind == "torch":  # it arrives as memory that both share: the learner's copy is still to be made
            for name, x in found.items():
                self.staging[name].copy_(x)
        end = perf_counter()
        return {kind: end - self.pipe.recv()}


def ray_turn(rollout: dict[str, Any]) -> Callable[[], dict[str, float]] | None:
    """Ray's object store, if Ray is installed: an actor puts, this process gets and copies."""
    try:
        import ray
    except ImportError:
        return None
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Collector:
        def __init__(self) -> None:
            self.rollout = {name: np.array(x) for name, x in rollout.items()}

        def put(self) -> tuple[float, Any]:
            start = perf_counter()
            return start, ray.put(self.rollout)

    collector = Collector.remote()
    staging = {name: np.zeros_like(x) for name, x in rollout.items()}

    def turn() -> dict[str, float]:
        start, ref = ray.get(collector.put.remote())
        for name, x in ray.get(ref).items():
            np.copyto(staging[name], x)
        return {"ray": perf_counter() - start}

    return turn


def measure(turns: list[Callable[[], dict[str, float]]], n_rounds: int) -> dict[str, list[float]]:
    """Microseconds by name; the first rounds touch the memory and are not kept."""
    found: dict[str, list[float]] = {}
    shuffle = random.Random(0)
    for number in range(-8, n_rounds):
        shuffle.shuffle(turns)
        for turn in turns:
            for name, seconds in turn().items():
                if number >= 0:
                    found.setdefault(name, []).append(seconds * 1e6)
    return found


def figures_of(us: dict[str, list[float]], peers: dict[str, str]) -> list[Figure]:
    def against(title: str, ours: str, theirs: str, bound: float) -> Figure:
        return Figure(title, *middle(us[ours]), median(us[theirs]), bound)

    return [
        against("write, to memcpy", "write", "memcpy in", 1.25),
        against("read, to memcpy", "read", "memcpy out", 1.25),
        against("write and read, to two memcpys", "write and read", "two memcpys", 1.25),
        Figure("wake-up", *middle(us["wake-up"]), None, 100.0),
        *(against(f"hand-over, to {name}", "ring", key, 1 / 3) for key, name in peers.items()),
    ]


def run(n_rounds: int, with_ray: bool) -> list[Figure]:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    peers = {"plain": "multiprocessing.Queue", "torch": "torch.multiprocessing.Queue"}
    queues: dict[str, Any] = {
        "plain": context.Queue(),
        "torch": torch.multiprocessing.get_context("spawn").Queue(),
    }
    with Ring(N, T, O, A, order="time", num_slots=SLOTS) as ring:
        nbytes = SLOTS * sum(4 * int(np.prod(shape)) for shape in ring.slot_shapes.values())
        segment = segments.create("bench", None, 64, nbytes, "bench").hold(lambda _: Nothing())
        block = segment.mapping.view(segment.data_at, nbytes)
        block[:] = 1
        mine, theirs = context.Pipe()
        child = context.Process(target=serve, args=(theirs, ring, segment.name, queues), daemon=True)
        child.start()
        reader = Reader(ring, block, mine, queues)
        mine.recv()
        turns = [
            reader.memcpy,
            reader.copies,
            reader.wake_up,
            partial(reader.taken, "hand_over", "ring"),
            partial(reader.taken, "copy_and_send", "ring, copied in"),
            *(lambda k=k: reader.queued(k) for k in peers),
        ]
        ray = ray_turn(rollout_of(ring)) if with_ray else None
        if ray is not None:
            turns.append(ray)
            peers["ray"] = "Ray's object store"
        us = measure(turns, n_rounds)
        mine.send(None)
        child.join(10)
        print(f"{nbytes / SLOTS / 1e6:.2f} MB a rollout; medians in µs:")
        print("  " + ", ".join(f"{name} {median(values):.0f}" for name, values in sorted(us.items())))
    if with_ray and "ray" not in peers:
        print("Ray is not installed: its object store is left out")
    return figures_of(us, peers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures without meaning")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a bound is missed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures = run(2 if args.quick else 150, not args.quick)
    for figure in figures:
        print(figure.line)
    if args.json:
        told = [asdict(f) | {"value": f.value, "verdict": f.verdict} for f in figures]
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(args.check and any(f.verdict == "MISS" for f in figures))


if __name__ == "__main__":
    sys.exit(main())

"""Rollout: what the coordinator itself costs. `python benchmarks/rollout.py [--quick] [--rows NAME ...]`.

Each row is run several times in one process; the median and the quartiles are printed as JSON. Nothing is compared
with another library here: the floors are memcpy, in the same run, and the goals of the contract.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import recollect.rollout as rr

SMALL = rr.Experience(
    tokens=np.arange(64, dtype=np.int32), prompt_length=0, logprobs=np.zeros(64, np.float32), reward=1.0
)


@rr.workflow("benchmarks.zero")
async def zero(task: Any, models: Any) -> Any:
    return rr.Result(metrics={"x": 1.0})


@rr.workflow("benchmarks.small")
async def small(task: Any, models: Any) -> Any:
    return SMALL


async def rate(name: str, kind: str, n: int, **fields: Any) -> float:
    """Tasks per second from submit to result."""
    sink = {"kind": "queue", "capacity": max(n, 1)}
    async with rr.RolloutCoordinator(rr.Config(**{"sink": sink, "max_queued_runs": 10**7} | fields), []) as c:
        tasks = [rr.Task(name) for _ in range(n)]
        finalize = c.finalize_eval_batch if kind == "eval" else c.finalize_train_batch
        gc.collect()
        start = time.perf_counter()
        await c.submit_batch(batch_id=1, tasks=tasks, batch_type=kind)
        result = await finalize(1)
        seconds = time.perf_counter() - start
        assert result["ok_task_count"] == n, result["errors"]
        assert kind == "eval" or result["experience_count"] == n
        return n / seconds


def zero_work(runners: int) -> Callable[[int], float]:
    return lambda n: asyncio.run(rate("benchmarks.zero", "eval", n, runners=runners))


def with_experience(n: int) -> float:
    return asyncio.run(rate("benchmarks.small", "train", n // 2))


def with_journal(n: int) -> float:
    """The rate with a journal over the rate without, side by side."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a queue is lost with the process; here it may be
        kept = asyncio.run(rate("benchmarks.small", "train", n // 4, journal=str(Path(place) / "j")))
    return kept / asyncio.run(rate("benchmarks.small", "train", n // 4))


def in_processes(n: int) -> float:
    sys.path.insert(0, str(Path(__file__).parent))
    return asyncio.run(
        rate("benchmarks.zero", "eval", n // 4, runner="process", runners=2, workflow_modules=("rollout",))
    )


async def _end_to_result() -> float:
    ended = [0.0]

    async def last(task: Any, models: Any) -> Any:
        await asyncio.sleep(0.002)
        ended[0] = time.perf_counter()
        return SMALL

    async with rr.RolloutCoordinator(rr.Config(), []) as c:
        await c.submit_batch(batch_id=1, tasks=[rr.Task(last)], batch_type="train")
        await c.finalize_train_batch(1)
        return (time.perf_counter() - ended[0]) * 1e3


async def _abort_to_raise() -> float:
    async def hangs(task: Any, models: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    async with rr.RolloutCoordinator(rr.Config(), []) as c:
        await c.submit_batch(batch_id=1, tasks=[rr.Task(hangs) for _ in range(100)], batch_type="train")
        waiting = asyncio.ensure_future(c.finalize_train_batch(1))
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        aborting = asyncio.ensure_future(c.abort_batch(1, reason="x"))
        await asyncio.wait([waiting])
        seconds = time.perf_counter() - start
        waiting.exception()
        await aborting
        return seconds * 1e3


def group() -> list[rr.Experience]:
    rng = np.random.default_rng(0)
    return [
        rr.Experience(
            tokens=rng.integers(0, 9, 4096, dtype=np.int32), prompt_length=0, logprobs=rng.random(4096, np.float32),
            action_mask=np.ones(4096, bool), reward=1.0, run_id=i,
        )
        for i in range(8)
    ]  # fmt: skip


def per_second(work: Callable[[], Any], n: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(n):
        work()
    return n / (time.perf_counter() - start)


def encoding(n: int) -> float:
    rows = group()
    return per_second(lambda: rr.encode(rows)) * 8


def encoding_to_memcpy(n: int) -> float:
    """Over memcpy of the same bytes, both out of 40 MB of groups: experience comes from elsewhere, not from cache."""
    groups = [group() for _ in range(1 if n < 1000 else 136)]
    flat = [np.frombuffer(rr.encode(rows), np.uint8) for rows in groups]
    return _each(rr.encode, groups) / _each(np.copy, flat)


def encoding_to_hot_memcpy(n: int) -> float:
    """The same with one group that stays in the cache; in turns, so that both meet the same disturbances."""
    rows = group()
    flat = np.frombuffer(rr.encode(rows), np.uint8)
    ours, floor = zip(*[(_each(rr.encode, [rows]), _each(np.copy, [flat])) for _ in range(100)])
    return statistics.median(ours) / statistics.median(floor)


def _each(work: Callable[[Any], Any], items: list[Any]) -> float:
    """The median seconds of one call."""
    seconds = []
    for item in items * 3:
        start = time.perf_counter()
        work(item)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def decoding(n: int) -> float:
    payload = rr.encode(group())
    return per_second(lambda: rr.decode(payload)) * 8


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _memory(n: int) -> float:
    async with rr.RolloutCoordinator(rr.Config(history=4), []) as c:
        for ident in range(40):
            if ident == 20:
                before = resident()
            tasks = [rr.Task("benchmarks.zero") for _ in range(max(1, n // 4))]
            await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="eval")
            await c.finalize_eval_batch(ident)
            del tasks
        return (resident() - before) / 2**20


ROWS: dict[str, tuple[str, str, float, Callable[[int], float]]] = {
    "zero-1": ("tasks/s, local, 1 runner", ">=", 20_000, zero_work(1)),
    "zero-256": ("tasks/s, local, 256 runners", ">=", 20_000, zero_work(256)),
    "small": ("tasks/s with a 64-token experience into a queue", ">=", 8_000, with_experience),
    "process": ("tasks/s, two processes", ">=", 2_000, in_processes),
    "finalize": (
        "ms from the last task's end to the result",
        "<=",
        2.0,
        lambda n: asyncio.run(_end_to_result()),
    ),
    "abort": ("ms from abort to the finalizer's error", "<=", 5.0, lambda n: asyncio.run(_abort_to_raise())),
    "encode": ("experiences/s, groups of 8 x 4096 tokens", ">=", 50_000, encoding),
    "encode-memcpy": ("times memcpy of the same bytes, out of memory", "<=", 4.0, encoding_to_memcpy),
    "encode-hot": ("times memcpy of the same bytes, out of cache", "<=", 4.0, encoding_to_hot_memcpy),
    "decode": ("experiences/s, groups of 8 x 4096 tokens", ">=", 100_000, decoding),
    "journal": ("share of the rate without a journal", ">=", 0.5, with_journal),
    "memory": (
        "MiB more after 20 more batches (10^5 tasks at full size)",
        "<=",
        8.0,
        lambda n: asyncio.run(_memory(n)),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: figures without meaning")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    options = parser.parse_args()
    n, rounds = (40, 1) if options.quick else (20_000, 5)
    for name in options.rows:
        unit, relation, goal, work = ROWS[name]
        few = 1 if name == "memory" else 15 if name in ("finalize", "abort") and not options.quick else rounds
        found = [work(n) for _ in range(few)]
        median = statistics.median(found)
        quartiles = statistics.quantiles(found, n=4) if len(found) > 1 else [median] * 3
        met = median >= goal if relation == ">=" else median <= goal
        row = {"row": name, "unit": unit, "median": median, "q1": quartiles[0], "q3": quartiles[2],
               "goal": f"{relation} {goal:g}", "met": met}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    # As a module of this name, so that processes find the same workflows.
    main()

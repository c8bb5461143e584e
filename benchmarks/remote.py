"""Times the remote manager: containers per second over each carrier, encoding against memcpy, an idle manager.

    python benchmarks/remote.py                # everything, about a minute
    python benchmarks/remote.py --quick        # a smoke test: seconds, figures without meaning

Two workers and one manager, mode `sync`, containers of 16 HyperGrid trajectories, stored, scored, baseline `min`.
The peer is what people do today: pickled containers through `comm.send` and `comm.recv` of mpi4py.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path

import numpy as np
from gymnasium import spaces

import recollect as rc
from recollect.remote.frame import cut_items, decode, encode, joined
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import item_space
from recollect.remote.messages import Data, Sample

HERE = Path(__file__)
RESULTS = HERE.parent / "results" / "remote.json"
STEP = spaces.Dict({"state": spaces.Box(0, 8, (2,), np.int64), "action": spaces.Discrete(3)})
SPACE = spaces.Dict(
    {
        "steps": spaces.Sequence(STEP, stack=True),
        "final_state": spaces.Box(0, 8, (2,), np.int64),
        "log_reward": spaces.Box(-np.inf, np.inf, (), np.float64),
    }
)
MAX_LENGTH, BATCH = 15, 16


def containers(n: int, seed: int) -> list[rc.remote.Trajectories]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        lengths = rng.integers(4, MAX_LENGTH + 1, BATCH)
        total = int(lengths.sum())
        steps = {"state": rng.integers(0, 8, (total, 2)), "action": rng.integers(0, 3, total)}
        final = rng.integers(0, 8, (BATCH, 2))
        made.append(rc.remote.Trajectories(steps, lengths, rng.normal(size=BATCH), final_state=final))
    return made


class Worker:
    """Adds ready-made containers as fast as it can for some seconds; returns how many and how long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, ctx) -> tuple[int, float]:
        made = containers(200, ctx.rank)
        with ctx.replay(SPACE) as replay:
            for container in made[:20]:
                replay.add(container)
            n, start = 0, time.perf_counter()
            while time.perf_counter() - start < self.seconds:
                replay.add(made[n % 200])
                n += 1
            return n, time.perf_counter() - start


class Manager:
    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def __call__(self, ctx):
        save = rc.remote.Checkpoint(self.path) if self.path else None
        return rc.remote.ReplayBufferManager(
            SPACE, ctx.rank, 2, communication_backend=ctx.carrier, max_length=MAX_LENGTH, checkpoint=save
        )


def rate(carrier: str, seconds: float, path: str | None = None) -> float:
    """Containers per second of two workers together; mpi starts its own ranks."""
    if carrier == "mpi":
        return in_mpi("mpi", seconds)
    out = rc.remote.launch(Worker(seconds), Manager(path), n_workers=2, carrier=carrier)
    return sum(n / s for n, s in out.results.values())


def rates_with_a_log(seconds: float, rounds: int) -> dict[str, float]:
    """Containers per second without and with a checkpoint log, by turns; medians."""
    rates: dict[str, list[float]] = {"local": [], "local with a log": []}
    for _ in range(rounds):
        for name, found in rates.items():
            with tempfile.TemporaryDirectory() as path:
                found.append(rate("local", seconds, f"{path}/log" if "log" in name else None))
    return {f"{name}, containers/s": statistics.median(found) for name, found in rates.items()}


def in_mpi(what: str, seconds: float) -> float:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec), "-n", "3", sys.executable, str(HERE), "--rank", what, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    told = re.findall(r"\{[^{}]*\}", done.stdout)  # two may stand in one line
    return sum(json.loads(one)["rate"] for one in told)


def mpi_rank(what: str, seconds: float) -> None:
    if what == "mpi":
        out = rc.remote.launch(Worker(seconds), Manager(), n_workers=2, carrier="mpi")
        for n, s in out.results.values():
            print(json.dumps({"rate": n / s}), flush=True)
        return
    pickled_rank(seconds)


def pickled_rank(seconds: float) -> None:
    """The same work with pickled objects: a list of the best, kept sorted."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    if rank < 2:
        made = containers(200, rank)
        n, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            comm.send(made[n % 200], dest=2)
            comm.recv(source=2)
            n += 1
        comm.send(None, dest=2)
        print(json.dumps({"rate": n / (time.perf_counter() - start)}), flush=True)
        return
    held: list = []
    left = 0
    status = MPI.Status()
    while left < 2:
        got = comm.recv(source=MPI.ANY_SOURCE, status=status)
        if got is None:
            left += 1
            continue
        held += [(got.log_rewards[i], i, got[i]) for i in range(len(got))]
        held = sorted(held, key=lambda item: -item[0])[:10_000]
        comm.send({"score": 0.0, "baseline_log_reward": float(held[-1][0])}, dest=status.Get_source())


TURN_S = 0.005
COLD_NBYTES = 128 << 20  # more than a cache holds


def median_s(*works, seconds: float) -> list[float]:
    """The seconds that each of these takes; they have turns of some milliseconds."""
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for work, own in zip(works, times, strict=True):
            turn_ends = time.perf_counter() + TURN_S
            while (start := time.perf_counter()) < turn_ends:
                work()
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def coding(seconds: float) -> dict[str, float]:
    """Encode + decode: packing the rows of a block, framing, checking and cutting; against memcpy."""
    out = {}
    for name, n in (("1 MB", 16_384), ("8 MB", 131_072)):
        items = item_space({"obs": ((12,), "float32"), "id": ((), "int64"), "reward": ((), "float64")})
        block = {"obs": np.zeros((n, 12), "float32"), "id": np.arange(n), "reward": np.zeros(n)}
        nbytes = n * items.shapes.row_nbytes
        for how, n_copies in (("", -(-COLD_NBYTES // nbytes)), (", in the cache", 1)):
            ours, theirs = median_s(
                _turn(items, block, n_copies), _memcpy(nbytes, n_copies), seconds=2 * seconds
            )
            out[f"{name} x memcpy{how}"] = ours / theirs
    small, items = containers(1, 0)[0], item_space(SPACE, MAX_LENGTH)
    pickled = lambda: pickle.loads(pickle.dumps(small.__reduce_ex__(2)[2]))  # noqa: E731
    ours, theirs = median_s(_turn(items, small), pickled, seconds=2 * seconds)
    packed = items.encode(small)
    out |= {"small, us": ours * 1e6, "pickle, us": theirs * 1e6}
    out["small, bytes more"] = len(joined(_framed(items, packed))) - packed.nbytes
    return out


def _framed(items, packed: PackedItems) -> list:
    head = Data(1, bytes(16), 1, items.id, packed.n, len(packed.rows), False)
    return encode(head, packed.blocks(), max_frame=1 << 28, first_crc=packed.rows_crc)


def _turn(items, container, n_copies: int = 1):
    """Encode one container and decode one frame; each time others of `n_copies`, which many are not in the cache."""
    containers = cycle([copy.deepcopy(container) for _ in range(n_copies)])
    frames = cycle([bytearray(joined(_framed(items, items.encode(container)))) for _ in range(n_copies)])

    def work() -> None:
        _framed(items, items.encode(next(containers)))
        message, _, body = decode(next(frames), max_frame=1 << 28)
        cut_items(message, body, items.shapes)

    return work


def _memcpy(nbytes: int, n_copies: int):
    """From memory as cold as the containers, into a block that stays warm, as what is encoded does."""
    block, sources = np.ones(nbytes, np.uint8), cycle([np.ones(nbytes, np.uint8) for _ in range(n_copies)])
    return lambda: np.copyto(block, next(sources))


def idle(seconds: float) -> float:
    """The share of one core that a manager takes while nobody sends."""
    ends = rc.remote.LocalCarrier.group(2)
    manager = rc.remote.ReplayBufferManager(
        SPACE, 1, None, communication_backend=ends[1], max_length=MAX_LENGTH
    )
    manager.start()
    start, used = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.perf_counter() - start)
    manager.close()
    ends[1].close()
    return share


def beside_a_slow_reader(seconds: float) -> float:
    """How many times as long an answer takes while another worker asks for much and reads nothing."""
    fork = multiprocessing.get_context("fork")
    ends, go, asked = rc.remote.LocalCarrier.group(3), fork.Event(), fork.Event()

    def ask() -> None:
        go.wait(60)
        for request in range(60):
            ends[0].send(2, 0, encode(Sample(request, 2_000, "uniform", True)))
        asked.set()
        threading.Event().wait(600)

    reader = fork.Process(target=ask)
    reader.start()
    manager = rc.remote.ReplayBufferManager(
        SPACE, 2, None, communication_backend=ends[2], max_length=MAX_LENGTH
    )
    made = containers(200, 0)
    with manager.start(), rc.remote.RemoteReplay(SPACE, 2, ends[1]) as replay:
        turn = cycle(made)
        usual = median_s(lambda: replay.add(next(turn)), seconds=seconds)[0]
        go.set()
        asked.wait(60)
        while (asker := manager.stats().senders.get(0)) is None or asker.requests < 60:
            replay.add(next(turn))  # until all is drawn, and none of it read
        meanwhile = median_s(lambda: replay.add(next(turn)), seconds=seconds)[0]
    reader.kill()
    reader.join()
    for end in ends[1:]:
        end.close()
    return meanwhile / usual


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--rank", default="")
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--check", action="store_true", help="exit with status 1 when a goal is missed")
    chosen = options.parse_args()
    if chosen.rank:
        mpi_rank(chosen.rank, chosen.seconds)
        return
    seconds = 0.3 if chosen.quick else chosen.seconds
    found: dict[str, float] = {}
    for carrier in ("tcp", "mpi"):
        found[f"{carrier}, containers/s"] = rate(carrier, seconds)
    found["pickle over mpi, containers/s"] = in_mpi("pickled", seconds)
    found |= rates_with_a_log(seconds, 1 if chosen.quick else 5)
    found |= coding(seconds / 6)
    found["beside a slow reader, x usual"] = beside_a_slow_reader(seconds)
    found["idle manager, share of a core"] = idle(seconds)
    goals = {
        "local, containers/s": 2000, "tcp, containers/s": 2000, "mpi, containers/s": 2000, "1 MB x memcpy": -3,
        "8 MB x memcpy": -3, "small, us": -25, "small, bytes more": -512, "idle manager, share of a core": -0.01,
        "beside a slow reader, x usual": -2,
        "local with a log, containers/s": 0.8 * found["local, containers/s"],
    }  # fmt: skip
    missed = False
    for name, value in found.items():
        goal = goals.get(name)
        ok = goal is None or (value >= goal if goal >= 0 else value <= -goal)
        missed |= not ok
        told = (
            ""
            if goal is None
            else f"{'PASS' if ok else 'MISS'}  goal {'>=' if goal >= 0 else '<='} {abs(goal):g}"
        )
        print(f"{name:38} {value:12.4g}  {told}")
    if not chosen.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(chosen.check and missed)


if __name__ == "__main__":
    main()

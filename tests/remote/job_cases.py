"""What the ranks of a job do in one case: ranks 0 and 1 work, rank 2 manages. Each returns what the test looks at."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from tests.remote.make import SAMPLE, samples

from recollect.errors import AuthError, DeadlineError, PeerDiedError, ScoringError
from recollect.remote import Limits, RemoteReplay, ReplayBufferManager, TcpCarrier
from recollect.remote.frame import encode
from recollect.remote.messages import Exit, Sample
from recollect.testing.carrier_contract import eventually

MANAGER = 2
WAIT = 20.0


def tell(path: str, name: str, text: str = "") -> None:
    """Let the other ranks know: under tcp workers have no line to one another."""
    half = Path(path) / f".{name}"
    half.write_text(text)
    half.rename(Path(path) / name)


def receive(path: str, name: str) -> str:
    """Wait until a rank has told it."""
    eventually((Path(path) / name).exists, WAIT)
    return (Path(path) / name).read_text()


def client(carrier: Any, **kw: Any) -> RemoteReplay:
    return RemoteReplay(SAMPLE, MANAGER, carrier, **{"deadline": WAIT, "retry_s": 1.0, **kw})


def managed(carrier: Any, n: int | None = 2, **kw: Any) -> ReplayBufferManager:
    kw = {"limits": Limits(rejoin_s=0.5, join_s=60.0), "capacity": 100_000, **kw}
    return ReplayBufferManager(SAMPLE, MANAGER, n, communication_backend=carrier, **kw)


def served(made: ReplayBufferManager) -> dict[str, Any]:
    """Run a manager to its end; its stats and what it holds, plain."""
    with made:
        stats = made.run()
        return {"stats": stats, "ids": made.buffer[:]["id"].tolist()}


def score_raises(carrier: Any) -> Any:
    """Rank 0 sends what the scoring function cannot bear; all ranks go on."""

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        if (obj["id"] == 13).any():
            raise KeyError("unlucky")
        return {"score": float(sender_rank)}

    if carrier.rank == MANAGER:
        return served(managed(carrier, scoring_function=score))
    got: list[Any] = []
    with client(carrier) as replay:
        for number in (12, 13, 14) if carrier.rank == 0 else (1, 2, 3):
            try:
                got.append(replay.add(samples([number], [0.0]))["score"])
            except ScoringError as error:
                got.append((str(error), error.seq, error.kept))
        return got, replay.stats()


def exit_twice(carrier: Any, path: str) -> Any:
    """Rank 0 says Exit three times; only one rank has left, and rank 1 is still served."""
    if carrier.rank == MANAGER:
        return served(managed(carrier))
    replay = client(carrier)
    replay.add(samples([carrier.rank], [0.0]))
    writer = replay._protocol.writer
    if carrier.rank == 0:
        replay.close()
        for request in range(2):
            carrier.send(MANAGER, 0, encode(Exit(request, writer, 0, "")), WAIT)
        tell(path, "gone")
        return None
    receive(path, "gone")
    left = replay.metadata()["n_left"]
    replay.add(samples([7], [0.0]))
    replay.close()
    return left


def slow_reader(carrier: Any, path: str, n_asked: int, n_items: int) -> Any:
    """Rank 0 asks for much and reads nothing, while rank 1 adds; how long each add took, before and meanwhile."""
    if carrier.rank == MANAGER:
        made = managed(carrier)
        made.add(samples(range(100), np.zeros(100)))
        return served(made)
    if carrier.rank == 0:
        replay = client(carrier)
        replay.metadata()
        receive(path, "go")
        for request in range(n_asked):
            with suppress(PeerDiedError, DeadlineError):
                carrier.send(MANAGER, 0, encode(Sample(request, n_items, "uniform", True)), WAIT)
        tell(path, "asked")
        receive(path, "done")  # rank 1 is done; what came meanwhile stays unread
        replay.close()
        return None
    with client(carrier) as replay:
        usual = _times(replay)
        tell(path, "go")
        receive(path, "asked")
        meanwhile = _times(replay)
        tell(path, "done")
    return usual, meanwhile


def _times(replay: RemoteReplay, n: int = 40) -> list[float]:
    times = []
    for i in range(n):
        start = monotonic()
        replay.add(samples([i], [0.0]))
        times.append(monotonic() - start)
    return times


def malformed(carrier: Any, path: str, n: int) -> Any:
    """Rank 0 sends n random, cut and oversized frames; rank 1 is served all the same."""
    if carrier.rank == MANAGER:
        return served(managed(carrier, worker_ranks=[1], n=1))
    if carrier.rank == 0:
        sent = _send_malformed(carrier, n)
        tell(path, "sent")
        return sent
    with client(carrier) as replay:
        while replay.stats().kept < 200 or not (Path(path) / "sent").exists():
            replay.add(samples([1], [0.0]))
        return replay.stats()


def _send_malformed(carrier: Any, n: int) -> int:
    """Send until the manager lets nothing more in; how many it sent."""
    rng, sent = random.Random(0), 0
    good = b"".join(encode(Sample(1, 1, "uniform", True)))
    most, carrier.max_frame = carrier.max_frame, 1 << 30  # it keeps to no bound
    with suppress(PeerDiedError, DeadlineError):
        for sent in range(n):
            frame = rng.randbytes(rng.randrange(200)) if sent % 2 else good[: rng.randrange(len(good))]
            if sent % (n // 10) == 3:
                frame = bytes(most + 1)
            carrier.send(MANAGER, 0, [frame], WAIT)
    return sent


def wrong_token(carrier: Any, path: str) -> Any:
    """A process that does not know the token tries to join; the job goes on."""
    if carrier.rank == MANAGER:
        tell(path, "address", carrier.address)
        return served(managed(carrier)) | {"refused": carrier.refused, "alive": sorted(carrier.alive())}
    address = receive(path, "address")
    said = None
    with client(carrier) as replay:
        if carrier.rank == 0:
            try:
                TcpCarrier.join([address], token=b"not the token of this job", rank=7, timeout=WAIT)
            except AuthError as error:
                said = str(error)
        replay.add(samples([carrier.rank], [0.0]))
        tell(path, f"done-{carrier.rank}")
        receive(path, f"done-{1 - carrier.rank}")
    return said


def until_killed(carrier: Any, path: str, ready: int) -> Any:
    """Rank 0 adds until it is killed; rank 1 goes on, and then kills the manager too."""
    tell(path, f"pid-{carrier.rank}", str(os.getpid()))
    if carrier.rank == MANAGER:
        return served(managed(carrier))
    if carrier.rank == 0:
        replay = client(carrier)
        for i in range(10_000_000):
            replay.add(samples([i], [0.0]))
            if i == ready:
                tell(path, "ready")
        return None
    replay = client(carrier, reconnect_s=0.3)
    receive(path, "ready")
    os.kill(int(receive(path, "pid-0")), 9)
    start = monotonic()
    while replay.metadata()["n_left"] == 0:
        assert monotonic() - start < WAIT
        threading.Event().wait(0.01)
    seen_s = monotonic() - start
    replay.add(samples([-1], [0.0]))
    held = replay.metadata()
    ids = replay.sample(held["length"], replace=False)["id"].tolist()
    os.kill(int(receive(path, f"pid-{MANAGER}")), 9)
    start = monotonic()
    try:
        while True:
            replay.add(samples([-2], [0.0]))
            assert monotonic() - start < WAIT
    except PeerDiedError as error:
        return seen_s, held, ids, monotonic() - start, str(error), replay.stats()


def example(carrier: Any, updates: int) -> Any:
    """The GFlowNet example, with a small budget, on this job's own carrier."""
    import importlib.util

    from tests.remote.carrier_host import ROOT

    from recollect.remote.carriers.mpi import MpiCarrier

    found = importlib.util.spec_from_file_location("example", ROOT / "examples" / "gflownet_hypergrid.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    kind = "mpi" if isinstance(carrier, MpiCarrier) else "torch"
    results = module.run(kind, updates=updates)
    return [(curve[0][1], curve[-1][1]) for curve, _ in results.values()]

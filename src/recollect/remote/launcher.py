"""launch: start workers and managers, serve, and bring back results."""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError, WorkerError
from recollect.remote.carriers.base import Carrier
from recollect.remote.carriers.by_name import NAMES, carrier_of, is_known, set_launched
from recollect.remote.carriers.local import LocalCarrier
from recollect.remote.carriers.tcp import TcpCarrier
from recollect.remote.client.client import RemoteReplay, was_used
from recollect.remote.frame import decode, encode
from recollect.remote.messages import DATA_TAG, Exit, Goodbye
from recollect.remote.ranks import RankLayout, rank_layout
from recollect.text import told

Work = Callable[["Context"], Any]
_LISTEN_S = 60.0  # until a manager listens
_LEAVE_S = 5.0  # for the Exit of a worker that will not come
_LOOK_S = 0.2  # between two looks whether the launch is over
_END_S = 5.0  # for a child to end by itself, or when it is told to


@dataclass(frozen=True, slots=True)
class Context:
    """What a worker or manager function is told."""

    rank: int
    manager_rank: int
    layout: RankLayout
    carrier: Carrier
    seed: int

    def replay(self, env: Any, **kwargs: Any) -> RemoteReplay:
        """A client of this rank's manager."""
        return RemoteReplay(env, self.manager_rank, self.carrier, **kwargs)


@dataclass(frozen=True, slots=True)
class Launched:
    """What came back: `results` by worker rank, `stats` by manager rank."""

    results: dict[int, Any] = field(default_factory=dict)
    stats: dict[int, Any] = field(default_factory=dict)


def launch(
    worker: Work,
    manager: Work,
    *,
    n_workers: int = 2,
    n_managers: int = 1,
    carrier: str = "local",
    max_restarts: int = 0,
    seed: int = 0,
) -> Launched:
    """Run `worker(ctx)` on each worker rank, and serve what `manager(ctx)` returns on each manager rank.

    `local` and `tcp` start processes here, `ray` actors; under `mpi` and `torch` every rank calls it. A worker that
    raises: the others finish, then WorkerError. A worker that dies is started again up to `max_restarts` times, a
    manager at least once: with a checkpoint it goes on where it was.
    """
    if not is_known(carrier):
        raise ValueError(f"carrier: must be one of {list(NAMES)}, got {carrier!r}")
    layout = rank_layout(n_workers + n_managers, n_managers)
    if carrier in ("mpi", "torch") or carrier not in NAMES:
        return _run_here(worker, manager, layout, carrier, seed)
    if carrier == "ray":
        from recollect.remote.carriers.ray import launch_on_ray

        launched: Launched = launch_on_ray(worker, manager, layout, max_restarts, seed)
        return launched
    return _Launch(worker, manager, layout, carrier, max_restarts, seed).run()


def most_restarts(rank: int, layout: RankLayout, max_restarts: int) -> int:
    """How often the process of a rank may die before that is an error."""
    return max(max_restarts, 1) if rank in layout.managers else max_restarts


def run_rank(worker: Work, manager: Work, layout: RankLayout, carrier: Carrier, seed: int) -> tuple[str, Any]:
    """Do this rank's work: ("result", value) of a worker, ("stats", record) of a manager."""
    rank = carrier.rank
    manager_rank = rank if rank in layout.managers else layout.manager_of(rank)
    ctx = Context(rank, manager_rank, layout, carrier, seed * 1_000_003 + rank)
    if rank in layout.managers:
        made = manager(ctx)
        try:
            return "stats", made.run()
        finally:
            made.close()
    return "result", worker(ctx)


def tell_absence(layout: RankLayout, carrier: Carrier, is_over: Callable[[], bool] | None = None) -> None:
    """Tell the manager of a worker that never spoke to it that it will not come; the manager would wait for it.

    Without `is_over` it is sent once: MPI and TCP keep it for a manager that is not at work yet. With it, it is said
    again to a manager that starts again, until that answers or `is_over()`.
    """
    if carrier.rank not in layout.workers or was_used(carrier, manager := layout.manager_of(carrier.rank)):
        return
    with suppress(ClosedError, OSError, ValueError, RuntimeError):
        if is_over is None:
            with suppress(PeerDiedError, DeadlineError):
                carrier.send(
                    manager, DATA_TAG, encode(Exit(secrets.randbits(48), bytes(16), 0, "ended")), _LEAVE_S
                )
            return
        while not is_over():
            with suppress(PeerDiedError, DeadlineError):
                if hasattr(carrier, "reconnect"):
                    carrier.reconnect(manager, _LOOK_S)
                if _is_answered(manager, carrier, is_over):
                    return


def _is_answered(manager: int, carrier: Carrier, is_over: Callable[[], bool]) -> bool:
    """Say Exit, and wait for the Goodbye; PeerDiedError if the manager ends before."""
    request = secrets.randbits(48)
    carrier.send(manager, DATA_TAG, encode(Exit(request, bytes(16), 0, "ended")), _LEAVE_S)
    while not is_over():
        with suppress(DeadlineError, FrameError):
            frame = carrier.recv(manager, DATA_TAG, _LOOK_S)[2]
            message, _, _ = decode(frame, max_frame=carrier.max_frame)
            if isinstance(message, Goodbye) and message.request == request:
                return True
    return False


def only_tell_absence(ctx: Context) -> None:
    """The work of a rank that only tells its manager that it will not come."""


def _run_here(worker: Work, manager: Work, layout: RankLayout, name: str, seed: int) -> Launched:
    found = carrier_of(name)
    size = len(layout.workers) + len(layout.managers)
    if found.size is not None and found.size != size:
        raise ValueError(f"n_workers + n_managers: must be the {found.size} ranks there are, got {size}")
    try:
        kind, value = run_rank(worker, manager, layout, found, seed)
    finally:
        tell_absence(layout, found)
    return Launched(**{"results" if kind == "result" else "stats": {found.rank: value}})


@dataclass(slots=True)
class _RankProcess:
    rank: int
    process: Any
    pipe: Connection
    restarts: int = 0
    outcome: tuple[str, Any] | None = None


class _Launch:
    """The processes of one launch. Ownership: ends them all when it ends."""

    def __init__(
        self, worker: Work, manager: Work, layout: RankLayout, kind: str, max_restarts: int, seed: int
    ) -> None:
        self.worker, self.manager, self.layout, self.kind = worker, manager, layout, kind
        self.max_restarts, self.seed = max_restarts, seed
        size = len(layout.workers) + len(layout.managers)
        self.ends = LocalCarrier.group(size) if kind == "local" else []
        self.token = os.urandom(32)
        self.addresses: dict[int, str] = {}
        self.children: dict[int, _RankProcess] = {}
        self.leaving: list[_RankProcess] = []  # processes that send Exit for workers that died
        # Functions defined in a script or a test need not be importable: forked children have them already.
        self.context = multiprocessing.get_context("fork")

    def run(self) -> Launched:
        try:
            for rank in self.layout.managers:
                self._start(rank)
            if self.kind == "tcp":
                self._await_addresses()
            for rank in self.layout.workers:
                self._start(rank)
            while any(child.outcome is None for child in self.children.values()):
                self._watch()
            return self._outcomes()
        finally:
            self._end()

    def _start(self, rank: int, restarts: int = 0) -> None:
        self.children[rank] = self._started(rank, self.worker, restarts)

    def _started(self, rank: int, worker: Work, restarts: int = 0) -> _RankProcess:
        ours, theirs = self.context.Pipe()
        end = self.ends[rank] if self.ends else None
        args = (worker, self.manager, self.layout, self.kind, rank, end, self.token, dict(self.addresses),
                self.seed, theirs, ours)  # fmt: skip
        process = self.context.Process(target=_child, args=args, name=f"recollect-rank-{rank}")
        process.start()
        theirs.close()
        return _RankProcess(rank, process, ours, restarts)

    def _await_addresses(self) -> None:
        """Wait until every manager listens; one that dies before is started again, as ever."""
        end = monotonic() + _LISTEN_S
        while silent := [rank for rank in self.layout.managers if rank not in self.addresses]:
            for rank in silent:
                if (outcome := self.children[rank].outcome) is not None:
                    raise WorkerError(f"launch: {outcome[1]}")
            if monotonic() >= end:
                raise WorkerError(f"rank {silent[0]}: did not begin to listen within {_LISTEN_S:g} s")
            self._watch()

    def _watch(self) -> None:
        """Wait for a message of a child, or for its end."""
        open_ones = [child for child in self.children.values() if child.outcome is None]
        wait([c.pipe for c in open_ones] + [c.process.sentinel for c in open_ones], timeout=1.0)
        for child in open_ones:
            while child.outcome is None and child.pipe.poll(0):
                if not self._receive(child):
                    break
            if child.outcome is None and not child.process.is_alive():
                self._receive_rest(child)

    def _receive_rest(self, child: _RankProcess) -> None:
        """What a child said before it ended counts; otherwise it died."""
        while child.pipe.poll(0) and self._receive(child):
            if child.outcome is not None:
                return
        self._died(child)

    def _receive(self, child: _RankProcess) -> bool:
        try:
            kind, value = child.pipe.recv()
        except (EOFError, OSError):
            return False
        if kind == "address":
            self.addresses[child.rank] = value
        else:
            child.outcome = (kind, value)
        return True

    def _died(self, child: _RankProcess) -> None:
        code = child.process.exitcode
        child.process.join()
        child.pipe.close()
        if child.restarts < most_restarts(child.rank, self.layout, self.max_restarts):
            self._start(child.rank, child.restarts + 1)
            return
        child.outcome = ("error", f"rank {child.rank}: its process ended with code {code} without a result")
        if child.rank in self.layout.workers:  # it may have died before its manager knew of it
            self.leaving.append(self._started(child.rank, only_tell_absence))

    def _outcomes(self) -> Launched:
        launched, failed = Launched(), []
        for rank, child in sorted(self.children.items()):
            kind, value = child.outcome or ("error", "no outcome")
            if kind == "error":
                failed.append(value)
            elif kind == "stats":
                launched.stats[rank] = value
            else:
                launched.results[rank] = value
        if failed:
            raise WorkerError("launch: " + "\n".join(failed))
        return launched

    def _end(self) -> None:
        all_children = (*self.children.values(), *self.leaving)
        for child in all_children:
            with suppress(OSError, ValueError):
                child.pipe.send("over")
        for child in all_children:
            if child.outcome is None and child.process.is_alive():
                child.process.terminate()
            child.process.join(_END_S)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.process.close()
            child.pipe.close()


def _child(worker: Work, manager: Work, layout: RankLayout, kind: str, rank: int, end: Any, token: bytes,
           addresses: dict[int, str], seed: int, pipe: Connection, other: Connection) -> None:  # fmt: skip
    other.close()
    parent = os.getppid()
    try:
        carrier = end if kind == "local" else _tcp_end(layout, rank, token, addresses, pipe)
        set_launched(kind, carrier)
        try:
            pipe.send(run_rank(worker, manager, layout, carrier, seed))
        except BaseException as error:  # told first: taking leave may take a moment
            pipe.send(("error", f"rank {rank}: {told(error)}"))
        finally:
            # A message from there, or the end of the process that launched it, is the end of the launch.
            tell_absence(layout, carrier, lambda: pipe.poll(0) or os.getppid() != parent)
            carrier.close()
    except BaseException as error:
        pipe.send(("error", f"rank {rank}: {told(error)}"))
    finally:
        pipe.close()


def _tcp_end(
    layout: RankLayout, rank: int, token: bytes, addresses: dict[int, str], pipe: Connection
) -> TcpCarrier:
    if rank not in layout.managers:
        carrier = TcpCarrier.join([addresses[layout.manager_of(rank)]], token=token, rank=rank)
        carrier.link_others(addresses)  # they may have served their workers and ended
        return carrier
    # Started again, it listens where it did, so that its peers find it.
    carrier = TcpCarrier.serve(rank, addresses.get(rank, "127.0.0.1:0"), token=token)
    pipe.send(("address", carrier.address))
    return carrier

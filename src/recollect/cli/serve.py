"""`recollect serve`: a replay manager on TCP, who is connected to it and at what rate."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from recollect.cli.terminal import words
from recollect.observe import Beacon
from recollect.remote.stats import OTHERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recollect.remote.manager.manager import ReplayBufferManager


@dataclass
class Serve:
    """Serve a replay buffer to workers on other machines, until they have left or a signal ends it.

    Workers join with the same token: RECOLLECT_TOKEN in the environment of both, or a file that only its owner may
    read. Every few seconds it tells who is connected and at what rate, as do `recollect top` and `recollect dash`;
    Ctrl-C or SIGTERM ends it after the message at hand, with a checkpoint if one was asked for, and prints a summary.

    Example: recollect serve --env CartPole-v1 --address 0.0.0.0:7077 --token-file token.txt

    The worker: RemoteReplay(env, 0, TcpCarrier.join(["host:7077"], token=open("token.txt").read().strip()))
    """

    env: str | None = None
    """A gymnasium environment id: items are its transitions."""
    space: Path | None = None
    """A file with the space of an item as JSON (recollect.spaces.space_to_json), instead of --env."""
    address: str = "127.0.0.1:0"
    """Where to listen; port 0 takes a free one."""
    token_file: Path | None = None
    """A file with the token; made, for its owner alone, if it is not there. Else RECOLLECT_TOKEN is used."""
    capacity: int = 10_000
    """Items that the buffer holds."""
    max_length: int | None = None
    """The most steps of a trajectory, if items are trajectories."""
    baseline: Literal["min", "percentile", "ema"] = "min"
    """How the baseline is found."""
    workers: int = 0
    """End when this many workers have left; 0 serves until a signal."""
    checkpoint: Path | None = None
    """A directory for checkpoints; what is there is taken up again."""
    every: float = 2.0
    """Seconds between two reports."""
    json: bool = False
    """Print one JSON object per line instead of text."""

    def run(self) -> None:
        """Serve until the end, and report."""
        from recollect.remote.stats import as_plain

        if not self.every > 0:
            sys.exit(f"recollect serve: --every must be above 0 seconds, got {self.every}")
        space, token = self._space(), self._token()
        with self._listening(token) as carrier, self._manager(space, carrier) as manager:
            view = ServeView(manager, carrier.address, self.every, self.json)
            with _stopped_by_signals(manager), view:
                view.say({"address": carrier.address, "pid": os.getpid()}, f"serving at {carrier.address}")
                stats = manager.run()
            if self.json:
                print(json.dumps({"stats": as_plain(stats)}, default=str), flush=True)
            else:
                manager._print_timing_summary()

    def _listening(self, token: str | None) -> Any:
        from recollect.remote.carriers.tcp import TcpCarrier

        try:
            return TcpCarrier.serve(0, self.address, token)
        except OSError as error:
            sys.exit(f"recollect serve: cannot listen at {self.address} ({error}); choose another --address")
        except ValueError as error:
            sys.exit(f"recollect serve: {error}")

    def _manager(self, space: Any, carrier: Any) -> ReplayBufferManager:
        from recollect.remote.config import Checkpoint
        from recollect.remote.manager.manager import ReplayBufferManager

        save = None if self.checkpoint is None else Checkpoint(str(self.checkpoint), resume=True)
        try:
            return ReplayBufferManager(
                space, 0, self.workers or None, capacity=self.capacity, communication_backend=carrier,
                baseline_strategy=self.baseline, max_length=self.max_length, checkpoint=save,
            )  # fmt: skip
        except (ValueError, TypeError, OSError) as error:
            sys.exit(f"recollect serve: {error}")

    def _space(self) -> Any:
        import gymnasium

        from recollect.spaces import space_from_json, transition_space

        if (self.env is None) == (self.space is None):
            sys.exit("recollect serve: give --env or --space, and not both")
        try:
            if self.env is not None:
                return transition_space(gymnasium.make(self.env))
            return space_from_json(json.loads(self.space.read_text()))  # type: ignore[union-attr]
        except (gymnasium.error.Error, OSError, ValueError, TypeError, KeyError) as error:
            sys.exit(f"recollect serve: {error}")

    def _token(self) -> str | None:
        if self.token_file is None:
            if not os.environ.get("RECOLLECT_TOKEN"):
                sys.exit("recollect serve: a token is needed; set RECOLLECT_TOKEN or give --token-file PATH")
            return None
        try:
            with suppress(FileExistsError):
                made = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(made, "w") as file:
                    file.write(secrets.token_hex(32))
            mode = self.token_file.stat().st_mode & 0o777
            if mode & 0o077:
                sys.exit(
                    f"recollect serve: {self.token_file}: must be for its owner alone, got mode {mode:o}; "
                    f"run chmod 600 {self.token_file}"
                )
            return self.token_file.read_text().strip()
        except OSError as error:
            sys.exit(f"recollect serve: {error}")


@contextmanager
def _stopped_by_signals(manager: ReplayBufferManager) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the manager's loop, and nothing else."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: manager.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if TYPE_CHECKING:
    from recollect.remote.manager.manager import ReplayBufferManager
    from recollect.remote.stats import ManagerStats

CHARTS = {
    "containers/s": ["rate/containers"],
    "MB/s": ["rate/mb"],
    "items": ["items/live", "items/offered"],
    "baseline": ["baseline"],
}
LEFT_SHOWN = 5  # of the ranks that have left, the last ones


class ServeView:
    """Shows a manager every few seconds, from a thread of its own.

    Concurrency: `say` from any thread; the rest is its own.
    """

    def __init__(
        self, manager: ReplayBufferManager, address: str, every_s: float, as_json: bool,
        console: Console | None = None,
    ) -> None:  # fmt: skip
        self._manager, self._every_s, self._as_json = manager, every_s, as_json
        self._console = console or Console()
        facts: dict[str, Any] = {
            "address": address,
            "capacity": manager.capacity,
            "strategy": manager.baseline_strategy,
        }
        self._beacon = Beacon("serve", address, charts=CHARTS, facts=facts)
        self._live: Live | None = None
        self._last: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="recollect-reports", daemon=True)

    def say(self, plain: dict[str, Any], text: str) -> None:
        """Print one line."""
        if self._as_json:
            print(json.dumps(plain), flush=True)
        else:
            self._console.print(words(text), soft_wrap=True)

    def _work(self) -> None:
        seen, then = self._manager.stats(), monotonic()
        while True:
            is_over = self._over.wait(self._every_s)
            stats, now = self._manager.stats(), monotonic()
            self._show(rates(seen, stats, max(now - then, 1e-9)))
            seen, then = stats, now
            if is_over:
                return

    def _show(self, plain: dict[str, Any]) -> None:
        senders = [{"rank": rank, **sender} for rank, sender in shown(plain).items()]
        self._beacon.publish(figures(plain), {"workers": senders})
        if self._live is not None:
            self._live.update(as_table(plain), refresh=True)
        elif self._as_json or plain != self._last:  # an idle manager need not say so again and again
            self.say(plain, as_text(plain))
        self._last = plain

    def __enter__(self) -> Self:
        if not self._as_json and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join(10.0)
        if self._live is not None:
            self._live.stop()
        self._beacon.__exit__(*error)


def rates(before: ManagerStats, after: ManagerStats, seconds: float) -> dict[str, Any]:
    """Who is connected, and what came per second between two looks."""
    each = {}
    for rank, sender in sorted(after.senders.items()):
        # Who was forgotten in between is counted among the others now, with all that it ever sent.
        forgotten = before.senders.keys() - after.senders.keys() if rank == OTHERS else set()
        old = [before.senders[r] for r in (*forgotten, rank) if r in before.senders]
        each[rank] = {
            "state": sender.state,
            "requests_per_s": (sender.requests - sum(o.requests for o in old)) / seconds,
            "items_per_s": (sender.items - sum(o.items for o in old)) / seconds,
            "mb_per_s": (sender.nbytes - sum(o.nbytes for o in old)) / seconds / 1e6,
        }
    return {
        "live": after.live,
        "offered": after.offered,
        "baseline": after.baseline,
        "containers_per_s": (after.containers - before.containers) / seconds,
        "senders": each,
    }


def figures(plain: dict[str, Any]) -> dict[str, float]:
    """The numbers of one moment, by the names that charts use."""
    senders = plain["senders"].values()
    found = {
        "items/live": float(plain["live"]),
        "items/offered": float(plain["offered"]),
        "rate/containers": plain["containers_per_s"],
        "rate/items": sum(sender["items_per_s"] for sender in senders),
        "rate/mb": sum(sender["mb_per_s"] for sender in senders),
        "workers/present": float(sum(sender["state"] == "present" for sender in senders)),
    }
    return found if plain["baseline"] is None else found | {"baseline": plain["baseline"]}


def shown(plain: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Who is connected, and the last of those who have left: over months that is everybody who ever came."""
    senders: dict[int, dict[str, Any]] = plain["senders"]
    left = [rank for rank, sender in senders.items() if sender["state"] == "left"]
    hidden = set(left[:-LEFT_SHOWN])
    return {rank: sender for rank, sender in senders.items() if rank not in hidden}


def headline(plain: dict[str, Any]) -> str:
    """What is held, in one line."""
    baseline = "none" if plain["baseline"] is None else f"{plain['baseline']:.4g}"
    n_hidden = len(plain["senders"]) - len(shown(plain))
    return (
        f"{plain['live']:,} items held, {plain['offered']:,} offered, {plain['containers_per_s']:,.0f} containers/s, "
        f"baseline {baseline}"
        + ("" if plain["senders"] else "; nobody is connected")
        + (f"; {n_hidden:,} more have left" if n_hidden else "")
    )


def _name(rank: int) -> str:
    return "others" if rank == OTHERS else f"rank {rank}"


def as_text(plain: dict[str, Any]) -> str:
    """One line, and one more for each rank."""
    lines = [headline(plain)]
    for rank, sender in shown(plain).items():
        lines.append(
            f"  {_name(rank)}: {sender['state']}, {sender['requests_per_s']:,.0f} requests/s, "
            f"{sender['items_per_s']:,.0f} items/s, {sender['mb_per_s']:.2f} MB/s"
        )
    return "\n".join(lines)


def as_table(plain: dict[str, Any]) -> Table:
    """The same for a terminal."""
    table = Table(title=headline(plain), title_justify="left")
    for name in ("rank", "state", "requests/s", "items/s", "MB/s"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for rank, sender in shown(plain).items():
        numbers = [f"{sender[name]:,.0f}" for name in ("requests_per_s", "items_per_s")]
        table.add_row(
            _name(rank).removeprefix("rank "), words(sender["state"]), *numbers, f"{sender['mb_per_s']:.2f}"
        )
    return table

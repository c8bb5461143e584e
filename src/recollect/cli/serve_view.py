"""Who is connected to a served manager and at what rate: on a terminal, as lines, as JSON, and by a beacon."""

from __future__ import annotations

import json
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from recollect.cli.words import words
from recollect.observe import Beacon
from recollect.remote.stats import OTHERS

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

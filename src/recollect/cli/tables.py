"""The demo's report as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from recollect.budget import human_nbytes
from recollect.cli.words import words


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what was recorded, the rates, where the data lies, and what to try next."""
    console = console or Console()
    stats = report["stats"]
    told = (
        f": {report['recorded']:,} transitions recorded in {report['episodes']:,} episodes "
        f"(mean length {report['mean_episode_length']:.1f}), {report['drawn']:,} drawn meanwhile, "
        f"{report['killed_and_replaced']} recorder killed with SIGKILL and replaced."
    )
    console.print(words("\n", (report["env"], "bold"), told))
    doors = ", ".join(
        f"{name} {stats[name]:,}" for name in ("live", "evicted", "removed", "rejected", "dropped")
    )
    console.print(f"Every sample left by a counted door: offered {stats['offered']:,} = {doors}\n")
    console.print(_rates(report["rates"]))
    console.print(_place(report["place"]))
    load = (
        ". Load it:\n"
        f'  python -c "import recollect as rc; print(rc.ReplayBuffer.load_from({report["dump"]!r})[0])"\n'
    )
    console.print(words("The buffer is saved in ", (report["dump"], "bold"), load))


def _rates(rates: list[dict[str, Any]]) -> Table:
    table = Table(title="In this process, on a copy in RAM", title_justify="left")
    for name in ("work", "µs a call", "samples/s", "GB/s", "time over memcpy"):
        table.add_column(name, justify="left" if name == "work" else "right")
    for r in rates:
        table.add_row(
            r["work"],
            f"{r['us']:.2f}",
            f"{r['samples_per_s']:,.0f}",
            f"{r['gb_per_s']:.2f}",
            f"{r['times_memcpy']:.2f}",
        )
    return table


def _place(place: dict[str, Any]) -> Table:
    parts = ", ".join(
        f"{part} {human_nbytes(place[part])}" for part in ("header", "stamps", "segments", "rows")
    )
    table = Table(
        title=f"One row of {place['row_nbytes']} bytes, {place['lanes']} lanes, {place['kind']} of "
        f"{human_nbytes(place['nbytes'])}: {parts}",
        title_justify="left",
    )
    for name in ("leaf", "dtype", "shape", "at byte", "bytes"):
        table.add_column(name, justify="left" if name in ("leaf", "dtype") else "right")
    for leaf in place["leaves"]:
        shape = "×".join(map(str, leaf["shape"])) or "scalar"
        table.add_row(
            words(leaf["name"]), words(leaf["dtype"]), shape, str(leaf["offset"]), str(leaf["nbytes"])
        )
    return table

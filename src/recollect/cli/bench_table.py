"""The report of `recollect bench` as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from recollect.cli.words import words


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
    table.add_row(
        "Recollect over memcpy", *(f"{work['times_memcpy']:.2f}×" for work in works), end_section=True
    )
    peers = list(works[0]["peer_times_recollect"])
    for name in peers:
        ratios = (work["peer_times_recollect"][name] for work in works)
        table.add_row(f"{name} over Recollect", *(f"{ratio:.1f}×" for ratio in ratios))
    console.print(table)
    for name, why in report["left_out"].items():
        console.print(words(f"Left out: {name}, {why}"), soft_wrap=True)
    if not peers:
        console.print(
            "No peer was timed: Stable-Baselines3, cpprb, TorchRL, Tianshou and flashbax are, where they are installed."
        )

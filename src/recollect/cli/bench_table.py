"""The report of `recollect bench` as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the times, and the ratios that travel between machines."""
    console = console or Console()
    table = Table(
        title=f"{report['rows']:,} transitions of {report['row_nbytes']} bytes, {report['cores']} cores; "
        "µs a call, in brackets the time over Recollect's",
        title_justify="left",
    )
    peers = list(report["works"][0]["peer_times_recollect"])
    for name in ("work", "memcpy", "Recollect", "GB/s", "× memcpy", *peers):
        table.add_column(name, justify="left" if name == "work" else "right")
    for work in report["works"]:
        us, ratios = work["us"], work["peer_times_recollect"]
        table.add_row(
            work["work"], f"{us['memcpy']:.2f}", f"{us['Recollect']:.2f}", f"{work['gb_per_s']:.2f}",
            f"{work['times_memcpy']:.2f}", *(f"{us[name]:.1f} ({ratios[name]:.1f}×)" for name in peers),
        )  # fmt: skip
    console.print(table)
    for name, why in report["left_out"].items():
        console.print(f"Left out: {name}, {why}", soft_wrap=True)
    if not peers:
        console.print(
            "No peer is installed here; benchmarks/setup.sh of the source tree makes an environment of them."
        )

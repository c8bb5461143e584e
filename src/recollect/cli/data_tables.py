"""The reports of `inspect` and `verify` as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from recollect.budget import human_nbytes
from recollect.cli.words import words


def show_inspection(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what a directory holds."""
    console = console or Console()
    storage = f", storage {report['storage']}" if report["storage"] else ""
    told = (
        f": {report['kind']}{storage}, {report['samples']:,} samples, "
        f"{report['files']['count']:,} files of {human_nbytes(report['files']['bytes'])}"
    )
    console.print(words("\n", (report["path"], "bold"), told))
    segments = report["segments"]
    if segments is None:
        console.print("Segments: not known")
    elif segments["count"]:
        console.print(
            f"Segments: {segments['count']:,}, of {segments['min']:,} to {segments['max']:,} samples, "
            f"mean {segments['mean']:.1f}"
        )
    table = Table()
    for name in ("leaf", "kind", "dtype", "shape", "min", "max", "NaN"):
        table.add_column(name, justify="left" if name in ("leaf", "kind", "dtype") else "right")
    for leaf in report["leaves"]:
        shape = "×".join(map(str, leaf["shape"] or ())) or "scalar"
        low, high = (
            f"{leaf[f'length_{side}']} long" if f"length_{side}" in leaf else leaf.get(side, "")
            for side in ("min", "max")
        )
        table.add_row(
            words(leaf["name"]),
            leaf["kind"],
            words(leaf["dtype"]),
            shape,
            _short(low),
            _short(high),
            str(leaf.get("nan", "")),
        )
    console.print(table)
    for name, text in report.get("first_texts", {}).items():
        if text:
            console.print(words((f"{name} of the first sample: ", "bold"), _cut(text)))
    for name, why in report["left_out"].items():
        console.print(words(f"Left out: {name}, which {why}"))


def show_verification(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what is damaged and what can still be read."""
    console = console or Console()
    if report["ok"]:
        told = f", {report['files']:,} files with their checksums" if report["files"] else ""
        console.print(words(f"{report['path']}: whole, {report['samples']:,} samples{told}"))
        if report["unchecked"]:
            console.print(f"Files without a checksum: {len(report['unchecked']):,}; their samples were read")
        return
    console.print(words((f"{report['path']}: damaged", "bold red")))
    for found in report["damaged"]:
        console.print(words(f"  {found['file']}: {found['problem']}"), soft_wrap=True)
    if report["readable"]:
        console.print(f"Still readable: {_counted(report['readable'])} of {report['samples']:,} samples")
    if report["unsure"]:
        console.print(
            f"Can be read, but some of them may be wrong: {_counted(report['unsure'])} of {report['samples']:,} samples"
        )
    if not report["readable"] and not report["unsure"]:
        console.print("Nothing of it can be read.")


def _cut(text: str, most: int = 500) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _counted(runs: list[list[int]]) -> str:
    shown = ", ".join(f"{a}..{b - 1}" for a, b in runs[:20])
    return f"{sum(b - a for a, b in runs):,} ({shown}{', ...' if len(runs) > 20 else ''})"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

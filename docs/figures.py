"""The tables of figures in the documentation, made from what the benchmarks wrote: one fact in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PEERS = {"cpprb": "cpprb", "torchrl": "TorchRL", "sb3": "SB3", "tianshou": "Tianshou", "flashbax": "flashbax",
         "flashbax-scan": "flashbax in a scan"}  # fmt: skip
FLOORS = {"memcpy": "memcpy", "C packed": "C gather"}


def compared() -> str:
    """Medians of `benchmarks/compare.py` as a table, with what was measured and where another library won."""
    found = json.loads((RESULTS / "compare.json").read_text())
    names = {"recollect": "**Recollect**", **PEERS, **FLOORS}
    lines = ["| µs a call | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for work in found["works"].values():
        cells = [_us(work["results"].get(name)) for name in names]
        lines.append(f"| {work['title']} | " + " | ".join(cells) + " |")
    versions = ", ".join(
        f"{PEERS[name]} {found['versions'][name]}" for name in PEERS if name != "flashbax-scan"
    )
    machine, rounds = found["machine"], found["settings"]["rounds"]
    wins = found["peer_wins"]
    about = (
        f"One run on {machine['cores']} cores of an {machine['cpu']}, {rounds} rounds, medians. {versions}. – is: not "
        "measured."
    )
    verdict = (
        "; ".join(map(str, wins))
        if wins
        else "No other library was faster at any of these works in that run."
    )
    return "\n".join([about, "", *lines, "", verdict, "", *_memory(found)])


def _us(result: dict[str, Any] | None) -> str:
    if result is None:
        return "–"
    us = result["median_us"]
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def _memory(found: dict[str, Any]) -> list[str]:
    names = {"recollect": "**Recollect**", **PEERS}
    there = {name: found["peak_memory"][name] for name in names if name in found["peak_memory"]}
    return [
        "The most memory that 10⁶ rows of 165 B took, in MB:",
        "",
        "| | " + " | ".join(names[name] for name in there) + " |",
        "|---" * (len(there) + 1) + "|",
        "| made and filled | " + " | ".join(f"{m['filled_nbytes'] / 1e6:.0f}" for m in there.values()) + " |",
    ]

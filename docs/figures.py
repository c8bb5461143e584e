"""The tables of figures in the documentation, made from what the benchmarks wrote: one fact in one place.

python docs/figures.py      writes the tables of README.md and docs/compare/index.md anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {"cpprb": "cpprb", "torchrl": "TorchRL", "sb3": "SB3", "tianshou": "Tianshou", "flashbax": "flashbax",
         "flashbax-scan": "flashbax in a scan"}  # fmt: skip
BEGIN, END = "<!-- figures: python docs/figures.py -->", "<!-- end of figures -->"
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


def summary() -> str:
    """The README's table: each work beside the fastest other library, memcpy and C."""
    found = json.loads((RESULTS / "compare.json").read_text())
    machine, wins = found["machine"], found["peer_wins"]
    lines = [
        f"One run of `benchmarks/compare.py` on {machine['cores']} cores of an {machine['cpu']} "
        f"({found['settings']['rounds']} rounds, medians in µs a call; all of it is in",
        "`benchmarks/results/compare.json`). "
        + (f"Another was faster: {'; '.join(map(str, wins))}." if wins else "No other library was faster."),
        "",
        "| work | Recollect | fastest other | memcpy of the bytes | plain C gather |",
        "|---|---|---|---|---|",
    ]
    for work in found["works"].values():
        results = work["results"]
        others = {name: results[name]["median_us"] for name in PEERS if results.get(name)}
        best = min(others, key=lambda name: others[name], default=None)
        in_c = [results[name] for name in ("C packed", "C leaves") if results.get(name)]
        plain = min(in_c, key=lambda result: result["median_us"], default=None)
        other = "–" if best is None else f"{_us(results[best])} ({PEERS[best]})"
        cells = [_us(results["recollect"]), other, _us(results.get("memcpy")), _us(plain)]
        lines.append(f"| {work['title']} | " + " | ".join(cells) + " |")
    missed = _missed(found)
    return "\n".join([*lines, "", missed] if missed else lines)


def _missed(found: dict[str, Any]) -> str:
    """Which goals of the benchmark the run did not reach; nothing if it reached all."""
    missed = [
        f"{found['works'][goal['work']]['title']} {goal['goal']} ({goal['measured']:.2f})"
        for goal in found["goals"]
        if goal["verdict"] == "MISS"
    ]
    return "Goals that this run missed: " + ";\n".join(missed) + "." if missed else ""


def in_page(text: str) -> tuple[str, str, str]:
    """The text before, between and after the marks."""
    before, rest = text.split(BEGIN + "\n")
    between, after = rest.split("\n" + END)
    return before, between, after


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


if __name__ == "__main__":
    for page, made in ((ROOT / "README.md", summary), (ROOT / "docs" / "compare" / "index.md", compared)):
        before, _, after = in_page(page.read_text())
        page.write_text(f"{before}{BEGIN}\n{made()}\n{END}{after}")

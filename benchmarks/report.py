"""Results as tables to read and as JSON to keep."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adapters import ENTRIES
from results import GOALS, OURS, Outcome, Results, peer_wins

COLUMNS = ("", "µs/call", "q1", "q3", "calls/s", "GB/s", "x fastest peer", "/ memcpy", "/ C")


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the rest to the right."""
    rows = [header, *lines]
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    made = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        made.append("  ".join(cells).rstrip())
    return "\n".join([made[0], "-" * max(map(len, made)), *made[1:]])


def number(value: float | None) -> str:
    """Three figures, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def outcome_line(outcome: Outcome, name: str) -> list[str]:
    timing = outcome.timings[name]
    us = outcome.us(name)
    assert us is not None
    low, high = timing.quartiles_us
    peers, memcpy, c = (outcome.reference_us(against) for against in ("peers", "memcpy", "C"))
    return [
        name + ("*" if outcome.delivers_other_bytes(name) else ""),
        number(timing.median_us),
        number(low),
        number(high),
        number(1e6 / timing.median_us),
        number(timing.nbytes / timing.median_us / 1e3),
        number(peers / us if peers else None),
        number(us / memcpy if memcpy else None),
        number(us / c if c else None),
    ]


def outcome_table(outcome: Outcome) -> str:
    names = sorted(outcome.timings, key=lambda name: outcome.us(name) or 0.0)
    text = f"{outcome.work.name}: {outcome.work.title}\n"
    text += table(COLUMNS, [outcome_line(outcome, name) for name in names])
    if any(outcome.delivers_other_bytes(name) for name in names):
        text += "\n* cannot but deliver other bytes (next_obs too); its ratios are per byte delivered"
    return text


def memory_table(results: Results) -> str:
    assert results.memory_work is not None
    work, header, lines = results.memory_work, ("peak / size", "created", "created and filled"), []
    for name in results.memory:
        ratios = (results.memory_ratio(name, which) for which in ("created_nbytes", "filled_nbytes"))
        lines.append((name, *map(number, ratios)))
    return f"{work.name}: {work.rows:,} rows of {work.row_nbytes} B when packed\n" + table(header, lines)


def goals_table(results: Results) -> str:
    lines = []
    for goal in GOALS:
        measured = goal.measured(results)
        figure = "-" if measured is None else f"{measured:.3f}"
        lines.append((goal.work, goal.text, figure, goal.verdict(results)))
    return table(("goal", "", "measured", ""), lines)


def wins_text(results: Results) -> str:
    met = [name for name, outcome in results.outcomes.items() if OURS in outcome.timings and outcome.peers]
    if not met:
        return f"Where a peer wins: {OURS} and a peer were not timed at the same work."
    wins = [f"- {sentence}" for sentence in peer_wins(results)]
    return "\n".join(["Where a peer wins:", *wins]) if wins else f"No peer wins at {', '.join(met)}."


def full_text(results: Results) -> str:
    parts = [outcome_table(outcome) for outcome in results.outcomes.values() if outcome.timings]
    if results.memory:
        parts.append(memory_table(results))
    parts.append(wins_text(results))
    parts.append(goals_table(results))
    parts.append("\n".join(f"skipped: {name}: {why}" for name, why in results.skipped))
    return "\n\n".join(part for part in parts if part)


def first_match(path: str, prefix: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(prefix)), "unknown")


def machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": first_match("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": first_match("/proc/meminfo", "MemTotal"),
        "cache": first_match("/proc/cpuinfo", "cache size"),
        "huge_pages": huge.read_text().strip() if huge.exists() else "unknown",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    found = {}
    for name, timing in outcome.timings.items():
        low, high = timing.quartiles_us
        found[name] = {
            "role": ENTRIES[name].role,
            "median_us": round(timing.median_us, 3),
            "quartiles_us": [round(low, 3), round(high, 3)],
            "calls_per_turn": timing.calls,
            "batch_nbytes": timing.nbytes,
            "rounds_us": [round(us, 3) for us in timing.rounds_us],
        }
    work = outcome.work
    return {
        "title": work.title,
        "rows": work.rows,
        "batch": work.batch,
        "row_nbytes": work.row_nbytes,
        "results": found,
    }


def as_json(results: Results, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "settings": settings,
        "versions": results.versions,
        "works": {name: outcome_json(outcome) for name, outcome in results.outcomes.items()},
        "peak_memory": results.memory,
        "goals": [
            {"work": g.work, "goal": g.text, "measured": g.measured(results), "verdict": g.verdict(results)}
            for g in GOALS
        ],
        "peer_wins": peer_wins(results),
        "skipped": [{"who": name, "why": why} for name, why in results.skipped],
    }

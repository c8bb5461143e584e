"""The doctor's report as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recollect.cli.machine import Fact
from recollect.cli.words import words
from recollect.collect import Finding

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def show(
    machine: Sequence[Fact],
    installed: Sequence[Fact],
    title: str,
    findings: Sequence[Finding] | None,
    console: Console | None = None,
) -> None:
    """Print the machine, the packages, the environment if there was one, and a last line that sums up."""
    console = console or Console()
    table = _table("This machine", ("check", "found"))
    for fact in machine:
        table.add_row(words((fact.level, STYLES[fact.level])), words(fact.name), words(fact.found))
    console.print(table)
    there = ", ".join(f"{fact.name} {fact.found}" for fact in installed if fact.level == "ok")
    console.print(words(("Packages: ", "bold"), there), soft_wrap=False)
    _show_remedies(console, [fact for fact in (*machine, *installed) if fact.remedy])
    if findings:
        console.print(_findings(title, findings))
    elif findings is not None:
        console.print(words((f"{title}: ", "bold"), ("nothing is wrong", "green")))
    facts = [fact.level for fact in (*machine, *installed)]
    console.print(_summary([*facts, *(finding.level for finding in findings or ())]))


def _show_remedies(console: Console, facts: Sequence[Fact]) -> None:
    """What to do, a line each and never broken: there are commands to copy."""
    if facts:
        console.print(Text("What to do", "bold"))
    for fact in facts:
        text = words((fact.level, STYLES[fact.level]), f"  {fact.name}: ", fact.remedy)
        console.print(text, soft_wrap=True)


def _findings(title: str, findings: Sequence[Finding]) -> Table:
    table = _table(title, ("place", "problem", "what to do"))
    for f in findings:
        table.add_row(words((f.level, STYLES[f.level])), words(f.place), words(f.problem), words(f.remedy))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=words((title, "bold")), title_justify="left")
    table.add_column("", no_wrap=True)
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", ratio=(None, 3, 2)[number] if len(columns) > 2 else None)
    return table


def _summary(levels: Sequence[str]) -> Text:
    n_errors, n_warnings = levels.count("error"), levels.count("warning")
    if not n_errors and not n_warnings:
        return Text("Ready.", "bold green")
    counts = [
        f"{n} {word}{'s' * (n != 1)}" for n, word in ((n_errors, "error"), (n_warnings, "warning")) if n
    ]
    return Text(", ".join(counts) + ".", STYLES["error" if n_errors else "warning"])

"""`recollect doctor`: what is wrong with this machine, or with an environment, and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recollect.cli.machine import Fact, look, packages
from recollect.cli.terminal import words
from recollect.collect import Finding, check_env_pipeline
from recollect.text import printable


@dataclass
class Doctor:
    """Look at this machine, its packages and, if one is named, an environment; say what is wrong and what to do.

    The environment is stepped at random and recorded into a scratch buffer. That finds values off their space, arrays
    that are written over later, a missing or wrong final_obs, an undeclared auto-reset mode, and rows unlike what the
    environment gave. Ends with status 1 if there is an error.

    Example: recollect doctor --env CartPole-v1 --num-envs 8
    """

    env: str | None = None
    """A gymnasium environment id, as my_module:MyEnv-v0 too; without one only the machine is looked at."""
    num_envs: int = 0
    """Check a vector environment of so many slots; 0 is a single environment."""
    vectorization: str = "sync"
    """How the slots are made: sync, async or vector_entry_point."""
    autoreset: str = "NEXT_STEP"
    """The auto-reset mode of sync and async slots: NEXT_STEP, SAME_STEP or DISABLED."""
    steps: int = 1000
    """How often the environment is stepped."""
    seed: int = 0
    """Seed of the environment and of the actions."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Look, report, and exit with status 1 on errors."""
        machine, installed = list(look()), packages()
        findings = self._check_env() if self.env is not None else None
        if self.json:
            self._print_json(machine, installed, findings)
        else:
            show(machine, installed, self._title(), findings)
        every: list[Fact | Finding] = [*machine, *installed, *(findings or ())]
        if any(found.level == "error" for found in every):
            sys.exit(1)

    def _title(self) -> str:
        slots = f", {self.num_envs} slots" if self.num_envs else ""
        return f"{self.env}{slots}, {self.steps:,} steps"

    def _check_env(self) -> list[Finding]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        env = self._make_env()
        columns = (TextColumn("stepping {task.description}", markup=False), BarColumn(), TaskProgressColumn())
        try:
            with Progress(
                *columns, console=Console(stderr=True), disable=self.json, transient=True
            ) as progress:
                task = progress.add_task(printable(self.env), total=self.steps)
                return check_env_pipeline(
                    env,
                    steps=self.steps,
                    seed=self.seed,
                    progress=lambda n: progress.update(task, completed=n),
                )
        finally:
            env.close()

    def _make_env(self) -> Any:
        import gymnasium

        from recollect.collect.autoreset import as_mode

        try:
            if not self.num_envs:
                return gymnasium.make(str(self.env))
            modes = {"autoreset_mode": as_mode(self.autoreset, "--autoreset")}
            kwargs: dict[str, Any] = (
                {} if self.vectorization == "vector_entry_point" else {"vector_kwargs": modes}
            )
            return gymnasium.make_vec(
                str(self.env), num_envs=self.num_envs, vectorization_mode=self.vectorization, **kwargs
            )
        except (gymnasium.error.Error, ImportError, ValueError) as error:
            sys.exit(f"recollect doctor: {self.env}: {error}")

    def _print_json(self, machine: list[Fact], installed: list[Fact], findings: list[Finding] | None) -> None:
        report: dict[str, Any] = {
            "machine": [asdict(fact) for fact in machine],
            "packages": [asdict(fact) for fact in installed],
        }
        if findings is not None:
            report["env"] = {"id": self.env, "num_envs": self.num_envs, "steps": self.steps,
                             "findings": [asdict(finding) for finding in findings]}  # fmt: skip
        sys.stdout.write(json.dumps(report, indent=2) + "\n")


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

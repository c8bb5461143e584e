"""`recollect doctor`: what is wrong with this machine, or with an environment, and what to do about it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from recollect.cli.machine import Fact, look, packages
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
            from recollect.cli.doctor_tables import show

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

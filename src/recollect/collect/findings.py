"""Findings: what a check says, as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be: how bad, where, what, and what to do about it."""

    level: Literal["error", "warning"]
    place: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.place}: {self.problem}; {self.remedy}"

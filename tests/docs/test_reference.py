"""The reference has every public name, and no other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from recollect import cli

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ENTRY = re.compile(r"^\.\. (?:autoclass|autofunction|automodule|data):: (\S+)", re.MULTILINE)
MODULES = (
    "recollect",
    "recollect.ipc",
    "recollect.ipc.replay_pipelines",
    "recollect.remote",
    "recollect.rollout",
    "recollect.datasets",
    "recollect.learners",
    "recollect.observe",
    "recollect.testing",
)
ENTRIES = [name for page in REFERENCE.glob("*.md") for name in ENTRY.findall(page.read_text())]


def found(entry: str) -> Any:
    """What an entry is about: a name of a module, or a module."""
    module, _, name = entry.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(module: str) -> None:
    there = [found(entry) for entry in ENTRIES]
    for name in import_module(module).__all__:
        value = getattr(import_module(module), name)
        assert name.startswith("__") or any(value is other for other in there), f"{module}.{name}"


def test_no_entry_is_there_twice() -> None:
    assert len(ENTRIES) == len(set(ENTRIES))


def test_every_command_is_described() -> None:
    page = (REFERENCE / "cli.md").read_text()
    assert all(f"## recollect {name}\n" in page for name in cli._COMMANDS)

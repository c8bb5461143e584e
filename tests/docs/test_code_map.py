"""docs/explain/code.md draws ways through the package; each is followed by the calls that are made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.ways import WAYS, modules_of

import recollect

PAGE = (Path(__file__).parents[2] / "docs/explain/code.md").read_text()
SOURCES = Path(recollect.__file__).parent


def drawn(way: str) -> list[str]:
    """The modules in the first column of the table under a way's heading."""
    section = PAGE.split(f"\n### {way}\n")[1].split("\n#")[0]
    return [
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_passes_the_modules_that_the_map_draws(way: str) -> None:
    names = drawn(way)
    assert len(names) == len(set(names))
    assert set(modules_of(way)) == set(names) - {"_core"}


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in SOURCES.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    table = PAGE.split("\n## Rooms\n")[1].split("\n## ")[0]
    assert rooms <= set(re.findall(r"`(\w+)/?`", table))


def test_every_module_that_the_map_names_is_there() -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE):
        assert (SOURCES / name).exists() or (SOURCES.parents[1] / name).exists(), name

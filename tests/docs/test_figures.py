"""The figures in the README are those that the benchmarks wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_readme_is_that_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    shown = figures.in_readme((ROOT / "README.md").read_text())[1]
    assert shown == figures.summary(), "run python docs/figures.py"

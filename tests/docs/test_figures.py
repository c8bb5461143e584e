"""The figures in the README and in the documentation are those that the benchmarks wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "made"), [("README.md", "summary"), ("docs/compare/index.md", "compared")])
def test_the_table_of_a_page_is_that_of_the_results(page: str, made: str) -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    shown = figures.in_page((ROOT / page).read_text())[1]
    assert shown == getattr(figures, made)(), "run python docs/figures.py"

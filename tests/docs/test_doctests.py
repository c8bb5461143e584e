"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import recollect

MODULES = [
    module.name
    for module in pkgutil.walk_packages(recollect.__path__, "recollect.")
    if not module.name.endswith(("__main__", "_native"))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    try:
        module = importlib.import_module(name)
    except recollect.MissingExtraError as error:
        if not name.startswith("recollect.adapters."):  # frameworks that are not in the test environment
            raise
        pytest.skip(str(error))
    failed, _ = doctest.testmod(module, optionflags=flags)
    assert failed == 0

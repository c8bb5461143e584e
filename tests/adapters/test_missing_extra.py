"""An adapter says what to install when its framework is not there."""

from __future__ import annotations

import importlib
import sys

import pytest

import recollect as rc


@pytest.mark.parametrize(
    ("adapter", "package"), [("sb3", "stable_baselines3.common"), ("trinity", "trinity.common")]
)
def test_without_its_framework_the_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch, adapter: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"recollect.adapters.{adapter}", raising=False)
    with pytest.raises(rc.MissingExtraError, match=rf'pip install "recollect\[{adapter}\]"'):
        importlib.import_module(f"recollect.adapters.{adapter}")

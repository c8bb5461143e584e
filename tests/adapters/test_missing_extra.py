"""An adapter says what to install when its framework is not there."""

from __future__ import annotations

import importlib
import sys

import pytest

import recollect as rc


def test_without_sb3_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3.common", None)
    monkeypatch.delitem(sys.modules, "recollect.adapters.sb3", raising=False)
    with pytest.raises(rc.MissingExtraError, match=r'pip install "recollect\[sb3\]"'):
        importlib.import_module("recollect.adapters.sb3")

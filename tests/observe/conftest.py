"""Jobs of the tests register in a directory of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory where jobs register, also those of child processes."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("RECOLLECT_RUNTIME_DIR", str(path))
    return path

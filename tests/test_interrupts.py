"""Ctrl-C while a large package is imported: heard, but only when the package is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recollect.interrupts import import_whole

# A torch that is interrupted in the middle of its import, as by a user who changed his mind.
TORCH = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nis_whole = True\n"


@pytest.fixture
def torch_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "torch_of_ours"
    (tmp_path / f"{name}.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_it_is_raised_when_the_import_is_done(torch_of_ours: str) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        import_whole(torch_of_ours)
    assert sys.modules[torch_of_ours].is_whole and signal.getsignal(signal.SIGINT) is handler
    assert import_whole(torch_of_ours) is sys.modules[torch_of_ours]


def test_who_ignores_it_is_not_interrupted(torch_of_ours: str) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert import_whole(torch_of_ours).is_whole
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_import_as_ever() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(import_whole("json")))
    thread.start()
    thread.join()
    assert found == [sys.modules["json"]]


def test_torch_is_imported_whole(tmp_path: Path) -> None:
    """By whatever needs it first; so is what its first optimizer would import in the midst of `learn`."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(TORCH)
    (tmp_path / "torch/_dynamo.py").write_text(TORCH)
    code = """
import sys
from recollect.backends import get_backend
from recollect.datasets.torch import _torch_dataset_class
from recollect.ipc.async_runner import best_device
from recollect.ipc.transitions import _tensor_field
from recollect.learners.run import need_torch
for call in (best_device, lambda: get_backend("torch"), _torch_dataset_class, lambda: _tensor_field(1, 2), need_torch):
    assert "torch" not in sys.modules
    try:
        call()
    except KeyboardInterrupt:
        print(sys.modules.pop("torch").is_whole)
open(sys.argv[1], "w").close()  # this one is not interrupted
try:
    need_torch()
except KeyboardInterrupt:
    print(sys.modules["torch._dynamo"].is_whole)
need_torch()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "torch/__init__.py")],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout == "True\n" * 6, done.stderr

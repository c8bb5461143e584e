"""A signal handler of the program that saves, closes or ends it, in the midst of a write or a commit."""

from __future__ import annotations

import gc
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interruption import interrupted
from tests.process.failing import no_syncs
from tests.process.test_commit_faults import IN_MEMORY, NEW, OLD, allowed, like, made
from tests.process.test_file_kills import KINDS, block, ids, state

import recollect as rc

# An exit that comes inside a callback of the collector is dropped by Python, with such a warning.
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FEW = ("parquet", "hdf5", "memory")


@pytest.fixture
def on_sigterm() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, lambda number, frame: handler())
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("deed", ["dumps", "close", "end"])
@pytest.mark.parametrize(
    "kind", [k if k in FEW else pytest.param(k, marks=pytest.mark.soak) for k in (*KINDS, *IN_MEMORY)]
)
def test_a_handler_in_the_midst_of_a_write(kind: str, deed: str, tmp_path: Path, on_sigterm: Any) -> None:
    """It is refused, or it saves; either way a write that returned is there, and nothing hangs."""
    path, data = tmp_path / "data", like(kind)
    where = tmp_path / "dump" if kind == "memory" else path
    ring = 12 if "ring" in kind else 10**6
    n, came = 0, True
    while came:
        with no_syncs():
            buffer = made(kind, path)
            buffer.extend(block(data, 0, 9), ends=np.arange(9) == 8)
            buffer.dumps(where)
            returned: list[int] = []

            def handle(buffer: rc.ReplayBuffer = buffer) -> None:
                if deed == "end":
                    sys.exit(0)
                with suppress(rc.LaneBusyError):
                    buffer.close() if deed == "close" else buffer.dumps(where)

            def write(buffer: rc.ReplayBuffer = buffer, returned: list[int] = returned) -> None:
                try:
                    buffer.extend(block(data, 100, 5))
                    buffer.mark_segment_end()
                    buffer.dumps(where)
                    returned.append(1)
                    assert deed == "close" or ids(data, buffer[...]) == [*OLD, *NEW][-ring:]
                except (rc.ClosedError, rc.ReadOnlyError):
                    assert deed == "close"
                except SystemExit:
                    assert deed == "end"

            on_sigterm(handle)
            came = interrupted(write, n, "signal", signal.SIGTERM)
            buffer.close()
            found = state(data, where)[0]
            assert found in allowed(kind) or "ring" in kind, n
            assert not returned or found == [*OLD, *NEW][-ring:], n
            shutil.rmtree(where)
        n += 401
    gc.collect()  # what the signal kept from its caller

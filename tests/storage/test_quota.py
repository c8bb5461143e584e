"""A quota and a full disk: what was committed stays, the error says why, and with room again the buffer works on."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.disk import file_size

import recollect as rc

SPACE: Any = {"id": ((), "int64"), "x": ((64,), "float64")}
N, N_ROWS = 40, 150


def rows(first: int, n: int) -> Any:
    ids = np.arange(first, first + n)
    noise = np.random.default_rng(first).standard_normal((n, 64))
    noise[:, 0] = ids
    return {"id": ids, "x": noise}


def found(path: Path) -> list[int]:
    with rc.ReplayBuffer.load_from(path, verify=True) as loaded:
        data = loaded[...]
        assert np.array_equal(data["x"][:, 0], data["id"])
        return [int(i) for i in data["id"]]


def make(path: Path, compression: str | None = None, **more: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create("hdf5", SPACE, cache_path=path, compression=compression, **more)


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.9, 1.0, 1.2])
def test_hdf5_under_a_quota(at: float, compression: str | None, tmp_path: Path) -> None:
    """The limit lies below, in or above the file that is being written."""
    path = tmp_path / "data"
    buffer = make(path, compression)
    buffer.extend(rows(0, N))
    buffer.storage.flush()
    (file,) = path.rglob("*.hdf5")
    with file_size(int(file.stat().st_size * at)):
        for _ in range(3):
            with pytest.raises(OSError) as error:
                for i in range(100):
                    buffer.extend(rows(100 + 20 * i, 20))
                    buffer.storage.flush()
            assert error.value.errno == errno.EFBIG
        before = found(path)
    assert before[:N] == [*range(N)]
    live = [int(i) for i in buffer[...]["id"]]
    assert live[: len(before)] == before
    buffer.extend(rows(5000, 3))
    buffer.storage.flush()
    assert found(path) == [*live, 5000, 5001, 5002]
    buffer.close()
    assert found(path) == [*live, 5000, 5001, 5002]


@pytest.mark.parametrize("ends", ["goes on", "closes"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_hdf5_on_a_full_disk(ends: str, one_by_one: bool, small_disk: Path) -> None:
    path = small_disk / "data"
    buffer = make(path)
    buffer.extend(rows(0, N))
    buffer.storage.flush()
    filler = small_disk / "filler"
    free = os.statvfs(small_disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - (16 << 10)))
    n = 1 if one_by_one else 50
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as error:
            for i in range(200):
                buffer.extend(rows(100 + n * i, n))
                buffer.storage.flush()
        assert error.value.errno == errno.ENOSPC
    assert found(path)[:N] == [*range(N)]
    live = [int(i) for i in buffer[...]["id"]]
    if ends == "closes":
        before = found(path)
        with contextlib.suppress(OSError):
            buffer.close()
        assert found(path)[: len(before)] == before
        return
    filler.unlink()
    buffer.extend(rows(5000, 3))
    buffer.close()
    assert found(path) == [*live, 5000, 5001, 5002]


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("capacity", [None, 80])
def test_hdf5_grows_with_its_rows(compression: str | None, capacity: int | None, tmp_path: Path) -> None:
    """Rows that are appended one by one, with a read and a commit behind each, take little more than themselves.

    A commit writes the last chunk again. Compressed, it is longer than before and goes to another place in the file:
    the place that it had must be used again by a later commit, which opens the file anew.
    """
    path = tmp_path / "data"
    with make(path, compression, capacity=capacity) as buffer:
        for i in range(N_ROWS):
            buffer.extend(rows(i, 1))
            assert int(buffer[-1]["id"]) == i
            buffer.storage.flush()
    (file,) = path.rglob("*.hdf5")
    held = capacity or N_ROWS
    assert file.stat().st_size < 3 * held * 65 * 8 + (1 << 19)
    assert found(path) == [*range(N_ROWS)][-held:]

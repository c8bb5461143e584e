"""Dumps that were written by an older release are loaded by every newer one.

`version-1.tar.xz` holds one dump of each kind, as version 1 wrote it: samples 0 to 4 in the segments 0-2 and 3-4,
where nothing else is said. It is never written again; a new version adds an archive of its own.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.storage import manifest

ARCHIVE = Path(__file__).with_name("version-1.tar.xz")
NEEDS = {"parquet": "pyarrow", "dict": "pyarrow PIL", "hdf5": "h5py", "image": "PIL", "video": "av"}
FIVE = ([0, 1, 2, 3, 4], [(0, 3), (3, 5)])
VERSION_1: dict[str, tuple[list[int], Any]] = {  # the numbers of the samples, and the segments
    "rows": ([0, 1, 2, 3, *range(102, 108)], [(0, 2), (2, 4), (4, 10)]),  # two lanes, the second gone round
    "lowest": ([5, 7, 9, 3], None),
    "unbounded": ([0, 1, 2], None),
    "memmap": ([1, 2, 3, 4], [(0, 2), (2, 4)]),  # live, a ring of four
    **dict.fromkeys(("parquet", "hdf5", "image", "video", "dict"), FIVE),
}


def numbers(data: Any) -> list[int]:
    """The numbers of samples that were read, each of them whole."""
    if not isinstance(data, dict):
        ids = data[:, 0, 0, 0]
        assert np.array_equal(data, np.broadcast_to(ids[:, None, None, None], (len(data), 16, 16, 3)))
    elif "frame" in data:
        ids = data["id"]
        assert np.array_equal(data["frame"], np.broadcast_to(ids[:, None, None], (len(ids), 4, 4)))
    else:
        ids = data["id"]
        assert np.array_equal(data["words"], ids[:, None] * np.array([1.0, -2.0, 0.5]))
    found: list[int] = ids.tolist()
    return found


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("name", VERSION_1)
def test_version_1_loads(name: str, read_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(name, "").split():
        pytest.importorskip(package)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, [m for m in archive if m.name.split("/")[0] == name], filter="data")
    monkeypatch.setattr(
        manifest, "FORMAT_VERSION", manifest.FORMAT_VERSION + 1
    )  # as the next release would read it
    path = tmp_path / name
    was, segments = VERSION_1[name]
    assert rc.ReplayBuffer.get_length_from_path(path) == len(was)
    with rc.ReplayBuffer.load_from(path, read_only=read_only, verify=True) as loaded:
        assert numbers(loaded[...]) == was and loaded.get_segments() == segments
        if not read_only:
            loaded.extend(loaded[[0]])
            loaded.dumps(tmp_path / "again")
            now = numbers(loaded[...])
    if not read_only:
        with rc.ReplayBuffer.load_from(tmp_path / "again") as again:
            assert numbers(again[...]) == now

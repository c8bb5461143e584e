"""Whatever a file or a peer says: it loads, or raises the documented error, within bounded memory and time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.datasets.lerobot_meta import file_name
from recollect.errors import BudgetError, FormatError, FrameError
from recollect.files.record import read_json, signed_json
from recollect.remote.messages import Data
from recollect.remote.wire import Shapes, check_drawn, cut_items
from recollect.spaces import compile_layout, space_from_json

ROOT = Path(__file__).parents[2]
FAMILIES = ("manifests", "spaces", "learners", "journals", "datasets", "frames")


def campaign(family: str, first: int, n: int, seconds: float) -> None:
    command = [sys.executable, "-m", "tests.fuzz.campaign", family, str(first), str(n)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_artefacts_load_or_raise_the_documented_error(family: str) -> None:
    campaign(family, 0, 40 if family == "learners" else 120, 600.0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_damaged_artefacts(family: str) -> None:
    for first in range(1_000, 101_000, 10_000):
        campaign(family, first, 10_000, 7000.0)


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    buf = rc.ReplayBuffer.create("memory", {"x": ((0,), "float32")}, capacity=None)
    buf.extend({"x": np.zeros((3, 0), "float32")})
    buf.dumps(tmp_path / "dump")
    buf.close()
    return tmp_path / "dump"


def forge(path: Path, **changes: Any) -> None:
    manifest = read_json(path / "manifest.json")
    manifest.pop("crc32c")
    (path / "manifest.json").write_text(signed_json({**manifest, **changes}))


def test_a_fifo_as_manifest_is_refused_at_once(dumped: Path) -> None:
    (dumped / "manifest.json").unlink()
    os.mkfifo(dumped / "manifest.json")
    with pytest.raises(FormatError, match="plain file"):
        rc.ReplayBuffer.load_from(dumped)


def test_rows_of_no_bytes_are_as_many_as_their_stamps(dumped: Path) -> None:
    lane = {"start": 0, "capacity": None, "count": 10**11, "offset": 0}
    files = read_json(dumped / "manifest.json")["files"]
    [name] = (name for name in files if "/rows-" in name)
    os.truncate(dumped / name, 8 * 10**11)  # a hole, which takes no disk
    files[name]["bytes"] = 8 * 10**11
    forge(dumped, count=10**11, lanes=[lane], files=files)
    with pytest.raises(FormatError, match="lane 0"):
        rc.ReplayBuffer.load_from(dumped)


def _longer(contents: Any, n: int) -> Any:
    """What a storage says of its rows, with n for each number of rows."""
    if isinstance(contents, dict):
        return {k: n if k == "length" else _longer(v, n) for k, v in contents.items()}
    pairs = isinstance(contents, list) and all(isinstance(x, list) and len(x) == 2 for x in contents)
    return [[name, n] if isinstance(name, str) else [name, x] for name, x in contents] if pairs else contents


@pytest.mark.parametrize("n", [10**9, 2**62 - 1])
@pytest.mark.parametrize("kind", ["hdf5", "parquet", "image", "video"])
def test_rows_that_files_do_not_have_take_no_memory(tmp_path: Path, kind: str, n: int) -> None:
    frames = np.zeros((3, 16, 16, 3), "uint8")
    with rc.ReplayBuffer.create(kind, ((16, 16, 3), "uint8"), cache_path=tmp_path) as buf:
        buf.extend(frames)
    storage = read_json(tmp_path / "manifest.json")["storage"]
    storage["options"]["contents"] = _longer(storage["options"]["contents"], n)
    lane = {"start": 0, "capacity": None, "count": n, "offset": 0}
    forge(tmp_path, count=n, lanes=[lane], storage=storage)
    with pytest.raises(FormatError):
        rc.ReplayBuffer.load_from(tmp_path)


def test_an_hdf5_file_of_any_length_is_refused_before_a_table_is_made(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.hdf5", "w") as f:
        f.create_dataset("x", (10**14,), "f4", chunks=(1024,), maxshape=(None,))
    with pytest.raises(FormatError, match="chunks"):
        rc.HDF5Storage.load_from(tmp_path / "rows.hdf5", {"x": ((), "float32")})


def test_a_small_description_makes_no_large_space() -> None:
    box = {"type": "box", "shape": [10**5, 10**5], "dtype": "float64", "low": 0.0, "high": 1.0}
    texts = [
        {"type": "text", "min_length": 0, "max_length": 9, "charset": [[k, 0x10FFFF]]} for k in range(40)
    ]
    again = {"type": "text", "min_length": 0, "max_length": 9, "charset": [[0, 0x10FFFF]] * 40}
    for forged in (box, {"type": "tuple", "items": texts}, again):
        with pytest.raises(FormatError, match="space"):
            space_from_json(forged)


def test_text_that_is_no_utf8_is_a_format_error() -> None:
    from gymnasium import spaces

    layout = compile_layout({"t": spaces.Text(4, charset="ab")})
    data, length = layout.encode_one({"t": "ab"})
    for wrong, n in ((np.full_like(data, 0xFF), length), (data, np.int32(-1)), (data, np.int32(99))):
        with pytest.raises(FormatError, match="t: must"):
            layout.decode_one([wrong, np.asarray(n)])


@pytest.mark.parametrize(
    "template", ["{i:0999999999d}", "{i:>99999}", "{i.__class__}", "{j}", "{i!r}", "{0}"]
)
def test_a_template_fills_in_known_values_narrowly(template: str) -> None:
    with pytest.raises(FormatError, match="must fill in"):
        file_name(template, i=3)
    assert file_name("a/{i:03d}", i=3) == "a/003"


def test_messages_of_few_bytes_take_little_memory() -> None:
    with pytest.raises(BudgetError, match="draw several times"):
        check_drawn(20_000_000, Shapes(8))
    for shapes in (Shapes(0), Shapes(0, 0, True)):
        with pytest.raises(FrameError):
            cut_items(Data(1, bytes(16), 1, bytes(16), 2**40, 2**40, False), memoryview(b""), shapes)

"""Whatever a file or a peer says: it loads, or raises the documented error, within bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.datasets.lerobot.meta import file_name
from recollect.errors import BudgetError, FormatError, FrameError
from recollect.files.record import read_json, signed_json
from recollect.remote.frame import Shapes, check_drawn, cut_items
from recollect.remote.messages import Data
from recollect.spaces import compile_layout, space_from_json

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "manifests", "spaces", "learners", "journals", "datasets", "frames", "logs", "dump_files", "dataset_files",
    "trees", "records", "states",
)  # fmt: skip


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


def test_a_parquet_piece_larger_than_the_piece_size_is_refused(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("parquet", {"x": ((), "int64")}, cache_path=tmp_path) as buf:
        buf.extend({"x": np.arange(4)})
    storage = read_json(tmp_path / "manifest.json")["storage"]
    storage["options"]["piece_size"] = 1
    forge(tmp_path, storage=storage)
    with pytest.raises(FormatError, match="piece_size"):
        rc.ReplayBuffer.load_from(tmp_path)


@pytest.mark.parametrize(("most", "error"), [(2**31 - 2, FormatError), (2**25, BudgetError)])
def test_texts_of_a_parquet_dump_take_no_more_memory_than_there_is(
    tmp_path: Path, most: int, error: type[Exception]
) -> None:
    from gymnasium import spaces

    n = 1 << 16
    text = {"t": spaces.Text(4, charset="ab")}
    with rc.ReplayBuffer.create("parquet", text, cache_path=tmp_path, piece_size=n) as buf:
        buf.extend({"t": ["ab"] * n})
    space = read_json(tmp_path / "manifest.json")["space"]
    space["items"][0][1]["max_length"] = most
    forge(tmp_path, space=space)
    with pytest.raises(error, match="bytes"):
        rc.ReplayBuffer.load_from(tmp_path)[0]


def test_a_manager_refuses_a_state_that_is_signed_but_wrong(tmp_path: Path) -> None:
    from random import Random

    from tests.fuzz.logs import Resumed

    checkpoint = Resumed(tmp_path, "items")
    checkpoint.state["generator"].pop("seed")
    checkpoint.state_paths = [()]  # nothing else is changed
    with pytest.raises(FormatError, match="seed"):
        checkpoint._state(Random(1))


def test_a_name_too_long_for_a_file_is_a_format_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "' + "n" * 300 + '"}]}')
    with pytest.raises(FormatError, match="Arrow stream"):
        rc.datasets.open_dataset(tmp_path)


def test_a_name_that_is_no_text_is_a_format_error(tmp_path: Path) -> None:
    from tests.fuzz.artefacts import _lerobot_2

    _lerobot_2(tmp_path)
    info = read_json(tmp_path / "meta/info.json")
    (tmp_path / "meta/info.json").write_text(json.dumps({**info, "data_path": "a\ud800b"}))
    with pytest.raises(FormatError, match="Parquet"):
        batch = rc.datasets.open_dataset(tmp_path)
        batch[0]


def test_an_hdf5_file_of_any_length_is_refused_before_a_table_is_made(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.hdf5", "w") as f:
        f.create_dataset("x", (10**14,), "f4", chunks=(1024,), maxshape=(None,))
    with pytest.raises(FormatError, match="chunks"):
        rc.HDF5Storage.load_from(tmp_path / "rows.hdf5", {"x": ((), "float32")})


def _elsewhere(file: Path, name: str, kind: str) -> None:
    """Let a dataset of an HDF5 file lead to one of another file that has the same form."""
    import h5py

    with h5py.File(file, "r+") as f:
        there = f[name]
        shape, dtype = there.shape, there.dtype
        other = file.with_name("other.hdf5")
        with h5py.File(other, "w") as g:
            g["secret"] = np.ones(shape, dtype)
        f["kept"] = there
        del f[name]
        if kind == "external link":
            f[name] = h5py.ExternalLink(other.name, "/secret")
        elif kind == "soft link":
            f[name] = h5py.SoftLink("/kept")
        elif kind == "external storage":
            other.write_bytes(bytes(there.nbytes))
            f.create_dataset(name, shape, dtype, external=[(str(other), 0, there.nbytes)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout(shape, dtype)
            layout[...] = h5py.VirtualSource(str(other), "secret", shape)
            f.create_virtual_dataset(name, layout)
        else:
            chunks = ((1 << 29) // dtype.itemsize, *shape[1:])
            f.create_dataset(name, shape, dtype, chunks=chunks, maxshape=(None, *shape[1:]))


LEADING = ["external link", "soft link", "external storage", "virtual", "chunk"]


@pytest.mark.parametrize("kind", LEADING)
def test_an_hdf5_file_leads_to_no_other(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("h5py")
    space = {"a": {"x": ((), "float32")}}
    with rc.ReplayBuffer.create("hdf5", space, cache_path=tmp_path / "dump") as buf:
        buf.extend({"a": {"x": np.arange(4, dtype="float32")}})
        buf.storage.dumps(tmp_path / "rows.hdf5")
    _elsewhere(tmp_path / "rows.hdf5", "a/x", kind)
    with pytest.raises(FormatError, match=r"rows\.hdf5: a/x: .*(in the file itself|a chunk)"):
        rc.HDF5Storage.load_from(tmp_path / "rows.hdf5", space)


@pytest.mark.parametrize("kind", LEADING)
@pytest.mark.parametrize("name", ["observations", "rewards"])
def test_a_minari_file_leads_to_no_other(tmp_path: Path, name: str, kind: str) -> None:
    pytest.importorskip("h5py")
    from tests.fuzz.artefacts import _minari

    _minari(tmp_path, "hdf5")
    _elsewhere(tmp_path / "data/main_data.hdf5", f"episode_0/{name}", kind)
    with pytest.raises(
        FormatError, match=rf"main_data\.hdf5: episode_0/{name}: .*(in the file itself|a chunk)"
    ):
        rc.datasets.open_dataset(tmp_path)[0]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 1 << 40), "f4"), ((4, 3), "f4"), ((1, 2), "f4"), ((), "f4"), ((4, 2), "S9")]
)
def test_minari_rows_of_another_shape_are_refused_before_they_are_read(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    h5py = pytest.importorskip("h5py")
    from tests.fuzz.artefacts import _minari

    _minari(tmp_path, "hdf5")
    with h5py.File(tmp_path / "data/main_data.hdf5", "r+") as f:
        del f["episode_0/observations"]
        f.create_dataset("episode_0/observations", shape, dtype, chunks=(1,) * len(shape) if shape else None)
    with pytest.raises(FormatError, match=r"main_data\.hdf5: episode_0/observations"):
        rc.datasets.open_dataset(tmp_path)[0]


@pytest.mark.parametrize("kind", ["lerobot", "lerobot episodes", "hdf5", "arrow"])
def test_a_fifo_among_the_files_of_a_data_set_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    from tests.fuzz.artefacts import _lerobot_2, _minari

    path = tmp_path / "set"
    if kind in ("hdf5", "arrow"):
        _minari(path, kind)
    elif kind == "lerobot":
        _lerobot_2(path)
    else:
        with rc.ReplayBuffer.create("memory", {"x": ((), "float32")}, capacity=4) as buf:
            buf.extend({"x": np.ones(3, "float32")})
            rc.datasets.to_lerobot(buf, path, fps=10, tasks="")
    names = {"lerobot": "data/**/*.parquet", "lerobot episodes": "meta/episodes/**/*.parquet"}
    [file] = path.glob(names.get(kind, f"**/*.{kind}"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(FormatError, match=f"{file.name}: must be a plain file"):
        rc.datasets.open_dataset(path)[0]


def test_a_damaged_hdf5_file_is_not_copied_to_go_on(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    with rc.ReplayBuffer.create("hdf5", {"x": ((), "int64")}, cache_path=tmp_path) as buf:
        buf.extend({"x": np.full(2000, 7)})
    [file] = tmp_path.glob("storage/*.hdf5")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1  # of a row
    file.write_bytes(data)
    with rc.ReplayBuffer.load_from(tmp_path, read_only=False) as buf:
        with pytest.raises(FormatError, match="checksum does not match"):
            buf.append({"x": 1})
        assert len(buf) == 2000
    with pytest.raises(FormatError, match="checksum does not match"):
        rc.ReplayBuffer.load_from(tmp_path, verify=True)


def test_an_arrow_type_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from tests.fuzz.artefacts import _minari

    from recollect.datasets.minari import _arrow_table

    _minari(tmp_path, "arrow")
    file = tmp_path / "data/0/data.arrow"
    data, n_refused = file.read_bytes(), 0
    for at in (i for i, byte in enumerate(data) if byte == 6):  # some of them are the type of a bool
        file.write_bytes(data[:at] + b"\x0e" + data[at + 1 :])  # a union, which has a buffer more
        _arrow_table.cache_clear()
        try:
            rc.datasets.open_dataset(tmp_path)[0]
        except FormatError:
            n_refused += 1
    assert n_refused


@pytest.mark.parametrize("kind", ["huggingface", "minari"])
def test_arrow_values_outside_their_file_are_refused(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    from tests.fuzz.artefacts import _minari

    offsets = pa.py_buffer(np.array([0, 2**30, 2**30 + 9, 1, 3], np.int32))
    texts = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(b"abc")])
    lists = pa.Array.from_buffers(
        pa.list_(pa.float32()), 4, [None, offsets], children=[pa.array(np.ones(4, "float32"))]
    )
    if kind == "minari":
        _minari(tmp_path, "arrow")
        file, open_file = tmp_path / "data/0/data.arrow", pa.ipc.new_file
        with pa.OSFile(str(file)) as f:
            table = pa.ipc.open_file(f).read_all().set_column(0, "observations", [lists])
    else:
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        file, open_file, table = (
            tmp_path / "data.arrow",
            pa.ipc.new_stream,
            pa.table({"t": texts, "x": lists}),
        )
    with pa.OSFile(str(file), "wb") as f, open_file(f, table.schema) as w:
        w.write_table(table)
    with pytest.raises(FormatError, match=r"offset|damaged"):
        rc.datasets.open_dataset(tmp_path)[0]


DAMAGES: list[Any] = [
    ("rng", "buffer_pos", -1000), ("rng", "state", {"counter": [1], "key": [2]}), ("stream", "counter", -1),
    ("stream", "key", "x"), ("epoch", "index", [[1]]), ("epoch", "row", [1]), ("epoch", "index", [-1] * 8),
    ("priorities", "mass", [1.0]), ("batches", None, float("inf")), ("batches", None, 1 << 70), ("rng", None, None),
    ("stream", None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("part", "key", "value"), DAMAGES)
@pytest.mark.parametrize("kind", ["memory", "parquet"])
def test_a_damaged_state_of_a_sampler_changes_nothing(
    tmp_path: Path, kind: str, part: str, key: str | None, value: Any
) -> None:
    where = {"cache_path": tmp_path} if kind == "parquet" else {"capacity": 32}
    with rc.ReplayBuffer.create(kind, {"x": ((), "int64")}, **where) as buf:  # type: ignore[arg-type]
        buf.extend({"x": np.arange(20)})
        sampler, same = (rc.PrioritizedSampler(buf, 4, seed=1) for _ in range(2))
        other = rc.PrioritizedSampler(buf, 4, seed=2)
        _, meta = other.sample_with_metadata()
        other.update_priorities(meta, np.full(4, 9.0))
        epoch = other.epoch_iter()
        next(epoch)
        state = other.state_dict()
        if key == "row" and "row" not in state["epoch"]:
            pytest.skip("rows are positions here")
        with pytest.raises(ValueError, match="state must be"):
            sampler.load_state_dict({**state, part: value if key is None else {**state[part], key: value}})
        for _ in range(3):
            np.testing.assert_array_equal(sampler.sample()["x"], same.sample()["x"])
        np.testing.assert_array_equal(
            np.concatenate([b["x"] for b in sampler.epoch_iter()]),
            np.concatenate([b["x"] for b in same.epoch_iter()]),
        )


def test_a_small_description_makes_no_large_space() -> None:
    box = {"type": "box", "shape": [10**5, 10**5], "dtype": "float64", "low": 0.0, "high": 1.0}
    texts = [
        {"type": "text", "min_length": 0, "max_length": 9, "charset": [[k, 0x10FFFF]]} for k in range(40)
    ]
    again = {"type": "text", "min_length": 0, "max_length": 9, "charset": [[0, 0x10FFFF]] * 40}
    long = {"type": "text", "min_length": 0, "max_length": 2**31 - 1, "charset": [[97, 98]]}
    wide = {"type": "text", "min_length": 0, "max_length": 2**25 + 1, "charset": [[97, 0x10FFFF]]}
    for forged in (
        box,
        {"type": "tuple", "items": texts},
        again,
        long,
        wide,
        {"type": "tuple", "items": [long]},
    ):
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

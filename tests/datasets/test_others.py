"""Minari, Hugging Face and torch data sets as batches, and batches for a DataLoader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.datasets import sets

import recollect as rc
from recollect.datasets import as_torch_dataset, from_huggingface, from_minari, from_torch, open_dataset
from recollect.datasets.torch import TorchBatch
from recollect.errors import FormatError
from recollect.testing.batch_contract import BatchContract, equal

MINARI = {
    "hdf5": sets.minari_hdf5,
    "arrow": sets.minari_arrow,
    "parquet": lambda root: sets.minari_arrow(root, "parquet"),
}


# -- Minari


@pytest.mark.parametrize("kind", MINARI)
def test_minari_episodes_are_transitions(tmp_path: Path, kind: str) -> None:
    data = from_minari(MINARI[kind](tmp_path / "set"))
    assert data.get_segments() == [(0, 4), (4, 5), (5, 11)]
    got = data[:]
    for (a, b), e in zip(data.get_segments(), range(3)):
        want = sets.minari_episode(e)
        np.testing.assert_array_equal(got["obs"]["pos"][a:b], want["pos"][:-1])
        np.testing.assert_array_equal(got["next_obs"]["pos"][a:b], want["pos"][1:])
        np.testing.assert_array_equal(got["next_obs"]["pair"][0][a:b], want["number"][1:])
        assert list(got["obs"]["pair"][1][a:b]) == want["text"][:-1]
        np.testing.assert_array_equal(got["action"][a:b], want["actions"])
        np.testing.assert_array_equal(got["reward"][a:b], want["rewards"])
        np.testing.assert_array_equal(got["terminated"][a:b], want["terminations"])
    assert isinstance(data[0]["obs"]["pair"][1], str)
    assert open_dataset(tmp_path / "set").get_segments() == data.get_segments()


def test_minari_is_found_by_id(tmp_path: Path, monkeypatch: Any) -> None:
    sets.minari_hdf5(tmp_path / "toy/x-v0")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    assert len(from_minari("toy/x-v0")) == 11


def test_a_filtered_minari_dataset_shows_its_episodes(tmp_path: Path) -> None:
    class Storage:
        data_path = sets.minari_hdf5(tmp_path / "set") / "data"

    class Filtered:
        storage, episode_indices = Storage(), np.array([2, 0])

    data = from_minari(Filtered())
    assert data.get_segments() == [(0, 6), (6, 10)]
    np.testing.assert_array_equal(data[:6]["reward"], sets.minari_episode(2)["rewards"])


def test_broken_minari_sets_are_format_errors(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no Minari"):
        from_minari(tmp_path / "nothing")
    root = sets.minari_hdf5(tmp_path / "set")
    meta = json.loads((root / "data/metadata.json").read_text())
    sets.put(root / "data/metadata.json", json.dumps({**meta, "total_episodes": 5}))
    with pytest.raises(FormatError, match=r"5 episodes, lacks \[3, 4\]"):
        from_minari(root)
    sets.put(root / "data/metadata.json", json.dumps({**meta, "action_space": '{"type": "Graph"}'}))
    with pytest.raises(FormatError, match="action_space"):
        from_minari(root)
    sets.put(root / "data/metadata.json", json.dumps({**meta, "total_episodes": 0}))
    with h5py.File(root / "data/main_data.hdf5", "w"):
        pass
    with pytest.raises(FormatError, match="must hold episodes, got none"):
        from_minari(root)
    sets.minari_meta(root / "data", "hdf5")
    (root / "data/main_data.hdf5").write_bytes(b"\x89HDF")
    with pytest.raises(FormatError, match="main_data.hdf5.*damaged"):
        from_minari(root)


def test_a_minari_set_without_spaces_runs_nothing_and_takes_them_from_its_reader(tmp_path: Path) -> None:
    root, made = sets.minari_hdf5(tmp_path / "set"), tmp_path / "made"
    whole = from_minari(root)
    meta = json.loads((root / "data/metadata.json").read_text())
    del meta["observation_space"], meta["action_space"]
    spec = gymnasium.envs.registration.EnvSpec(
        "forged-v0", entry_point="os:mkdir", kwargs={"path": str(made)}
    )
    sets.put(root / "data/metadata.json", json.dumps({**meta, "env_spec": spec.to_json()}))
    for read in (from_minari, open_dataset):
        with pytest.raises(FormatError, match=r"must say its observation_space, .*observation_space=env\."):
            read(root)
    obs, action = whole.single_space["obs"], whole.single_space["action"]
    with pytest.raises(FormatError, match="must say its action_space"):
        from_minari(root, observation_space=obs)
    data = from_minari(root, observation_space=obs, action_space=action)
    assert equal(data[:], whole[:])
    assert not made.exists()


# -- Hugging Face


def test_a_saved_huggingface_set_is_read_by_column(tmp_path: Path) -> None:
    data = from_huggingface(sets.huggingface(tmp_path / "hf"), episode="episode_index")
    assert data.get_segments() == [(0, 4), (4, 5), (5, 11)]
    assert sorted(data.left_out) == ["language_events", "ragged"]
    got = data[[10, 0, 5]]
    state = np.concatenate([sets.numbers(e)["observation.state"] for e in range(3)])
    np.testing.assert_array_equal(got["observation.state"], state[[10, 0, 5]])
    assert list(got["word"]) == ["w10", "w0", "w5"]
    pictures = np.concatenate([sets.frames(e) for e in range(3)])
    np.testing.assert_array_equal(got["observation.images.wrist"], pictures[[10, 0, 5]])
    assert from_huggingface(tmp_path / "hf", columns=["action"]).get_segments() is None
    with pytest.raises(KeyError, match="must be among"):
        from_huggingface(tmp_path / "hf", columns=["nope"])


class Live:
    """What is asked of a `datasets.Dataset`: Arrow columns, and the order of its rows."""

    def __init__(self, table: Any, order: Any) -> None:
        self.table, self.order, self.column_names = table, order, table.column_names

    def with_format(self, kind: str) -> Live:
        assert kind == "arrow"
        return self

    def select_columns(self, names: list[str]) -> Live:
        return Live(self.table.select(names), self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, rows: slice) -> Any:
        return self.table.take(self.order[rows])


def test_a_live_huggingface_set_is_read_in_its_own_order(tmp_path: Path) -> None:
    saved = from_huggingface(sets.huggingface(tmp_path / "hf"))
    files = sorted((tmp_path / "hf").glob("*.arrow"))
    table = pa.concat_tables([pa.ipc.open_stream(str(file)).read_all() for file in files])
    order = np.array([9, 5, 4, 2, 0, 3])
    live = from_huggingface(Live(table, order), episode="episode_index")
    assert live.get_segments() == [(0, 2), (2, 3), (3, 6)]
    assert equal(live[:], saved[order]) and equal(live[[4, 1]], saved[[0, 5]])
    assert live.left_out == saved.left_out
    with pytest.raises(TypeError, match="must be a datasets.Dataset or a path, got list"):
        from_huggingface([1, 2])


def test_splits_and_broken_huggingface_sets(tmp_path: Path) -> None:
    sets.huggingface(tmp_path / "dict/train")
    sets.huggingface(tmp_path / "dict/test")
    sets.put(tmp_path / "dict/dataset_dict.json", '{"splits": ["train", "test"]}')
    assert len(from_huggingface(tmp_path / "dict", split="test")) == 11
    with pytest.raises(ValueError, match=r"\['test', 'train'\]"):
        from_huggingface(tmp_path / "dict")
    with pytest.raises(FormatError, match="state.json"):
        from_huggingface(tmp_path)
    next((tmp_path / "dict/train").glob("*.arrow")).write_bytes(b"no")
    with pytest.raises(FormatError, match="Arrow stream"):
        from_huggingface(tmp_path / "dict", split="train")


def test_a_huggingface_set_without_rows_or_values_is_told(tmp_path: Path) -> None:
    root = sets.huggingface(tmp_path / "hf")
    columns = {"whole": pa.array([1, 2, 3]), "holes": pa.array([1.0, None, 3.0])}
    for rows, name in ((pa.table(columns), "holes"), (pa.table(columns).slice(0, 0), "none")):
        sets.put(root / "state.json", json.dumps({"_data_files": [{"filename": f"{name}.arrow"}]}))
        with pa.ipc.new_stream(str(root / f"{name}.arrow"), rows.schema) as writer:
            writer.write_table(rows)
        if name == "holes":
            assert from_huggingface(root).left_out == {"holes": "1 rows have no value"}
    with pytest.raises(FormatError, match="must hold rows, got none"):
        from_huggingface(root)


# -- torch


def buffer(n: int) -> rc.ReplayBuffer:
    buf = rc.ReplayBuffer.create("memory", {"x": ((2,), "float32"), "i": ((), "int64")}, capacity=max(n, 1))
    buf.extend({"x": np.arange(2 * n, dtype="float32").reshape(n, 2), "i": np.arange(n)})
    return buf


def test_a_loader_reads_whole_batches() -> None:
    data = as_torch_dataset(buffer(10))
    assert isinstance(data, torch.utils.data.Dataset)
    assert data[3]["i"].item() == 3 and data[-1]["x"].dtype == torch.float32
    calls: list[int] = []
    read = data.batch.get_at
    data.batch.get_at = lambda idx: calls.append(len(idx)) or read(idx)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, collate_fn=data.collate)
    seen = torch.cat([batch["i"] for batch in loader])
    assert sorted(seen.tolist()) == list(range(10)) and calls == [4, 4, 2]
    with pytest.raises(IndexError):
        data[10]
    with pytest.raises(TypeError):
        data[[1, 2]]
    with pytest.raises(TypeError, match="from_torch"):
        as_torch_dataset([1, 2])


@pytest.mark.parametrize("n_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_a_plain_loader_needs_no_collate_fn(n_workers: int) -> None:
    chunks = rc.SliceStackedBatch(buffer(10), {"i": range(3)})
    for data in (as_torch_dataset(chunks), chunks):  # the batch itself is read sample by sample
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=n_workers)
        first, _, last = loader
        assert type(first) is dict and isinstance(first["x"], torch.Tensor) and first["x"].shape == (4, 2)
        assert last["i"].tolist() == [[8, 9, 9], [9, 9, 9]]
        assert last["i_valid_mask"].tolist() == [[True, True, False], [True, False, False]]
    with pytest.raises(KeyError):
        as_torch_dataset(chunks).__getitems__([0])["y"]


@pytest.mark.parametrize(
    "space", [((2,), "float32"), (((2,), "float32"), ((), "int64"))], ids=["leaf", "tuple"]
)
def test_a_plain_loader_over_samples_that_are_no_dict(space: Any) -> None:
    buf = rc.ReplayBuffer.create("memory", space, capacity=5)
    x = np.arange(10, dtype="float32").reshape(5, 2)
    buf.extend(x if len(space) == 2 and space[1] == "float32" else (x, np.arange(5)))
    data = as_torch_dataset(buf)
    for collate in (None, data.collate):
        batch = list(torch.utils.data.DataLoader(data, batch_size=3, collate_fn=collate))[1]
        got = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert got.tolist() == [[6, 7], [8, 9]]


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((2,), float(i)), "label": i}


class TestTorchBatch(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Any:
        return lambda n: TorchBatch(Numbers(n), {"x": ((2,), "float32"), "label": ((), "int64")})


def test_from_torch_and_back() -> None:
    there = from_torch(Numbers(5))
    np.testing.assert_array_equal(there[[4, 0]]["x"], [[4, 4], [0, 0]])
    one = there[4]["x"]
    assert isinstance(one, np.ndarray) and one.dtype == np.float32 and one.tolist() == [4, 4]
    back = as_torch_dataset(there)
    assert back.__getitems__([1, 2])["label"].tolist() == [1, 2]
    with pytest.raises(FormatError, match="empty"):
        from_torch(Numbers(0))
    with pytest.raises(TypeError, match="__len__"):
        from_torch(iter([1]))


def test_reads_fill_the_callers_arrays(tmp_path: Path) -> None:
    for data, key in (
        (from_torch(Numbers(5)), "x"),
        (from_huggingface(sets.huggingface(tmp_path / "hf"), columns=["action"]), "action"),
    ):
        out = data[[0, 0]]
        assert data.get_at([3, 1], out=out) is out
        np.testing.assert_array_equal(out[key], data[[3, 1]][key])
        with pytest.raises(rc.SchemaError, match=f"{key}: out must be"):
            data.get_at([3, 1, 2], out=out)


def test_a_sample_of_another_shape_is_an_error() -> None:
    class Uneven(Numbers):
        def __getitem__(self, i: int) -> Any:
            return {"x": torch.zeros(2 + i // 3)}

    with pytest.raises(rc.SchemaError, match="x"):
        from_torch(Uneven(5))[:]


def test_the_package_loads_no_optional_package() -> None:
    code = ("import sys, recollect.datasets; "
            "print([m for m in ('torch', 'pyarrow', 'h5py', 'av', 'PIL') if m in sys.modules])")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"


def test_nothing_known_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="got nothing"):
        open_dataset(tmp_path / "none")
    with pytest.raises(FormatError, match="no data set that is known"):
        open_dataset(tmp_path)

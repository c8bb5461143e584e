"""Checkpoints: whole or not at all, nothing unpickled, damage named."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.process.killing import killed_at, steps

import recollect as rc
from recollect.errors import FormatError
from recollect.files import OwnedDirectory
from recollect.files.record import signed_json
from recollect.learners.checkpoint import (
    check_shapes,
    load_checkpoint,
    remove_checkpoint,
    replay_path,
    save_checkpoint,
)


def state(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    net = {"0.weight": torch.randn((3, 4), generator=g), "0.bias": torch.zeros(0), "n": torch.tensor(seed)}
    adam = {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "param_groups": [{"betas": (0.9, 0.999), "params": [0, 1]}],
    }
    return {
        "iteration": seed, "network": net, "adam": adam, "generator": g.get_state(), "best": None, "worst": -math.inf,
        "flag": True, "names": ["a", "ü"], "half": torch.ones(3, dtype=torch.bfloat16), "stats": np.arange(3.0),
        "scale": np.array(2.5),
        "odd": {"$tuple": [1]}, "strided": torch.arange(6).reshape(2, 3).T, "bits": torch.tensor([True, False]),
    }  # fmt: skip


def equal(a: Any, b: Any) -> bool:
    """Same values, kinds and dtypes; the keys of a JSON object may come back in another order."""
    if type(a) is not type(b):
        return False
    if isinstance(b, dict):
        return set(a) == set(b) and all(equal(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def test_every_kind_of_state_comes_back(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "model_1", state(1))
    assert equal(load_checkpoint(path), state(1))
    assert sorted(os.listdir(path)) == ["manifest.json", "tensors.bin"]
    assert replay_path(path) is None


def test_numbers_that_do_not_lie_side_by_side_come_back(tmp_path: Path) -> None:
    """Of one dimension too, where flattening copies nothing."""
    given = {"tensor": torch.arange(6)[::2], "array": np.arange(6)[::2]}
    assert equal(load_checkpoint(save_checkpoint(tmp_path / "model_1", given)), given)


def test_loading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "model_1", state())
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("torch.load"))
    load_checkpoint(path)


@pytest.mark.process
@pytest.mark.parametrize("over", ["nothing", "an older one"])
def test_save_killed_at_every_step(over: str, tmp_path: Path) -> None:
    old, new = state(1), state(2)
    seen = []
    for step in steps():
        path = tmp_path / f"at-{step}" / "model_5"
        if over != "nothing":
            save_checkpoint(path, old)
        killed = killed_at(step, lambda: save_checkpoint(path, new))  # noqa: B023
        if path.exists() or over != "nothing":  # loading gives one that was put aside its name again
            found = load_checkpoint(path)["iteration"]
            assert found in ((2,) if over == "nothing" else (1, 2))
            seen.append(found)
        else:
            seen.append(None)
        save_checkpoint(path, new)  # the next save clears what the killed one left
        assert os.listdir(path.parent) == ["model_5"]
        assert load_checkpoint(path)["iteration"] == 2
        if not killed:
            break
    assert len(seen) > 6 and len(set(seen)) == 2


@pytest.mark.process
def test_removal_killed_at_every_step(tmp_path: Path) -> None:
    for step in steps():
        path = save_checkpoint(tmp_path / f"at-{step}" / "model_5", state(1))
        killed = killed_at(step, lambda: remove_checkpoint(path))  # noqa: B023
        assert not list(path.parent.glob("model_*")) or load_checkpoint(path)["iteration"] == 1
        save_checkpoint(path.parent / "model_6", state(2))  # the next save clears what the killed one left
        assert not list(path.parent.glob(".*"))
        if not killed:
            assert not path.exists()
            break
    assert step > 0
    remove_checkpoint(path)  # it is gone already


def test_nobody_sees_a_checkpoint_that_is_half_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, seen = save_checkpoint(tmp_path / "model_1", state()), os.unlink, list[bool]()

    def remove(where: Any, **kwargs: Any) -> None:
        seen.append(path.exists())
        real(where, **kwargs)

    monkeypatch.setattr(os, "unlink", remove)
    remove_checkpoint(path)
    assert seen and not any(seen) and not os.listdir(tmp_path)


def test_a_failed_save_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model_1", state(1))
    with pytest.raises(TypeError, match="state/bad: must be numbers"):
        save_checkpoint(path, {"bad": object()})

    with pytest.raises(TypeError, match="state/bad: must be numbers"):
        save_checkpoint(tmp_path / "deep" / "model_1", {"bad": object()})
    assert os.listdir(tmp_path) == ["model_1"]  # it was named before anything was written

    with pytest.raises(TypeError, match="state/bad: dtype must be one of"):
        save_checkpoint(path, {"bad": torch.zeros(1, dtype=torch.complex64)})

    (tmp_path / ".model_1.tmp-1-0123abcd" / "replay").mkdir(parents=True)  # of a save that was killed

    def full(where: Path) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, state(2), dump_replay=full)
    assert load_checkpoint(path)["iteration"] == 1
    assert os.listdir(tmp_path) == ["model_1"]


def test_an_older_one_stays_until_the_new_one_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, seen = (
        save_checkpoint(tmp_path / "model_1", state(1)),
        OwnedDirectory.remove_noted,
        list[int](),
    )

    def remove(owned: OwnedDirectory, keep: Any) -> None:
        real(owned, keep)
        seen.append(load_checkpoint(path)["iteration"])

    monkeypatch.setattr(OwnedDirectory, "remove_noted", remove)
    save_checkpoint(path, state(2))
    assert seen == [2]  # what was removed is the older one, by then under another name


def test_files_are_synced_before_the_rename_and_directories_round_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sizes = list[Any](), dict[str, int]()

    def sync(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        sizes[name] = os.fstat(fd).st_size
        synced.append((name.partition("-")[0], (tmp_path / "model_1").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    save_checkpoint(tmp_path / "model_1", state())
    assert synced == [
        ("tensors.bin", False), ("manifest.json", False), (".model_1.tmp", False),
        (tmp_path.name.partition("-")[0], True),
    ]  # fmt: skip
    for file in (tmp_path / "model_1").iterdir():
        assert sizes[file.name] == file.stat().st_size  # all of it


@pytest.mark.parametrize("file", ["manifest.json", "tensors.bin"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_named(file: str, how: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model_1", state())
    target = path / file
    data = bytearray(target.read_bytes())
    if how == "remove":
        target.unlink()
    else:
        data[len(data) // 2] ^= 1
        target.write_bytes(data if how == "flip" else data[: len(data) // 2])
    said = r"must have \d+ bytes, got \d+; it is truncated" if (file, how) == ("tensors.bin", "cut") else ""
    with pytest.raises(FormatError, match=f"{file}: {said}" if said else file):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "torch"}, "another program's"),
        ({"format_version": 99}, "needs a newer release"),
        ({"format_version": "1"}, "needs a newer release"),
        ({"files": {}}, "it is damaged"),
        ({"extra": 1}, "it is damaged"),
        ({"state": [1]}, "state"),
        (
            {"state": {"x": {"$tensor": {"dtype": "float32", "shape": [4], "at": 10**6, "bytes": 16}}}},
            "it is damaged",
        ),
        (
            {"state": {"x": {"$tensor": {"dtype": "object", "shape": [1], "at": 0, "bytes": 8}}}},
            "it is damaged",
        ),
        *(
            ({"state": {"x": {"$tensor": {"dtype": "uint8", **place}}}}, "its place is outside the file")
            for place in (
                {"shape": [4], "at": -64, "bytes": 4}, {"shape": [-1, -4], "at": 0, "bytes": 4},
                {"shape": [4], "at": 0, "bytes": 0},
            )
        ),
    ],
)  # fmt: skip
def test_forged_manifests_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model_1", state())
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32c"]
    body = {**manifest, **change}
    (path / "manifest.json").write_text(signed_json(body))
    with pytest.raises(FormatError, match=said):
        load_checkpoint(path)


@pytest.mark.parametrize("data", [b"[1]", b"\xff\xfe", b"{"], ids=str)
def test_what_is_no_manifest_is_refused(data: bytes, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model_1", state())
    (path / "manifest.json").write_bytes(data)
    with pytest.raises(FormatError, match="manifest.json"):
        load_checkpoint(path)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model_1").write_text("weights")
    for path in (tmp_path / "model_1", tmp_path / "model_2"):
        with pytest.raises(FormatError, match="must hold manifest.json, got none; it is no checkpoint"):
            load_checkpoint(path)


def test_another_network_is_named_by_its_parameter() -> None:
    net = {"0.weight": torch.zeros(3, 4)}
    with pytest.raises(FormatError, match=r"actor.0.weight: shape must be \(3, 4\), got \(4, 3\)"):
        check_shapes("actor", net, {"0.weight": torch.zeros(4, 3)})
    with pytest.raises(FormatError, match=r"actor.0.weight: shape must be \(3, 4\), got \(3, 5\)"):
        check_shapes("actor", net, {"0.weight": torch.zeros(3, 5)})
    with pytest.raises(FormatError, match="actor.0.weight: is not in the checkpoint"):
        check_shapes("actor", net, {})
    with pytest.raises(FormatError, match="actor.1.weight: is in the checkpoint but not"):
        check_shapes("actor", net, {**net, "1.weight": torch.zeros(1)})


def test_the_replay_is_saved_beside(tmp_path: Path) -> None:
    buf = rc.ipc.ReplayBuffer(8, 2, 1, "numpy", seed=0)
    x = np.arange(10, dtype=np.float32)
    no = np.zeros(10, bool)
    buf.add(np.stack([x, x], 1), x[:, None], x, np.stack([x, x], 1), no, no)
    path = save_checkpoint(tmp_path / "model_1", state(), dump_replay=buf.dumps)
    where = replay_path(path)
    assert where is not None
    again = rc.ipc.ReplayBuffer.load_from(where)
    for seed in range(3):
        a, b = buf.sample(5, seed=seed), again.sample(5, seed=seed)
        assert all(np.array_equal(a[k], b[k]) for k in a)
    again.cleanup()
    buf.cleanup()


def saved(path: Path) -> Path:
    with rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=3) as buf:
        buf.extend({"x": np.arange(3)})
        return save_checkpoint(path, state(), dump_replay=buf.dumps)


@pytest.mark.parametrize("name", ["notes.txt", "replay/notes.txt", "replay/storage/notes.txt", "replay/link"])
def test_a_checkpoint_with_a_file_of_somebody_else_is_neither_replaced_nor_removed(
    name: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "model_1")
    if name.endswith("link"):
        (path / name).symlink_to(tmp_path)
    else:
        (path / name).write_text("mine")
    for change in (saved, remove_checkpoint):
        with pytest.raises(FileExistsError, match=f"must be new or a checkpoint.*{name}"):
            change(path)
    assert equal(load_checkpoint(path), state()) and os.path.lexists(path / name)
    (path / name).unlink()
    saved(path)
    remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".removed-mine", ".removed-model_2-old", ".model_1.tmp-mine"])
def test_a_hidden_checkpoint_of_the_users_own_naming_stays(name: str, tmp_path: Path) -> None:
    kept = saved(tmp_path / "model_2").rename(tmp_path / name)
    (tmp_path / f"{name}-empty").mkdir()
    saved(tmp_path / "model_1")
    saved(tmp_path / "model_1")
    assert equal(load_checkpoint(kept), state()) and (tmp_path / f"{name}-empty").is_dir()

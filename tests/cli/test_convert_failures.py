"""What the machine or the files cannot give ends convert with one line, loses nothing, and a new try goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.cli import run
from recollect.datasets import open_dataset
from recollect.datasets.convert import convert

SPACE = {"x": ((256,), "float64"), "image": ((32, 32, 3), "uint8"), "n": ((), "int64")}
N, LENGTH = 160, 16
TARGETS = ["memory", "memmap", "hdf5", "parquet", "dict", "lerobot"]


def rows() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((N, 256)),
        "image": rng.integers(0, 255, (N, 32, 32, 3), np.uint8),
        "n": np.arange(N),
    }


@pytest.fixture(scope="module")
def src(tmp_path_factory: Any) -> Path:
    """About 800 kB of noise, which no compression makes smaller."""
    path: Path = tmp_path_factory.mktemp("noise") / "src"
    with rc.ReplayBuffer.create("memory", SPACE, capacity=N, maintain_segment_metadata=True) as buffer:
        buffer.extend(rows(), ends=np.arange(N) % LENGTH == LENGTH - 1)
        buffer.dumps(path)
    return path


def command(*args: Any) -> str:
    """Run a command that must fail, and return the line that it ends with."""
    with pytest.raises(SystemExit) as error:
        run([str(a) for a in args])
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code


def options_for(target: str) -> dict[str, Any]:
    if target == "lerobot":
        return {"fps": 10.0, "tasks": "", "commit_rows": LENGTH}
    return {"piece_size": LENGTH} if target == "parquet" else {}


@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_ends_it_and_room_lets_it_go_on(
    src: Path, small_disk: Path, target: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("recollect.datasets.convert.FLUSH_S", 0.0)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(600 << 10))
    dst, told = small_disk / "dst", []
    with open_dataset(src) as source:  # type: ignore[attr-defined]
        with pytest.raises(OSError):
            convert(source, dst, target, origin="src", chunk_size=8, **options_for(target))
        assert not dst.exists()
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        convert(source, dst, target, origin="src", chunk_size=8, progress=told.append, **options_for(target))
    assert sum(told) == N
    if target in ("parquet", "dict", "lerobot"):  # the others need room for all of it at once
        assert told[0] >= LENGTH, "whole segments were there already"
    with open_dataset(dst) as got:  # type: ignore[attr-defined]
        for key, want in rows().items():
            np.testing.assert_array_equal(np.reshape(got[:][key], want.shape), want, err_msg=key)
        assert len(got.get_segments() or ()) == N // LENGTH
    assert [p.name for p in small_disk.iterdir()] == ["dst"]


@pytest.mark.parametrize("target", ["parquet", "lerobot"])
def test_the_command_tells_a_full_disk_in_one_line(src: Path, small_disk: Path, target: str) -> None:
    (small_disk / "filler").write_bytes(bytes(900 << 10))
    said = command("convert", src, small_disk / "dst", "--to", target, "--fps", "5", "--json")
    assert "No space left" in said


def test_a_full_disk_does_not_crash_the_hdf5_library(src: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(300 << 10))
    args = [sys.executable, "-m", "recollect", "convert", str(src), str(small_disk / "dst"), "--to", "hdf5"]
    found = subprocess.run(args, capture_output=True, text=True, timeout=200)
    assert found.returncode == 1 and "No space left" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("target", ["hdf5", "parquet", "lerobot", "memory"])
def test_a_place_that_cannot_be_written(src: Path, small_disk: Path, target: str) -> None:
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        pytest.skip("may not remount")
    said = command("convert", src, small_disk / "dst", "--to", target, "--fps", "5", "--json")
    assert "Read-only file system" in said


@pytest.mark.parametrize("harm", ["truncated", "flipped", "foreign", "gone"])
def test_a_damaged_source_is_named_and_goes_on_once_it_is_mended(tmp_path: Path, harm: str) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    with rc.ReplayBuffer.create(
        "parquet", SPACE, cache_path=src, piece_size=LENGTH, maintain_segment_metadata=True
    ) as buffer:
        buffer.extend(rows(), ends=np.arange(N) % LENGTH == LENGTH - 1)
    file = sorted((src / "storage").iterdir(), key=lambda f: int(f.stem.split("-")[1]))[5]
    whole = file.read_bytes()
    damaged = {
        "truncated": whole[:-1],
        "flipped": whole[:99] + b"~" + whole[100:],
        "foreign": bytes(len(whole)),
    }
    assert damaged.get("flipped") != whole
    file.write_bytes(damaged[harm]) if harm != "gone" else file.unlink()
    said = command("convert", src, dst, "--to", "memory", "--chunk", "8", "--json")
    assert file.name in said and not dst.exists()
    file.write_bytes(whole)
    run(["convert", str(src), str(dst), "--to", "memory", "--chunk", "8", "--json"])
    with open_dataset(dst) as got:  # type: ignore[attr-defined]
        np.testing.assert_array_equal(got[:]["x"], rows()["x"])


@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("parquet", "pyarrow", "parquet"), ("hdf5", "h5py", "hdf5"), ("lerobot", "pyarrow", "parquet"),
     ("dict", "av", "video")],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_command(
    src: Path, tmp_path: Path, monkeypatch: Any, target: str, package: str, extra: str
) -> None:
    for name in [package, *(name for name in sys.modules if name.split(".")[0] == package)]:
        monkeypatch.setitem(sys.modules, name, None)
    said = command("convert", src, tmp_path / "dst", "--to", target, "--fps", "5")
    assert f'pip install "recollect[{extra}]"' in said and not list(tmp_path.iterdir())


def test_what_does_not_fit_the_target_names_the_leaf(src: Path, tmp_path: Path) -> None:
    said = command("convert", src, tmp_path / "dst", "--to", "image")
    assert "uint8" in said and "DictStorage" in said
    with rc.ReplayBuffer.create("memory", {"z": ((), "bfloat16")}, capacity=2) as buffer:
        buffer.extend({"z": np.ones(2, buffer.storage.layout.fields[0].dtype)})
        buffer.dumps(tmp_path / "brief")
    said = command("convert", tmp_path / "brief", tmp_path / "dst", "--to", "lerobot", "--fps", "5")
    assert said.startswith("recollect convert: z:") and "bfloat16" in said

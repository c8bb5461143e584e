"""A byte that is flipped anywhere in any form is found, and the file that it is in is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.batch import CastTransformation
from recollect.cli import run
from recollect.datasets import from_lerobot, open_dataset, to_lerobot
from recollect.datasets.convert import convert
from recollect.datasets.verify import verify

SPACE: Any = {"obs": ((3,), "float32"), "image": ((8, 6, 3), "uint8"), "n": ((), "int64")}
N = 24
BOTH: Any = {"image": "video", "*": ("parquet", {"piece_size": 8})}


def rows(n: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(n, 3)).astype(np.float32),
        "image": rng.integers(0, 255, (n, 8, 6, 3), np.uint8),
        "n": np.arange(n),
    }


def filled(kind: str, path: Path, *args: Any, space: Any = SPACE, data: Any = None, **options: Any) -> Path:
    with rc.ReplayBuffer.create(
        kind, space, *args, cache_path=path, maintain_segment_metadata=True, **options
    ) as buffer:
        buffer.extend(rows() if data is None else data, ends=np.arange(N) % 8 == 7)
    return path


def dumped(path: Path, **options: Any) -> Path:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=N, **options) as buffer:
        buffer.extend(rows())
        buffer.dumps(path)
    return path


def lerobot(path: Path, codec: str | None) -> Path:
    with rc.ReplayBuffer.create("memory", SPACE, capacity=N, maintain_segment_metadata=True) as buffer:
        buffer.extend(rows(), ends=np.arange(N) % 8 == 7)
        to_lerobot(buffer, path, fps=10, tasks="", video_codec=codec, commit_rows=8)
    return path


def images(path: Path) -> Path:
    with rc.ReplayBuffer.create("image", IMAGE, capacity=4, cache_path=path) as buffer:
        buffer.extend(FRAMES[:4])
    return path


IMAGE, FRAMES = SPACE["image"], rows()["image"]
FORMS: dict[str, Callable[[Path], Path]] = {
    "row dump": lambda p: dumped(p, maintain_segment_metadata=True),
    "row dump, lowest": lambda p: dumped(p, evict="lowest", evict_key="n"),
    "hdf5": lambda p: filled("hdf5", p, capacity=None),
    "hdf5, gzip": lambda p: filled("hdf5", p, capacity=None, compression="gzip"),
    "parquet": lambda p: filled("parquet", p, piece_size=8),
    "image": lambda p: images(p),
    "video": lambda p: filled("video", p, space=IMAGE, data=FRAMES),
    "dict": lambda p: filled("dict", p, BOTH),
    "transformed": lambda p: filled(
        "transformed", p, CastTransformation({"obs": "float64"}), inner="parquet"
    ),
    "lerobot, pictures": lambda p: lerobot(p, None),
    "lerobot, video": lambda p: lerobot(p, "h264"),
}


@pytest.fixture(scope="module", params=FORMS)
def whole(request: Any, tmp_path_factory: Any) -> Path:
    return FORMS[request.param](tmp_path_factory.mktemp("form") / "set")


def flip(file: Path, at: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def test_a_flipped_bit_anywhere_names_its_file(whole: Path) -> None:
    report = verify(whole)
    assert report["ok"] and sum(b - a for a, b in report["readable"]) == report["samples"] > 0
    assert not report["unchecked"]
    rng = np.random.default_rng(1)
    for file in sorted(f for f in whole.rglob("*") if f.is_file()):
        size = file.stat().st_size
        for at in {0, size - 1, *rng.integers(0, size, 4).tolist()}:
            bit = int(rng.integers(8))
            flip(file, at, bit)
            report = verify(whole)
            flip(file, at, bit)
            name = str(file.relative_to(whole))
            assert [d["file"] for d in report["damaged"]] == [name] and not report["ok"], (name, at, report)
    assert verify(whole)["ok"], "all bytes are back"


@pytest.mark.parametrize("harm", ["truncated", "empty", "gone", "foreign"])
def test_a_file_that_is_not_what_it_was_is_named(whole: Path, tmp_path: Path, harm: str) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    for file in sorted(f for f in copy.rglob("*") if f.is_file()):
        kept = file.read_bytes()
        if harm == "gone":
            file.unlink()
        else:
            file.write_bytes({"truncated": kept[:-1], "empty": b"", "foreign": b"%PDF" + kept}[harm])
        name = str(file.relative_to(copy))
        if harm == "gone" and name in ("manifest.json", "meta/info.json"):
            with pytest.raises(rc.FormatError, match="must hold"):  # nothing says any more what this is
                verify(copy)
        elif not (harm == "gone" and name == "meta/recollect-checksums.json"):  # then it is a set of others
            assert [d["file"] for d in verify(copy)["damaged"]] == [name]
        file.write_bytes(kept)


def test_another_spelling_of_the_same_number_is_damage(tmp_path: Path) -> None:
    space = rc.spaces.as_space({"x": ((), "float32")})
    space["x"].low[...] = -1e38
    with rc.ReplayBuffer.create("memory", space, capacity=2) as buffer:
        buffer.dumps(tmp_path)
    file = tmp_path / "manifest.json"
    text = file.read_text()
    assert "e+37" in text
    file.write_text(text.replace("e+37", "E+37"))  # one bit
    assert [d["file"] for d in verify(tmp_path)["damaged"]] == ["manifest.json"]


def test_what_is_left_is_told_to_the_sample(tmp_path: Path) -> None:
    root = FORMS["parquet"](tmp_path / "d")
    file = sorted((root / "storage").glob("*.parquet"))[1]
    flip(file, 100, 3)
    assert verify(root)["readable"] == [[0, 8], [16, 24]] and not verify(root)["unsure"]


def test_hdf5_loses_only_the_chunk_that_is_damaged(tmp_path: Path) -> None:
    space = {"x": ((64,), "float64")}
    data = np.random.default_rng(0).normal(size=(2048, 64))
    with rc.ReplayBuffer.create("hdf5", space, capacity=None, cache_path=tmp_path) as buffer:
        buffer.extend({"x": data})
    file = next(tmp_path.rglob("*.hdf5"))
    whole = file.read_bytes()
    flip(file, whole.index(data[700].tobytes()), 5)
    report = verify(tmp_path)
    assert report["readable"] == [[0, 512], [1024, 2048]] and not report["unsure"]


def test_rows_of_a_damaged_row_dump_are_told_apart_from_sure_ones(tmp_path: Path) -> None:
    root = FORMS["row dump"](tmp_path / "d")
    flip(next(root.rglob("rows-*.bin")), 50, 1)
    report = verify(root)
    assert (report["readable"], report["unsure"]) == ([], [[0, N]])


def test_lerobot_keeps_the_episodes_of_other_files(tmp_path: Path) -> None:
    root = FORMS["lerobot, pictures"](tmp_path / "d")
    flip(root / "data/chunk-000/file-001.parquet", 40, 1)
    report = verify(root)
    kept = {i for a, b in report["readable"] for i in range(a, b)}
    assert kept == {*range(8), *range(16, 24)}
    flip(root / "data/chunk-000/file-001.parquet", 40, 1)
    flip(root / "meta/stats.json", 40, 1)  # which no sample is read from
    assert verify(root)["readable"] == [[0, N]] and [d["file"] for d in verify(root)["damaged"]] == [
        "meta/stats.json"
    ]


def test_a_live_memmap_says_what_it_cannot_check(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memmap", SPACE, capacity=N, cache_path=tmp_path) as buffer:
        buffer.extend(rows())
    report = verify(tmp_path)
    assert report["ok"] and report["unchecked"] and report["readable"] == [[0, N]]


def test_the_leaves_that_can_be_read_without_their_video_are_told(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    root = lerobot(tmp_path / "set", "h264")
    for file in root.glob("videos/**/*.mp4"):
        file.unlink()
    monkeypatch.chdir(tmp_path)
    report = verify("set")
    assert not report["readable"] and not report["unsure"] and "image" not in report["leaves"]
    assert report["leaves"]["obs"] == report["leaves"]["n"] == [[0, N]]
    for found in report["damaged"]:
        assert found["problem"] == "is gone; the set is damaged, or was not copied or downloaded whole"
    with pytest.raises(SystemExit):
        run(["verify", "set"])
    said = capsys.readouterr().out
    assert "No whole sample can be read" in said and "obs 24" in said and said.count("file-000.mp4") == 1


@pytest.mark.parametrize("name", ["data", "videos", "meta/info.json", "meta/stats.json", "meta/episodes"])
def test_a_damaged_lerobot_set_is_not_copied(tmp_path: Path, name: str) -> None:
    root = lerobot(tmp_path / "set", "h264")
    file = next(
        f for f in sorted(root.rglob("*")) if f.is_file() and str(f.relative_to(root)).startswith(name)
    )
    says = rf"{file.name}: its checksum does not match"
    with open_dataset(root) as opened:  # before the damage
        flip(file, file.stat().st_size // 2, 0)
        for target in ("parquet", "lerobot"):
            with pytest.raises(rc.FormatError, match=says):
                convert(opened, tmp_path / "copy", target)
    for check in (from_lerobot, open_dataset):
        with pytest.raises(rc.FormatError, match=says):
            check(root, verify=True)
    if name.startswith("meta"):
        with pytest.raises(rc.FormatError, match=r"then remove meta/recollect-checksums\.json"):
            open_dataset(root)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["set"]


def test_a_set_whose_files_are_links_is_checked_by_what_they_lead_to(tmp_path: Path) -> None:
    """The Hub's cache has the files elsewhere, under other names."""
    root = lerobot(tmp_path / "set", None)
    for number, file in enumerate([f for f in root.rglob("*") if f.is_file()]):
        file.symlink_to(file.rename(tmp_path / str(number)))
    with from_lerobot(root, verify=True) as opened:
        convert(opened, tmp_path / "copy", "parquet")
    assert len(open_dataset(tmp_path / "copy", verify=True)) == N
    assert verify(root)["ok"]

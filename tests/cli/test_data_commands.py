"""inspect, verify and convert do what they say, on dumps and data sets, and after SIGKILL."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.datasets import sets

import recollect as rc
from recollect.cli import run
from recollect.datasets import convert as converting
from recollect.datasets import open_dataset
from recollect.datasets.convert import TARGETS, convert
from recollect.errors import FormatError

SPACE = {"obs": ((3,), "float32"), "image": ((8, 8, 3), "uint8"), "n": ((), "int64")}
LENGTHS = (40, 7, 90, 1, 60)


def block(first: int, n: int) -> dict[str, Any]:
    at = np.arange(first, first + n)
    return {
        "obs": np.stack([at, at, np.full(n, np.nan)], 1).astype(np.float32),
        "image": np.broadcast_to(at[:, None, None, None] % 256, (n, 8, 8, 3)).astype(np.uint8),
        "n": at,
    }


def dump(path: Path, kind: str = "memory", **options: Any) -> Path:
    args = {} if kind == "memory" else {"cache_path": path}
    with rc.ReplayBuffer.create(
        kind, SPACE, capacity=None, maintain_segment_metadata=True, **args, **options
    ) as buf:
        first = 0
        for n in LENGTHS:
            buf.extend(block(first, n))
            first += n
        if kind == "memory":
            buf.dumps(path)
    return path


def command(capsys: Any, *args: Any) -> tuple[int, str, str]:
    status = 0
    try:
        run([str(a) for a in args])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            return status, *capsys.readouterr()[:1], error.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("name", ["inspect", "verify", "convert"])
def test_help_has_an_example(capsys: Any, name: str) -> None:
    assert f"Example: recollect {name}" in " ".join(command(capsys, name, "--help")[1].split())


def test_inspect_says_counts_segments_and_ranges(tmp_path: Path, capsys: Any) -> None:
    status, out, _ = command(capsys, "inspect", dump(tmp_path / "d"), "--json")
    report = json.loads(out)
    assert status == 0 and report["samples"] == 198 and report["storage"] == "memory"
    assert report["segments"] == {"count": 5, "min": 1, "mean": 39.6, "max": 90}
    leaves = {leaf["name"]: leaf for leaf in report["leaves"]}
    assert (leaves["n"]["min"], leaves["n"]["max"], leaves["n"]["dtype"]) == (0, 197, "int64")
    assert (leaves["obs"]["nan"], leaves["obs"]["max"], leaves["obs"]["shape"]) == (198, 197.0, [3])
    assert report["files"]["bytes"] > 198 * 192
    text = command(capsys, "inspect", tmp_path / "d")[1]
    assert "198 samples" in text and "of 1 to 90 samples" in text
    assert (
        "min"
        not in json.loads(command(capsys, "inspect", tmp_path / "d", "--json", "--no-ranges")[1])["leaves"][0]
    )


@pytest.mark.parametrize("make", [sets.lerobot_v3, sets.minari_hdf5, sets.huggingface])
def test_inspect_and_verify_know_other_data_sets(tmp_path: Path, capsys: Any, make: Any) -> None:
    root = make(tmp_path / "set")
    report = json.loads(command(capsys, "inspect", root, "--json")[1])
    assert report["samples"] == 11 and report["kind"] in ("lerobot", "minari", "huggingface")
    assert json.loads(command(capsys, "verify", root, "--json")[1])["readable"] == [[0, 11]]


def test_verify_names_the_damaged_file_and_what_is_left(tmp_path: Path, capsys: Any) -> None:
    root = dump(tmp_path / "d", "parquet", piece_size=50)
    status, out, _ = command(capsys, "verify", root, "--json")
    assert status == 0 and json.loads(out)["ok"] and json.loads(out)["readable"] == [[0, 198]]
    file = sorted((root / "storage").glob("part-*.parquet"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    status, out, _ = command(capsys, "verify", root, "--json")
    report = json.loads(out)
    assert status == 1 and [d["file"] for d in report["damaged"]] == [f"storage/{file.name}"]
    lost = 198 - sum(b - a for a, b in report["readable"])
    assert lost in range(1, 51) and len(report["readable"]) == 2
    assert "Still readable: " in command(capsys, "verify", root)[1]


@pytest.mark.parametrize("harm", ["truncated", "longer", "flipped", "gone", "manifest"])
def test_verify_of_a_row_dump(tmp_path: Path, capsys: Any, harm: str) -> None:
    root = dump(tmp_path / "d")
    file = root / "manifest.json" if harm == "manifest" else next((root / "storage").glob("rows-*.bin"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes({"truncated": data[:-9], "longer": data + b"more"}.get(harm, data))
    if harm == "gone":
        file.unlink()
    status, out, _ = command(capsys, "verify", root, "--json")
    damaged = json.loads(out)["damaged"][0]
    assert status == 1 and damaged["file"].endswith(file.name)
    for size in ("truncated", "longer"):
        assert (f"it is {size}" in damaged["problem"]) == (harm == size)


def test_verify_of_a_lerobot_set_names_the_video(tmp_path: Path, capsys: Any) -> None:
    root = sets.lerobot_v3(tmp_path / "set")
    (root / "videos/observation.images.top/chunk-000/file-001.mp4").write_bytes(b"no video")
    report = json.loads(command(capsys, "verify", root, "--json")[1])
    assert "file-001.mp4" in report["damaged"][0]["file"] and report["readable"] == [[0, 5]]


# -- convert


def same(path: Path, n: int = 198) -> None:
    with open_dataset(path) as got:  # type: ignore[attr-defined]
        ends = np.cumsum(LENGTHS).tolist()
        assert len(got) == n and got.get_segments() == list(zip([0, *ends], ends))
        data, want = got[:], block(0, n)
        for key in SPACE:
            np.testing.assert_array_equal(np.reshape(data[key], want[key].shape), want[key], err_msg=key)


WHOLE = [target for target in TARGETS if target not in ("image", "video")]  # those two hold one leaf


@pytest.mark.parametrize("target", WHOLE)
def test_convert_to_every_form(tmp_path: Path, capsys: Any, target: str) -> None:
    src, dst = dump(tmp_path / "src"), tmp_path / "dst"
    status, out, err = command(
        capsys, "convert", src, dst, "--to", target, "--fps", "10", "--chunk", "32", "--json"
    )
    assert status == 0, err
    assert json.loads(out)["segments"] == 5
    same(dst)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]
    assert not (dst / "convert.json").exists()
    status, _, err = command(capsys, "convert", src, dst, "--to", target, "--fps", "10")
    assert status == 1 and "is there already" in err


@pytest.mark.parametrize("target", ["image", "video"])
def test_convert_one_leaf_of_pictures(tmp_path: Path, target: str) -> None:
    with rc.ReplayBuffer.load_from(dump(tmp_path / "src")) as source:
        convert(source.get_column("image"), tmp_path / "dst", target)
    with rc.ReplayBuffer.load_from(tmp_path / "dst") as got:
        np.testing.assert_array_equal(got[:], block(0, 198)["image"])


def options_for(target: str) -> dict[str, Any]:
    if target == "lerobot":
        return {"fps": 10.0, "tasks": "", "commit_rows": 1}
    return {"piece_size": 16} if target == "parquet" else {}  # commits within segments


def copy_and_die(src: Path, dst: Path, target: str, rows: int) -> None:
    left = rows

    def tell(n: int) -> None:
        nonlocal left
        left -= n
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    converting.FLUSH_S = 0.0
    convert(
        open_dataset(src), dst, target, origin=str(src), chunk_size=16, progress=tell, **options_for(target)
    )


@pytest.mark.process
@pytest.mark.parametrize("target", WHOLE)
def test_a_copy_killed_with_sigkill_goes_on(tmp_path: Path, target: str) -> None:
    src, dst = dump(tmp_path / "src"), tmp_path / "dst"
    # within the third segment, and then within the last
    for rows in (60, 150) if target == "parquet" else (60,):
        child = mp.get_context("fork").Process(target=copy_and_die, args=(src, dst, target, rows))
        child.start()
        child.join(50)
        assert child.exitcode == -signal.SIGKILL
        assert not dst.exists() and (tmp_path / "dst.partial").exists()
    told: list[int] = []
    with open_dataset(src) as source:  # type: ignore[attr-defined]
        convert(source, dst, target, origin=str(src), progress=told.append, **options_for(target))
    assert told[0] >= 47 and sum(told) == 198  # two segments at least were not copied again
    same(dst)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]


def test_a_copy_of_many_episodes_commits_now_and_then_and_makes_large_files(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, maintain_segment_metadata=True) as source:
        source.extend({"x": np.arange(3000)}, ends=np.arange(3000) % 10 == 9)
        convert(source, tmp_path / "dst", "parquet")
    manifest = json.loads((tmp_path / "dst" / "manifest.json").read_text())
    assert manifest["commit"] <= 3, "the first, the last, and one for every FLUSH_S"
    assert len(manifest["files"]) == 1
    with rc.ReplayBuffer.load_from(tmp_path / "dst") as got:
        assert got[:]["x"].tolist() == [*range(3000)] and len(got.get_segments() or ()) == 300


def test_full_pieces_are_written_before_they_are_committed(tmp_path: Path) -> None:
    """So that a long copy does not grow in memory."""
    seen = []
    with rc.ReplayBuffer.create("memory", {"x": ((), "int64")}) as source:
        source.extend({"x": np.arange(300)})
        files = tmp_path / "dst.partial" / "data" / "storage"
        convert(source, tmp_path / "dst", "parquet", chunk_size=50, piece_size=100,
                progress=lambda n: seen.append(len(list(files.glob("*.parquet")))))  # fmt: skip
    assert seen == [0, 0, 1, 1, 2, 2, 3]


def test_a_half_made_copy_of_another_source_is_refused(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(n: int) -> None:
        raise Stop

    with rc.ReplayBuffer.load_from(dump(tmp_path / "src")) as source:
        with pytest.raises(Stop):
            convert(source, tmp_path / "dst", "parquet", origin="here", progress=stop)
        with pytest.raises(FormatError, match="origin.*differ"):
            convert(source, tmp_path / "dst", "parquet", origin="there")


def test_a_set_without_tasks_is_told_of_in_one_line(tmp_path: Path, capsys: Any) -> None:
    src = dump(tmp_path / "src")
    to = ("--to", "lerobot", "--fps", "5")
    status, out, err = command(capsys, "convert", src, tmp_path / "a", *to)
    assert not status and "are now in" in out
    [line] = [line for line in err.splitlines() if "empty" in line]
    assert line.startswith("recollect convert: to_lerobot: the task of every frame is empty")
    assert line.endswith("; pass --task")
    assert "empty" not in command(capsys, "convert", src, tmp_path / "b", *to, "--task", "push")[2]


def test_what_cannot_be_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert "got nothing" in command(capsys, "convert", tmp_path / "no", tmp_path / "dst")[2]
    status, _, err = command(capsys, "convert", dump(tmp_path / "src"), tmp_path / "dst", "--to", "lerobot")
    assert status == 1 and "fps" in err
    status, _, err = command(capsys, "convert", tmp_path / "src", tmp_path / "dst", "--to", "video")
    assert status == 1 and "Traceback" not in err

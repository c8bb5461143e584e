"""A conversion that was cut short goes on at the next call, has one writer, and touches nothing of anybody else's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interruption import interrupted
from tests.process.failing import no_syncs

import recollect as rc
from recollect.datasets import open_dataset, to_lerobot
from recollect.datasets.convert import convert

SPACE: Any = {"x": ((2,), "float64"), "id": ((), "int64")}
N = 9


def made(**options: Any) -> rc.ReplayBuffer:
    buffer = rc.ReplayBuffer.create("memory", SPACE, capacity=N, maintain_segment_metadata=True, **options)
    buffer.extend({"x": np.ones((N, 2)), "id": np.arange(N)}, ends=np.arange(N) % 3 == 2)
    return buffer


def copy(source: Any, path: Path, target: str, **options: Any) -> None:
    more: Any = {"fps": 10.0, "tasks": "", "commit_rows": 3} if target == "lerobot" else {}
    convert(source, path, target, origin="it", chunk_size=3, **more, **options)


def check(path: Path) -> None:
    with open_dataset(path) as got:  # type: ignore[attr-defined]
        assert got[:]["id"].reshape(-1).tolist() == [*range(N)]
        assert got.get_segments() == [(0, 3), (3, 6), (6, 9)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("target", ["parquet", "memory"])
def test_ctrl_c_anywhere_and_the_next_call_goes_on(target: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / "data"
    with made() as source, no_syncs():
        copy(source, path, target)  # imports
        shutil.rmtree(path.parent)
        n, came = 0, True
        while came:
            came = interrupted(lambda: copy(source, path, target), n)
            if not path.exists():
                copy(source, path, target)
            check(path)
            assert [p.name for p in path.parent.iterdir()] == [path.name], n
            shutil.rmtree(path.parent)
            n += 239


@pytest.mark.parametrize("target", ["parquet", "memory", "lerobot"])
def test_a_second_conversion_to_the_same_place_is_refused_and_harms_nothing(
    target: str, tmp_path: Path
) -> None:
    path, refused = tmp_path / "data", []

    def again(n: int) -> None:
        for other in (target, "memory", "lerobot"):
            with pytest.raises((rc.LaneBusyError, FileExistsError)) as error:
                copy(source, path, other)
            refused.append(error.type)

    with made() as source:
        copy(source, path, target, progress=again)
    assert refused[0] is rc.LaneBusyError
    check(path)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(("first", "second"), [("parquet", "lerobot"), ("lerobot", "parquet")])
def test_half_a_copy_of_another_kind_stays(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recollect.datasets.convert.FLUSH_S", 0.0)
    path, told = tmp_path / "data", []

    def stop(n: int) -> None:
        told.append(n)
        if sum(told) >= 6:
            raise Stop

    with made() as source:
        with pytest.raises(Stop):
            copy(source, path, first, progress=stop)
        with pytest.raises(FileExistsError, match="data.partial: must be new or a half-made copy"):
            copy(source, path, second)
        told.clear()
        copy(source, path, first, progress=told.append)
    assert told[0] >= 3, "what was committed was not copied again"
    check(path)


@pytest.mark.parametrize("name", ["mine.txt", "data/mine.txt", "convert.json", "manifest.json"])
@pytest.mark.parametrize("target", ["parquet", "lerobot"])
def test_a_directory_of_another_program_stays_as_it_is(target: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "data.partial" / name
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": 1}')
    with made() as source:
        with pytest.raises((FileExistsError, rc.FormatError), match="data.partial"):
            copy(source, tmp_path / "data", target)
        with pytest.raises((FileExistsError, rc.FormatError), match="data.partial"):
            to_lerobot(source, tmp_path / "data", fps=10.0, tasks="")
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == [file]
    assert file.read_text() == '{"mine": 1}'

"""The extras of pyproject.toml, and the errors that name them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.datasets import from_lerobot, to_lerobot

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FRAMES = {"state": ((2,), "float32"), "camera": ((16, 16, 3), "uint8")}


def packages(extra: str) -> set[str]:
    """The packages of an extra, those of the extras that it names included."""
    found: set[str] = set()
    for wanted in EXTRAS[extra]:
        own = re.fullmatch(r"recollect\[(.+)\]", wanted)
        found |= set().union(*map(packages, own[1].split(","))) if own else {wanted}
    return found


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in {*names, *(name for name in sys.modules if name.split(".")[0] in names)}:
        monkeypatch.setitem(sys.modules, name, None)


def test_all_brings_every_extra_for_users() -> None:
    others = (
        "test",
        "docs",
        "dev",
        "sb3",
        "torchrl",
        "trinity",
    )  # for developers, and frameworks that people have or do not want
    wanted = set().union(*(packages(extra) for extra in EXTRAS if extra not in others))
    assert packages("all") == wanted
    assert {"lerobot", "minari", "rollout"} <= set(EXTRAS)


@pytest.mark.parametrize(("codec", "extras"), [("libx264", "parquet,video"), (None, "parquet,images")])
def test_a_lerobot_set_names_all_that_it_needs(
    codec: str | None, extras: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf = rc.ReplayBuffer.create("memory", FRAMES, capacity=4)
    buf.extend({"state": np.zeros((3, 2), "float32"), "camera": np.zeros((3, 16, 16, 3), "uint8")})
    to_lerobot(buf, tmp_path / "set", fps=10, tasks="", video_codec=codec)
    hide(monkeypatch, "pyarrow", "av", "PIL")
    said = rf'pip install "recollect\[{extras}\]"'
    with pytest.raises(rc.MissingExtraError, match=said):
        from_lerobot(tmp_path / "set")
    with pytest.raises(rc.MissingExtraError, match=said):
        to_lerobot(buf, tmp_path / "new", fps=10, tasks="", video_codec=codec)
    with pytest.raises(rc.MissingExtraError, match=r'needs pyarrow; run pip install "recollect\[parquet\]"'):
        from_lerobot(tmp_path / "set", features=["state"])
    assert not (tmp_path / "new").exists()
    assert packages("lerobot") >= packages("parquet") | packages("video") | packages("images")


def test_a_storage_of_storages_names_what_all_of_them_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages = {"camera": "video", "*": "hdf5"}

    def make(path: Path) -> Any:
        return rc.ReplayBuffer.create("dict", FRAMES, capacity=None, cache_path=path, storages=storages)

    with make(tmp_path / "run") as buf:
        buf.extend({"state": np.zeros((3, 2), "float32"), "camera": np.zeros((3, 16, 16, 3), "uint8")})
    hide(monkeypatch, "h5py", "av")
    for call in (lambda: make(tmp_path / "new"), lambda: rc.ReplayBuffer.load_from(tmp_path / "run")):
        with pytest.raises(rc.MissingExtraError, match=r'pip install "recollect\[(hdf5,video|video,hdf5)\]"'):
            call()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], 'recollect: needs tyro and rich; run pip install "recollect[cli]"\n'),
        (
            ["view", "x"],
            'recollect view: needs tyro and rich and starlette; run pip install "recollect[cli,web]"\n',
        ),
    ],
)
def test_the_bare_command_says_in_one_line_what_it_needs(words: list[str], said: str) -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(('tyro', 'rich', 'starlette')))"
    code = f"{hidden}; from recollect.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", said)


def test_view_names_the_page_and_the_data_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("recollect.cli")
    buf = rc.ReplayBuffer.create("memory", {"x": ((2,), "float32")}, capacity=4)
    buf.extend({"x": np.zeros((3, 2), "float32")})
    to_lerobot(buf, tmp_path / "set", fps=10, tasks="")
    hide(monkeypatch, "pyarrow", "starlette")
    with pytest.raises(SystemExit, match=r'pip install "recollect\[web,parquet\]"'):
        cli.run(["view", str(tmp_path / "set")])


def test_the_project_says_who_made_it_and_where_it_runs() -> None:
    assert PROJECT["authors"] == [{"name": "The Recollect developers"}]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        PROJECT["classifiers"]
    )

"""Data sets by id: found here, downloaded by the library that can, or the command that would."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.datasets import sets

import recollect as rc
from recollect.cli import run
from recollect.datasets import open_dataset


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No data set of this machine is seen, and no library that downloads."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_LEROBOT_HOME", raising=False)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for name in ("huggingface_hub", "minari"):
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def test_without_the_library_the_error_is_the_command() -> None:
    hub = r"huggingface_hub && hf download lerobot/pusht --repo-type dataset --local-dir .*/lerobot/pusht$"
    with pytest.raises(rc.MissingExtraError, match=hub):
        open_dataset("lerobot/pusht")
    with pytest.raises(SystemExit, match=hub):
        run(["convert", "lerobot/pusht", "copy"])
    with pytest.raises(rc.MissingExtraError, match=r"minari download D4RL/pen/human-v2$"):
        open_dataset("D4RL/pen/human-v2")


def test_a_set_of_the_hub_is_downloaded_and_opened(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, *, repo_type: str) -> str:
        asked.append((name, repo_type))
        return str(sets.lerobot_v3(elsewhere / "snapshot"))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert open_dataset("lerobot/pusht").get_segments() and asked == [("lerobot/pusht", "dataset")]


def test_what_lerobot_and_minari_keep_is_found_without_them(elsewhere: Path) -> None:
    sets.lerobot_v3(elsewhere / "hf" / "lerobot" / "lerobot" / "pusht")
    assert len(open_dataset("lerobot/pusht"))
    kept = elsewhere / "hf" / "lerobot" / "hub" / "datasets--lerobot--aloha" / "snapshots"
    sets.lerobot_v3(kept / "1f2e")  # as LeRobot keeps it since 0.6
    assert len(open_dataset("lerobot/aloha"))
    sets.minari_hdf5(elsewhere / "minari" / "D4RL" / "pen" / "human-v2")
    assert len(open_dataset("D4RL/pen/human-v2"))


def test_a_set_of_minari_is_downloaded(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = SimpleNamespace(download_dataset=lambda name: sets.minari_hdf5(elsewhere / "minari" / name))
    monkeypatch.setitem(sys.modules, "minari", minari)
    assert len(open_dataset("pointmaze/umaze-v2"))


def test_what_cannot_be_downloaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, *, repo_type: str) -> str:
        raise ConnectionError("the line is down")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(rc.FormatError, match=r"^lerobot/pusht: .*ConnectionError: the line is down"):
        open_dataset("lerobot/pusht")


def test_a_path_is_not_taken_for_an_id(elsewhere: Path) -> None:
    (elsewhere / "work" / "runs").mkdir()
    for path in ("runs/demo", "./lerobot/pusht", "/lerobot/pusht", "~/pusht", "pusht"):
        with pytest.raises(rc.FormatError, match="must hold manifest.json"):
            open_dataset(path)


def test_a_directory_of_its_first_name_does_not_hide_a_set_that_is_here(elsewhere: Path) -> None:
    for name in ("D4RL", "lerobot"):
        (elsewhere / "work" / name).mkdir()
    with pytest.raises(rc.FormatError, match=r"no id to download, for the directory 'D4RL' is here"):
        open_dataset("D4RL/pen/human-v2")
    sets.minari_hdf5(elsewhere / "minari" / "D4RL/pen/human-v2")
    sets.lerobot_v3(elsewhere / "hf" / "lerobot" / "lerobot" / "pusht")
    for name in ("D4RL/pen/human-v2", "lerobot/pusht"):
        with open_dataset(name) as found:  # type: ignore[attr-defined]
            assert len(found) == 11

"""Data sets by id: `lerobot/pusht` of the Hugging Face Hub, `D4RL/pen/human-v2` of Minari.

What is on this machine already is found without asking anybody: where Minari and LeRobot keep what they downloaded.
Else the library that downloads is asked, if it is installed; if not, the error is the command that does it.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from recollect.errors import FormatError, MissingExtraError

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_VERSION = re.compile(r"-v\d+$")


def located(path: str | Path) -> Path:
    """Return the directory of a data set: the path, if something is there, or where the set of this id is.

    A path whose first directory is there is a path, and nothing is downloaded for it; if nothing is at the path, a set
    of that id on this machine is found.

    >>> located("/tmp").name
    'tmp'
    """
    is_path = isinstance(path, str) and path.startswith(".")
    path = Path(path)
    parts = path.parts
    if is_path or os.path.lexists(path) or not all(map(_PART.fullmatch, parts)):
        return path
    name = "/".join(parts)
    if Path(parts[0]).is_dir():
        return _kept(name) or path
    if _VERSION.search(name):
        return _minari(name)
    return hub_dataset(name) if len(parts) == 2 else path


def minari_home() -> Path:
    """Where Minari keeps its data sets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def _kept(name: str) -> Path | None:
    """Where a set of this id is on this machine, None if it is not."""
    if _VERSION.search(name):
        place = minari_home() / name
        return place if place.is_dir() else None
    return _kept_of_hub(name) if name.count("/") == 1 else None


def why_no_id(path: Path) -> str:
    """Why nothing was downloaded for a path that may be meant as an id; empty if it may not."""
    first = path.parts[0] if len(path.parts) > 1 and all(map(_PART.fullmatch, path.parts)) else ""
    if not first or not Path(first).is_dir():
        return ""
    return (
        f" (a path and no id to download, for the directory {first!r} is here; run this in another directory)"
    )


def _minari(name: str) -> Path:
    place = minari_home() / name
    if not place.is_dir():
        minari = _library("minari", f'{name}: is not in {minari_home()}; run pip install "minari[all]" && '
                          f"minari download {name}")  # fmt: skip
        _download(name, lambda: minari.download_dataset(name))
    return place


def lerobot_home() -> Path:
    """Where LeRobot keeps its data sets."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    return Path(os.environ.get("HF_LEROBOT_HOME") or cache / "lerobot").expanduser()


def _kept_of_hub(name: str) -> Path | None:
    home = lerobot_home()
    if (home / name).is_dir():
        return home / name
    # LeRobot keeps what it downloads since 0.6 by revision, in folders of the Hub's making.
    snapshots = home / "hub" / f"datasets--{name.replace('/', '--')}" / "snapshots"
    kept = list(snapshots.glob("*/"))
    return max(kept, key=lambda snapshot: snapshot.stat().st_mtime) if kept else None


def hub_dataset(name: str) -> Path:
    """Where the data set of this id on the Hugging Face Hub is; it is downloaded if it is not on this machine."""
    if kept := _kept_of_hub(name):
        return kept
    home = lerobot_home()
    hub = _library("huggingface_hub", f"{name}: is not in {home}; run pip install huggingface_hub && "
                   f"hf download {name} --repo-type dataset --local-dir {home / name}")  # fmt: skip
    return Path(_download(name, lambda: hub.snapshot_download(name, repo_type="dataset")))


def _library(name: str, without: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingExtraError(without) from None


def _download(name: str, download: Any) -> Any:
    try:
        return download()
    except Exception as error:  # of a library, a line that is down, or a set that is not there
        raise FormatError(
            f"{name}: is not here and cannot be downloaded, got {type(error).__name__}: {error}"
        ) from error

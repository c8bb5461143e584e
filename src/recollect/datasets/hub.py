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

    A path whose first directory is there is a path, not an id.

    >>> located("/tmp").name
    'tmp'
    """
    is_path = isinstance(path, str) and path.startswith(".")
    path = Path(path)
    parts = path.parts
    if is_path or os.path.lexists(path) or not all(map(_PART.fullmatch, parts)) or Path(parts[0]).is_dir():
        return path
    name = "/".join(parts)
    if _VERSION.search(name):
        return _minari(name)
    return hub_dataset(name) if len(parts) == 2 else path


def minari_home() -> Path:
    """Where Minari keeps its data sets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")


def _minari(name: str) -> Path:
    place = minari_home() / name
    if not place.is_dir():
        minari = _library("minari", f'{name}: is not in {minari_home()}; run pip install "minari[all]" && '
                          f"minari download {name}")  # fmt: skip
        _download(name, lambda: minari.download_dataset(name))
    return place


def hub_dataset(name: str) -> Path:
    """Where the data set of this id on the Hugging Face Hub is; it is downloaded if it is not on this machine."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
    home = Path(os.environ.get("HF_LEROBOT_HOME") or cache / "lerobot").expanduser()
    if (home / name).is_dir():
        return home / name
    # LeRobot keeps what it downloads since 0.6 by revision, in folders of the Hub's making.
    snapshots = home / "hub" / f"datasets--{name.replace('/', '--')}" / "snapshots"
    if kept := list(snapshots.glob("*/")):
        return max(kept, key=lambda snapshot: snapshot.stat().st_mtime)
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

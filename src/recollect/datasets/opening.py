"""Whatever is at a path as a batch: a dump of ours, or a data set of LeRobot, Minari or Hugging Face."""

from __future__ import annotations

from pathlib import Path

from recollect.batch import BatchBase
from recollect.errors import BudgetError, FormatError
from recollect.files.record import read_json

KINDS = ("recollect", "lerobot", "minari", "huggingface")


def kind_of(path: Path) -> str:
    """Which of `KINDS` is at a path, by the files there; FormatError if none."""
    if (path / "manifest.json").is_file():
        return "recollect"
    if (path / "meta" / "info.json").is_file():
        return "lerobot"
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return "huggingface"
    for place in (path, path / "data"):
        if (place / "main_data.hdf5").is_file() or _is_minari(place / "metadata.json"):
            return "minari"
    what = "no dump and no data set that is known" if path.exists() else "nothing"
    raise FormatError(
        f"{path}: must hold manifest.json (Recollect), meta/info.json (LeRobot), data/metadata.json (Minari) or "
        f"state.json (Hugging Face), got {what}"
    )


def open_dataset(path: str | Path, *, split: str | None = None) -> BatchBase:
    """Open whatever is at a path for reading; `split` chooses one of a Hugging Face data set's.

    >>> import numpy as np, recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/run"
    >>> buf = rc.ReplayBuffer.create("memory", ((), "float32"), capacity=4)
    >>> buf.extend(np.ones(3, "float32")); buf.dumps(path)
    >>> len(rc.datasets.open_dataset(path))
    3
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "recollect":
        from recollect.replay import ReplayBuffer

        return ReplayBuffer.load_from(path)
    if kind == "lerobot":
        from recollect.datasets.lerobot import from_lerobot

        return from_lerobot(path)
    if kind == "minari":
        from recollect.datasets.minari import from_minari

        return from_minari(path)
    from recollect.datasets.huggingface import from_huggingface

    return from_huggingface(path, split=split)


def _is_minari(file: Path) -> bool:
    try:
        return "data_format" in read_json(file)
    except (OSError, FormatError, BudgetError):
        return False

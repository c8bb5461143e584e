"""Whatever is at a path as a batch: dumps or rollouts of ours, data sets of LeRobot, Minari, UniEnv, Hugging Face."""

from __future__ import annotations

from pathlib import Path

from recollect import plugins
from recollect.batch import BatchBase
from recollect.datasets.hub import located, why_no_id
from recollect.datasets.lerobot.meta import packages_for
from recollect.datasets.rollouts import from_rollout, is_rollout
from recollect.datasets.unienv import from_unienv, is_unienv
from recollect.errors import BudgetError, FormatError, class_name
from recollect.files.record import read_json

KINDS = ("recollect", "lerobot", "minari", "unienv", "huggingface", "rollout")


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
    if is_unienv(path):
        return "unienv"
    if is_rollout(path):
        return "rollout"
    what = "no dump and no data set that is known" if path.exists() else f"nothing{why_no_id(path)}"
    raise FormatError(
        f"{path}: must hold manifest.json (Recollect), meta/info.json (LeRobot), data/metadata.json (Minari), "
        f"metadata.json (UniEnv), state.json (Hugging Face) or files of recollect rollout, got {what}"
    )


def packages_at(path: Path) -> list[str]:
    """The optional packages that the data set at a path needs, as far as its metadata can be read."""
    try:
        kind = kind_of(path)
        if kind == "lerobot":
            features = read_json(path / "meta" / "info.json")["features"].values()
            return packages_for([feature["dtype"] for feature in features])
    except (OSError, FormatError, BudgetError, AttributeError, KeyError, TypeError):
        return []  # opening it says what is wrong
    return {"huggingface": ["pyarrow"]}.get(kind, [])


def open_dataset(path: str | Path, *, split: str | None = None, verify: bool = False) -> BatchBase:
    """Open whatever is at a path for reading; `split` chooses one of a Hugging Face data set's.

    With `verify` every file of what Recollect wrote, a dump or a LeRobot set, is compared with its checksum first.

    `path` may also be the id of a set of the Hugging Face Hub or of Minari, as `lerobot/pusht` or `D4RL/pen/human-v2`:
    one that is not on this machine is downloaded by `huggingface_hub` or `minari`, if that is installed.

    What is none of ours is shown to the packages that give `recollect.datasets` (`docs/howto/extend.md`).

    >>> import numpy as np, recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/run"
    >>> buf = rc.ReplayBuffer.create("memory", ((), "float32"), capacity=4)
    >>> buf.extend(np.ones(3, "float32")); buf.dumps(path)
    >>> len(rc.datasets.open_dataset(path))
    3
    """
    path = located(path)
    try:
        kind = kind_of(path)
    except FormatError:
        given = _opened_by_others(path)
        if given is None:
            raise
        return given
    if kind == "recollect":
        from recollect.replay import ReplayBuffer

        return ReplayBuffer.load_from(path, verify=verify)
    if kind == "lerobot":
        from recollect.datasets.lerobot.dataset import from_lerobot

        return from_lerobot(path, verify=verify)
    if kind == "minari":
        from recollect.datasets.minari import from_minari

        return from_minari(path)
    if kind == "unienv":
        return from_unienv(path)
    if kind == "rollout":
        return from_rollout(path)
    from recollect.datasets.huggingface import from_huggingface

    return from_huggingface(path, split=split)


def _opened_by_others(path: Path) -> BatchBase | None:
    """What the first package that knows the data set at a path makes of it, None if none does."""
    for name in plugins.names(plugins.DATASETS):
        found = plugins.call(plugins.DATASETS, name, path)
        if found is None:
            continue
        if not isinstance(found, BatchBase):
            raise plugins.failure(plugins.DATASETS, name, f"{class_name(found)}, which is no BatchBase")
        return found
    return None


def _is_minari(file: Path) -> bool:
    try:
        return "data_format" in read_json(file)
    except (OSError, FormatError, BudgetError):
        return False

"""Data sets of others as batches, and batches as data sets: torch, Hugging Face, Minari, LeRobot, UniEnv."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# By the module each is loaded from, when first used: each is about another optional package.
_HOME = {
    "as_torch_dataset": "recollect.datasets.torch",
    "from_torch": "recollect.datasets.torch",
    "from_huggingface": "recollect.datasets.huggingface",
    "from_minari": "recollect.datasets.minari",
    "from_unienv": "recollect.datasets.unienv",
    "from_lerobot": "recollect.datasets.lerobot",
    "to_lerobot": "recollect.datasets.lerobot_writer",
    "DatasetBatch": "recollect.datasets.batch",
    "open_dataset": "recollect.datasets.opening",
}

if TYPE_CHECKING:
    from recollect.datasets.batch import DatasetBatch as DatasetBatch
    from recollect.datasets.huggingface import from_huggingface as from_huggingface
    from recollect.datasets.lerobot import from_lerobot as from_lerobot
    from recollect.datasets.lerobot_writer import to_lerobot as to_lerobot
    from recollect.datasets.minari import from_minari as from_minari
    from recollect.datasets.opening import open_dataset as open_dataset
    from recollect.datasets.torch import as_torch_dataset as as_torch_dataset
    from recollect.datasets.torch import from_torch as from_torch
    from recollect.datasets.unienv import from_unienv as from_unienv

__all__ = sorted(_HOME)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect.datasets' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)

"""Data sets of others as batches, and batches as data sets: torch, Hugging Face, Minari, LeRobot, UniEnv."""

from __future__ import annotations

from recollect._lazy import lazy

# By the module each is loaded from, when first used: each is about another optional package.
_MODULE_OF = {
    "as_torch_dataset": "recollect.datasets.torch",
    "from_torch": "recollect.datasets.torch",
    "from_huggingface": "recollect.datasets.huggingface",
    "from_minari": "recollect.datasets.minari",
    "from_unienv": "recollect.datasets.unienv",
    "from_lerobot": "recollect.datasets.lerobot.dataset",
    "to_lerobot": "recollect.datasets.lerobot.writer",
    "DatasetBatch": "recollect.datasets.batch",
    "open_dataset": "recollect.datasets.open",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULE_OF)

"""The names of recollect.datasets for type checkers; `__init__.py` loads each when it is first used."""

from recollect.datasets.batch import DatasetBatch as DatasetBatch
from recollect.datasets.huggingface import from_huggingface as from_huggingface
from recollect.datasets.lerobot.dataset import from_lerobot as from_lerobot
from recollect.datasets.lerobot.writer import to_lerobot as to_lerobot
from recollect.datasets.minari import from_minari as from_minari
from recollect.datasets.open import open_dataset as open_dataset
from recollect.datasets.torch import as_torch_dataset as as_torch_dataset
from recollect.datasets.torch import from_torch as from_torch
from recollect.datasets.unienv import from_unienv as from_unienv

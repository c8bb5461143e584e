"""Recollect carries experience from the processes that make it to those that learn from it.

`import recollect as rc` gives every public name, flat. The module behind a name is imported when the name is
first used, so importing the package costs next to nothing and never loads torch, jax, ray or mpi4py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The one table of public names, by the module each is loaded from. Type checkers cannot read it: the imports
# below say the same to them, and tests/test_public_names.py holds the two equal.
_NAMES = {
    "recollect.batch": (
        "BatchBase CombinedBatch DataTransformation FrameStackedBatch Location SliceStackedBatch "
        "SubIndexedBatch SubItemBatch ToBackendOrDeviceBatch TransformedBatch"
    ),
    "recollect.errors": (
        "AttachError BudgetError ClosedError ContentionError DeadlineError DtypeError EmptyError "
        "FormatError LaneBusyError MissingExtraError MissingLeafError PeerDiedError ReadOnlyError "
        "RecollectError SchemaError SegmentOpenError WorkerDiedError WorkerError"
    ),
    "recollect.replay": "ReplayBuffer",
    "recollect.sampling": "BatchSampler StepSampler",
    "recollect.spaces": "Layout as_space compile_layout transition_space",
    "recollect.storage": "MemmapStorage MemoryStorage SharedMemoryStorage SpaceStorage register_storage",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from recollect.batch import BatchBase as BatchBase
    from recollect.batch import CombinedBatch as CombinedBatch
    from recollect.batch import DataTransformation as DataTransformation
    from recollect.batch import FrameStackedBatch as FrameStackedBatch
    from recollect.batch import Location as Location
    from recollect.batch import SliceStackedBatch as SliceStackedBatch
    from recollect.batch import SubIndexedBatch as SubIndexedBatch
    from recollect.batch import SubItemBatch as SubItemBatch
    from recollect.batch import ToBackendOrDeviceBatch as ToBackendOrDeviceBatch
    from recollect.batch import TransformedBatch as TransformedBatch
    from recollect.errors import AttachError as AttachError
    from recollect.errors import BudgetError as BudgetError
    from recollect.errors import ClosedError as ClosedError
    from recollect.errors import ContentionError as ContentionError
    from recollect.errors import DeadlineError as DeadlineError
    from recollect.errors import DtypeError as DtypeError
    from recollect.errors import EmptyError as EmptyError
    from recollect.errors import FormatError as FormatError
    from recollect.errors import LaneBusyError as LaneBusyError
    from recollect.errors import MissingExtraError as MissingExtraError
    from recollect.errors import MissingLeafError as MissingLeafError
    from recollect.errors import PeerDiedError as PeerDiedError
    from recollect.errors import ReadOnlyError as ReadOnlyError
    from recollect.errors import RecollectError as RecollectError
    from recollect.errors import SchemaError as SchemaError
    from recollect.errors import SegmentOpenError as SegmentOpenError
    from recollect.errors import WorkerDiedError as WorkerDiedError
    from recollect.errors import WorkerError as WorkerError
    from recollect.replay import ReplayBuffer as ReplayBuffer
    from recollect.sampling import BatchSampler as BatchSampler
    from recollect.sampling import StepSampler as StepSampler
    from recollect.spaces import Layout as Layout
    from recollect.spaces import as_space as as_space
    from recollect.spaces import compile_layout as compile_layout
    from recollect.spaces import transition_space as transition_space
    from recollect.storage import MemmapStorage as MemmapStorage
    from recollect.storage import MemoryStorage as MemoryStorage
    from recollect.storage import SharedMemoryStorage as SharedMemoryStorage
    from recollect.storage import SpaceStorage as SpaceStorage
    from recollect.storage import register_storage as register_storage

__all__ = sorted(["__version__", *_HOME])

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value  # the next use does not come through here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

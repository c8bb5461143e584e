"""Recollect carries experience from the processes that make it to those that learn from it.

`import recollect as rc` gives every public name, flat. The module behind a name is imported when the name is
first used, so importing the package costs next to nothing and never loads torch, jax, ray or mpi4py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The one table of public names, by the module each is loaded from. Type checkers cannot read it: the imports
# below say the same to them, and tests/test_public_names.py holds the two equal.
_NAMES = {
    "recollect.batch": (
        "BatchBase CombinedBatch DataTransformation FrameStackedBatch Location NStepBatch SliceStackedBatch "
        "SubIndexedBatch SubItemBatch ToBackendOrDeviceBatch TransformedBatch TransitionBatch"
    ),
    "recollect.collect": "Finding ReplayBufferCollectionWrapper check_env_pipeline",
    "recollect.errors": (
        "AttachError AuthError BatchAborted BatchFailed BudgetError ClosedError CollectorDiedError CollectorError "
        "ContentionError DeadlineError DtypeError EmptyError EnvContractError FormatError FrameError LaneBusyError "
        "MissingExtraError MissingLeafError ModelError PeerDiedError PipelineError PrepareError ReadOnlyError "
        "RecollectError RemoteError ResetNeeded SchemaError ScoringError SegmentOpenError WorkerDiedError WorkerError "
        "WrongTickError"
    ),
    "recollect.replay": "RateLimiter ReplayBuffer",
    "recollect.rollout": "BatchLifecycleState BatchState RolloutCoordinator",
    "recollect.sampling": (
        "BatchSampler HindsightSampler MultiprocessingSampler PrioritizedSampler SequenceSampler StepSampler"
    ),
    "recollect.spaces": "Layout as_space compile_layout transition_space",
    "recollect.storage": (
        "DictStorage FlattenedStorage HDF5Storage ImageStorage MemmapStorage MemoryStorage ParquetStorage "
        "SharedMemoryStorage SpaceStorage ToBackendOrDeviceStorage TransformedStorage VideoStorage register_storage"
    ),
}
_MODULES = (
    "datasets",
    "ipc",
    "learners",
    "remote",
    "observe",
    "rollout",
    "testing",
)  # reached as `rc.ipc.ReplayBuffer`; loaded when first used, like the names
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    import recollect.datasets as datasets  # noqa: F401
    import recollect.ipc as ipc  # noqa: F401
    import recollect.learners as learners  # noqa: F401
    import recollect.observe as observe  # noqa: F401
    import recollect.remote as remote  # noqa: F401
    import recollect.rollout as rollout  # noqa: F401
    import recollect.testing as testing  # noqa: F401
    from recollect.batch import BatchBase as BatchBase
    from recollect.batch import CombinedBatch as CombinedBatch
    from recollect.batch import DataTransformation as DataTransformation
    from recollect.batch import FrameStackedBatch as FrameStackedBatch
    from recollect.batch import Location as Location
    from recollect.batch import NStepBatch as NStepBatch
    from recollect.batch import SliceStackedBatch as SliceStackedBatch
    from recollect.batch import SubIndexedBatch as SubIndexedBatch
    from recollect.batch import SubItemBatch as SubItemBatch
    from recollect.batch import ToBackendOrDeviceBatch as ToBackendOrDeviceBatch
    from recollect.batch import TransformedBatch as TransformedBatch
    from recollect.batch import TransitionBatch as TransitionBatch
    from recollect.collect import Finding as Finding
    from recollect.collect import ReplayBufferCollectionWrapper as ReplayBufferCollectionWrapper
    from recollect.collect import check_env_pipeline as check_env_pipeline
    from recollect.errors import AttachError as AttachError
    from recollect.errors import AuthError as AuthError
    from recollect.errors import BatchAborted as BatchAborted
    from recollect.errors import BatchFailed as BatchFailed
    from recollect.errors import BudgetError as BudgetError
    from recollect.errors import ClosedError as ClosedError
    from recollect.errors import CollectorDiedError as CollectorDiedError
    from recollect.errors import CollectorError as CollectorError
    from recollect.errors import ContentionError as ContentionError
    from recollect.errors import DeadlineError as DeadlineError
    from recollect.errors import DtypeError as DtypeError
    from recollect.errors import EmptyError as EmptyError
    from recollect.errors import EnvContractError as EnvContractError
    from recollect.errors import FormatError as FormatError
    from recollect.errors import FrameError as FrameError
    from recollect.errors import LaneBusyError as LaneBusyError
    from recollect.errors import MissingExtraError as MissingExtraError
    from recollect.errors import MissingLeafError as MissingLeafError
    from recollect.errors import ModelError as ModelError
    from recollect.errors import PeerDiedError as PeerDiedError
    from recollect.errors import PipelineError as PipelineError
    from recollect.errors import PrepareError as PrepareError
    from recollect.errors import ReadOnlyError as ReadOnlyError
    from recollect.errors import RecollectError as RecollectError
    from recollect.errors import RemoteError as RemoteError
    from recollect.errors import ResetNeeded as ResetNeeded
    from recollect.errors import SchemaError as SchemaError
    from recollect.errors import ScoringError as ScoringError
    from recollect.errors import SegmentOpenError as SegmentOpenError
    from recollect.errors import WorkerDiedError as WorkerDiedError
    from recollect.errors import WorkerError as WorkerError
    from recollect.errors import WrongTickError as WrongTickError
    from recollect.replay import RateLimiter as RateLimiter
    from recollect.replay import ReplayBuffer as ReplayBuffer
    from recollect.rollout import BatchLifecycleState as BatchLifecycleState
    from recollect.rollout import BatchState as BatchState
    from recollect.rollout import RolloutCoordinator as RolloutCoordinator
    from recollect.sampling import BatchSampler as BatchSampler
    from recollect.sampling import HindsightSampler as HindsightSampler
    from recollect.sampling import MultiprocessingSampler as MultiprocessingSampler
    from recollect.sampling import PrioritizedSampler as PrioritizedSampler
    from recollect.sampling import SequenceSampler as SequenceSampler
    from recollect.sampling import StepSampler as StepSampler
    from recollect.spaces import Layout as Layout
    from recollect.spaces import as_space as as_space
    from recollect.spaces import compile_layout as compile_layout
    from recollect.spaces import transition_space as transition_space
    from recollect.storage import DictStorage as DictStorage
    from recollect.storage import FlattenedStorage as FlattenedStorage
    from recollect.storage import HDF5Storage as HDF5Storage
    from recollect.storage import ImageStorage as ImageStorage
    from recollect.storage import MemmapStorage as MemmapStorage
    from recollect.storage import MemoryStorage as MemoryStorage
    from recollect.storage import ParquetStorage as ParquetStorage
    from recollect.storage import SharedMemoryStorage as SharedMemoryStorage
    from recollect.storage import SpaceStorage as SpaceStorage
    from recollect.storage import ToBackendOrDeviceStorage as ToBackendOrDeviceStorage
    from recollect.storage import TransformedStorage as TransformedStorage
    from recollect.storage import VideoStorage as VideoStorage
    from recollect.storage import register_storage as register_storage

__all__ = sorted(["__version__", *_HOME])

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"recollect.{name}")
        if name not in _HOME:
            # With both, Python adds "Did you mean ...?" where a name is near.
            raise AttributeError(
                f"module 'recollect' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            )
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value  # the next use does not come through here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

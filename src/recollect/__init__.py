"""Recollect carries experience from the processes that make it to those that learn from it.

`import recollect as rc` gives every public name, flat. The module behind a name is imported when the name is
first used, so importing the package costs next to nothing and never loads torch, jax, ray or mpi4py.
"""

from __future__ import annotations

from recollect._lazy import lazy

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
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__getattr__, __dir__, _all = lazy(__name__, _MODULE_OF, _MODULES)
__all__ = sorted(["__version__", *_all])

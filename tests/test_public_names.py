"""The flat public namespace is exactly this; changing it is a decision, not an accident."""

from __future__ import annotations

import ast
import inspect

import pytest

import recollect

PUBLIC = """
AttachError AuthError BatchAborted BatchBase BatchFailed BatchLifecycleState BatchSampler BatchState
BudgetError ClosedError CollectorDiedError CollectorError CombinedBatch ContentionError DataTransformation
DeadlineError DictStorage DtypeError EmptyError EnvContractError Finding FlattenedStorage FormatError
FrameError FrameStackedBatch HDF5Storage HindsightSampler ImageStorage LaneBusyError Layout Location
MemmapStorage MemoryStorage MissingExtraError MissingLeafError ModelError MultiprocessingSampler NStepBatch
ParquetStorage PeerDiedError PipelineError PrepareError PrioritizedSampler RateLimiter ReadOnlyError
RecollectError RemoteError ReplayBuffer ReplayBufferCollectionWrapper ResetNeeded RolloutCoordinator
SchemaError ScoringError SegmentOpenError SequenceSampler SharedMemoryStorage SliceStackedBatch SpaceStorage
StepSampler SubIndexedBatch SubItemBatch ToBackendOrDeviceBatch ToBackendOrDeviceStorage TransformedBatch
TransformedStorage VideoStorage WorkerDiedError WorkerError WrongTickError __version__ as_space
check_env_pipeline compile_layout register_storage transition_space
""".split()


def test_all_is_pinned() -> None:
    assert recollect.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_name_resolves(name: str) -> None:
    assert getattr(recollect, name) is not None
    assert name in dir(recollect)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(recollect))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == recollect._HOME


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ReplayBufer'"):
        recollect.ReplayBufer


def test_every_error_is_public() -> None:
    from recollect import errors

    ours = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.RecollectError)
    }
    assert ours <= set(PUBLIC)


BUILT_IN = {
    ValueError: "SchemaError MissingLeafError DtypeError AttachError EnvContractError FormatError FrameError",
    KeyError: "MissingLeafError",
    TypeError: "DtypeError ReadOnlyError",
    RuntimeError: "EmptyError ClosedError LaneBusyError WrongTickError PrepareError ContentionError CollectorError "
    "PeerDiedError CollectorDiedError WorkerDiedError WorkerError RemoteError SegmentOpenError",
    TimeoutError: "DeadlineError",
    MemoryError: "BudgetError",
    ImportError: "MissingExtraError",
    PermissionError: "AuthError",
    recollect.SchemaError: "MissingLeafError DtypeError",
    recollect.PeerDiedError: "CollectorDiedError WorkerDiedError",
}


@pytest.mark.parametrize("base", BUILT_IN, ids=lambda base: base.__name__)
def test_errors_are_also_what_callers_expect(base: type[Exception]) -> None:
    for name in BUILT_IN[base].split():
        error = getattr(recollect, name)
        assert issubclass(error, base) and issubclass(error, recollect.RecollectError), name


@pytest.mark.parametrize("name", ["datasets", "ipc", "learners", "observe", "remote", "rollout", "testing"])
def test_packages_are_reached_by_attribute(name: str) -> None:
    assert getattr(recollect, name).__name__ == f"recollect.{name}"

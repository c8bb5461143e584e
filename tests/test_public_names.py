"""The flat public namespace is exactly this; changing it is a decision, not an accident."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

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
TransformedStorage TransitionBatch VideoStorage WorkerDiedError WorkerError WrongTickError __version__ as_space
check_env_pipeline compile_layout register_storage transition_space
""".split()


def test_all_is_pinned() -> None:
    assert recollect.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_name_resolves(name: str) -> None:
    assert getattr(recollect, name) is not None
    assert name in dir(recollect)


# The packages whose names are loaded when they are first used; what type checkers know of them is in a stub.
LAZY = [
    "recollect",
    "recollect.datasets",
    "recollect.ipc",
    "recollect.ipc.replay_pipelines",
    "recollect.learners",
    "recollect.remote",
    "recollect.rollout",
    "recollect.testing",
]


def test_every_lazy_package_is_listed() -> None:
    root = Path(recollect.__file__).parent
    stubs = {stub.parent.relative_to(root.parent) for stub in root.rglob("__init__.pyi")}
    assert {str(path).replace("/", ".") for path in stubs} == set(LAZY)


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_same_names(package: str) -> None:
    found = import_module(package)
    tree = ast.parse(Path(str(found.__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    stub = {alias.asname: node.module for node in imports for alias in node.names}
    assert all(
        alias.asname == alias.name for node in imports for alias in node.names
    )  # else it is not public
    assert set(found.__all__) - {"__version__"} <= set(stub) <= set(dir(found))
    for name, module in stub.items():
        if module == package:
            assert getattr(found, name) is import_module(f"{package}.{name}")
        else:
            assert name in found.__all__
            assert getattr(found, name) is getattr(import_module(str(module)), name)


SIGNATURES = {
    "SubIndexedBatch": "batch, sub_indexes",
    "SubItemBatch": "batch, sub_indexes",
    "TransformedBatch": "batch, transformation, metadata_transformation=None",
    "ToBackendOrDeviceBatch": "batch, backend=None, device=None",
    "CombinedBatch": "batches, device=None, use_thread_pool=False",
    "SliceStackedBatch": "batch, fixed_offset, get_valid_mask_function=None, fill_invalid_data=True, "
    "stack_metadata=False",
    "FrameStackedBatch": "batch, prefetch_horizon=0, postfetch_horizon=0, get_valid_mask_function=None, "
    "fill_invalid_data=True, stack_metadata=False",
    "TransitionBatch": "batch, stack=None, obs='obs', next_obs='next_obs'",
    "NStepBatch": "batch, n, gamma, reward='reward', next_obs='next_obs', terminated='terminated'",
    "ReplayBufferCollectionWrapper": "env, replay_buffers, replay_mode='auto', transition_builder=None, "
    "validate_transition=False, dump_on_episode_end=False, dump_on_reset_boundary=False, dump_path=None, *, "
    "autoreset_mode=None, record_final_obs=False",
    "BatchSampler": "single_space, single_metadata_space=None, batch_size=1",
    "StepSampler": "data, batch_size, seed=None, device=None, *, replace=True, backend=None",
    "MultiprocessingSampler": "sampler, n_workers=4, n_buffers=8, ctx=None, doze_time=0.005, daemon=None, *, "
    "deadline=60.0, max_lengths=None",
    "PrioritizedSampler": "data, batch_size, alpha=0.6, beta=0.4, eps=1e-06, seed=None, device=None, *, backend=None",
    "SequenceSampler": "data, batch_size, length, burn_in=0, pad=False, seed=None, device=None, *, backend=None",
    "HindsightSampler": "data, batch_size, compute_reward, strategy='future', ratio=0.8, seed=None, *, device=None, "
    "backend=None",
    "RateLimiter": "samples_per_insert, min_size, band, deadline=60.0",
    "check_env_pipeline": "env, buffer=None, steps=1000, seed=0, strict=False, *, progress=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_those_promised(name: str) -> None:
    promised = getattr(recollect, name)
    is_class = isinstance(promised, type)
    found = inspect.signature(promised.__init__ if is_class else promised)
    arguments = [p.replace(annotation=p.empty) for p in found.parameters.values()][is_class:]
    shown = found.replace(parameters=arguments, return_annotation=found.empty)
    assert str(shown) == f"({SIGNATURES[name]})"


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

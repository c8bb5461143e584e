"""Tasks, the workflows that turn them into experience, and what a workflow returns."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from typing import Any

import msgspec

from recollect.errors import SchemaError, class_name
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.experience import Experience

WorkflowFunction = Callable[..., Any]
_MASK = 2**64 - 1


def _count(name: str, value: Any, least: int) -> int:
    """A plain int that a record can hold: what is written must be read again."""
    plain = -1 if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if not least <= plain < 2**62:
        raise ValueError(f"{name}: must be an int of at least {least}, got {value!r}")
    return plain


class GiveUp(Exception):
    """Raised by a workflow to fail its run at once: another attempt would not help."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: the workflow that solves it, and what that needs to know.

    `data` and `args` are JSON-like. `repeat_times` runs of it make one group. `timeout_s` and `max_retries` are
    the config's unless given here.

    >>> Task("math", {"a": 2}, repeat_times=8).repeat_times
    8
    """

    workflow: Any
    data: dict[str, Any]
    args: dict[str, Any]
    repeat_times: int
    task_id: BatchId | None
    timeout_s: float | None
    max_retries: int | None

    def __init__(
        self,
        workflow: Any,
        data: dict[str, Any] | None = None,
        *,
        args: dict[str, Any] | None = None,
        repeat_times: int = 1,
        task_id: BatchId | None = None,
        timeout_s: float | None = None,
        max_retries: int | None = None,
    ) -> None:
        """Check and set everything."""
        repeat_times = _count("repeat_times", repeat_times, 1)
        if timeout_s is not None:
            if not 0 <= timeout_s <= sys.float_info.max:
                raise ValueError(f"timeout_s: must be a finite number of seconds, got {timeout_s!r}")
            timeout_s = float(timeout_s)
        if max_retries is not None:
            max_retries = _count("max_retries", max_retries, 0)
        set_field = object.__setattr__
        set_field(self, "workflow", workflow)
        set_field(self, "data", {} if data is None else data)
        set_field(self, "args", {} if args is None else args)
        set_field(self, "repeat_times", repeat_times)
        set_field(self, "task_id", task_id)
        set_field(self, "timeout_s", timeout_s)
        set_field(self, "max_retries", max_retries)


class Work(msgspec.Struct, kw_only=True):
    """The workflow's own copy of its task, with what is known of this run of it.

    The seed is the same in every attempt of a run. A grouped workflow reads `run_ids`; the others `run_id`.
    """

    workflow: str
    data: dict[str, Any]
    args: dict[str, Any]
    repeat_times: int
    task_id: BatchId
    batch_id: BatchId
    is_eval: bool
    run_id: int
    run_ids: tuple[int, ...]
    attempt: int
    seed: int
    seeds: tuple[int, ...] = ()


class Result(msgspec.Struct):
    """What a run made: its steps in order, and numbers about it."""

    experiences: Any = ()
    metrics: dict[str, float] = {}


def task_key(seed: int, batch_id: BatchId, task_id: BatchId) -> int:
    """The root of a task's randomness; `run_seed` makes one seed per run of it."""
    text = f"{seed}/{type(batch_id).__name__}:{batch_id}/{type(task_id).__name__}:{task_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def run_seed(key: int, run_id: int) -> int:
    """Return the seed of a run: 63 bits, so that it fits int64."""
    z = (key + (run_id + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


# -- workflows by name


@dataclass(frozen=True, slots=True)
class Workflow:
    """A workflow function and what is known of it."""

    name: str
    function: WorkflowFunction
    is_async: bool
    grouped: bool


_registered: dict[str, Workflow] = {}


def workflow(name: str, *, grouped: bool = False) -> Callable[[WorkflowFunction], WorkflowFunction]:
    """Register a workflow under a name, so that tasks, files and other processes can speak of it.

    >>> @workflow("nothing")
    ... async def nothing(task, models):
    ...     return Result(metrics={"x": 1.0})
    """
    if not name or type(name) is not str:
        raise TypeError(f"workflow: its name must be a non-empty str, got {name!r}")

    def register(function: WorkflowFunction) -> WorkflowFunction:
        known = _registered.get(name)
        if known is not None and _origin(known.function) != _origin(function):
            raise ValueError(
                f"workflow: the name {name!r} is taken by {_origin(known.function)}; choose another"
            )
        _registered[name] = Workflow(name, function, _is_async(function), grouped)
        return function

    return register


def find_workflow(spec: Any, *, by_name: bool = False, modules: Sequence[str] = ()) -> Workflow:
    """Return the workflow of a name, an import path (`module:function`) or a function.

    With `by_name` a bare function must be one that its import path leads to, else TypeError. A name that is not
    known in this process yet is looked for in `modules`, which are imported then.
    """
    if isinstance(spec, str):
        return _named(spec, modules)
    if not callable(spec):
        raise TypeError(f"workflow: must be a function or a name, got {type(spec).__name__}")
    for known in _registered.values():
        if known.function is spec:
            return known
    path = _origin(spec)
    if by_name and _import(path) is not spec:
        raise TypeError(
            f"workflow: must have a name or an import path here, got {path}; register it with @rr.workflow('...')"
        )
    return Workflow(path, spec, _is_async(spec), False)


def is_registered(name: str) -> bool:
    """Whether a workflow has this name in this process."""
    return name in _registered


def _named(name: str, modules: Sequence[str]) -> Workflow:
    if name not in _registered and ":" not in name:
        import_modules(modules)
    if name in _registered:
        return _registered[name]
    function = _import(name) if ":" in name else None
    if function is None:
        raise ValueError(f"workflow: must be registered or an import path 'module:function', got {name!r}; "
                         f"there are {sorted(_registered)}")  # fmt: skip
    return find_workflow(function)


def import_modules(names: Iterable[str]) -> None:
    """Import the modules that register workflows and operators; SchemaError names one that cannot be imported."""
    for name in names:
        try:
            import_module(name)
        except (ImportError, TypeError, ValueError) as error:  # "" and ".x" are no names of modules
            raise SchemaError(f"workflow_modules: must be importable, got {name!r}: {error}") from error


def _origin(function: Any) -> str:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_result(returned: Any) -> Result:
    """Return what a workflow returned in one form; TypeError for what is none."""
    result = _as_result(returned)
    for x in result.experiences:
        if not isinstance(x, Experience):
            raise TypeError(
                f"workflow: must return an rr.Experience, a list of them, or an rr.Result, got {class_name(x)}; "
                "return g.experience(reward=...) of a generation g"
            )
    return result


def _as_result(returned: Any) -> Result:
    if returned is None:
        return Result()
    if isinstance(returned, Result):
        experiences = returned.experiences
        is_many = type(experiences) in (list, tuple) or isinstance(experiences, Sequence)
        steps = list(experiences) if is_many else [experiences]
        return Result(steps, returned.metrics)
    if isinstance(returned, list | tuple):
        return Result(list(returned))
    return Result([returned])


class AttemptSpec(msgspec.Struct, array_like=True):
    """An attempt as it is sent to a runner."""

    attempt_id: int
    workflow: str
    data: bytes  # msgpack of (data, args)
    repeat_times: int
    task_id: BatchId
    batch_id: BatchId
    is_eval: bool
    run_ids: tuple[int, ...]
    number: int
    seeds: tuple[int, ...]
    group_id: int
    version: int
    rollout: int = -1  # the rollout replica chosen for it


class RunOutcome(msgspec.Struct, array_like=True):
    """How a run ended."""

    run_id: int
    ok: bool
    seconds: float
    metrics: dict[str, float] = {}
    bad_metrics: int = 0
    payload: bytes | None = None
    n: int = 0
    reward: float | None = None
    response_length: int | None = None
    version: int = 0
    error: str = ""
    final: bool = False  # another attempt would not help

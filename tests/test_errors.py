"""What each error is besides: `except ValueError` keeps working."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium.error
import numpy as np
import pytest
from gymnasium import spaces

import recollect as rc
from recollect import errors
from recollect.remote.items.space import item_space

ALSO: dict[str, type[BaseException]] = {
    "SchemaError": ValueError,
    "MissingLeafError": KeyError,
    "DtypeError": TypeError,
    "ReadOnlyError": TypeError,
    "SegmentOpenError": RuntimeError,
    "EmptyError": RuntimeError,
    "LaneBusyError": RuntimeError,
    "ContentionError": RuntimeError,
    "DeadlineError": TimeoutError,
    "WorkerError": RuntimeError,
    "WorkerDiedError": rc.PeerDiedError,
    "FormatError": ValueError,
    "ClosedError": RuntimeError,
    "ResetNeeded": gymnasium.error.ResetNeeded,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize("name", ALSO)
def test_an_error_is_ours_and_the_builtin_that_callers_expect(name: str) -> None:
    error = getattr(rc, name)
    assert issubclass(error, rc.RecollectError) and issubclass(error, ALSO[name])


@pytest.mark.parametrize("name", ["MissingLeafError", "DtypeError"])
def test_children_of_the_schema_error(name: str) -> None:
    assert issubclass(getattr(rc, name), rc.SchemaError)


DRAWN = re.compile(r"^    (?P<lines>[│ ]*)[├└]── (?P<name>\w+)(?: \((?P<also>[^)]+)\))? +\S")


def test_the_tree_is_drawn_as_the_classes_are() -> None:
    """Name, parent and builtin of each error, in the drawing and in the module."""
    drawn, above = {}, ["RecollectError"]
    for line in str(errors.__doc__).splitlines():
        if found := DRAWN.match(line):
            depth = len(found["lines"]) // 4 + 1
            drawn[found["name"]] = (above[depth - 1], found["also"])
            above[depth:] = [found["name"]]
    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.RecollectError)
    ]
    there = {}
    for c in classes[1:]:
        parents = [b.__name__ for b in c.__bases__ if issubclass(b, errors.RecollectError)]
        also = [b for b in c.__bases__ if not issubclass(b, errors.RecollectError)]
        names = [
            b.__name__ if b.__module__ == "builtins" else f"{b.__module__.partition('.')[0]}'s" for b in also
        ]
        there[c.__name__] = (*parents, *(names or [None]))
    assert drawn == there


def foreign(name: str) -> Any:
    """An object of another library, whose class has the name of one of ours."""
    return type(name, (), {"__module__": "elsewhere.containers", "__len__": lambda self: 3})()


def item_space_of_paths() -> Any:
    step = spaces.Dict({"state": spaces.Box(0, 8, (2,), np.int32)})
    return item_space(spaces.Dict({"steps": spaces.Sequence(step, stack=True)}), 5)


BUFFER = rc.ReplayBuffer.create("memory", {"obs": ((2,), "float32")}, capacity=4)
CONFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a container": ("Trajectories", lambda x: item_space_of_paths().encode(x)),
    "a block": ("Trajectories", BUFFER.extend),
    "a sample": ("OrderedDict", BUFFER.append),
    "another buffer": ("ReplayBuffer", BUFFER.extend_from),
    "a source": ("ReplayBuffer", lambda x: rc.StepSampler(x, 4)),
    "a member": ("ReplayBuffer", lambda x: rc.CombinedBatch([BUFFER, x])),
    "a sampler": ("StepSampler", lambda x: rc.MultiprocessingSampler(x)),
    "a recorded buffer": (
        "ReplayBuffer",
        lambda x: rc.ReplayBufferCollectionWrapper(gymnasium.make("CartPole-v1"), x),
    ),
    "an environment": ("Env", lambda x: rc.ReplayBufferCollectionWrapper(x, BUFFER)),
    "a space": ("Box", rc.as_space),
    "a limiter": (
        "RateLimiter",
        lambda x: rc.ReplayBuffer.create("memory", ((), "int64"), capacity=2, limiter=x),
    ),
    "a configuration": ("Config", lambda x: rc.RolloutCoordinator(x, [])),
}


@pytest.mark.parametrize("what", CONFUSED)
def test_a_class_of_the_same_name_is_told_with_its_module(what: str) -> None:
    name, use = CONFUSED[what]
    with pytest.raises((TypeError, ValueError), match=rf"got elsewhere\.containers\.{name}\b"):
        use(foreign(name))

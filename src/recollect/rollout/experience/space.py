"""What an experience is made of: its space, and the plan by which rows of it are packed and read.

Fixed leaves lie in packed rows; a Sequence leaf is one block of values and its offsets, with no padding between.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import _core
from recollect.errors import class_name
from recollect.spaces import Layout, as_space, compile_layout

Array = np.ndarray[Any, Any]
MAX_TOKENS = 4096
ALIGNMENT = 64  # of the blocks of a payload
# Their length is that of the response, not of prompt and response.
PER_RESPONSE = ("logprobs", "action_mask", "advantages", "token_versions")
OPTIONAL = {"advantages": "float32", "token_versions": "int64"}
STAMPS = {"group_id": "int64", "run_id": "int32", "step": "int32"}
VERSIONS = {"model_version": "int64", "version_drift": "int32"}


class ExperienceSpace(spaces.Dict):
    """A gymnasium Dict that knows how long its sequences may be."""

    def __init__(self, leaves: Mapping[str, Space[Any]], max_tokens: int) -> None:
        super().__init__(OrderedDict(leaves))
        self.max_tokens = max_tokens


def experience_space(
    kind: str = "token",
    *,
    max_tokens: int = MAX_TOKENS,
    obs: Any = None,
    action: Any = None,
    leaves: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> ExperienceSpace:
    """Return the space of an experience: `token` (a prompt and a response) or `step` (one step of an agent).

    >>> list(experience_space("step", obs=((4,), "float32"), action=((), "int64")))[:3]
    ['obs', 'action', 'terminated']
    """
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens: must be an int of at least 1, got {max_tokens!r}")
    for name in leaves:
        if name not in OPTIONAL or kind != "token":
            raise ValueError(f"leaves: must be of {sorted(OPTIONAL)} with kind 'token', got {name!r}")
    found: dict[str, Space[Any]] = {}
    if kind == "token":
        found["tokens"] = _sequence("int32")
        found["prompt_length"] = as_space(((), "int32"))
        found["logprobs"] = _sequence("float32")
        found["action_mask"] = _sequence("bool")
        found |= {name: _sequence(OPTIONAL[name]) for name in leaves}
    elif kind == "step":
        if obs is None or action is None:
            raise ValueError("obs, action: must be given with kind 'step', got None")
        found |= {"obs": as_space(obs), "action": as_space(action), "terminated": as_space(((), "bool"))}
    else:
        raise ValueError(f"kind: must be 'token' or 'step', got {kind!r}")
    found |= {"reward": as_space(((), "float32")), "advantage": as_space(((), "float32"))}
    found["truncated"] = as_space(((), "bool"))
    found |= {name: as_space(((), dtype)) for name, dtype in (STAMPS | VERSIONS).items()}
    for name, spec in (extra or {}).items():
        if name in found:
            raise ValueError(f"extra: must be new leaves, got {name!r}, which is there already")
        found[name] = as_space(spec)
    return ExperienceSpace(found, max_tokens)


def _sequence(dtype: str) -> spaces.Sequence:
    return spaces.Sequence(as_space(((), dtype)), stack=True)


@dataclass(frozen=True, slots=True)
class Ragged:
    """A Sequence leaf: elements of one dtype and shape, at most `most` of them."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    most: int
    n_elements: int  # numbers in one element of the sequence
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExperiencePlan:
    """A space of experience, compiled: the packed rows of its fixed leaves, and its ragged leaves."""

    space: spaces.Dict
    layout: Layout  # whole, as a buffer stores it
    fixed: Layout
    row_dtype: np.dtype[Any]
    ragged: tuple[Ragged, ...]
    defaults: Mapping[str, Any]  # of fixed scalars that may be left out
    names: frozenset[str]
    native: _core.PayloadPlan  # gathers rows whose values need no conversion
    most: Array  # (ragged leaves, 1), of their lengths
    is_token: bool
    tokens_at: int  # which ragged leaf the tokens are, and which follow the response
    responses_at: Array

    @property
    def max_lengths(self) -> dict[str, int]:
        return {leaf.name: leaf.most for leaf in self.ragged}


DEFAULTS = {
    "reward": float("nan"), "advantage": float("nan"), "truncated": False, "terminated": False, "prompt_length": 0,
    "group_id": 0, "run_id": 0, "step": 0, "model_version": 0, "version_drift": 0,
}  # fmt: skip

_known: dict[str, ExperiencePlan] = {}  # by the layout's hash: payloads name it


def plan_of(space: Any = None, max_lengths: Mapping[str, int] | None = None) -> ExperiencePlan:
    """Return the plan of a space (None: the default one); TypeError if it cannot hold experience."""
    if space is None and max_lengths is None:
        return _default_plan()
    space = _default_space() if space is None else as_space(space)
    if not isinstance(space, spaces.Dict):
        raise TypeError(f"space: must be a Dict of experience leaves, got {class_name(space)}")
    missing = [name for name in (*STAMPS, *VERSIONS, "reward") if name not in space.spaces]
    if missing:
        raise TypeError(f"space: must have the leaves of experience_space(), got none named {missing}")
    names = [key for key, sub in space.spaces.items() if isinstance(sub, spaces.Sequence)]
    most = getattr(space, "max_tokens", MAX_TOKENS)
    lengths = dict.fromkeys(names, most) | {k: v for k, v in (max_lengths or {}).items() if k in names}
    layout = compile_layout(space, lengths)
    if layout.hash not in _known:
        _known[layout.hash] = _compile(space, layout, lengths)
    return _known[layout.hash]


@lru_cache(maxsize=1)
def _default_space() -> ExperienceSpace:
    return experience_space()


@lru_cache(maxsize=1)
def _default_plan() -> ExperiencePlan:
    return plan_of(_default_space())


def known_plan(layout_hash: str) -> ExperiencePlan | None:
    """The plan of a layout that this process has met."""
    if layout_hash not in _known:
        plan_of()
    return _known.get(layout_hash)


def _compile(space: spaces.Dict, layout: Layout, lengths: Mapping[str, int]) -> ExperiencePlan:
    ragged = []
    for name, most in lengths.items():
        element = space.spaces[name].feature_space  # type: ignore[attr-defined]
        field = compile_layout(element)
        if len(field.fields) != 1:
            raise TypeError(f"{name}: a Sequence of experience must hold arrays, got {element}")
        dtype, shape = field.fields[0].dtype, field.fields[0].shape
        n = math.prod(shape)
        ragged.append(Ragged(name, dtype, shape, most, n, n * dtype.itemsize))
    rest = OrderedDict((key, sub) for key, sub in space.spaces.items() if key not in lengths)
    fixed = compile_layout(spaces.Dict(rest))
    row_dtype = np.dtype(
        {
            "names": [field.name for field in fixed.fields],
            "formats": [(field.dtype, field.shape) for field in fixed.fields],
            "offsets": [field.offset for field in fixed.fields],
            "itemsize": fixed.row_nbytes,
        }
    )
    defaults = {name: value for name, value in DEFAULTS.items() if name in rest}
    names = [leaf.name for leaf in ragged]
    return ExperiencePlan(
        space=space,
        layout=layout,
        fixed=fixed,
        row_dtype=row_dtype,
        ragged=tuple(ragged),
        defaults=defaults,
        names=frozenset(space.spaces),
        native=_native(fixed, ragged),
        most=np.array([[leaf.most] for leaf in ragged], np.uint32).reshape(-1, 1),
        is_token="tokens" in lengths,
        tokens_at=names.index("tokens") if "tokens" in names else -1,
        responses_at=np.array([i for i, name in enumerate(names) if name in PER_RESPONSE], np.intp),
    )


def _native(fixed: Layout, ragged: Sequence[Ragged]) -> _core.PayloadPlan:
    """A leaf with a shape has no plain value, so rows that have one are gathered in Python."""
    plain = [(f.name, np.dtype((f.dtype, f.shape)), f.offset) for f in fixed.fields]
    is_token = any(leaf.name == "tokens" for leaf in ragged)
    sequences = [
        (leaf.name, leaf.dtype, leaf.shape, leaf.most, is_token and leaf.name in PER_RESPONSE,
         is_token and leaf.name == "action_mask")
        for leaf in ragged
    ]  # fmt: skip
    return _core.PayloadPlan(plain, sequences, fixed.row_nbytes, ALIGNMENT)

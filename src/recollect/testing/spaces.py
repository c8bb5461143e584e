"""A catalogue of spaces over which laws are tested, and samples of any space.

Use it to test your own storages and views: `@pytest.mark.parametrize("name", CATALOGUE)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.spaces.extended import ExtendedBox
from recollect.spaces.make import as_space
from recollect.spaces.tree import make_dict, node_kind, path_name, sequence_paths

_MOST = 5  # the greatest length of every Sequence in the catalogue
_UNICODE = "aé漢😀\0\ud800"  # one to four bytes in UTF-8, a NUL, and a lone surrogate that has no UTF-8


def _scalars() -> dict[str, Space[Any]]:
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
    return {f"scalar-{name}": as_space(((), name)) for name in names}


def _extended() -> dict[str, Space[Any]]:
    if find_spec("ml_dtypes") is None:
        return {}
    names = "bfloat16 float8_e4m3fn float8_e5m2 int4 uint4".split()
    beside = [
        ("x", as_space(((2,), "bfloat16"))),
        ("y", as_space(((), "int64"))),
        ("z", spaces.Box(-1, 1, (3,))),
    ]
    box = ExtendedBox(-2, 2, (3, 2), "bfloat16")
    return {f"scalar-{name}": as_space(((), name)) for name in names} | {
        "box-bfloat16": box,
        "box-bfloat16-unequal": ExtendedBox(np.array([-1.0, 0.0]), np.array([1.0, 8.0]), (2,), "bfloat16"),
        "dict-bfloat16": make_dict(beside),
        "sequence-bfloat16": spaces.Sequence(box),
        "sequence-bfloat16-stacked": spaces.Sequence(box, stack=True),
    }


def _boxes() -> dict[str, Space[Any]]:
    return {
        "box-vector": spaces.Box(-1, 1, (17,)),
        "box-image": spaces.Box(0, 255, (4, 3, 2), np.uint8),
        "box-one": spaces.Box(-np.inf, np.inf, (1,), np.float64),
        "box-half-bounded": spaces.Box(0, np.inf, (3,), np.float32),
        "box-unequal-bounds": spaces.Box(
            np.array([-1, 0, -np.inf]), np.array([1, np.inf, 5]), dtype=np.float64
        ),
        "box-negative-zero": spaces.Box(np.array([-0.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)),
        "box-int64-limits": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (3,), np.int64),
        "box-int8-unbounded": spaces.Box(-np.inf, np.inf, (2,), np.int8),
        "box-empty": spaces.Box(0, 1, (0,)),
        "box-empty-2d": spaces.Box(0, 1, (3, 0, 2), np.int16),
        "box-big-endian": spaces.Box(-1, 1, (3,), np.dtype(">f4")),
    }


def _discretes() -> dict[str, Space[Any]]:
    return {
        "discrete": spaces.Discrete(4),
        "discrete-start": spaces.Discrete(5, start=-2),
        "discrete-int8": spaces.Discrete(100, dtype=np.int8),
        "discrete-uint64": spaces.Discrete(3, start=2**62, dtype=np.uint64),
        "multibinary": spaces.MultiBinary(5),
        "multibinary-tuple": spaces.MultiBinary((5,)),
        "multibinary-2d": spaces.MultiBinary((2, 3)),
        "multidiscrete": spaces.MultiDiscrete([3, 3, 3]),
        "multidiscrete-2d": spaces.MultiDiscrete(
            np.array([[2, 3], [4, 5]]), start=np.array([[0, -1], [7, 0]])
        ),
        "multidiscrete-uint8": spaces.MultiDiscrete([200, 3], dtype=np.uint8),
    }


def _texts() -> dict[str, Space[Any]]:
    return {
        "text": spaces.Text(8),
        "text-empty-allowed": spaces.Text(4, min_length=0, charset="ab"),
        "text-unicode": spaces.Text(6, min_length=0, charset=_UNICODE),
        "text-nul-only": spaces.Text(3, min_length=0, charset="\0"),
        "text-nothing": spaces.Text(0, min_length=0),
    }


def _nests() -> dict[str, Space[Any]]:
    float32, int64 = spaces.Box(-1, 1, (3,)), as_space(((), "int64"))
    return {
        "dict-flat": make_dict([("b", float32), ("a", spaces.Discrete(3)), ("c", as_space(((), "bool")))]),
        "dict-one": make_dict([("only", float32)]),
        "dict-nested": make_dict(
            [
                ("obs", make_dict([("image", spaces.Box(0, 255, (2, 2), np.uint8)), ("pos", float32)])),
                ("a", int64),
            ]
        ),
        "dict-with-empty": make_dict(
            [("x", float32), ("nothing", make_dict([])), ("none", spaces.Tuple([]))]
        ),
        "dict-odd-keys": make_dict([("a b", int64), ("ключ", int64), ("a.b", int64)]),
        "dict-mixed-widths": make_dict(
            [(d, as_space(((), d))) for d in ("uint8", "int64", "bool", "float16")]
        ),
        "tuple-flat": spaces.Tuple([spaces.Discrete(3), float32]),
        "tuple-nested": spaces.Tuple(
            [spaces.Tuple([int64]), make_dict([("x", spaces.Tuple([float32, int64]))])]
        ),
        "tuple-empty-inside": spaces.Tuple([spaces.Tuple([]), spaces.MultiBinary(2)]),
        "dict-text": make_dict(
            [("prompt", spaces.Text(12, charset=_UNICODE)), ("score", as_space(((), "float32")))]
        ),
    }


def _sequences() -> dict[str, Space[Any]]:
    features: dict[str, Space[Any]] = {
        "discrete": spaces.Discrete(7),
        "box": spaces.Box(-1, 1, (2,)),
        "scalar": as_space(((), "float32")),
        "text": spaces.Text(4, min_length=0, charset=_UNICODE),
        "dict": make_dict([("x", spaces.Box(-1, 1, (2,))), ("a", spaces.Discrete(3))]),
        "dict-text": make_dict([("t", spaces.Text(3)), ("x", as_space(((), "int64")))]),
        "tuple": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
        "sequence": spaces.Sequence(spaces.Discrete(3)),
    }
    found: dict[str, Space[Any]] = {}
    for name, feature in features.items():
        found[f"sequence-{name}"] = spaces.Sequence(feature)
        found[f"sequence-{name}-stacked"] = spaces.Sequence(feature, stack=True)
    steps = make_dict(
        [("obs", spaces.Box(-1, 1, (2,))), ("tokens", spaces.Sequence(spaces.Discrete(9), stack=True))]
    )
    found["dict-trajectory"] = make_dict(
        [("steps", spaces.Sequence(steps)), ("return", as_space(((), "float64")))]
    )
    return found


CATALOGUE: Mapping[str, Space[Any]] = (
    _scalars() | _extended() | _boxes() | _discretes() | _texts() | _nests() | _sequences()
)
"""Spaces by a readable name, for `pytest.mark.parametrize`."""


def max_lengths_of(name: str) -> dict[str, int]:
    """Return the `max_lengths` of the catalogue's space `name`; empty if it has no Sequence."""
    return {path_name(path): _MOST for path in sequence_paths(CATALOGUE[name])}


def samples(space: Space[Any], n: int, seed: int = 0) -> list[Any]:
    """Return `n` samples of `space`, each as its `sample()` would give it.

    The space's own generator is not touched. Whole ranges are covered (all of int64, not just what a float64
    reaches), and a Sequence has at most 5 elements.
    """
    rng = np.random.default_rng(seed)
    return [_draw(space, rng) for _ in range(n)]


def _draw(space: Any, rng: np.random.Generator) -> Any:
    return _DRAWS[node_kind(space)](space, rng)


def _draw_box(space: Any, rng: np.random.Generator) -> Any:
    kind = space.dtype.kind
    if kind == "b":
        return np.asarray(rng.integers(space.low, space.high, endpoint=True, size=space.shape)).astype(bool)
    if kind in "iu" and not isinstance(space, ExtendedBox):
        return np.asarray(
            rng.integers(space.low, space.high, endpoint=True, size=space.shape, dtype=space.dtype)
        )
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    unit, normal = rng.random(space.shape), rng.standard_normal(space.shape)
    with np.errstate(invalid="ignore"):
        values = np.where(
            np.isfinite(low) & np.isfinite(high) & (high - low < 1e9), low + unit * (high - low), normal
        )
    values = np.rint(values) if isinstance(space, ExtendedBox) and "int" in space.dtype.name else values
    return np.asarray(np.clip(values, low, high)).astype(space.dtype)


def _draw_discrete(space: Any, rng: np.random.Generator) -> Any:
    return space.dtype.type(int(space.start) + int(rng.integers(int(space.n))))


def _draw_multidiscrete(space: Any, rng: np.random.Generator) -> Any:
    return space.start + rng.integers(0, space.nvec, dtype=space.dtype)


def _draw_text(space: Any, rng: np.random.Generator) -> str:
    characters = sorted(space.character_set)
    count = int(rng.integers(space.min_length, space.max_length, endpoint=True))
    return "".join(characters[int(i)] for i in rng.integers(len(characters), size=count))


def _draw_sequence(space: Any, rng: np.random.Generator) -> Any:
    items = tuple(_draw(space.feature_space, rng) for _ in range(int(rng.integers(_MOST, endpoint=True))))
    return stack(space.feature_space, items) if space.stack else items


_DRAWS: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "box": _draw_box,
    "discrete": _draw_discrete,
    "multibinary": lambda space, rng: rng.integers(0, 2, size=space.shape, dtype=np.int8),
    "multidiscrete": _draw_multidiscrete,
    "text": _draw_text,
    "sequence": _draw_sequence,
    "dict": lambda space, rng: {key: _draw(child, rng) for key, child in space.spaces.items()},
    "tuple": lambda space, rng: tuple(_draw(child, rng) for child in space.spaces),
}


def stack(space: Space[Any], items: list[Any] | tuple[Any, ...]) -> Any:
    """Return samples of `space` as one batch, in the form of `batch_space`."""
    if isinstance(space, spaces.Dict):
        return {key: stack(child, [item[key] for item in items]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stack(child, [item[i] for item in items]) for i, child in enumerate(space.spaces))
    if isinstance(space, spaces.Text | spaces.Sequence):
        return tuple(items)
    return np.stack(items) if items else np.empty((0, *(space.shape or ())), space.dtype)


def assert_same(a: Any, b: Any, path: str = "value") -> None:
    """Assert that two nested values are equal bit for bit, types, dtypes and key order too."""
    assert type(a) is type(b), f"{path}: {type(a)} != {type(b)}"
    if isinstance(a, dict):
        assert list(a) == list(b), f"{path}: keys {list(a)} != {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, tuple | list):
        assert len(a) == len(b), f"{path}: length {len(a)} != {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype, f"{path}: dtype {a.dtype} != {b.dtype}"
        assert a.shape == b.shape, f"{path}: shape {a.shape} != {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{path}: {a} != {b}"
    else:
        assert a == b, f"{path}: {a!r} != {b!r}"

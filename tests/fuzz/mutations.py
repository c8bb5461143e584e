"""Changes to a valid artefact: any value at any path becomes something else, or the bytes do."""

from __future__ import annotations

import marshal
from random import Random
from typing import Any


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def _deep_dict(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {
            "items": [["k", value]],
            "type": "dict",
            "name": "dict",
            "options": {},
            "children": {"x": value},
        }
    return value


SURROGATE = "a\ud800b"
NAMES = (
    "", ".", "..", "../x", "a/../../x", "storage/../../x", "/etc/passwd", "/dev/zero", "link", "storage/link", "loop",
    "folder/passwd", "\0", "a\0b", "a//b", "storage/", "n" * 255, "n" * 256, "d/" * 3000, SURROGATE, "manifest.json",
    ".recollect-writer", "\u202e", "%00", "con", "~", "$HOME",
)  # fmt: skip
"""Names that lead elsewhere: out of a directory, to a link (see `LINKS`), to a device, or to what no name can be."""
LINKS = {"link": "/etc/passwd", "loop": "loop", "folder": "/etc"}
BOUNDS = (
    -1,
    0,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**31),
    -(2**63),
)
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
VALUES: list[Any] = [
    None, True, False, 1, 2, 3, 10**11, 0.5, -0.0, *BOUNDS, *NO_NUMBERS, *NAMES, 5e-324, "1", "NaN", "1e999",
    1e308, -1e308, 1.0, "", "x", "a" * 300, "a" * 100_000, [], {}, [[]],
    [1], [2**40], [2**31, 2**31], {"x": 1}, [None], [-1], ["a", "b"], _deep(50), _deep(600), _deep_dict(8),
    {"type": "box", "shape": [2**20, 2**20], "dtype": "float64", "low": 0, "high": 1},
    {"type": "text", "min_length": 0, "max_length": 2**31 - 1, "charset": [[0, 0x10FFFF]]},
    {"type": "tuple", "items": [{"type": "text", "min_length": 0, "max_length": 9, "charset": [[k, 0x10FFFF]]}
                                for k in range(40)]},
    "{episode_index:0999999999d}", "{chunk_index.__class__.__mro__}", "{0}", "{", "memory", "hdf5", "parquet", "image",
    "video", "dict", "flattened", "transformed", "backend", "memmap", "float32", "V1000000000", "<U400000000", "object",
]  # fmt: skip


def copied(value: Any) -> Any:
    """A copy, however deep."""
    return marshal.loads(marshal.dumps(value))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a value, its own included."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += places(child, (*path, key))
    return found


def mutated(value: Any, random: Random, paths: list[tuple[Any, ...]]) -> Any:
    """A copy of a value with one to three changes at these paths."""
    value = copied(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed(value, random.choice(paths), random)
    return value


def _changed(value: Any, path: tuple[Any, ...], random: Random) -> Any:
    if not path:
        return copied(random.choice(VALUES)) if random.random() < 0.1 else value
    at = value
    try:
        for key in path[:-1]:
            at = at[key]
        old = at[path[-1]]
    except (KeyError, IndexError, TypeError):
        return value
    if not isinstance(at, dict | list):
        return value
    kind = random.random()
    if kind < 0.08:
        del at[path[-1]]
    elif kind < 0.14 and isinstance(at, dict):
        at[random.choice(("extra", "crc32c", "", SURROGATE, "$tensor", "$pairs"))] = old
    elif kind < 0.2 and isinstance(at, dict):  # the same value under another name
        del at[path[-1]]
        at[random.choice(NAMES)] = old
    elif kind < 0.25 and isinstance(at, list):
        at.append(copied(random.choice(at)))
    elif kind < 0.55 and isinstance(old, int):
        near = (
            old + 1,
            old - 1,
            -old,
            old * 2,
            old << 40,
            old * 1024,
            float(old),
            str(old),
            bool(old),
            *BOUNDS,
        )
        at[path[-1]] = random.choice(near)
    elif kind < 0.55 and isinstance(old, float):
        at[path[-1]] = random.choice((-old, old * 1e300, 0.0, 1e308, *NO_NUMBERS, str(old)))
    elif kind < 0.55 and isinstance(old, str):
        at[path[-1]] = random.choice(
            (*NAMES, old + "x", old[:-1], old * 2, old.upper(), "../" + old, "./" + old)
        )
    elif kind < 0.65:  # what stands elsewhere in it
        at[path[-1]] = copied(random.choice(list(at.values()) if isinstance(at, dict) else at))
    else:
        at[path[-1]] = copied(random.choice(VALUES))
    return value


def garbled(data: bytes, random: Random) -> bytes:
    """Bytes with a few flipped, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if not out:
            break
        at, kind = random.randrange(len(out)), random.random()
        if kind < 0.5:
            out[at] ^= 1 << random.randrange(8)
        elif kind < 0.7:
            out[at] = random.choice((0, 255, 127, 128, 0x22, 0x5B, 0x7B))
        elif kind < 0.8:
            del out[at : at + random.randrange(1, 64)]
        elif kind < 0.9:
            out[at:at] = out[at : at + random.randrange(1, 64)]
        else:
            del out[at:]
    return bytes(out)

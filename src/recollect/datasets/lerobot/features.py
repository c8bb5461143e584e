"""The leaves of a space as features of a LeRobot data set, and their rows as Arrow columns."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.datasets.batch import need
from recollect.datasets.lerobot.meta import OWN
from recollect.errors import class_name
from recollect.spaces.tree import leaf_paths

Array = np.ndarray[Any, Any]
OWN_DTYPES = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64",
              "task_index": "int64"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Feature:
    """One leaf: its path in a sample, its name, and how it is written (a numpy dtype, string, image or video)."""

    path: tuple[Any, ...]
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_picture(self) -> bool:
        """Whether it is kept as pictures or video."""
        return self.dtype in ("image", "video")

    def about(self, names: Any = None) -> dict[str, Any]:
        """What `info.json` says of it, and of its components."""
        names = ["height", "width", "channels"] if self.is_picture else names
        return {"dtype": self.dtype, "shape": list(self.shape), "names": names}

    def pick(self, data: Any) -> Any:
        """Take this leaf out of a sample or block."""
        for key in self.path:
            data = data[key]
        return data


def features_of(space: Space[Any], as_video: bool) -> list[Feature]:
    """The features of a space; those that LeRobot fills in itself are left out, for they are made anew."""
    if not isinstance(space, spaces.Dict):
        raise TypeError(
            f"space: must be a Dict to be a LeRobot data set, got {class_name(space)}; name the leaf"
        )
    found: dict[str, Feature] = {}
    for path, child in leaf_paths(space):
        name = ".".join(map(str, path))
        if name in OWN:
            continue
        if "/" in name or name in found:
            raise ValueError(
                f"{name}: a LeRobot feature must have a name of its own without '/'; rename the leaf"
            )
        found[name] = _feature(path, name, child, as_video)
    if not found:
        raise ValueError("space: must have a leaf beside those that LeRobot fills in, got none")
    return list(found.values())


def _feature(path: tuple[Any, ...], name: str, space: Space[Any], as_video: bool) -> Feature:
    if isinstance(space, spaces.Text):
        return Feature(path, name, "string", (1,))
    if isinstance(space, spaces.Sequence):
        raise TypeError(f"{name}: a LeRobot feature must have a fixed size, got a Sequence; leave it out")
    shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype)
    if dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3):
        return Feature(path, name, "video" if as_video else "image", shape)
    if dtype.kind not in "biuf" or len(shape) > 5 or prod(shape) == 0:
        raise TypeError(
            f"{name}: a LeRobot feature must be numbers in 1 to 5 axes, got {dtype} {shape}; leave it out"
        )
    return Feature(path, name, str(dtype), shape or (1,))


def to_column(pa: Any, feature: Feature, rows: Any) -> Any:
    """Rows as the Arrow column that LeRobot writes."""
    if feature.dtype == "string":
        return pa.array(list(rows), pa.string())
    if feature.dtype == "image":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        items = [{"bytes": png(row), "path": f"frame-{i:06d}.png"} for i, row in enumerate(rows)]
        return pa.array(items, kind)
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    if feature.shape == (1,):
        return flat
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, feature.shape[0])
    for size in reversed(feature.shape):  # as datasets keeps Array2D and so on: lists of lists
        n = len(flat) // size
        flat = pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32) * size), flat)
    return flat


def png(row: Array) -> bytes:
    """One picture as PNG."""
    image = need("PIL.Image", "images", "to_lerobot")
    out = io.BytesIO()
    image.fromarray(row[..., 0] if row.shape[-1] == 1 else row).save(out, "PNG", compress_level=6)
    return out.getvalue()


def schema_metadata(features: list[Feature]) -> dict[str, str]:
    """What the package `datasets` wants to find in the schema of a file."""
    every = {f.name: _hf_type(f.dtype, f.shape) for f in features if f.dtype != "video"}
    every |= {name: _hf_type(dtype, (1,)) for name, dtype in OWN_DTYPES.items()}
    return {"huggingface": json.dumps({"info": {"features": every}})}


def _hf_type(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    if dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": dtype, "_type": "Value"}
    if shape == (1,):
        return value
    if len(shape) == 1:
        return {"feature": value, "length": shape[0], "_type": "Sequence"}
    return {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}

"""What a sample is: spaces, their short forms, and their compilation to packed rows."""

from __future__ import annotations

from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import dtype_from, dtype_name
from recollect.spaces.extended import ExtendedBox
from recollect.spaces.json import canonical, space_from_json, space_to_json
from recollect.spaces.layout import Field, Layout, Leaf, compile_layout
from recollect.spaces.make import as_space
from recollect.spaces.transition import transition_space
from recollect.spaces.tree import batch_space, first_difference, space_at

__all__ = [
    "ExtendedBox",
    "Field",
    "Layout",
    "Leaf",
    "as_numpy",
    "as_space",
    "batch_space",
    "canonical",
    "compile_layout",
    "dtype_from",
    "dtype_name",
    "first_difference",
    "space_at",
    "space_from_json",
    "space_to_json",
    "transition_space",
]

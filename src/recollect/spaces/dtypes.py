"""Which dtypes a leaf may have, their names, and what each can hold exactly.

numpy's own booleans, integers and floats up to 8 bytes, and those of ml_dtypes (bfloat16, float8, int4 ...).
ml_dtypes is imported only when one of its dtypes is named or met: most programs never need it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import numpy as np

from recollect.errors import MissingExtraError

DtypeKind = Literal["bool", "int", "float"]

# The names ml_dtypes uses. numpy does not know them until ml_dtypes was imported, and "int4" is not its "i4".
_EXTENDED_NAME = re.compile(r"bfloat16|float[468]_\w+|u?int[124]")
_NUMPY_KINDS: dict[str, DtypeKind] = {"b": "bool", "i": "int", "u": "int", "f": "float"}


def _ml_dtypes() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingExtraError(
            'bfloat16 and other small dtypes: need ml_dtypes; run pip install "recollect[ml-dtypes]"'
        ) from error
    return ml_dtypes


def is_extended(dtype: np.dtype[Any]) -> bool:
    """Tell whether ml_dtypes defines this dtype (gymnasium's Box refuses those)."""
    return dtype.type.__module__ == "ml_dtypes"


def is_dtype_like(spec: object) -> bool:
    """Tell whether `spec` is meant as a dtype: a name, a dtype of numpy or torch, or a type."""
    return isinstance(spec, str | np.dtype | type) or _torch_dtype_name(spec) is not None


def _torch_dtype_name(spec: object) -> str | None:
    kind = type(spec)
    is_torch = (kind.__module__, kind.__name__) == ("torch", "dtype")
    return str(spec).removeprefix("torch.") if is_torch else None


def dtype_from(spec: Any, subject: str) -> np.dtype[Any]:
    """Return the numpy dtype that `spec` names, or raise TypeError speaking of `subject`."""
    name = _torch_dtype_name(spec) or spec
    try:
        if isinstance(name, str) and _EXTENDED_NAME.fullmatch(name):
            dtype = np.dtype(getattr(_ml_dtypes(), name))
        else:
            dtype = np.dtype(name)
    except (TypeError, AttributeError) as error:
        raise TypeError(f"{subject}: dtype must be one of numpy or ml_dtypes, got {spec!r}") from error
    return supported(dtype, subject)


def supported(dtype: np.dtype[Any], subject: str) -> np.dtype[Any]:
    """Return `dtype` if a leaf may have it, else raise TypeError speaking of `subject`."""
    if is_extended(dtype) or (dtype.kind in _NUMPY_KINDS and dtype.itemsize <= 8):
        return dtype
    hint = "describe strings with gymnasium.spaces.Text" if dtype.kind in "USO" else "convert it"
    raise TypeError(f"{subject}: dtype must be bool, int or float of at most 8 bytes, got {dtype}; {hint}")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name that `dtype_from` reads back, with the byte order if that is foreign."""
    return dtype.name if dtype.isnative else dtype.str


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return `dtype` in this machine's byte order, which is how rows are kept."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


@cache
def dtype_kind(dtype: np.dtype[Any]) -> DtypeKind | None:
    """Return "bool", "int" or "float", or None for any other dtype."""
    if is_extended(dtype):
        return "int" if "int" in dtype.name else "float"
    return _NUMPY_KINDS.get(dtype.kind)


@cache
def int_bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the smallest and largest value of an integer dtype, as Python ints."""
    info = _ml_dtypes().iinfo(dtype) if is_extended(dtype) else np.iinfo(dtype)
    return int(info.min), int(info.max)


@cache
def float_bounds(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and largest finite value of a float dtype, as Python floats."""
    info = _ml_dtypes().finfo(dtype) if is_extended(dtype) else np.finfo(dtype)
    return float(info.min), float(info.max)


@cache
def exact_bits(dtype: np.dtype[Any]) -> int:
    """Return p such that every integer of at most p bits is exact in this float dtype."""
    info = _ml_dtypes().finfo(dtype) if is_extended(dtype) else np.finfo(dtype)
    return int(info.nmant) + 1


def promote(dtypes: list[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the common dtype by numpy's promotion.

    numpy cannot promote some pairs with ml_dtypes and narrows others (float8 with int8 stays float8), so
    beside anything else those stand for float32 and int8.
    """
    distinct = set(dtypes)
    if len(distinct) == 1:
        return distinct.pop()
    return np.result_type(*sorted({_stand_in(dtype) for dtype in distinct}, key=str))


def _stand_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if not is_extended(dtype):
        return dtype
    return np.dtype(np.int8 if dtype_kind(dtype) == "int" else np.float32)

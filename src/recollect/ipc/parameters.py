"""Parameters of a state dict: what each must be, and its bytes on the host, of numpy arrays and tensors alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from recollect.errors import AttachError, DtypeError, SchemaError
from recollect.spaces.arrays import as_numpy, is_arraylike

Array = np.ndarray[Any, Any]

# Dtypes that numpy does not know without ml_dtypes. Their bits are moved, never their values, so none is needed.
_BITS = re.compile(r"bfloat16|float8_\w+")
_WORDS = {1: "uint8", 2: "int16"}
ANY = "any"  # the dtype of a parameter of which only the shape was said
_MAPPINGS = (dict, Mapping)  # in this order: an abstract class takes longer to ask


def dtype_name(spec: Any, subject: str) -> str:
    """Return the name of a dtype given by name, by numpy or by torch; TypeError if it is none."""
    name = spec if isinstance(spec, str) else str(spec).removeprefix("torch.")
    if _BITS.fullmatch(name):
        return name
    try:
        dtype = np.dtype(name if type(spec).__module__ == "torch" else spec)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise TypeError(f"{subject}: dtype must be bool, int, float or complex, got {spec!r}")
    return dtype.name


def itemsize(name: str) -> int:
    """Bytes of one value of a dtype."""
    if _BITS.fullmatch(name):
        return 2 if name == "bfloat16" else 1
    return np.dtype(name).itemsize


def _kind(name: str) -> str:
    return "f" if _BITS.fullmatch(name) else np.dtype(name).kind.replace("u", "i")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Of arrays that hold its bytes; words of bits where numpy has no such dtype."""
        return np.dtype(_WORDS[itemsize(self.dtype)] if _BITS.fullmatch(self.dtype) else self.dtype)

    @property
    def usual_dtype(self) -> np.dtype[Any] | None:
        """The dtype of numpy arrays that can be copied as they are."""
        return None if _BITS.fullmatch(self.dtype) else np.dtype(self.dtype)

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.name}: {self.shape}" + (f" of {self.dtype}" if self.dtype != ANY else "")

    def to_json(self) -> list[Any]:
        return [self.name, list(self.shape), self.dtype]

    @staticmethod
    def from_json(obj: Sequence[Any]) -> Parameter:
        name, shape, dtype = obj
        return Parameter(name, tuple(shape), dtype)


def is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the shell patterns matches."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def parse(
    param_shapes: Mapping[str, Any],
    dtypes: Mapping[str, Any] | None,
    exclude: Sequence[str],
    default: str = "float32",
) -> list[Parameter]:
    """Return the parameters that name → shape or (shape, dtype) describes, in order, without the excluded.

    A shape alone has the dtype `default`; ANY stands for whatever it is.
    """
    dtypes = dict(dtypes or {})
    unknown = sorted(set(dtypes) - set(checked_mapping("param_shapes", param_shapes)))
    if unknown:
        raise SchemaError(f"dtypes: names must be those of param_shapes, got {unknown}")
    found = []
    for name, spec in param_shapes.items():
        if not isinstance(name, str):
            raise SchemaError(f"param_shapes: names must be text, got {name!r}")
        if is_excluded(name, exclude):
            continue
        shape, dtype = _split(spec)
        try:
            sizes = tuple(int(n) for n in shape)
        except (TypeError, ValueError):
            sizes = (-1,)
        if any(n < 0 for n in sizes):
            raise SchemaError(f"{name}: shape must be sizes of at least 0, got {spec!r}")
        given = dtypes.get(name, dtype)
        found.append(Parameter(name, sizes, default if given is None else dtype_name(given, name)))
    if not found:
        left = f" that exclude={list(exclude)} does not leave out" if exclude else ""
        raise SchemaError(f"param_shapes: must name a parameter to share, got none{left}")
    return found


def checked_mapping(label: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping by name, as it is; SchemaError if it is none."""
    if isinstance(value, _MAPPINGS):
        return value
    hint = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
    raise SchemaError(f"{label}: must be a mapping of names, got {type(value).__name__}{hint}")


def _split(spec: Any) -> tuple[Any, Any]:
    """A shape, or (shape, dtype): the second of two is a dtype only if the first is a shape itself."""
    if isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[0], tuple | list):
        return spec[0], spec[1]
    return (spec,) if isinstance(spec, int | np.integer) else spec, None


def check_same(wanted: Sequence[Parameter], found: Sequence[Parameter]) -> None:
    """Raise AttachError naming the first parameter that differs."""
    for mine, theirs in zip(wanted, found):
        if mine != (replace(theirs, dtype=ANY) if mine.dtype == ANY else theirs):
            raise AttachError(
                f"param_shapes: must be those it was made with, got {mine.text} where it has {theirs.text}; "
                "pass the same"
            )
    if len(wanted) != len(found):
        longer = max(wanted, found, key=len)
        raise AttachError(
            f"param_shapes: must be {len(wanted)} parameters, found {len(found)}; "
            f"{longer[min(len(wanted), len(found))].name} is only in one of them"
        )


# -- values


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of torch; does not import it."""
    return hasattr(x, "detach")


def is_on_device(x: Any) -> bool:
    """Whether `x` is a tensor that the host cannot read in place."""
    return is_tensor(x) and x.device.type != "cpu"


def tensor_dtype_name(x: Any) -> str | None:
    """Return the dtype's name of a real tensor, None for anything else."""
    found: Any = getattr(x, "dtype", None)
    name = tensor_dtypes.get(found)
    if name is None and type(found).__module__ == "torch" and not found.is_complex:
        name = tensor_dtypes[found] = str(found)[6:]
    return name


tensor_dtypes: dict[Any, str] = {}  # asking torch for a name costs more than copying a small parameter


def check(p: Parameter, x: Any, cast: bool) -> bool:
    """Raise for another shape, or a dtype that may not be cast; True when a cast is needed."""
    if is_tensor(x):
        name = tensor_dtype_name(x) or str(x.dtype)[6:]
    elif is_arraylike(x):
        name = x.dtype.name if getattr(x.dtype, "isnative", True) else x.dtype.str
    else:
        raise SchemaError(f"{p.name}: must be an array or a tensor, got {type(x).__name__}")
    if tuple(x.shape) != p.shape:
        raise SchemaError(f"{p.name}: shape must be {p.shape}, got {tuple(x.shape)}; the networks differ")
    if name == p.dtype:
        return False
    of_a_kind = _kind(name) == _kind(p.dtype)
    if not (cast and of_a_kind):
        other = "it is of another kind: convert it, or declare its dtype (from_state_dict does)"
        hint = "convert it, or pass cast=True" if of_a_kind else other
        raise DtypeError(f"{p.name}: dtype must be {p.dtype}, got {name}; {hint}")
    return True


def as_declared(p: Parameter, x: Any) -> Any:
    """Return `x` cast to the declared dtype; SchemaError if integers do not survive it."""
    if is_tensor(x):
        import torch

        made = x.detach().to(getattr(torch, p.dtype))
        kept = not p.dtype.startswith(("int", "uint")) or bool((made == x).all())
    else:
        x = as_numpy(x)
        made = x.astype(_dtype_for_cast(p))
        kept = made.dtype.kind not in "iu" or np.array_equal(made, x)
    if not kept:
        raise SchemaError(f"{p.name}: values must fit {p.dtype}, got {x.dtype} values out of its range")
    return made


def check_fits(p: Parameter, bits: Array, x: Any) -> None:
    """Raise SchemaError if integers of the parameter would not survive a cast to the dtype of `x`."""
    if _kind(p.dtype) == "i":
        as_declared(Parameter(p.name, p.shape, dtype_name(x.dtype, p.name)), bits)


def _dtype_for_cast(p: Parameter) -> np.dtype[Any]:
    from recollect.spaces.dtypes import dtype_from

    return dtype_from(p.dtype, p.name) if _BITS.fullmatch(p.dtype) else np.dtype(p.dtype)


def host_array(p: Parameter, x: Any) -> Array:
    """Return the contiguous bytes of a host array or tensor of the declared dtype; shares its memory if it can."""
    if is_tensor(x):
        x = x.detach()
        if _BITS.fullmatch(p.dtype):
            import torch

            x = x.view(getattr(torch, _WORDS[x.element_size()]))
        array = x.numpy(force=True)
    else:
        array = as_numpy(x)
        if _BITS.fullmatch(p.dtype):
            array = array.view(p.numpy_dtype)
    return np.ascontiguousarray(array)


def target_array(p: Parameter, x: Any) -> Array | None:
    """Return the memory of `x` itself, to be filled, or None when it can only be copied into."""
    if is_tensor(x):
        if is_on_device(x) or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        array: Array = host_array(p, x)
        return array
    array = x.view(p.numpy_dtype) if _BITS.fullmatch(p.dtype) else x
    return array if array.flags.c_contiguous else None


def copy_into(p: Parameter, bits: Array, x: Any) -> None:
    """Copy a parameter's host bytes into an array or tensor of any strides, dtype and device."""
    if is_tensor(x):
        import torch

        host = torch.from_numpy(bits)
        if _BITS.fullmatch(p.dtype):
            host = host.view(getattr(torch, p.dtype))
        x.detach().copy_(host)
        return
    x[...] = bits.view(_dtype_for_cast(p)) if _BITS.fullmatch(p.dtype) else bits

"""as_numpy, dtypes, and ExtendedBox."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from recollect.errors import MissingExtraError
from recollect.spaces import ExtendedBox, as_numpy
from recollect.spaces.arrays import is_arraylike
from recollect.spaces.dtypes import dtype_from, dtype_kind, dtype_name, exact_bits, int_bounds, native


def test_numpy_arrays_are_themselves() -> None:
    array = np.zeros(3)
    assert as_numpy(array) is array
    assert as_numpy(np.float32(2)).shape == ()
    assert as_numpy([1, 2]).tolist() == [1, 2]


def test_tensors_share_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    as_numpy(tensor)[0] = 1
    assert tensor[0] == 1
    assert as_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert as_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert as_numpy(torch.tensor(3)).shape == ()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_come_by_their_bits(name: str) -> None:
    torch = pytest.importorskip("torch")
    for values in ([1.5, -2.0], 1.5):
        array = as_numpy(torch.tensor(values).to(getattr(torch, name)))
        assert array.dtype == np.dtype(getattr(ml_dtypes, name))
        assert array.tolist() == values


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert as_numpy(jnp.arange(3)).tolist() == [0, 1, 2]
    assert as_numpy(jnp.ones(2, jnp.bfloat16)).dtype == ml_dtypes.bfloat16


def test_dlpack_alone_is_enough() -> None:
    class Capsule:
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self._array = array

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self._array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    assert as_numpy(Capsule(np.arange(3))).tolist() == [0, 1, 2]


def test_what_counts_as_an_array() -> None:
    assert is_arraylike(np.zeros(1))
    assert is_arraylike(np.float32(1))
    assert not any(map(is_arraylike, [1, 1.0, True, "a", None, [1], (1,), {}]))


@pytest.mark.parametrize(
    "name", ["bool", "int8", "uint64", "float16", "bfloat16", "float8_e5m2", "int4", ">f4", "<i8"]
)
def test_dtype_names_read_back(name: str) -> None:
    dtype = dtype_from(name, "x")
    assert dtype_from(dtype_name(dtype), "x") == dtype
    assert native(dtype).isnative


def test_kinds_and_limits() -> None:
    kinds = {
        name: dtype_kind(dtype_from(name, "x"))
        for name in ("bool", "uint8", "float16", "int4", "float8_e5m2")
    }
    assert list(kinds.values()) == ["bool", "int", "float", "int", "float"]
    assert dtype_kind(np.dtype("U3")) is None
    assert int_bounds(dtype_from("uint4", "x")) == (0, 15)
    bits = [exact_bits(dtype_from(name, "x")) for name in ("float16", "float32", "float64", "bfloat16")]
    assert bits == [11, 24, 53, 8]


def test_without_ml_dtypes_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ml_dtypes":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r'pip install "recollect\[ml-dtypes\]"'):
        dtype_from("bfloat16", "x")
    assert dtype_from("float32", "x") == np.float32


def test_extended_box_is_a_space() -> None:
    space = ExtendedBox(-1, 1, (2,), "bfloat16", seed=0)
    sample = space.sample()
    assert sample in space
    assert sample.astype(np.float32) not in space
    assert sample[:1] not in space
    assert sample + sample.dtype.type(4) not in space
    assert space != ExtendedBox(-1, 2, (2,), "bfloat16")
    assert space != ExtendedBox(-1, 1, (3,), "bfloat16")
    assert eval(repr(space)) == space
    assert space.from_jsonable(space.to_jsonable([sample]))[0].tolist() == sample.tolist()
    assert not space.is_np_flattenable
    with pytest.raises(ValueError, match="no mask"):
        space.sample(mask=1)


def test_extended_box_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="low must not be above high"):
        ExtendedBox(2, 1, (2,), "bfloat16")
    with pytest.raises(ValueError, match="dtype must be one of ml_dtypes, got float32"):
        ExtendedBox(0, 1, (2,), "float32")


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn"]
)
def test_unbounded_extended_boxes_sample_within_themselves(name: str) -> None:
    space = ExtendedBox(dtype=name, shape=(50,), seed=1)
    assert space.sample() in space


def test_extended_boxes_in_gymnasiums_vector_functions() -> None:
    from gymnasium.vector import utils

    space = ExtendedBox(-1, 1, (2,), "bfloat16", seed=0)
    items = [space.sample() for _ in range(3)]
    out = utils.concatenate(space, items, utils.create_empty_array(space, 3))
    assert out in utils.batch_space(space, 3)
    assert all(a in space for a in utils.iterate(utils.batch_space(space, 3), out))

"""Backends: conversion there and back, devices, and nested data."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from recollect.backends import Backend, backend_of, get_backend, map_arrays, move
from recollect.backends.numpy import NumpyBackend
from recollect.errors import MissingExtraError
from recollect.spaces import compile_layout
from recollect.testing.spaces import CATALOGUE, assert_same, max_lengths_of, samples, stack

NAMES = ["numpy", "torch", "jax"]
EVERY = pytest.mark.parametrize("name", NAMES)
DTYPES = (
    "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 bfloat16 float8_e4m3fn float8_e5m2".split()
)
WIDE = ["int64", "uint64", "float64"]


@pytest.fixture
def jax_x64() -> Any:
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def array_of(dtype: str, shape: tuple[int, ...] = (2, 3)) -> np.ndarray[Any, Any]:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) % 2).astype(kind)


@EVERY
def test_a_backend_is_one(name: str) -> None:
    pytest.importorskip(name)
    backend = get_backend(name)
    assert isinstance(backend, Backend)
    assert backend.name == name
    assert get_backend(backend) is backend
    assert get_backend(name) == backend
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert backend.same_device(backend.default_device, "cpu")


def test_none_is_numpy() -> None:
    assert get_backend(None).name == "numpy"


@pytest.mark.parametrize("spec", ["tensorflow", "Numpy", ""])
def test_an_unknown_name_is_a_value_error_naming_those_there_are(spec: str) -> None:
    with pytest.raises(ValueError, match=r"\['numpy', 'torch', 'jax'\]"):
        get_backend(spec)


@pytest.mark.parametrize("spec", [3, np, NumpyBackend, object()])
def test_what_is_no_backend_is_a_type_error(spec: Any) -> None:
    with pytest.raises(TypeError, match="^backend: "):
        get_backend(spec)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_missing_package_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "recollect\[{name}\]"'):
        get_backend(name)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_every_dtype_goes_there_and_back(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip(name)
    backend = get_backend(name)
    array = array_of(dtype, shape)
    there = backend.from_numpy(array.copy())
    assert backend.is_array(there)
    assert backend_of(there) == backend
    assert str(there.dtype).removeprefix("torch.") == dtype
    back = backend.to_numpy(there)
    assert_same(np.asarray(back), array)


@EVERY
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.usefixtures("jax_x64")
def test_64_bit_values_stay_exact(name: str, dtype: str) -> None:
    pytest.importorskip(name)
    backend = get_backend(name)
    array = np.array([0, 2**53 + 1, 2**63 - 1]).astype(dtype)
    assert_same(np.asarray(backend.to_numpy(backend.from_numpy(array.copy()))), array)


@pytest.mark.parametrize("dtype", WIDE)
def test_jax_never_narrows(dtype: str) -> None:
    pytest.importorskip("jax")
    for value in (np.zeros(3, dtype), np.dtype(dtype).type(1)):
        with pytest.raises(ValueError, match=f"got {dtype}, which it would make .*jax_enable_x64"):
            get_backend("jax").from_numpy(value)


@EVERY
def test_numpy_scalars_become_0d_arrays(name: str) -> None:
    pytest.importorskip(name)
    backend = get_backend(name)
    there = backend.from_numpy(np.float32(1.5))
    assert there.shape == ()
    assert float(there) == 1.5


def test_tensors_share_the_arrays_memory() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16", "bool"):
        array = array_of(dtype)
        tensor = get_backend("torch").from_numpy(array)
        array[0, 0] = 1
        assert tensor[0, 0] == torch.ones((), dtype=tensor.dtype)


def test_torch_takes_arrays_that_it_cannot_share() -> None:
    pytest.importorskip("torch")
    backend = get_backend("torch")
    frozen = np.arange(3)
    frozen.flags.writeable = False
    tensor = backend.from_numpy(frozen)
    tensor[0] = 9
    assert frozen.tolist() == [0, 1, 2]
    assert backend.from_numpy(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert backend.from_numpy(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="^dtype: must be one that torch has, got int4"):
        backend.from_numpy(np.zeros(2, ml_dtypes.int4))


def test_tensors_with_gradients_are_read() -> None:
    torch = pytest.importorskip("torch")
    assert get_backend("torch").to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_devices_of_numpy() -> None:
    backend = get_backend("numpy")
    assert backend.device_of(np.zeros(1)) == "cpu"
    assert backend.as_device(None) == backend.as_device("cpu") == "cpu"
    for call in (backend.as_device, lambda d: backend.from_numpy(np.zeros(1), d)):
        with pytest.raises(ValueError, match="^device: must be 'cpu' for numpy, got 'cuda'"):
            call("cuda")


def test_devices_of_torch() -> None:
    torch = pytest.importorskip("torch")
    backend = get_backend("torch")
    assert backend.device_of(torch.zeros(1)) == torch.device("cpu")
    assert backend.same_device("cpu", torch.device("cpu"))
    assert not backend.same_device("cpu", "meta")
    assert backend.from_numpy(np.zeros(2), "meta").device.type == "meta"
    for device in ("nowhere", 1.5):
        with pytest.raises(ValueError, match="^device: must be one that torch knows"):
            backend.as_device(device)


def test_devices_of_jax() -> None:
    jax = pytest.importorskip("jax")
    backend = get_backend("jax")
    cpu = jax.devices("cpu")[0]
    assert backend.device_of(backend.from_numpy(np.zeros(2, "f4"), "cpu:0")) == cpu
    assert backend.same_device("cpu", cpu)
    for device in ("nowhere", "cpu:99", "cpu:x", 3):
        with pytest.raises(ValueError, match="^device: must be"):
            backend.as_device(device)


@pytest.mark.parametrize("x", [1, 1.0, "a", None, [1], np.str_("a")])
def test_what_is_no_array_has_no_backend(x: Any) -> None:
    with pytest.raises(TypeError, match="must be an array of numpy, torch or jax"):
        backend_of(x)


def test_finding_a_backend_loads_none() -> None:
    code = (
        "import sys, numpy as np; from recollect.backends import backend_of, move;"
        "from recollect.backends.registry import find_backend;"
        "assert backend_of(np.zeros(1)).name == 'numpy'; move({'x': np.zeros(1)}, 'numpy');"
        "Foreign = type('Foreign', (), {'__dlpack__': None}); assert find_backend(Foreign()) is None;"
        "sys.exit(str(bad) if (bad := {'torch', 'jax'} & set(sys.modules)) else 0)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True, timeout=50
    )


def test_map_arrays_changes_arrays_and_leaves_the_rest() -> None:
    pair = namedtuple("pair", "x y")
    strings, objects = np.array(["a"]), np.array([None])
    data = {
        "b": np.ones(2),
        "a": (np.int64(1), "text", [None, 3]),
        "n": pair(np.ones(1), 2),
        "s": [strings, objects],
    }
    mapped = map_arrays(lambda x: -x, data)
    assert list(mapped) == list(data)
    assert mapped["b"].tolist() == [-1, -1]
    assert mapped["a"] == (-1, "text", [None, 3])
    assert type(mapped["n"]) is pair
    assert mapped["n"].y == 2
    assert mapped["s"][0] is strings
    assert mapped["s"][1] is objects
    assert data["b"].tolist() == [1, 1]


@EVERY
@pytest.mark.parametrize("other", NAMES)
def test_move_goes_between_all_backends(name: str, other: str) -> None:
    pytest.importorskip(name)
    pytest.importorskip(other)
    data = {"x": np.arange(3, dtype="f4"), "t": ("text", np.bool_(True)), "b": array_of("bfloat16")}
    there = move(data, name)
    again = move(there, other, "cpu")
    assert backend_of(again["x"]).name == other
    assert again["t"][0] == "text"
    back = move(again, None)
    assert_same(back["x"], data["x"])
    assert_same(back["b"], data["b"])
    assert bool(back["t"][1]) is True


def test_move_reads_arrays_of_other_libraries() -> None:
    class Foreign:
        def __dlpack__(self, **kwargs: Any) -> Any:
            return np.arange(3).__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return np.arange(3).__dlpack_device__()

    assert_same(move({"x": Foreign()}), {"x": np.arange(3)})


def test_move_passes_on_what_is_there_already() -> None:
    torch = pytest.importorskip("torch")
    tensor, array = torch.ones(2), np.ones(2)
    assert move({"x": tensor}, "torch")["x"] is tensor
    assert move({"x": array})["x"] is array
    assert move(tensor, "torch", "meta").device.type == "meta"
    with pytest.raises(ValueError, match="^device: "):
        move({}, "numpy", "cuda")


@pytest.mark.usefixtures("jax_x64")
@EVERY
@pytest.mark.parametrize(
    "space", sorted(CATALOGUE.keys() - {"scalar-int4", "scalar-uint4"})
)  # torch has none
def test_batches_of_every_space_move_there_and_are_written_back(name: str, space: str) -> None:
    pytest.importorskip(name)
    layout = compile_layout(CATALOGUE[space], max_lengths_of(space))
    n, arrays = layout.encode_batch(stack(layout.space, samples(layout.space, 3)))
    batch = layout.decode_batch(arrays, n)
    count, back = layout.encode_batch(move(map_arrays(np.array, batch), name))
    assert count == n
    for a, b in zip(arrays, back, strict=True):
        assert_same(np.asarray(b), a)

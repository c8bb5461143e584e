"""SharedWeightSync: any dtype bit for bit, one version for all, refusals that change nothing."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.process.killing import in_child, killed_at, steps

import recollect as rc
from recollect._core import exact_parts
from recollect.ipc import parameters
from recollect.ipc.weight_sync import SharedWeightSync, weights_nbytes

torch = pytest.importorskip("torch")

DTYPES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64".split()


def numpy_dict(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    values = {f"x.{d}": (rng.random((3, 4)) * 100).astype(d) for d in DTYPES}
    return {**values, "scalar": np.array(rng.random()), "none": np.zeros((0, 3), np.float32)}


def torch_dict(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    made = {"w": torch.randn(5, 3, generator=generator), "n": torch.tensor(seed), "flag": torch.tensor(True)}
    for name in ("float16", "bfloat16", "float64", "int64", "float8_e4m3fn", "complex64"):
        made[name] = torch.randn(4, 2, generator=generator).mul(50).to(getattr(torch, name))
    made["bf0"] = torch.randn((), generator=generator).to(torch.bfloat16)
    return made


def zeros(values: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.zeros_like(v) if hasattr(v, "detach") else np.zeros_like(v) for k, v in values.items()}


def bits(x: Any) -> bytes:
    if hasattr(x, "detach"):
        return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bytes(np.ascontiguousarray(x).tobytes())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(bits(a[k]) == bits(b[k]) for k in a)


# -- bit for bit


@pytest.mark.parametrize("make", [numpy_dict, torch_dict])
def test_any_dtype_survives(make: Callable[[int], dict[str, Any]]) -> None:
    first, second = make(0), make(1)
    with SharedWeightSync.from_state_dict(first) as sync:
        out = zeros(first)
        assert (sync.version, sync.read_weights_into(out)) == (1, 1) and same(out, first)
        sync.write_weights(second)
        assert (sync.version, sync.read_weights_into(out)) == (2, 2) and same(out, second)


def test_numpy_and_torch_are_alike() -> None:
    values = {"w": np.float32([[1, 2], [3, 4]]), "n": np.array(5)}
    with SharedWeightSync.from_state_dict(values) as sync:
        tensors = {"w": torch.zeros(2, 2), "n": torch.tensor(0)}
        sync.read_weights_into(tensors)
        assert tensors["w"].tolist() == [[1, 2], [3, 4]] and tensors["n"].item() == 5
        sync.write_weights({"w": tensors["w"] * 2, "n": np.array(6)})
        sync.read_weights_into(values)
        assert values["w"].tolist() == [[2, 4], [6, 8]] and values["n"] == 6


def test_a_modules_own_parameters() -> None:
    net, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with SharedWeightSync.from_state_dict(net.state_dict()) as sync:
        assert sync.read_weights_into(dict(other.named_parameters())) == 1
        x = torch.randn(2, 4)
        assert torch.equal(net(x), other(x)) and other.weight.requires_grad


def test_strided_values_both_ways() -> None:
    source = {"t": torch.arange(6.0).reshape(2, 3).t(), "n": np.arange(6.0).reshape(2, 3).T}
    with SharedWeightSync.from_state_dict(source) as sync:
        out = {"t": torch.zeros(2, 3).t(), "n": np.zeros((2, 3)).T}
        sync.read_weights_into(out)
        assert torch.equal(out["t"], source["t"]) and np.array_equal(out["n"], source["n"])


def test_strided_and_contiguous_tensors_mean_the_same() -> None:
    turned, plain = torch.arange(6.0).reshape(2, 3).t(), torch.zeros(3, 2)
    with SharedWeightSync.from_state_dict({"t": turned}) as sync:
        sync.read_weights_into({"t": plain})
        assert torch.equal(plain, turned)
        sync.write_weights({"t": plain + 1})
        sync.read_weights_into({"t": turned})
        assert torch.equal(turned, plain + 1)


def test_tensors_whose_memory_is_not_their_value() -> None:
    for z in (torch.tensor([1 + 2j]), torch.tensor([1 + 2j, 3 - 4j])):  # contiguous, and not
        with SharedWeightSync.from_state_dict({"w": z.conj().imag}) as sync:
            out, there = torch.zeros(len(z)), torch.zeros_like(z)
            sync.read_weights_into({"w": out})
            assert there.conj().imag.is_neg() and torch.equal(out, -z.imag)
            sync.read_weights_into({"w": there.conj().imag})
            assert torch.equal(there.imag, z.imag)
        with SharedWeightSync.from_state_dict({"z": z.conj()}) as sync:
            sync.read_weights_into({"z": there})
            assert torch.equal(there, z.conj())
            sync.read_weights_into({"z": there.conj()})
            assert torch.equal(there, z)


def test_any_mapping_will_do() -> None:
    written = {"w": torch.arange(3.0), "n": np.array(4)}
    with SharedWeightSync.from_state_dict(MappingProxyType(written)) as sync:
        out = zeros(written)
        assert sync.read_weights_into(UserDict(out)) == 1 and same(out, written)


class Unlisted(torch.Tensor):
    """A tensor of a library without a table of C functions."""

    __dlpack_c_exchange_api__ = None


WANTED = [("w", (2,), np.dtype("float32"), "float32"), ("t", (2, 3), np.dtype("float32"), "float32")]
NAMES = {torch.float32: "float32", torch.float64: "float64"}


def addresses(parts: list[Any] | None) -> list[int] | None:
    """Of tensors; each comes with the tensor, which keeps its memory."""
    return parts and [address for address, _ in parts]


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Unlisted])
def test_exact_arrays_and_tensors_are_copied_as_they_are(kind: type) -> None:
    w, t = np.zeros(2, "float32"), torch.zeros(2, 3)
    mine = t.as_subclass(kind)
    assert type(mine) is kind and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    parts = exact_parts({"w": w, "t": mine}, WANTED, NAMES)
    assert parts is not None and parts[0] is w and parts[1][0] == t.data_ptr() and parts[1][1] is mine
    for other in (
        t[:1],
        t[0],
        t[None],
        torch.zeros(2, 4),
        torch.zeros(3, 3),
        torch.zeros(3, 2),
        t.double(),
        t.half(),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(3, 2).T,
        torch.zeros(4, 3)[::2],
        torch.zeros(9).as_strided((2, 3), (3, 2)),
        t.to("meta"),
        torch._neg_view(t),
    ):
        assert exact_parts({"w": w, "t": other.as_subclass(kind)}, WANTED, NAMES) is None, other
    assert exact_parts({"w": w, "t": t.to_sparse()}, WANTED, NAMES) is None
    assert exact_parts({"w": w, "t": np.zeros((2, 3))}, WANTED, NAMES) is None
    assert exact_parts({"w": w, "t": [0, 0]}, WANTED, NAMES) is None
    assert exact_parts({"w": w}, WANTED, NAMES) is None
    assert exact_parts(UserDict(w=w, t=mine), WANTED, NAMES) is None


@pytest.mark.parametrize("kind", [torch.Tensor, Unlisted])
def test_steps_that_are_never_taken_are_no_stride(kind: type) -> None:
    for t in (torch.zeros(9)[::9], torch.zeros(5, 1).T, torch.zeros(3, 4)[:, :0], torch.tensor(3.0)):
        wanted = [("t", tuple(t.shape), np.dtype("float32"), "float32")]
        assert addresses(exact_parts({"t": t.as_subclass(kind)}, wanted, NAMES)) == [t.data_ptr()]


class Table(ctypes.Structure):
    """A table of C functions as DLPack lays it out, of which one is used."""

    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3), ("look", ctypes.c_void_p), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class Told(ctypes.Structure):
    """What such a table tells of a tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    ]  # fmt: skip


CPU, CUDA, PINNED, METAL = 1, 2, 3, 8


@pytest.mark.parametrize(
    ("device", "major", "name", "ready"),
    [
        (CPU, 1, b"dlpack_exchange_api", "told"),
        (PINNED, 1, b"dlpack_exchange_api", "told"),
        (CUDA, 1, b"dlpack_exchange_api", None),
        (METAL, 1, b"dlpack_exchange_api", None),
        (CPU, 2, b"dlpack_exchange_api", "asked"),
        (CPU, 1, b"another", "asked"),
        (CPU, 0, b"dlpack_exchange_api", "asked"),
        (0, 1, b"dlpack_exchange_api", None),
    ],
)
def test_a_table_says_where_a_tensor_is_if_it_is_one_that_is_known(
    device: int, major: int, name: bytes, ready: str | None
) -> None:
    numbers = (ctypes.c_int64 * 2)(2, 3), (ctypes.c_int64 * 2)(3, 1)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Told))
    def look(tensor: int, told: Any) -> int:
        places = [ctypes.addressof(n) for n in numbers]
        told[0] = Told(4096, (device or CPU, 0), 2, 0, places[0], places[1], 64)
        return 0 if device else -1

    table = Table(major, 0, None, (None, None, None), ctypes.cast(look, ctypes.c_void_p), None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kind = type(
        "Listed", (torch.Tensor,), {"__dlpack_c_exchange_api__": new(ctypes.addressof(table), name, None)}
    )
    t = torch.zeros(2, 3)
    parts = addresses(exact_parts({"t": t.as_subclass(kind)}, WANTED[1:], NAMES))
    assert parts == {"told": [4096 + 64], "asked": [t.data_ptr()], None: None}[ready]
    both = addresses(
        exact_parts({"w": t.as_subclass(kind), "t": t}, [("w", *WANTED[1][1:]), WANTED[1]], NAMES)
    )
    assert both == (parts and [*parts, t.data_ptr()])  # a table is of one type


@pytest.mark.parametrize(
    "w",
    [
        np.float32([7, 8]),
        np.float32([7, 0, 8])[::2],
        torch.tensor([7.0, 0, 8])[::2],
        torch.tensor([7.0, 8], dtype=torch.float64),
        np.float16([7, 8]),
    ],
    ids=["exact", "strided array", "strided tensor", "other tensor", "other array"],
)
def test_version_zero_touches_nothing(w: Any) -> None:
    with SharedWeightSync({"w": (2,), "n": ((), "int64")}, cast=True) as sync:
        out = {"w": w, "n": np.array(9)}
        assert (sync.version, sync.read_weights_into(out)) == (0, 0)
        assert out["w"].tolist() == [7, 8] and out["n"] == 9


def test_declared_shapes_and_dtypes() -> None:
    shapes = {
        "a": (2, 3),
        "b": ((4,), "int16"),
        "c": ((2,), torch.bfloat16),
        "d": 3,
        "e": ((2,), np.uint8),
        "f": (2, 2),
    }
    with SharedWeightSync(shapes, dtypes={"f": "float64"}) as sync:
        found = [(p.name, p.shape, p.dtype) for p in sync._params]
    assert found == [("a", (2, 3), "float32"), ("b", (4,), "int16"), ("c", (2,), "bfloat16"), ("d", (3,), "float32"),
                     ("e", (2,), "uint8"), ("f", (2, 2), "float64")]  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "kwargs", "error"),
    [
        ({"a": (-1,)}, {}, rc.SchemaError),
        ({"a": "xy"}, {}, rc.SchemaError),
        ({1: (2,)}, {}, rc.SchemaError),
        ({"a": ((2,), "object")}, {}, TypeError),
        ({"a": (2,)}, {"dtypes": {"b": "int8"}}, rc.SchemaError),
        ({}, {}, rc.SchemaError),
        ({"a": (2,)}, {"exclude": "*"}, rc.SchemaError),
        (None, {}, rc.SchemaError),
        (["a"], {}, rc.SchemaError),
    ],
)
def test_bad_declarations(shapes: Any, kwargs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        SharedWeightSync(shapes, **kwargs)


def test_nothing_to_share_is_said_with_its_reason() -> None:
    with pytest.raises(rc.SchemaError, match="must name a parameter to share, got none$"):
        SharedWeightSync.from_state_dict({})
    with pytest.raises(rc.SchemaError, match=r"got none that exclude=\['w', 'n\*', 'z'\] does not leave out"):
        SharedWeightSync.from_state_dict(declared(), exclude=["w", "n*", "z"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "got NoneType$"),
        ("abc", "got str$"),
        ([("w", 1), ("n", 2), ("z", 3)], "got list$"),
        (torch.nn.Linear(1, 1), r"got Linear; pass its state_dict\(\)"),
    ],
)
def test_what_is_no_state_dict_is_refused(given: Any, said: str) -> None:
    with SharedWeightSync.from_state_dict(declared()) as sync:
        for call in (sync.write_weights, sync.read_weights_into, SharedWeightSync.from_state_dict):
            with pytest.raises(rc.SchemaError, match="state_dict: must be a mapping of names, " + said):
                call(given)
        assert sync.version == 1


# -- refusals


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "missing": (lambda d: d.pop("w"), rc.MissingLeafError, "w: must be in"),
    "undeclared": (lambda d: d.update(extra=np.zeros(1)), rc.SchemaError, "extra: is not declared"),
    "shape": (
        lambda d: d.update(w=np.zeros((3, 2), "f4")),
        rc.SchemaError,
        r"w: shape must be \(2, 3\), got \(3, 2\)",
    ),
    "dtype": (lambda d: d.update(w=np.zeros((2, 3))), rc.DtypeError, "w: dtype must be float32, got float64"),
    "another kind": (
        lambda d: d.update(w=np.zeros((2, 3), int)),
        rc.DtypeError,
        r"w: dtype must be float32, got int64; it is of another kind: convert it, or declare its dtype",
    ),
    "byte order": (
        lambda d: d.update(w=np.zeros((2, 3), ">f4")),
        rc.DtypeError,
        "w: dtype must be float32, got >f4",
    ),
    "last one": (lambda d: d.update(z=np.zeros(2, "f4")), rc.SchemaError, "z: shape"),
    "no array": (lambda d: d.update(w=[[0.0] * 3] * 2), rc.SchemaError, "w: must be an array"),
}


def as_tensors(values: dict[str, Any]) -> None:
    """Turn what can be a tensor into one."""
    for name, x in values.items():
        if isinstance(x, np.ndarray) and x.dtype.isnative:
            values[name] = torch.from_numpy(x)


def declared() -> dict[str, Any]:
    return {"w": np.ones((2, 3), "f4"), "n": np.array(1), "z": np.ones(1, "f4")}


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("what", WRONG)
def test_a_refused_write_changes_nothing(what: str, tensors: bool) -> None:
    change, error, text = WRONG[what]
    with SharedWeightSync.from_state_dict(declared()) as sync:
        bad = {k: np.asarray(v * 2) for k, v in declared().items()}
        change(bad)
        if tensors:
            as_tensors(bad)
        with pytest.raises(error, match=text):
            sync.write_weights(bad)
        out = zeros(declared())
        assert sync.read_weights_into(out) == 1 and same(out, declared())


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize("what", WRONG)
def test_a_refused_read_touches_nothing(what: str, tensors: bool) -> None:
    change, error, text = WRONG[what]
    with SharedWeightSync.from_state_dict(declared()) as sync:
        bad = {k: np.asarray(v * 5) for k, v in declared().items()}
        change(bad)
        if tensors:
            as_tensors(bad)
        before = deepcopy(bad)
        with pytest.raises(error, match=text):
            sync.read_weights_into(bad)
        assert all(np.array_equal(before[k], bad[k]) for k in bad)


def test_missing_is_a_key_error_and_dtype_a_type_error() -> None:
    with SharedWeightSync({"w": (1,)}) as sync:
        with pytest.raises(KeyError):
            sync.write_weights({})
        with pytest.raises(TypeError):
            sync.write_weights({"w": np.zeros(1)})


def test_a_read_only_destination_is_refused() -> None:
    with SharedWeightSync.from_state_dict(declared()) as sync:
        out = zeros(declared())
        out["z"].setflags(write=False)
        with pytest.raises(rc.SchemaError, match="z: must be writable in place, got a read-only array"):
            sync.read_weights_into(out)
        assert not out["w"].any()


def test_not_strict_ignores_what_is_not_declared() -> None:
    with SharedWeightSync.from_state_dict(declared(), strict=False) as sync:
        more = {**declared(), "extra": np.zeros(1)}
        sync.write_weights(more)
        assert sync.read_weights_into(more) == 2
        with pickle.loads(pickle.dumps(sync)) as again:
            assert again.read_weights_into(more) == 2


# -- exclude and cast


def test_excluded_names_are_neither_written_nor_read() -> None:
    values = {"actor.w": np.ones(2, "f4"), "noise.scale": np.ones(3, "f4"), "noise.n": np.array(4)}
    with SharedWeightSync.from_state_dict(values, exclude=("noise.*",)) as sync:
        mine = {"actor.w": np.zeros(2, "f4"), "noise.scale": np.full(3, 7.0), "noise.n": np.array(8)}
        assert sync.read_weights_into(mine) == 1
        assert (
            mine["actor.w"].tolist() == [1, 1]
            and mine["noise.scale"].tolist() == [7] * 3
            and mine["noise.n"] == 8
        )
        sync.write_weights({"actor.w": np.zeros(2, "f4")})  # absent is as good
        with pickle.loads(pickle.dumps(sync)) as again:
            assert again.read_weights_into(mine) == 2 and mine["noise.n"] == 8


def test_declared_names_may_be_excluded() -> None:
    with SharedWeightSync({"w": (2,), "noise.s": (3,)}, exclude=("noise.*",)) as sync:
        sync.write_weights({"w": np.ones(2, "f4"), "noise.s": np.ones(3, "f4")})
        mine = {"w": np.zeros(2, "f4"), "noise.s": np.full(3, 7, "f4")}
        assert sync.read_weights_into(mine) == 1
        assert mine["w"].tolist() == [1, 1] and mine["noise.s"].tolist() == [7, 7, 7]


def test_a_cast_of_integers_that_do_not_fit_is_no_read() -> None:
    with SharedWeightSync({"w": (2,), "n": ((2,), "int64")}, cast=True) as sync:
        sync.write_weights({"w": np.ones(2, "f4"), "n": np.array([1, 70000])})
        for small in (np.zeros(2, np.int16), torch.zeros(2, dtype=torch.int16), np.zeros(2, np.uint8)):
            out = {"w": np.zeros(2, "f4"), "n": small}
            with pytest.raises(rc.SchemaError, match=r"n: values must fit u?int\d+, got int64"):
                sync.read_weights_into(out)
            assert out["w"].tolist() == [0, 0] and small.tolist() == [0, 0]
        sync.write_weights({"w": np.ones(2, "f4"), "n": np.array([1, -70])})
        with pickle.loads(pickle.dumps(sync)) as again:  # which casts too
            assert again.read_weights_into({"w": np.zeros(2), "n": small.astype(np.int8)}) == 2
            out["n"] = np.zeros(2, np.int16)
            assert again.read_weights_into(out) == 2 and out["n"].tolist() == [1, -70]
            assert out["w"].tolist() == [1, 1]


def test_cast_within_a_kind() -> None:
    with SharedWeightSync({"w": (2,), "n": ((2,), "int16"), "b": ((2,), "bfloat16")}, cast=True) as sync:
        sync.write_weights({"w": np.array([0.5, 1.5]), "n": np.array([1, 2]), "b": torch.tensor([1.0, 2.0])})
        out = {
            "w": torch.zeros(2, dtype=torch.float16),
            "n": np.zeros(2, np.int64),
            "b": np.zeros(2, np.float64),
        }
        sync.read_weights_into(out)
        assert (
            out["w"].tolist() == [0.5, 1.5]
            and out["n"].tolist() == [1, 2]
            and out["b"].tolist() == [1.0, 2.0]
        )
        good = {"w": np.zeros(2, "f4"), "n": np.zeros(2, "i2"), "b": torch.zeros(2, dtype=torch.bfloat16)}
        with pytest.raises(rc.DtypeError, match="n: dtype must be int16, got float64; it is of another kind"):
            sync.write_weights({**good, "n": np.zeros(2)})
        for wrong in (np.array([1, 70000]), torch.tensor([1, 70000])):
            with pytest.raises(rc.SchemaError, match="n: values must fit int16"):
                sync.write_weights({**good, "n": wrong})
        assert sync.version == 1


# -- devices, without one: the tensors of a device are those that is_on_device says


def test_device_tensors_come_in_one_transfer_per_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"w{i}": torch.randn(3, i + 1) for i in range(4)} | {
        "n": torch.tensor(3),
        "h": torch.randn(2).bfloat16(),
    }
    transfers: list[Any] = []
    to = torch.Tensor.to

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        transfers.append(args)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(SharedWeightSync, "_ready", lambda *_: None)  # what is on a device is never ready
    monkeypatch.setattr(parameters, "is_on_device", parameters.is_tensor)
    monkeypatch.setattr(torch.Tensor, "to", counted)
    with SharedWeightSync({k: (tuple(v.shape), v.dtype) for k, v in values.items()}) as sync:
        sync.write_weights(values)
        assert len(transfers) == 3
        out = zeros(values)
        assert sync.read_weights_into(out) == 1 and same(out, values)
        assert len(transfers) == 6


# -- attaching


@pytest.mark.process
def test_attach_by_name() -> None:
    shapes = {"w": (2, 3), "n": ((), "int64")}
    with SharedWeightSync(shapes, shm_name="only a label", lock=object()) as sync:
        with SharedWeightSync(shapes, create=False, shm_name=sync.name) as other:
            sync.write_weights({"w": np.ones((2, 3), "f4"), "n": np.array(3)})
            assert other.version == 1
        for wrong in ({"w": (3, 2), "n": ((), "int64")}, {"w": (2, 3)}, {**shapes, "z": (1,)}, {"v": (2, 3)}):
            with pytest.raises(rc.AttachError, match="param_shapes: must be"):
                SharedWeightSync(wrong, create=False, shm_name=sync.name)
        assert sync.version == 1
    with pytest.raises(ValueError, match="shm_name: is needed"):
        SharedWeightSync(shapes, create=False)


def test_a_shape_alone_attaches_to_any_dtype() -> None:
    """A network with BatchNorm has an integer count; whoever attaches knows the shapes."""
    weights = {"w": np.ones((2, 3), "float32"), "n": np.array(7), "half": np.ones(4, "float16")}
    shapes = {name: x.shape for name, x in weights.items()}
    with SharedWeightSync.from_state_dict(weights) as sync:
        with SharedWeightSync(shapes, create=False, shm_name=sync.name) as other:
            mine = {name: np.zeros_like(x) for name, x in weights.items()}
            assert other.read_weights_into(mine) == 1 and mine["n"] == 7
        with SharedWeightSync(shapes, create=False, shm_name=sync.name, dtypes={"n": "int64"}) as other:
            assert other.version == 1
        with pytest.raises(rc.AttachError, match=r"got n: \(\) of int32 where it has n: \(\) of int64"):
            SharedWeightSync(shapes | {"n": ((), "int32")}, create=False, shm_name=sync.name)
        with pytest.raises(rc.AttachError, match=r"got w: \(3, 2\) where it has w: \(2, 3\) of float32"):
            SharedWeightSync(shapes | {"w": (3, 2)}, create=False, shm_name=sync.name)
        sync.cleanup()


def test_the_handle_stays_small() -> None:
    values = {f"encoder.layers.{i}.attention.weight": np.zeros((2, 2), "f4") for i in range(300)}
    with SharedWeightSync.from_state_dict(values, exclude=("x" * 50, "y" * 50)) as sync:
        assert len(pickle.dumps(sync)) < 300 and len(sync.name) < 300
        with pickle.loads(pickle.dumps(sync)) as again:
            assert again.read_weights_into(values) == 1
        assert sync.nbytes == weights_nbytes(dict.fromkeys(values, (2, 2)), exclude=("x" * 50, "y" * 50))
        assert sync.nbytes == os.fstat(sync._box.segment().fd).st_size


@pytest.mark.process
def test_an_unrelated_process_without_torch() -> None:
    script = (
        "import sys, numpy as np; sys.modules['torch'] = None; import recollect as rc;"
        "s = rc.ipc.SharedWeightSync({'w': (2,)}, create=False, shm_name=sys.argv[1]);"
        "d = {'w': np.zeros(2, 'f4')}; print(s.read_weights_into(d), d['w'].tolist(), s.wait_newer(1, 0.0))"
    )
    with SharedWeightSync.from_state_dict({"w": torch.tensor([1.0, 2.0])}) as sync:
        done = subprocess.run(
            [sys.executable, "-c", script, sync.name], capture_output=True, text=True, timeout=40, check=True
        )
        assert done.stdout.strip() == "1 [1.0, 2.0] False"


@pytest.mark.process
def test_one_writer_and_a_killed_one() -> None:
    values = {"w": np.zeros(3000), "v": np.zeros(10)}

    def numbered(n: int) -> dict[str, Any]:
        return {"w": np.full(3000, float(n)), "v": np.full(10, float(n))}

    with SharedWeightSync.from_state_dict(values) as sync:

        def refused() -> None:
            with pytest.raises(rc.LaneBusyError):
                sync.write_weights(numbered(1))

        in_child(refused)
        sync.release_lane()
        last = 0
        for step in steps():
            killed = killed_at(step, lambda step=step: sync.write_weights(numbered(step + 1)))
            out = zeros(values)
            version = sync.read_weights_into(out)
            n = int(out["w"][0])
            assert same(out, numbered(n)) and n in (last, step + 1) and version == sync.version
            last = n
            if not killed:
                assert n == step + 1
                break


@pytest.mark.process
def test_closing() -> None:
    sync = SharedWeightSync.from_state_dict(declared())
    other = pickle.loads(pickle.dumps(sync))
    sync.cleanup()
    sync.cleanup()
    for s in (sync, other):
        for call in (lambda: s.version, lambda: s.write_weights(declared()), lambda: s.read_weights_into(declared()),  # noqa: B023
                     lambda: s.wait_newer(0, 0.0), s.stats, lambda: s.name, lambda: s.nbytes,  # noqa: B023
                     lambda: pickle.dumps(s)):  # noqa: B023  # fmt: skip
            with pytest.raises(rc.ClosedError):
                call()
    other.close()
    other.close()


@pytest.mark.process
def test_a_failed_first_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(SharedWeightSync, "write_weights", fail)
    with pytest.raises(RuntimeError, match="no"):
        SharedWeightSync.from_state_dict(declared())


def test_stats() -> None:
    with SharedWeightSync.from_state_dict(declared()) as sync:
        sync.read_weights_into(declared())
        s = sync.stats()
        assert (s.version, s.n_params, s.param_nbytes, s.writer_pid, s.reads) == (1, 3, 36, os.getpid(), 1)
        with pytest.raises(AttributeError):
            s.version = 2  # type: ignore[misc]


def test_names_may_be_left_out_by_the_one_that_attaches_alone() -> None:
    with SharedWeightSync({"w": (2,)}) as learner:
        attached = SharedWeightSync(
            {"w": (2,), "noise": (3,)}, create=False, shm_name=learner.name, exclude=("noise",)
        )
        with attached:
            learner.write_weights({"w": np.ones(2, np.float32)})
            mine = {"w": np.zeros(2, np.float32), "noise": np.full(3, 7, np.float32)}
            assert attached.read_weights_into(mine) == 1
            assert mine["w"].tolist() == [1, 1] and mine["noise"].tolist() == [7, 7, 7]


def test_a_first_write_that_fails_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SharedWeightSync] = []

    def refuse(self: SharedWeightSync, state_dict: Any) -> None:
        made.append(self)
        raise RuntimeError("refused")

    monkeypatch.setattr(SharedWeightSync, "write_weights", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        SharedWeightSync.from_state_dict({"w": np.ones(2, np.float32)})
    with pytest.raises(rc.ClosedError):
        made[0].version


@pytest.mark.parametrize("method", ["publish", "latest"])
def test_a_tensor_that_is_copied_lives_though_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The core has its address alone, and copies without the GIL."""
    torch = pytest.importorskip("torch")
    weights = {"w": torch.ones(3)}
    sync = rc.ipc.SharedWeightSync.from_state_dict(weights)
    copied, real, lives = weakref.ref(weights["w"]), getattr(sync._box, method), []

    def meanwhile(ready: list[Any]) -> int:
        weights["w"] = torch.zeros(3)
        lives.append(copied() is not None)
        return int(real(ready))

    monkeypatch.setattr(sync._box, method, meanwhile)
    sync.write_weights(weights) if method == "publish" else sync.read_weights_into(weights)
    assert lives == [True]
    sync.cleanup()

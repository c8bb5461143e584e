"""native_h2d: never raises when asked whether it is there, checks what it copies, calls the runtime once."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recollect.ipc.replay_pipelines import native_h2d

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_h2d, "_found", [])


def test_its_absence_is_told_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with monkeypatch.context() as patch:
        patch.setattr(native_h2d, "_look", lambda: pytest.fail("it looked"))
        assert native_h2d.is_available() is False
    assert native_h2d.ensure_available() is False
    assert "sees no CUDA device" in native_h2d.get_diagnostic()
    monkeypatch.setattr(native_h2d, "_found", [])
    monkeypatch.setattr(native_h2d, "_look", lambda: 1 / 0)
    assert native_h2d.ensure_available() is False
    assert "could not be opened: division by zero" in native_h2d.get_diagnostic()


def test_before_torch_is_loaded_nothing_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(native_h2d.sys.modules, "torch")
        assert native_h2d.ensure_available() is False and "not loaded" in native_h2d.get_diagnostic()
    assert "not loaded" not in native_h2d.get_diagnostic()


@pytest.mark.parametrize(
    ("library", "call"), [("libcudart.so.12", "cudaMemcpyAsync"), ("libamdhip64.so.6", "hipMemcpyAsync")]
)
def test_the_runtime_that_torch_loaded_is_opened(
    library: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inits: list[int] = []
    loaded = SimpleNamespace(is_available=lambda: True, init=lambda: inits.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=loaded))
    maps = f"7f00-7f01 r-xp 0 08:01 5   /lib/libm.so.6\n7f02-7f03 r-xp 0 08:01 6   /a b/{library}\n"
    monkeypatch.setattr(Path, "read_text", lambda self: maps)
    function, opened = SimpleNamespace(), list[str]()
    runtime = SimpleNamespace(**{call: function})
    monkeypatch.setattr(native_h2d.ctypes, "CDLL", lambda path: opened.append(path) or runtime)
    assert native_h2d.ensure_available() and native_h2d._found[0][0] is function
    assert opened == [f"/a b/{library}"] and function.restype is ctypes.c_int
    assert native_h2d.get_diagnostic() == f"{call} of {library}"
    assert inits == [1] == [len(opened)]  # looked for once; torch had loaded it before


def test_a_runtime_that_is_not_mapped_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(is_available=lambda: True, init=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=loaded))
    monkeypatch.setattr(Path, "read_text", lambda self: "7f00-7f01 r-xp 0 08:01 5   /lib/libm.so.6\n")
    assert native_h2d.ensure_available() is False
    assert "no shared CUDA runtime is mapped" in native_h2d.get_diagnostic()


class OnCuda:
    """A CPU tensor that says it is on a device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.device = tensor, torch.device("cuda:0")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class Stream:
    cuda_stream = 77


def test_wrong_tensors_are_refused() -> None:
    good, src = OnCuda(torch.zeros(8)), torch.zeros(8)
    for dst, source, match in (
        (torch.zeros(8), src, "dst: must be on cuda, got cpu"),
        (good, OnCuda(src), "src: must be on cpu, got cuda:0"),
        (OnCuda(torch.zeros(8, 2)[:, 0]), src, "dst: must be contiguous"),
        (good, torch.zeros(8, 2)[:, 0], "src: must be contiguous"),
        (OnCuda(torch.zeros(7)), src, "dst: must have 32 bytes as src, got 28"),
        (OnCuda(torch.zeros(8, dtype=torch.float64)), src, "dst: must have 32 bytes as src, got 64"),
    ):
        with pytest.raises(ValueError, match=match):
            native_h2d.submit_h2d(dst, source, Stream())


def test_a_copy_is_one_call_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def memcpy(dst: Any, src: Any, nbytes: Any, kind: int, stream: Any) -> int:
        calls.append((nbytes.value, kind, stream.value))
        ctypes.memmove(dst, src, nbytes)
        return 0

    monkeypatch.setattr(native_h2d, "_found", [(memcpy, "a fake")])
    dst, src = OnCuda(torch.zeros(8)), torch.arange(8.0)
    native_h2d.submit_h2d(dst, src, Stream())
    assert torch.equal(dst.tensor, src) and calls == [(32, 1, 77)]
    monkeypatch.setattr(native_h2d, "_found", [(lambda *a: 700, "a fake")])
    with pytest.raises(RuntimeError, match="status 700"):
        native_h2d.submit_h2d(dst, src, Stream())


def test_without_a_runtime_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_h2d, "_found", [(None, "none here")])
    with pytest.raises(RuntimeError, match=r"needs the CUDA runtime, got none \(none here\); use copy_"):
        native_h2d.submit_h2d(OnCuda(torch.zeros(8)), torch.zeros(8), Stream())

"""Copies to a CUDA (or ROCm) device by one call of the runtime that torch brought along; nothing is compiled.

torch's own copy holds the GIL longer and looks at more. Where the runtime cannot be had, torch moves the same bytes.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

_HOST_TO_DEVICE = 1
_CALLS = {"libcudart": "cudaMemcpyAsync", "libamdhip64": "hipMemcpyAsync"}
_found: list[tuple[Any, str]] = []  # the call once it is known, and what is said of it


def is_available() -> bool:
    """Whether `submit_h2d` works; looks no further than what `ensure_available` has found."""
    return bool(_found) and _found[0][0] is not None


def ensure_available() -> bool:
    """Look for the runtime once; whether `submit_h2d` works. Never raises."""
    if not _found and "torch" in sys.modules:  # it may be loaded later
        try:
            _found.append(_look())
        except Exception as error:
            _found.append((None, f"the runtime could not be opened: {error}"))
    return is_available()


def get_diagnostic() -> str:
    """Say what was found, or why nothing was."""
    ensure_available()
    return _found[0][1] if _found else "torch is not loaded, and with it no CUDA runtime"


def submit_h2d(dst: Any, src: Any, stream: Any) -> None:
    """Queue a copy of a contiguous CPU tensor to a contiguous one on the device, on a torch stream.

    Ownership: both must stay until the stream has passed the copy.
    """
    for label, tensor, kind in (("dst", dst, "cuda"), ("src", src, "cpu")):
        if tensor.device.type != kind:
            raise ValueError(f"{label}: must be on {kind}, got {tensor.device}; move it there first")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{label}: must be contiguous, got strides {tensor.stride()}; pass .contiguous()"
            )
    nbytes = src.numel() * src.element_size()
    if dst.numel() * dst.element_size() != nbytes:
        raise ValueError(
            f"dst: must have {nbytes} bytes as src, got {dst.numel() * dst.element_size()}; give it that size"
        )
    if not ensure_available():
        raise RuntimeError(f"native_h2d: needs the CUDA runtime, got none ({get_diagnostic()}); use copy_")
    pointers = ctypes.c_void_p(dst.data_ptr()), ctypes.c_void_p(src.data_ptr())
    status = _found[0][0](
        *pointers, ctypes.c_size_t(nbytes), _HOST_TO_DEVICE, ctypes.c_void_p(stream_of(stream))
    )
    if status != 0:
        raise RuntimeError(f"native_h2d: the copy must be accepted, got status {status} of the runtime")


def stream_of(stream: Any) -> int:
    """The runtime's own pointer behind a torch stream."""
    return int(stream.cuda_stream)


def _look() -> tuple[Any, str]:
    torch = sys.modules["torch"]
    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no CUDA device"
    torch.cuda.init()  # loads the runtime
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        name = Path(path[1] + path[2]).name
        call = next((call for prefix, call in _CALLS.items() if name.startswith(prefix)), None)
        if call is not None:
            function = getattr(ctypes.CDLL(path[1] + path[2]), call)
            function.restype = ctypes.c_int
            return function, f"{call} of {name}"
    return None, "torch has a CUDA device but no shared CUDA runtime is mapped (is it linked statically?)"

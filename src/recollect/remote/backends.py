"""Backends: the carrier that a name stands for."""

from __future__ import annotations

from typing import Any

from recollect.errors import class_name
from recollect.remote.carriers.base import Carrier

NAMES = ("local", "tcp", "mpi", "torch", "ray")
_launched: dict[str, Carrier] = {}


def check_backend(backend: Any) -> None:
    """Raise ValueError unless it is a carrier or the name of one; nothing is opened."""
    if isinstance(backend, str):
        if backend not in NAMES:
            raise ValueError(
                f"communication_backend: must be one of {list(NAMES)} or a carrier, got {backend!r}"
            )
    elif not isinstance(backend, Carrier):
        raise ValueError(f"communication_backend: must be a carrier or a name, got {class_name(backend)}")


def carrier_of(backend: Any) -> Carrier:
    """The carrier itself; `mpi` and `torch` are this process's one, the others what `launch` made here."""
    check_backend(backend)
    if not isinstance(backend, str):
        carrier: Carrier = backend
        return carrier
    if backend == "mpi":
        from recollect.remote.carriers.mpi import the_mpi_carrier

        return the_mpi_carrier()
    if backend == "torch":
        from recollect.remote.carriers.torch import the_torch_carrier

        return the_torch_carrier()
    if backend not in _launched:
        raise ValueError(
            f"communication_backend: {backend!r} names the carrier that recollect.remote.launch made in this "
            "process, got none; start it by launch, or pass a carrier"
        )
    return _launched[backend]


def set_launched(kind: str, carrier: Carrier | None) -> None:
    """Say which carrier `launch` made here."""
    if carrier is None:
        _launched.pop(kind, None)
    else:
        _launched[kind] = carrier

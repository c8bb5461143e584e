"""The carrier that a name stands for: one of ours, or one of a plugin."""

from __future__ import annotations

from typing import Any

from recollect import plugins
from recollect.errors import class_name
from recollect.remote.carriers.base import Carrier

NAMES = ("local", "tcp", "mpi", "torch", "ray")
_launched: dict[str, Carrier] = {}
_given: dict[str, Carrier] = {}  # those of other packages, one in a process, as with mpi and torch


def check_backend(backend: Any) -> None:
    """Raise ValueError unless it is a carrier or the name of one; nothing is opened."""
    if isinstance(backend, str):
        if not is_known(backend):
            known = [*NAMES, *plugins.names(plugins.CARRIERS)]
            raise ValueError(f"communication_backend: must be one of {known} or a carrier, got {backend!r}")
    elif not isinstance(backend, Carrier):
        raise ValueError(f"communication_backend: must be a carrier or a name, got {class_name(backend)}")


def is_known(name: str) -> bool:
    """Whether a name stands for a carrier, of ours or of another package; nothing is imported."""
    return name in NAMES or name in plugins.names(plugins.CARRIERS)


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
    if backend not in NAMES:
        return _carrier_given(backend)
    if backend not in _launched:
        raise ValueError(
            f"communication_backend: {backend!r} names the carrier that recollect.remote.launch made in this "
            "process, got none; start it by launch, or pass a carrier"
        )
    return _launched[backend]


def _carrier_given(name: str) -> Carrier:
    """The carrier of another package, made at the first call in this process."""
    if name not in _given:
        carrier = plugins.call(plugins.CARRIERS, name)
        if not isinstance(carrier, Carrier):
            problem = f"{class_name(carrier)}, which is no carrier"
            raise plugins.failure(plugins.CARRIERS, name, problem)
        _given[name] = carrier
    return _given[name]


def set_launched(kind: str, carrier: Carrier | None) -> None:
    """Say which carrier `launch` made here."""
    if carrier is None:
        _launched.pop(kind, None)
    else:
        _launched[kind] = carrier

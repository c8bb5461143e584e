"""Public names that are loaded when they are first used, so that importing a package costs next to nothing.

    __getattr__, __dir__, __all__ = lazy(__name__, {"SharedWeightSync": "recollect.ipc.weight_sync"})

Type checkers cannot follow that: each package that does it has a stub beside it, `__init__.pyi`, with one import per
name. tests/test_public_names.py holds the two equal, and tests/test_typing.py runs a type checker over every name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, names: Mapping[str, str], modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package: each name by its module, and its lazy modules.

    A name is set in the package when it is loaded, so only its first use comes through here. The modules are
    attributes of the package too, but not in its `__all__`.
    """
    modules, public = frozenset(modules), sorted(names)

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")  # which sets the attribute
        if name not in names:
            # With both, Python adds "Did you mean ...?" where a name is near.
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        value = getattr(import_module(names[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def known() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public, *modules})

    return load, known, public

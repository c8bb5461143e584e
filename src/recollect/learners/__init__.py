"""Reference learners on the runner: soft actor-critic and asynchronous PPO, and what they and collectors share.

`rc.learners.sac` and `rc.learners.appo` are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recollect.learners.normalization import normalize

if TYPE_CHECKING:
    import recollect.learners.appo as appo
    import recollect.learners.sac as sac

__all__ = ["appo", "normalize", "sac"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in ("appo", "sac"):
            raise AttributeError(f"module 'recollect.learners' has no attribute {name!r}")
        return import_module(f"recollect.learners.{name}")

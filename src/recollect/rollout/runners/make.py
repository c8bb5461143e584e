"""The pool that a config names."""

from __future__ import annotations

from recollect.rollout.runners.base import RunnerPool, Surroundings


def make_pool(around: Surroundings) -> RunnerPool:
    """Return a pool of the config's kind; it is not started."""
    kind = around.config.runner
    if kind == "local":
        from recollect.rollout.runners.local import LocalPool

        return LocalPool(around)
    if kind == "process":
        from recollect.rollout.runners.process import ProcessPool

        return ProcessPool(around)
    from recollect.rollout.runners.ray import RayPool

    return RayPool(around)

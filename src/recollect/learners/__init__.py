"""Reference learners on the runner: soft actor-critic and asynchronous PPO, and what they and collectors share.

`rc.learners.sac` and `rc.learners.appo` are loaded when they are first used.
"""

from __future__ import annotations

from recollect._lazy import lazy

__getattr__, __dir__, _ = lazy(__name__, {"normalize": "recollect.learners.normalization"}, ("appo", "sac"))
__all__ = ["appo", "normalize", "sac"]

"""Collecting: environments that record themselves, and what may be wrong with an environment."""

from __future__ import annotations

from recollect.collect.check import Finding, check_env_pipeline
from recollect.collect.wrapper import ReplayBufferCollectionWrapper

__all__ = ["Finding", "ReplayBufferCollectionWrapper", "check_env_pipeline"]

"""Samplers: choose rows of a batch and gather them."""

from __future__ import annotations

from recollect.sampling.base import BatchSampler, SamplerStats
from recollect.sampling.step import StepSampler
from recollect.sampling.stream import IndexStream

__all__ = ["BatchSampler", "IndexStream", "SamplerStats", "StepSampler"]

"""Samplers: choose rows of a batch and gather them."""

from __future__ import annotations

from recollect.sampling.base import BatchSampler, SamplerStats
from recollect.sampling.hindsight import HindsightSampler
from recollect.sampling.prioritized import PrioritizedSampler, PrioritizedStats
from recollect.sampling.sequence import SequenceSampler
from recollect.sampling.step import StepSampler
from recollect.sampling.stream import IndexStream
from recollect.sampling.workers.sampler import MultiprocessingSampler

__all__ = [
    "BatchSampler",
    "HindsightSampler",
    "IndexStream",
    "MultiprocessingSampler",
    "PrioritizedSampler",
    "PrioritizedStats",
    "SamplerStats",
    "SequenceSampler",
    "StepSampler",
]

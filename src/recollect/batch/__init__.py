"""Batches: anything that can be indexed into samples, and the lazy views over them."""

from __future__ import annotations

from recollect.batch.base import BatchBase, BatchStats, Draws
from recollect.batch.combined import CombinedBatch
from recollect.batch.location import Location
from recollect.batch.nstep import NStepBatch
from recollect.batch.stacked import FrameStackedBatch, SliceStackedBatch
from recollect.batch.subindex import SubIndexedBatch
from recollect.batch.subitem import SubItemBatch
from recollect.batch.to_backend import ToBackendOrDeviceBatch
from recollect.batch.transformed import TransformedBatch
from recollect.batch.transitions import TransitionBatch
from recollect.spaces.transformation import (
    CastTransformation,
    DataTransformation,
    register_transformation,
    transformation_from_json,
    transformation_to_json,
)

__all__ = [
    "BatchBase",
    "BatchStats",
    "CastTransformation",
    "CombinedBatch",
    "DataTransformation",
    "Draws",
    "FrameStackedBatch",
    "Location",
    "NStepBatch",
    "SliceStackedBatch",
    "SubIndexedBatch",
    "SubItemBatch",
    "ToBackendOrDeviceBatch",
    "TransformedBatch",
    "TransitionBatch",
    "register_transformation",
    "transformation_from_json",
    "transformation_to_json",
]

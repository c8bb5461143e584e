"""Watching a run: its trace, and its state while it goes on; loaded when first used."""

from __future__ import annotations

from recollect.observe.beacon import Beacon
from recollect.observe.jobs import Job, Snapshot, find_jobs
from recollect.observe.trace import TraceRecorder

__all__ = ["Beacon", "Job", "Snapshot", "TraceRecorder", "find_jobs"]

"""Watching a run: traces now; loaded when first used."""

from __future__ import annotations

from recollect.observe.trace import TraceRecorder

__all__ = ["TraceRecorder"]

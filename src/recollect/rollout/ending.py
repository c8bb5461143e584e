"""How a batch ended, for as long as the history remembers it."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.rollout.state import BatchState


@dataclass(frozen=True, slots=True)
class Ending:
    """The last state of a batch, and why it was aborted if it was."""

    state: BatchState
    reason: str | None = None

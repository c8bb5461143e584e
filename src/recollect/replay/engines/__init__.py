"""The rings that a ReplayBuffer can be made of, and the choice between them."""

from __future__ import annotations

from typing import Any

from recollect.replay.engines.any import AnyEngine
from recollect.replay.engines.base import Engine
from recollect.replay.engines.lowest import LowestEngine
from recollect.replay.engines.rows import RowsEngine
from recollect.storage.contract import SpaceStorage
from recollect.storage.rows.base import RowStorage


def make_engine(
    storage: SpaceStorage,
    tracked: bool,
    evict: dict[str, Any],
    state: dict[str, Any] | None,
    live_as: dict[str, Any],
) -> Engine:
    """Make the ring that fits a storage; `live_as` goes into every commit of one that lives in a directory."""
    if not isinstance(storage, RowStorage):
        engine = AnyEngine(storage, tracked, state)
        engine.go_live(live_as)
        return engine
    if evict["by"] == "lowest":
        return LowestEngine(storage, evict["key"])
    if tracked and not storage.rows.geometry.tagged:
        raise ValueError(
            "maintain_segment_metadata: this storage keeps no segments; create it with segments=True"
        )
    return RowsEngine(storage, tracked)

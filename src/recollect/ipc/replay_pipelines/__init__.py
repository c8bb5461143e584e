"""Replay pipelines: batches drawn, packed and copied to the device one tick ahead of the learner.

Names are loaded when they are first used; none of them needs torch until a device of torch is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "recollect.ipc.replay_pipelines.base": "ReplayPipeline ReplayTickMetadata",
    "recollect.ipc.replay_pipelines.cpu_pinned_double_buffer": (
        "CPUPinnedDoubleBufferReplayPipeline make_collector_pack serve_pack_requests"
    ),
    "recollect.ipc.replay_pipelines.transfer": "TransferBackend",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from recollect.ipc.replay_pipelines.base import ReplayPipeline as ReplayPipeline
    from recollect.ipc.replay_pipelines.base import ReplayTickMetadata as ReplayTickMetadata
    from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import (
        CPUPinnedDoubleBufferReplayPipeline as CPUPinnedDoubleBufferReplayPipeline,
    )
    from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import (
        make_collector_pack as make_collector_pack,
    )
    from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import (
        serve_pack_requests as serve_pack_requests,
    )
    from recollect.ipc.replay_pipelines.transfer import TransferBackend as TransferBackend

__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect.ipc.replay_pipelines' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

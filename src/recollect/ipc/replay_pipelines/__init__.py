"""Replay pipelines: batches drawn, packed and copied to the device one tick ahead of the learner.

Names are loaded when they are first used; none of them needs torch until a device of torch is asked for.
"""

from __future__ import annotations

from recollect._lazy import lazy

_MODULE_OF = {
    "ReplayPipeline": "recollect.ipc.replay_pipelines.base",
    "ReplayTickMetadata": "recollect.ipc.replay_pipelines.base",
    "CPUPinnedDoubleBufferReplayPipeline": "recollect.ipc.replay_pipelines.cpu_pinned_double_buffer",
    "make_collector_pack": "recollect.ipc.replay_pipelines.cpu_pinned_double_buffer",
    "serve_pack_requests": "recollect.ipc.replay_pipelines.cpu_pinned_double_buffer",
    "TransferBackend": "recollect.ipc.replay_pipelines.transfer",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULE_OF)

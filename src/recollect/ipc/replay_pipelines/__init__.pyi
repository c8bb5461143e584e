"""The names of recollect.ipc.replay_pipelines for type checkers; `__init__.py` loads each when it is first used."""

from recollect.ipc.replay_pipelines.base import ReplayPipeline as ReplayPipeline
from recollect.ipc.replay_pipelines.base import ReplayTickMetadata as ReplayTickMetadata
from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import (
    CPUPinnedDoubleBufferReplayPipeline as CPUPinnedDoubleBufferReplayPipeline,
)
from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import make_collector_pack as make_collector_pack
from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import serve_pack_requests as serve_pack_requests
from recollect.ipc.replay_pipelines.transfer import TransferBackend as TransferBackend

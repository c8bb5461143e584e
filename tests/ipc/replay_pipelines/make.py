"""Buffers whose rows tell their number, pipelines over them, and what a batch must then be."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline, ReplayTickMetadata
from recollect.sampling import IndexStream

O, A, N = 3, 2, 32
Pipeline = CPUPinnedDoubleBufferReplayPipeline


def transitions(ids: Any) -> dict[str, Any]:
    """Transitions whose every field tells the id of the row."""
    x = np.asarray(ids, np.float32)
    done = x % 5 == 4
    return {
        "obs": np.repeat(x[:, None], O, 1), "actions": np.repeat(x[:, None] + 0.25, A, 1), "rewards": x.copy(),
        "next_obs": np.repeat(x[:, None] + 1, O, 1), "dones": done, "truncated": done & (x % 10 == 9),
    }  # fmt: skip


def add(buf: ReplayBuffer, n: int) -> None:
    """Add the next n rows; ids go on from `ptr`."""
    buf.add(**transitions(range(buf.ptr, buf.ptr + n)))


def buffer(n: int = 0, capacity: int = 64, **kwargs: Any) -> ReplayBuffer:
    buf = ReplayBuffer(capacity, O, A, "numpy", **kwargs)
    if n:
        add(buf, n)
    return buf


def pipeline(buf: ReplayBuffer, **kwargs: Any) -> Pipeline:
    return Pipeline(buf, **{"device": "numpy", "sample_count": N, "deadline": 20.0, **kwargs})


def drawn_ids(m: ReplayTickMetadata) -> list[int]:
    """The ids of a batch drawn from one lane, as the contract says: draw i is number i of the tick's generator."""
    low = m.snapshot_ptr - m.snapshot_size
    return [low + int(i) for i in IndexStream(m.sample_seed).indices(m.snapshot_size, m.sample_count)]


def ids(batch: dict[str, Any]) -> list[int]:
    """The ids of a batch whose fields all belong together."""
    x = np.asarray(batch["rewards"])
    expected = transitions(x)
    assert set(batch) == set(expected)
    for name, value in batch.items():
        assert np.array_equal(np.asarray(value), expected[name].astype(np.float32)), name
    return [int(i) for i in x]

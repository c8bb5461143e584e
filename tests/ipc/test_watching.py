"""Whoever looks after collectors is called in waits, also when each of them ends at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.ipc.replay_pipelines.make import buffer

import recollect as rc
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline
from recollect.memory import waiting

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@contextmanager
def a_ring() -> Iterator[tuple[Any, Callable[[], object]]]:
    with rc.ipc.RolloutRingBuffer(1, 1, 1, 1) as ring:
        assert ring.write_slot >= 0
        ring.signal_write_done()
        yield ring, lambda: ring.wait_for_data(5.0)


@contextmanager
def weights() -> Iterator[tuple[Any, Callable[[], object]]]:
    with rc.ipc.SharedWeightSync.from_state_dict({"w": np.zeros(1)}) as sync:
        yield sync, lambda: sync.wait_newer(0, 5.0)


@contextmanager
def a_pipeline() -> Iterator[tuple[Any, Callable[[], object]]]:
    with buffer(8) as buf, CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=4) as pipe:
        pipe.wait_until_ready(1, 4)
        yield pipe, lambda: pipe.wait_until_ready(1, 4)


@pytest.mark.parametrize("resource", [a_ring, weights, a_pipeline])
def test_a_look_is_due_ten_times_a_second_though_nobody_has_to_wait(
    resource: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two collectors fill a ring, one is killed: the other one kept it full, and nobody looked."""
    now, looks = [100.0], [0]
    monkeypatch.setattr(waiting, "monotonic", lambda: now[0])

    def look() -> bool:
        looks[0] += 1
        return True

    with resource() as (watched, wait):
        watched.watch(look)
        assert wait() is True and looks == [0]
        now[0] += 0.15
        assert wait() is True and looks == [1]
        assert wait() is True and looks == [1]
        now[0] += 0.15
        watched.watch(None)
        assert wait() is True and looks == [1]


def test_what_the_look_raises_ends_the_wait() -> None:
    def look() -> bool:
        raise rc.CollectorDiedError("collector 1: must live")

    with a_ring() as (ring, wait), pytest.MonkeyPatch.context() as patch:
        ring.watch(look)
        patch.setattr(waiting, "LOOK_S", 0.0)
        with pytest.raises(rc.CollectorDiedError):
            wait()

"""What a runner does for its collectors beside starting them: cores, devices, lanes, delays, owned pipelines."""

from __future__ import annotations

import os
import signal
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.ipc import crews
from tests.ipc.crews import Say, runner, wait_until

import recollect as rc
from recollect.ipc import async_runner, crew
from recollect.ipc.collector_error import ExceptionWrapper, create_error_pipe
from recollect.ipc.control import Counters
from recollect.ipc.crew import Crew, Death
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline, make_collector_pack
from recollect.learners.episodes import EpisodeBoard

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


class Clock:
    """Time as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(crew, "monotonic", found)
    return found


def dying_crew(max_restarts: int) -> tuple[Crew, Any]:
    """A crew whose one collector has just been killed; `_bury` decides what follows."""
    made = Crew(
        1, make_job=lambda *_: pytest.fail("started"), restart="on_death", max_restarts=max_restarts,
        start_method="spawn", deadline=60.0, has_rows=lambda lane: True,
    )  # fmt: skip
    made._ended = lambda m: Death(m.lane, -signal.SIGKILL, None)  # type: ignore[method-assign]
    return made, made.members[0]


def bury(made: Crew, member: Any, clock: Clock) -> float | None:
    """Let it die again; seconds until it is started again, None if it is not."""
    made._bury(member)
    if member.due is None:
        return None
    delay: float = member.due - clock.now
    member.recent.append(clock.now)
    member.due = None
    return delay


class Lingering:
    """The end of a process that has not come."""

    def wait(self, timeout_s: float) -> bool:
        return False


def test_a_collector_on_its_way_out_is_not_taken_for_one_that_reported() -> None:
    """Its pipe ends early in the end of an interpreter, which takes its time on a busy machine."""
    receive, send = create_error_pipe()
    member = crew.Member(0, Counters(), ending=Lingering(), errors=receive)  # type: ignore[arg-type]
    assert not crew._has_ended(member)
    try:
        raise ValueError("the simulator gave up")
    except ValueError:
        send.send(ExceptionWrapper("collector 0"))
    assert crew._has_ended(member)
    assert member.reported is not None and "gave up" in member.reported.traceback_text
    member.reported = None
    send.close()
    assert not crew._has_ended(member)
    receive.close()
    member.counters.cleanup()


class TestDelays:
    def test_they_double_up_to_half_a_minute(self, clock: Clock) -> None:
        made, member = dying_crew(max_restarts=9)
        assert [bury(made, member, clock) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
        made.close()

    def test_restarts_are_counted_over_ten_minutes(self, clock: Clock) -> None:
        made, member = dying_crew(max_restarts=2)
        assert bury(made, member, clock) == 0.5
        clock.now += 300
        assert bury(made, member, clock) == 1.0
        clock.now += 299
        assert bury(made, member, clock) is None and member.death is not None
        member.death = None
        clock.now += 2  # the first of them is forgotten
        assert bury(made, member, clock) == 1.0
        made.close()


def tell_threads(ctx: Any, say: Say) -> None:
    import torch

    say(torch.get_num_threads())
    say(int(os.environ["OMP_NUM_THREADS"]))


class TestCores:
    def test_collectors_have_theirs_and_the_learner_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        before = torch.get_num_threads()
        with runner(num_collectors=2, collector_threads=3) as it:
            say = it.own(Say.create(2))
            it.start_collectors(tell_threads, {"say": say})
            assert torch.get_num_threads() == 8 - 2 * 3
            assert [say.hear() for _ in range(4)] == [3, 3, 3, 3]
        assert torch.get_num_threads() == before

    @pytest.mark.parametrize("first", ["cuda", "xpu", "mps", "cpu"])
    def test_the_first_device_that_exists(self, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
        there = ["cuda", "xpu", "mps", "cpu"]
        there = there[there.index(first) :]
        for name, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
            monkeypatch.setattr(module, "is_available", lambda name=name: name in there)
        assert async_runner.best_device() == first


def say_lane_and_make_workers(ctx: Any, parts: Any) -> None:
    env = ctx.make_env()  # with processes of its own, which a daemon may not have
    obs, _ = env.reset(seed=ctx.seed)
    env.close()
    parts["deep"][0](100 * ctx.lane + len(obs))


def test_resources_anywhere_in_the_arguments_are_bound_and_environments_may_have_workers() -> None:
    overrides = {"vectorization_mode": "async"}
    with runner(env_cfg_overrides=overrides, num_envs=4, num_collectors=2) as it:
        say = it.own(Say.create(2))
        it.start_collectors(say_lane_and_make_workers, {"parts": {"deep": [say]}})
        heard = {}
        for _ in range(2):
            taken = say.ring.take(60.0)
            heard[taken.lane] = int(taken.values["n"])
            say.ring.release()
        assert heard == {0: 2, 1: 102}
        wait_until(lambda: it.stats().alive == 0, 30, it.check_collectors)


def test_a_wait_for_a_batch_tells_of_a_dead_collector() -> None:
    with runner() as it:
        buf = it.own(rc.ipc.ReplayBuffer(64, 2, 1, "numpy"))
        pipe = it.own(CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=4))
        it.start_collectors(crews.die_by, {"number": signal.SIGKILL})
        pipe.start_prepare(1, 4, min_snapshot_ptr=10)
        with pytest.raises(rc.CollectorDiedError, match="SIGKILL"):
            pipe.wait_ready()


def records() -> dict[str, Any]:
    """One of everything that counts."""
    buf = rc.ipc.ReplayBuffer(8, 2, 1, "numpy")
    return {
        "weights": rc.ipc.SharedWeightSync({"w": (2,)}), "statistics": rc.ipc.SharedObsNormStats(),
        "ring": rc.ipc.RolloutRingBuffer(2, 2, 2, 1), "replay": buf, "slots": make_collector_pack(buf, 4)[2],
        "pipeline": CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=4), "runner": runner(),
    }  # fmt: skip


def test_every_object_counts_in_a_frozen_record() -> None:
    objects = records()
    for name, thing in objects.items():
        record = thing.stats()
        assert is_dataclass(record), name
        with pytest.raises((FrozenInstanceError, AttributeError)):
            setattr(record, fields(record)[0].name, 1)
    for name in ("pipeline", "slots", "replay", "ring", "statistics", "weights", "runner"):
        (getattr(objects[name], "cleanup", None) or objects[name].close)()


def test_a_board_reports_lanes_apart() -> None:
    with EpisodeBoard(2) as board:
        lane = board.on_lane(1)
        report = lane.mine()
        report.totals["env_steps"] = 5.0
        lane.publish(report)
        assert [r and r.totals["env_steps"] for r in board.read()] == [None, 5.0]
        lane.close()
    assert np.isfinite(report.totals["env_steps"])

"""Sequences, stacks, returns and goals while another process overwrites the ring: whole, of one episode, in order."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import pytest
from tests.process import rows

import recollect as rc

pytestmark = pytest.mark.process
SPAWN = multiprocessing.get_context("spawn")
LANES, RUN, EPISODE, LOOK_S, PATIENCE_S = 2, 96, 10, 0.5, 15.0
GOAL = {"achieved_goal": ((1,), "int64"), "desired_goal": ((1,), "int64")}
SPACE = {**rows.SPACE, "obs": GOAL, "next_obs": GOAL, "reward": ((), "float64"), "terminated": ((), "bool")}


def block(lane: int, first: int, n: int) -> dict[str, Any]:
    """Rows whose goals, reward and flag follow from their number; every EPISODE-th ends an episode."""
    made = rows.block(lane, first, n)
    number = made["number"]
    goal = {"achieved_goal": number[:, None].copy(), "desired_goal": np.full((n, 1), -1)}
    ends = number % EPISODE == EPISODE - 1
    return {**made, "obs": goal, "next_obs": goal, "reward": number.astype(float), "terminated": ends}


def write(buffer: rc.ReplayBuffer, lane: int, stop: Any, ready: Any) -> None:
    """Whole episodes and single rows in turn, as fast as it goes."""
    with buffer, buffer.on_lane(lane) as out:
        first = 0
        while not stop.is_set():
            out.extend(block(lane, first, 2 * EPISODE), ends=np.arange(2 * EPISODE) % EPISODE == EPISODE - 1)
            single = block(lane, first + 2 * EPISODE, EPISODE)
            for i in range(EPISODE):
                out.append(pick(single, i))
            out.mark_segment_end()
            first += 3 * EPISODE
            if first >= 4 * RUN:
                ready.set()


def pick(part: Any, i: int) -> Any:
    return {k: pick(v, i) for k, v in part.items()} if isinstance(part, dict) else part[i]


def check_whole(frames: dict[str, Any]) -> None:
    """Every row of [B, T] is one that a writer wrote."""
    flat = {key: frames[key].reshape(-1, *frames[key].shape[2:]) for key in rows.SPACE}
    rows.check_whole(flat)
    np.testing.assert_array_equal(frames["reward"], frames["number"])
    np.testing.assert_array_equal(frames["next_obs"]["achieved_goal"][..., 0], frames["number"])


def check_episode(frames: dict[str, Any], valid: Any) -> None:
    """The valid frames of each window are consecutive rows of one episode of one lane."""
    number, lane = frames["number"], frames["lane"]
    both = valid[:, 1:] & valid[:, :-1]
    assert (np.diff(number, axis=1)[both] == 1).all()
    assert (np.diff(lane, axis=1)[both] == 0).all()
    assert (np.diff(number // EPISODE, axis=1)[both] == 0).all()


def sequences(buffer: rc.ReplayBuffer) -> Any:
    plain = rc.SequenceSampler(buffer, 16, 5, seed=0)
    padded = rc.SequenceSampler(
        buffer, 16, 2 * EPISODE, burn_in=3, pad=True, seed=1
    )  # none is as long as that
    rare = rc.SequenceSampler(buffer, 8, EPISODE, seed=2)

    def look() -> None:
        for sampler in (plain, rare):
            batch, meta = sampler.sample_with_metadata()
            check_whole(batch)
            check_episode(batch, meta["valid_mask"])  # type: ignore[index]
            np.testing.assert_array_equal(meta["step"], batch["number"][:, 0] % EPISODE)  # type: ignore[index]
        batch, meta = padded.sample_with_metadata()
        valid = meta["valid_mask"]  # type: ignore[index]
        check_episode(batch, valid)
        rows.check_whole({key: batch[key][valid] for key in rows.SPACE})
        assert not batch["words"][~valid].any()
        assert valid[:, 3].all() and not valid[:, 3 + EPISODE :].any()

    return look


def epochs(buffer: rc.ReplayBuffer) -> Any:
    sampler = rc.SequenceSampler(buffer, 8, 4, seed=0)

    def look() -> None:
        seen: list[tuple[int, int]] = []
        for batch, meta in sampler.epoch_iter_with_metadata():
            check_whole(batch)
            check_episode(batch, meta["valid_mask"])  # type: ignore[index]
            seen += zip(batch["lane"][:, 0].tolist(), batch["number"][:, 0].tolist())
        assert len(set(seen)) == len(seen)

    return look


def stacks(buffer: rc.ReplayBuffer) -> Any:
    view = rc.FrameStackedBatch(buffer, 3, 2)
    sampler = rc.StepSampler(view, 32, seed=0)

    def look() -> None:
        batch, meta = sampler.sample_with_metadata()
        check_whole(batch)
        check_episode(batch, meta["slice_valid_mask"])  # type: ignore[index]
        check_whole(sampler.sample())
        place = view.locate(np.arange(20, 40))
        found = view.get_located(place, metadata=True)
        if found is not None:
            check_episode(found[0], found[1]["slice_valid_mask"])  # type: ignore[index]

    return look


def returns(buffer: rc.ReplayBuffer) -> Any:
    sampler = rc.StepSampler(rc.NStepBatch(buffer, 3, 1.0), 32, seed=0)

    def look() -> None:
        batch = sampler.sample()
        rows.check_whole({key: batch[key] for key in rows.SPACE})
        last, first = batch["next_obs"]["achieved_goal"][:, 0], batch["number"]
        k = last - first + 1
        assert ((k >= 1) & (k <= 3) & (last // EPISODE == first // EPISODE)).all()
        np.testing.assert_array_equal(batch["reward"], k * (first + last) / 2)
        np.testing.assert_array_equal(batch["discount"], 1.0 - (last % EPISODE == EPISODE - 1))

    return look


def goals(buffer: rc.ReplayBuffer) -> Any:
    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        return (desired - achieved)[:, 0].astype(float)

    sampler = rc.HindsightSampler(buffer, 32, reward, ratio=1.0, seed=0)

    def look() -> None:
        batch, meta = sampler.sample_with_metadata()
        goal, number = batch["obs"]["desired_goal"][:, 0], batch["number"]
        assert ((goal // EPISODE == number // EPISODE) & (goal >= number)).all()
        np.testing.assert_array_equal(meta["goal_step"], goal % EPISODE)  # type: ignore[index]
        np.testing.assert_array_equal(batch["reward"], goal - number)

    return look


def look_on(buffer: rc.ReplayBuffer, look: Any) -> None:
    """Look for a while; the ring must have gone round meanwhile.

    A ring this small is lapped in a millisecond: a reader that gets little of the processor may be too late for a
    whole second, and then says so. It must see something all the same.
    """
    before, seen, start = buffer.stats().offered, 0, time.monotonic()
    while time.monotonic() < start + LOOK_S or seen < 5:
        try:
            look()
        except rc.ContentionError:
            assert time.monotonic() < start + PATIENCE_S, f"saw {seen} batches only"
        else:
            seen += 1
    assert buffer.stats().offered > before + LANES * RUN


def test_beside_live_writers() -> None:
    buffer = rc.ReplayBuffer.create(
        "shared",
        SPACE,
        capacity=LANES * RUN,
        num_lanes=LANES,
        multiprocessing=True,
        maintain_segment_metadata=True,
    )
    stop, ready = SPAWN.Event(), [SPAWN.Event() for _ in range(LANES)]
    writers = [
        SPAWN.Process(target=write, args=(buffer, k, stop, ready[k]), daemon=True) for k in range(LANES)
    ]
    with buffer:
        try:
            for writer in writers:
                writer.start()
            assert all(event.wait(30) for event in ready)
            for reader in (sequences, epochs, stacks, returns, goals):
                look_on(buffer, reader(buffer))
        finally:
            stop.set()
            for writer in writers:
                writer.join(30)
        assert [writer.exitcode for writer in writers] == [0] * LANES
        for writer in writers:
            writer.close()

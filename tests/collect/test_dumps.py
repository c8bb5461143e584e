"""Automatic dumps, other buffers in mid-run, and the asynchronous calls."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from tests.collect.worlds import (
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Counting,
    counting,
    lanes_for,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc

Wrapper = rc.ReplayBufferCollectionWrapper
Z = np.zeros(2, np.int64)
load = rc.ReplayBuffer.load_from


def long() -> Any:
    return Counting(longest=10**9)


def mixed(mode: Any = NEXT_STEP, n: int = 2) -> Any:
    """Slot 0 ends with every step, the others never."""
    from gymnasium.vector import SyncVectorEnv

    return SyncVectorEnv([lambda: Counting(0, longest=1), *[long] * (n - 1)], autoreset_mode=mode)


def commit_of(path: Path) -> int:
    import json

    return int(json.loads((path / "manifest.json").read_text())["commit"])


# -- dumps


@pytest.mark.parametrize("when", ["dump_on_episode_end", "dump_on_reset_boundary"])
def test_dumps_need_a_path(when: str, tmp_path: Path) -> None:
    env = counting()
    with pytest.raises(ValueError, match="dump_path: is needed"):
        Wrapper(env, tracked_for(env), **{when: True})
    wrapped = Wrapper(env, tracked_for(env), **{when: True}, dump_path=tmp_path)
    with pytest.raises(ValueError, match="dump_path: is needed"):
        wrapped.dump_path = None
    assert wrapped.dump_path == tmp_path


def test_an_env_dumps_when_an_episode_ends(tmp_path: Path) -> None:
    env = Counting(longest=2)
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf, dump_on_episode_end=True, dump_path=tmp_path / "a")
    wrapped.reset(seed=0)
    while True:
        _, _, terminated, truncated, _ = wrapped.step(0)
        if terminated or truncated:
            break
        assert not (tmp_path / "a").exists()
    assert len(load(tmp_path / "a")) == len(buf)
    wrapped.dump_path = tmp_path / "b"
    wrapped.reset()
    while not (tmp_path / "b").exists():
        wrapped.step(0)
    assert load(tmp_path / "b").get_segments() == buf.get_segments()
    assert len(load(tmp_path / "a")) < len(buf)


def test_shared_lanes_are_dumped_with_the_open_ones_cut(tmp_path: Path) -> None:
    envs = mixed()
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf, dump_on_episode_end=True, dump_path=tmp_path / "d")
    wrapped.reset()
    wrapped.step(Z)
    with load(tmp_path / "d") as saved:
        assert len(saved) == 2
        assert saved.get_segments() == [(0, 1), (1, 2)]
    assert buf.get_segments() == [(0, 1)]  # slot 1 goes on
    assert buf.on_lane(1).open_segment == (1, 2)


def test_per_env_dumps_only_the_slots_that_ended(tmp_path: Path) -> None:
    envs = mixed()
    buffers = [tracked_for(envs), tracked_for(envs)]
    wrapped = Wrapper(envs, buffers, dump_on_episode_end=True, dump_path=tmp_path)
    wrapped.reset()
    wrapped.step(Z)
    assert sorted(os.listdir(tmp_path)) == ["env-0000"]
    assert len(load(tmp_path / "env-0000")) == 1


def test_untracked_blocks_are_dumped_too(tmp_path: Path) -> None:
    envs = mixed()
    wrapped = Wrapper(envs, untracked_for(envs), dump_on_episode_end=True, dump_path=tmp_path / "d")
    wrapped.reset()
    wrapped.step(Z)
    assert len(load(tmp_path / "d")) == 2


def test_a_reset_boundary_closes_first_and_skips_when_nothing_is_new(tmp_path: Path) -> None:
    env = long()
    buf = tracked_for(env)
    path = tmp_path / "d"
    wrapped = Wrapper(env, buf, dump_on_reset_boundary=True, dump_path=path)
    wrapped.reset()
    assert not path.exists()  # nothing yet
    wrapped.step(0)
    wrapped.step(0)
    wrapped.reset()
    assert load(path).get_segments() == [(0, 2)]
    first = commit_of(path)
    wrapped.reset()
    assert commit_of(path) == first
    buf.set_at(0, buf[1])  # not a new row, yet something new
    wrapped.reset()
    assert commit_of(path) > first
    wrapped.dump_path = tmp_path / "e"
    wrapped.reset()
    assert len(load(tmp_path / "e")) == 2


def test_a_masked_reset_is_a_boundary_of_its_slots(tmp_path: Path) -> None:
    envs = vector(long, 2, NEXT_STEP)
    buffers = [tracked_for(envs), tracked_for(envs)]
    wrapped = Wrapper(envs, buffers, dump_on_reset_boundary=True, dump_path=tmp_path)
    wrapped.reset()
    wrapped.step(Z)
    wrapped.reset(mask=np.array([False, True]))
    assert os.listdir(tmp_path) == ["env-0001"]
    lanes = lanes_for(envs, 2)
    wrapped = Wrapper(envs, lanes, dump_on_reset_boundary=True, dump_path=tmp_path / "shared")
    wrapped.reset()
    wrapped.step(Z)
    wrapped.reset(mask=np.array([False, True]))
    assert len(load(tmp_path / "shared")) == 2
    assert lanes.get_segments() == [(1, 2)]


def test_an_automatic_reset_is_no_boundary(tmp_path: Path) -> None:
    envs = vector(lambda: Counting(longest=1), 2, NEXT_STEP)
    wrapped = Wrapper(envs, lanes_for(envs, 2), dump_on_reset_boundary=True, dump_path=tmp_path / "d")
    wrapped.reset()
    for _ in range(4):
        wrapped.step(Z)
    assert not (tmp_path / "d").exists()


def test_an_episode_that_ends_with_an_error_is_dumped_all_the_same(tmp_path: Path) -> None:
    class Bad(Counting):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs[:3], reward, *rest

    env = Bad(longest=1)
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf, dump_on_episode_end=True, dump_path=tmp_path / "d")
    wrapped.reset()
    with pytest.raises(rc.SchemaError, match="next_obs: shape"):
        wrapped.step(0)
    assert (tmp_path / "d").exists()


# -- other buffers


def test_swap_at_an_episodes_end_returns_the_old_unclosed() -> None:
    env = Counting(longest=1)
    old, new = tracked_for(env), tracked_for(env)
    wrapped = Wrapper(env, old)
    wrapped.reset()
    wrapped.step(0)
    assert wrapped.set_replay_buffers(new) == [old]
    assert wrapped.replay_buffers == [new]
    assert len(old) == 1  # not closed
    wrapped.reset()
    wrapped.step(0)
    assert (len(old), len(new)) == (1, 1)


@pytest.mark.parametrize("n", [1, 2])
def test_swap_in_mid_episode(n: int, tmp_path: Path) -> None:
    env = long() if n == 1 else vector(long, n, NEXT_STEP)
    action = 0 if n == 1 else Z
    first, second, third, fourth = (lanes_for(env, n) for _ in range(4))
    wrapped = Wrapper(env, first)
    wrapped.dump_path = tmp_path / "old"
    wrapped.reset()
    wrapped.step(action)
    for kwargs in ({}, {"dump_old": True}):
        with pytest.raises(rc.SegmentOpenError, match=r"finalize_old_segments=True.*allow_mid_episode=True"):
            wrapped.set_replay_buffers(second, **kwargs)
    assert wrapped.replay_buffers == [first] and not (tmp_path / "old").exists()

    wrapped.set_replay_buffers(second, allow_mid_episode=True)
    assert first.get_segments() == []  # left open
    wrapped.step(action)
    assert second[:]["obs"][:, 2].tolist() == [1] * n  # the episode goes on here

    wrapped.set_replay_buffers(third, finalize_old_segments=True)
    assert len(second.get_segments()) == n
    wrapped.step(action)

    wrapped.set_replay_buffers(fourth, allow_mid_episode=True, dump_old=True)
    assert len(third.get_segments()) == n
    assert len(load(tmp_path / "old")) == n


def test_dump_old_always_dumps_and_needs_a_path(tmp_path: Path) -> None:
    env = counting()
    old, new = tracked_for(env), tracked_for(env)
    wrapped = Wrapper(env, old)
    with pytest.raises(ValueError, match="dump_old: needs dump_path"):
        wrapped.set_replay_buffers(new, dump_old=True)
    wrapped.dump_path = tmp_path / "d"
    wrapped.set_replay_buffers(new, dump_old=True)
    assert len(load(tmp_path / "d")) == 0


def test_swap_counts_the_new_buffers_for_auto() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    wrapped = Wrapper(envs, lanes_for(envs, 2))
    pair = [tracked_for(envs), tracked_for(envs)]
    wrapped.set_replay_buffers(pair, replay_mode="auto")
    wrapped.reset()
    wrapped.step(Z)
    assert [len(buf) for buf in pair] == [1, 1]
    wrapped.set_replay_buffers(untracked_for(envs), replay_mode="auto", finalize_old_segments=True)
    with pytest.raises(ValueError, match="per_env mode of 2 slots needs 2 buffers"):
        wrapped.set_replay_buffers(untracked_for(envs), replay_mode="per_env")
    fixed = Wrapper.shared(envs, lanes_for(envs, 2))
    with pytest.raises(ValueError, match="shared mode"):
        fixed.set_replay_buffers(pair)
    fixed.set_replay_buffers(pair, replay_mode="auto")


def test_swap_checks_all_before_it_changes_anything() -> None:
    envs = vector(long, 2, NEXT_STEP)
    old = lanes_for(envs, 2)
    wrapped = Wrapper(envs, old)
    wrapped.reset()
    wrapped.step(Z)
    other = untracked_for(envs, keys=["obs", "reward"], num_lanes=2)
    with pytest.raises(ValueError, match="require_same_space=False"):
        wrapped.set_replay_buffers(other, finalize_old_segments=True)
    assert old.get_segments() == [] and wrapped.replay_buffers == [old]
    assert not other.engine.native.owner(0)  # type: ignore[attr-defined]
    wrapped.set_replay_buffers(other, finalize_old_segments=True, require_same_space=False)
    wrapped.step(Z)
    assert list(other[0]) == ["obs", "reward"]
    assert not old.engine.native.owner(0)  # type: ignore[attr-defined]


def test_the_mode_is_what_auto_came_to_and_stays() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    wrapped = Wrapper(envs, [tracked_for(envs) for _ in range(2)])
    assert wrapped.replay_mode == "per_env"
    with pytest.raises(ValueError, match="per_env mode of 2 slots needs 2 buffers"):
        wrapped.set_replay_buffers(lanes_for(envs, 2))
    assert wrapped.replay_mode == "per_env"
    wrapped.set_replay_buffers(lanes_for(envs, 2), replay_mode="auto")
    assert wrapped.replay_mode == "shared"


def test_a_single_environment_has_no_slots_for_per_env() -> None:
    env = counting()
    with pytest.raises(ValueError, match="replay_mode: per_env must be of a VectorEnv"):
        Wrapper.per_env(env, [tracked_for(env)])
    wrapped = Wrapper(env, [tracked_for(env)])
    with pytest.raises(ValueError, match="per_env"):
        wrapped.set_replay_buffers([tracked_for(env)], replay_mode="per_env")
    assert wrapped.replay_mode == "shared"


# -- asynchronous calls


def test_the_class_has_them_as_methods_and_an_object_where_its_environment_has_them() -> None:
    for name in ("step_async", "step_wait", "reset_async", "reset_wait"):
        assert inspect.isfunction(getattr(Wrapper, name)), name
    env, envs = counting(), vector(counting, 2, NEXT_STEP)
    for name in ("step_async", "step_wait", "reset_async", "reset_wait"):
        assert not hasattr(Wrapper(env, tracked_for(env)), name)
        assert not hasattr(Wrapper(envs, lanes_for(envs, 2)), name)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_waits_record_exactly_as_the_sync_calls(mode: Any) -> None:
    def run(calls: str) -> Any:
        envs = vector(counting, 2, mode, "async", context="fork")
        buf = lanes_for(envs, 2)
        with Wrapper(envs, buf) as wrapped:

            def reset(**kwargs: Any) -> Any:
                if calls == "sync":
                    return wrapped.reset(**kwargs)
                wrapped.reset_async(**kwargs)
                return wrapped.reset_wait()

            reset(seed=3)
            rng = np.random.default_rng(0)
            for step in range(25):
                actions = rng.integers(0, 5, 2)
                if calls == "sync":
                    result = wrapped.step(actions)
                else:
                    wrapped.step_async(actions)
                    actions[:] = 0  # copied when seen, not when recorded
                    result = wrapped.step_wait()
                over = result[2] | result[3]
                if mode is DISABLED and over.any():
                    reset(mask=over)
                elif step == 12:
                    reset(mask=np.array([True, False]))
        return buf[:], buf.get_segments()

    (one, cuts), (other, same_cuts) = run("sync"), run("async")
    assert cuts == same_cuts and len(cuts) > 4
    for key, column in one.items():
        assert column.tobytes() == other[key].tobytes()
    assert not multiprocessing.active_children()


def test_an_asynchronous_step_needs_a_reset_as_a_sync_one_does() -> None:
    envs = vector(lambda: Counting(longest=1), 2, DISABLED, "async", context="fork")
    buf = lanes_for(envs, 2)
    with Wrapper(envs, buf) as wrapped:
        with pytest.raises(rc.ResetNeeded, match="needs a reset first"):
            wrapped.step_async(Z)
        wrapped.reset()
        wrapped.step(Z)
        with pytest.raises(rc.ResetNeeded, match="slots 0, 1 are past the end"):
            wrapped.step_async(Z)
        wrapped.reset()  # the environment has not moved: no step is under way
        assert buf.stats().offered == 2


def test_calls_out_of_order_change_nothing() -> None:
    envs = vector(long, 2, SAME_STEP, "async", context="fork")
    buf = lanes_for(envs, 2)
    with Wrapper(envs, buf) as wrapped:
        with pytest.raises(NoAsyncCallError):
            wrapped.step_wait()
        wrapped.reset()
        wrapped.step_async(np.array([1, 2]))
        with pytest.raises(AlreadyPendingCallError):
            wrapped.step_async(np.array([3, 4]))
        with pytest.raises(AlreadyPendingCallError):
            wrapped.reset()
        wrapped.step_wait()
        assert buf[:]["action"].tolist() == [1, 2]
        wrapped.step(Z)
        assert len(buf) == 4 and buf.get_segments() == []

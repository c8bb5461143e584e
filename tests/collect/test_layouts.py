"""Which buffers fit which environments, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.collect.worlds import (
    NEXT_STEP,
    Counting,
    Nested,
    counting,
    lanes_for,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc

Wrapper = rc.ReplayBufferCollectionWrapper


def stepped(wrapped: Any, steps: int = 3) -> Any:
    wrapped.reset(seed=0)
    for _ in range(steps):
        wrapped.step(wrapped.action_space.sample())
    return wrapped


def sink_of(wrapped: Any) -> str:
    return type(wrapped._recorder.sink).__name__


def test_auto_chooses_by_counts() -> None:
    env, envs = counting(), vector(counting, 3, NEXT_STEP)
    buffers = [tracked_for(env) for _ in range(3)]
    assert sink_of(Wrapper(env, tracked_for(env))) == "EnvSink"
    assert sink_of(Wrapper(env, [tracked_for(env)])) == "EnvSink"
    assert sink_of(Wrapper(envs, lanes_for(envs, 3))) == "LaneSink"
    assert sink_of(Wrapper(envs, untracked_for(envs))) == "BlockSink"
    assert sink_of(Wrapper(envs, buffers)) == "PerEnvSink"
    one = vector(counting, 1, NEXT_STEP)
    assert sink_of(Wrapper(one, tracked_for(one))) == "EnvSink"
    assert sink_of(Wrapper.per_env(one, [tracked_for(one)])) == "PerEnvSink"


def test_shared_and_per_env_fix_the_mode() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    assert Wrapper.shared(envs, lanes_for(envs, 2)).replay_mode == "shared"
    assert Wrapper.per_env(envs, [tracked_for(envs), tracked_for(envs)]).replay_mode == "per_env"
    with pytest.raises(ValueError, match=r"shared mode of 2 slots needs 1 buffer, got 2"):
        Wrapper.shared(envs, [tracked_for(envs), tracked_for(envs)])
    with pytest.raises(ValueError, match=r"per_env mode of 2 slots needs 2 buffers, got 1.*num_lanes=2"):
        Wrapper.per_env(envs, [tracked_for(envs)])


def test_misfits_are_value_errors_that_name_what_is_needed() -> None:
    envs = vector(counting, 3, NEXT_STEP)
    with pytest.raises(ValueError, match=r"keeps segments; create it with num_lanes=3"):
        Wrapper(envs, tracked_for(envs))
    with pytest.raises(ValueError, match=r"has 2 lanes; create it with num_lanes=3"):
        Wrapper(envs, lanes_for(envs, 2))
    with pytest.raises(ValueError, match=r"needs 1 buffer, got 2; pass 3, or one created with num_lanes=3"):
        Wrapper(envs, [tracked_for(envs) for _ in range(2)])
    with pytest.raises(ValueError, match="at least one"):
        Wrapper(envs, [])
    with pytest.raises(ValueError, match=r"replay_mode: must be one of .*'each'"):
        Wrapper(envs, untracked_for(envs), replay_mode="each")
    buf = tracked_for(envs)
    with pytest.raises(ValueError, match="different buffers, got one twice"):
        Wrapper(envs, [buf, tracked_for(envs), buf])
    with pytest.raises(ValueError, match="one space, got buffer 2"):
        Wrapper(envs, [tracked_for(envs), tracked_for(envs), untracked_for(envs, keys=["obs"])])
    with pytest.raises(TypeError, match="must be ReplayBuffers, got dict"):
        Wrapper(envs, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="env: must be a gymnasium Env"):
        Wrapper(object(), buf)


def test_a_read_only_buffer_is_refused(tmp_path: Any) -> None:
    env = counting()
    tracked_for(env).dumps(tmp_path / "d")
    with pytest.raises(rc.ReadOnlyError, match="read_only=False"):
        Wrapper(env, rc.ReplayBuffer.load_from(tmp_path / "d"))


def test_an_env_appends_and_ends_a_segment_with_each_episode() -> None:
    env = Counting(longest=1)  # every step ends an episode
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf)
    for _ in range(4):
        wrapped.reset()
        wrapped.step(0)
    assert buf.get_segments() == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize(("call", "make"), [("extend", untracked_for), ("extend_lanes", lanes_for)])
def test_one_write_per_step_of_all_slots(call: str, make: Any) -> None:
    envs = vector(lambda: Counting(longest=10**9), 3, NEXT_STEP)
    buf = make(envs) if make is untracked_for else make(envs, 3)
    write, n_rows = getattr(buf, call), []

    def counted(*args: Any, **kwargs: Any) -> None:
        before = len(buf)
        write(*args, **kwargs)
        n_rows.append(len(buf) - before)

    setattr(buf, call, counted)
    stepped(Wrapper(envs, buf), 5)
    assert n_rows == [3] * 5


def test_lanes_without_segments() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    buf = untracked_for(envs, num_lanes=2)
    stepped(Wrapper(envs, buf))
    assert len(buf) > 4
    assert buf.get_segments() is None


def test_a_lane_of_another_owner_is_busy_at_construction_and_nothing_is_kept() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    native = buf.engine.native  # type: ignore[attr-defined]
    assert native.owner(0) and native.owner(1)
    wrapped.close()
    assert not native.owner(0) and not native.owner(1)
    with pytest.raises(ValueError, match="'score'"):  # a wrong space, told before the lanes are claimed
        other = rc.ReplayBuffer.create(rc.MemoryStorage, {"score": ((), "float32")}, capacity=4, num_lanes=2)
        Wrapper(envs, other)
    assert not other.engine.native.owner(0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["env", "lanes", "block", "per_env"])
def test_nested_spaces_in_every_layout(layout: str) -> None:
    n = 1 if layout == "env" else 2
    env = Nested() if n == 1 else vector(Nested, n, NEXT_STEP)
    kwargs: dict[str, Any] = {"maintain_segment_metadata": layout != "block"}
    if layout == "lanes":
        kwargs["num_lanes"] = n

    def make() -> rc.ReplayBuffer:
        return rc.ReplayBuffer.create(rc.MemoryStorage, rc.transition_space(env), capacity=100, **kwargs)

    buffers = [make() for _ in range(n)] if layout == "per_env" else [make()]
    wrapped = Wrapper(env, buffers if layout == "per_env" else buffers[0])
    obs, _ = wrapped.reset(seed=0)
    wrapped.action_space.seed(0)
    action = wrapped.action_space.sample()
    next_obs, *_ = wrapped.step(action)
    row = buffers[0][0]
    if n == 2:

        def pick(o: Any) -> Any:
            pair = o["pair"]
            return {"pair": (pair[0][0], pair[1][0]), "name": o["name"][0], "image": o["image"][0]}

        obs, next_obs = pick(obs), pick(next_obs)
        action = {key: value[0] for key, value in action.items()}
    for name, given in (("obs", obs), ("next_obs", next_obs)):
        assert row[name]["name"] == given["name"]
        assert np.array_equal(row[name]["image"], given["image"])
        assert np.array_equal(row[name]["pair"][0], given["pair"][0])
        assert row[name]["pair"][1] == given["pair"][1]
    assert row["action"]["go"] == action["go"]
    assert np.array_equal(row["action"]["how"], action["how"])


def test_a_shared_buffer_of_many_lanes_takes_one_env_per_process_lane() -> None:
    env = counting()
    buf = rc.ReplayBuffer.create(
        rc.SharedMemoryStorage, rc.transition_space(env), capacity=40, num_lanes=4, multiprocessing=True,
        maintain_segment_metadata=True,
    )  # fmt: skip
    with buf:
        stepped(Wrapper(env, buf), 1)
        assert len(buf) == 1


def test_a_subclass_gets_the_right_kind() -> None:
    class Mine(rc.ReplayBufferCollectionWrapper):
        def reset(self, **kwargs: Any) -> Any:
            self.called = True
            return super().reset(**kwargs)

    env, envs = counting(), vector(counting, 2, NEXT_STEP)
    one, many = Mine(env, tracked_for(env)), Mine(envs, lanes_for(envs, 2))
    assert isinstance(one, gymnasium.Wrapper) and isinstance(many, gymnasium.vector.VectorWrapper)
    many.reset()
    assert isinstance(many, Mine) and many.called


def test_close_ends_segments_closes_the_env_and_no_buffer() -> None:
    class Closing(Counting):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    env = Closing(longest=10**9)
    buf = tracked_for(env)
    with Wrapper(env, buf) as wrapped:
        stepped(wrapped)
        assert buf.open_segment == (0, 3)
    wrapped.close()
    assert env.closed == 1
    assert buf.get_segments() == [(0, 3)]
    for call in (lambda: wrapped.step(0), wrapped.reset, lambda: wrapped.set_replay_buffers(buf)):
        with pytest.raises(rc.ClosedError):
            call()


def test_close_after_the_buffer_is_closed() -> None:
    for n in (1, 2):
        env = Counting() if n == 1 else vector(counting, n, NEXT_STEP)
        buf = lanes_for(env, n)
        wrapped = stepped(Wrapper(env, buf), 1)
        buf.close()
        with pytest.raises(rc.ClosedError):
            wrapped.step(wrapped.action_space.sample())
        wrapped.close()


class ThreeSteps(Counting):
    """Its episodes have three steps."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        found = super().reset(**kwargs)
        self.length = 3
        return found


def test_lanes_of_one_buffer_are_recorded_into_by_several_writers() -> None:
    """One environment and one of two slots, each into lanes of its own."""
    env, envs = ThreeSteps(), vector(ThreeSteps, 2, NEXT_STEP)
    buffer = lanes_for(env, 4)
    lanes = [buffer.on_lane(k) for k in range(4)]
    one, two = Wrapper(env, lanes[1]), Wrapper(envs, [lanes[3], lanes[2]])
    assert one.replay_mode == two.replay_mode == "shared" and two.replay_buffers == [buffer]
    stepped(one, 2)
    stepped(two, 3)
    assert lanes[1].open_segment == (0, 2) and lanes[3].open_segment is None
    assert buffer.get_segments() == [(2, 5), (5, 8)] and len(buffer) == 8
    one.close()
    two.close()
    assert buffer.get_segments() == [(0, 2), (2, 5), (5, 8)]
    lanes[1].append(buffer[0])  # a lane stays the caller's
    lanes[0].close()
    with pytest.raises(rc.ClosedError, match="lane 0"):
        Wrapper(env, lanes[0])
    for wrong in ([lanes[1]], lanes[1:], [lanes[1], lanes[1]], [lanes[1], buffer]):
        with pytest.raises(ValueError, match=r"lanes.*pass buf\.on_lane\(k\) for each slot"):
            Wrapper(envs, wrong)
    with pytest.raises(ValueError, match="2 slots need 2 lanes and shared mode, got 2 and per_env"):
        Wrapper.per_env(envs, lanes[2:])

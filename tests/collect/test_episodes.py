"""Where episodes begin and end: resets, masks, the three auto-reset modes, and what is refused before the env moves."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests.collect.worlds import (
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Contextual,
    ContextualVector,
    Counting,
    counting,
    lanes_for,
    tracked_for,
    untracked_for,
    vector,
)

import recollect as rc
from recollect.collect.autoreset import as_mode, mode_of

Wrapper = rc.ReplayBufferCollectionWrapper
Z = np.zeros(2, np.int64)


def short() -> Any:
    return Counting(longest=1)


def long() -> Any:
    return Counting(longest=10**9)


class Undeclared(SyncVectorEnv):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.metadata = {}


# -- the mode


def test_pain_17_an_undeclared_mode_is_never_guessed() -> None:
    envs = Undeclared([counting] * 2)
    with pytest.raises(ValueError, match=r"autoreset_mode.*got none in Undeclared; pass autoreset_mode="):
        Wrapper(envs, untracked_for(envs))
    assert Wrapper(envs, untracked_for(envs), autoreset_mode="SAME_STEP")._slots.mode is SAME_STEP
    assert mode_of(envs, None, version="1.0.0") is NEXT_STEP
    with pytest.raises(ValueError):
        mode_of(envs, None, version="1.1.0")
    with pytest.raises(ValueError):
        mode_of(envs, None, version="1.10.0")


def test_the_argument_beats_the_declaration() -> None:
    envs = vector(counting, 2, NEXT_STEP)
    assert mode_of(envs, None) is NEXT_STEP
    assert mode_of(envs, AutoresetMode.DISABLED) is DISABLED


def test_modes_by_member_value_and_name() -> None:
    for mode in MODES:
        assert as_mode(mode, "x") is as_mode(mode.value, "x") is as_mode(mode.name, "x") is mode
    with pytest.raises(ValueError, match=r"x: must be one of AutoresetMode\.NEXT_STEP.*'never'"):
        as_mode("never", "x")


def test_an_env_is_disabled_unless_autoreset_is_among_its_wrappers() -> None:
    env = counting()
    assert mode_of(env, None) is DISABLED
    env.metadata = {"autoreset_mode": SAME_STEP}  # what an older vector environment may leave behind
    assert mode_of(env, None) is DISABLED
    inner = gymnasium.wrappers.Autoreset(env)
    assert mode_of(gymnasium.wrappers.OrderEnforcing(inner), None) is NEXT_STEP


# -- reset needed


@pytest.mark.parametrize("error", [rc.ResetNeeded, gymnasium.error.ResetNeeded, rc.RecollectError])
def test_a_step_before_reset(error: type[Exception]) -> None:
    for env in (counting(), vector(counting, 2, NEXT_STEP)):
        with pytest.raises(error, match="needs a reset first"):
            Wrapper(env, untracked_for(env)).step(Z)


def test_a_step_past_the_end_is_refused_before_the_env_moves() -> None:
    env = short()
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0)
    with pytest.raises(rc.ResetNeeded, match=r"past the end of an episode; call reset\(\) first"):
        wrapped.step(0)
    assert env.count == 1 and len(buf) == 1


def test_disabled_slots_past_their_end_are_named() -> None:
    envs = vector(short, 2, DISABLED)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    wrapped.step(Z)
    with pytest.raises(rc.ResetNeeded, match=r"slots 0, 1 are past the end .*reset\(mask=\.\.\.\)"):
        wrapped.step(Z)
    wrapped.reset(mask=np.array([True, False]))
    with pytest.raises(rc.ResetNeeded, match="slot 1 is past the end"):
        wrapped.step(Z)
    assert [e.count for e in envs.envs] == [0, 1]
    assert buf.stats().offered == 2
    wrapped.reset(mask=np.array([False, True]))
    wrapped.step(Z)
    assert len(buf) == 4


def test_an_error_of_the_environment_needs_a_reset_for_nobody_knows_where_it_is() -> None:
    class Failing(Counting):
        def step(self, action: Any) -> Any:
            if action == 4:
                raise RuntimeError("out of steam")
            return super().step(action)

    envs = vector(lambda: Failing(longest=10**9), 2, NEXT_STEP)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    wrapped.step(Z)
    with pytest.raises(RuntimeError, match="out of steam"):
        wrapped.step(np.array([0, 4]))  # slot 0 has moved, slot 1 has not
    assert buf.get_segments() == [(0, 1), (1, 2)]
    with pytest.raises(rc.ResetNeeded, match="left by an error"):
        wrapped.step(Z)
    wrapped.reset()
    wrapped.step(Z)
    assert len(buf) == 4


# -- reset


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_reset_ends_open_segments_and_the_last_row_keeps_its_flags(mode: Any) -> None:
    envs = vector(long, 2, mode)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    for _ in range(3):
        wrapped.step(Z)
    assert buf.get_segments() == []
    wrapped.reset()
    assert buf.get_segments() == [(0, 3), (3, 6)]
    assert not (buf[:]["terminated"] | buf[:]["truncated"]).any()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
@pytest.mark.parametrize("as_option", [False, True])
def test_a_masked_reset_touches_only_its_slots(mode: Any, as_option: bool) -> None:
    envs = vector(long, 2, mode)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    wrapped.step(Z)
    mask = np.array([False, True])
    options = {"reset_mask": mask}
    obs, _ = wrapped.reset(options=options) if as_option else wrapped.reset(mask=mask)
    assert "reset_mask" in options
    assert obs[:, 1].tolist() == [1, 2] and obs[:, 2].tolist() == [1, 0]  # all slots' observations come back
    assert buf.get_segments() == [(1, 2)]
    wrapped.step(Z)
    assert buf[:]["obs"][:, 2].tolist() == [0, 1, 0, 0]
    assert buf[:]["obs"][:, 1].tolist() == [1, 1, 1, 2]


def test_wrong_masks() -> None:
    envs = vector(long, 2, NEXT_STEP)
    wrapped = Wrapper(envs, lanes_for(envs, 2))
    with pytest.raises(rc.ResetNeeded, match="the first one must be of all slots"):
        wrapped.reset(mask=[True, False])
    wrapped.reset()
    with pytest.raises(ValueError, match="got both"):
        wrapped.reset(mask=[True, False], options={"reset_mask": np.array([True, False])})
    for mask in ([True], [0, 1], [False, False], [[True, False]]):
        with pytest.raises(ValueError, match=r"mask: must be bool of shape \(2,\)"):
            wrapped.reset(mask=mask)
    assert [e.episode for e in envs.envs] == [1, 1]
    env = counting()
    with pytest.raises(TypeError, match="mask is for a VectorEnv"):
        Wrapper(env, tracked_for(env)).reset(mask=[True])


def test_an_environment_that_does_not_know_masks_is_found_out() -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset(seed=0)
    wrapped.step(Z)
    with pytest.raises(ValueError, match=r"seems not to know options\['reset_mask'\]"):
        wrapped.reset(mask=[True, False])
    with pytest.raises(rc.ResetNeeded):
        wrapped.step(Z)
    assert len(buf.get_segments()) == 2


def test_next_step_is_the_reset_unless_reset_came_first() -> None:
    envs = vector(short, 2, NEXT_STEP)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    wrapped.step(Z)  # both end
    wrapped.reset(mask=np.array([True, False]))
    wrapped.step(Z)  # slot 0 steps, slot 1 resets itself
    assert buf[:]["obs"][:, :3].tolist() == [[0, 1, 0], [0, 2, 0], [0, 1, 0]]
    env = gymnasium.wrappers.Autoreset(short())
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0)
    wrapped.reset()
    wrapped.step(0)
    wrapped.step(0)
    assert len(buf) == 2


def test_an_episode_that_was_open_before_wrapping_does_not_go_on() -> None:
    env = long()
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf)
    wrapped.reset()
    wrapped.step(0)
    again = Wrapper(env, buf)
    again.reset()
    again.step(0)
    assert buf.get_segments() == [(0, 1)]


def test_reset_passes_everything_on() -> None:
    seen: list[Any] = []

    class Taking(Counting):
        def reset(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return super().reset(seed=kwargs["seed"])

    env = Taking()
    Wrapper(env, tracked_for(env)).reset("x", seed=3, options={"a": 1}, more=2)
    assert seen == [(("x",), {"seed": 3, "options": {"a": 1}, "more": 2})]


# -- SAME_STEP


class Final(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Changes info["final_obs"] by a function."""

    def __init__(self, env: Any, change: Any) -> None:
        super().__init__(env)
        self.change = change

    def step(self, actions: Any) -> Any:
        *rest, info = self.env.step(actions)
        return *rest, self.change(dict(info))


def without(info: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in info.items() if "final_obs" not in k}


def masked_out(info: dict[str, Any]) -> dict[str, Any]:
    return info | {"_final_obs": np.array([True, False])}


def half_missing(info: dict[str, Any]) -> dict[str, Any]:
    info["final_obs"][1] = None
    return {k: v for k, v in info.items() if k != "_final_obs"}


@pytest.mark.parametrize("change", [masked_out, half_missing])
def test_a_missing_final_obs_names_its_slot_and_costs_only_that_row(change: Any) -> None:
    envs = Final(vector(short, 2, SAME_STEP), change)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    with pytest.raises(ValueError, match=r'slot 1: info\["final_obs"\] must hold'):
        wrapped.step(Z)
    stats = buf.stats()
    assert (stats.live, stats.rejected) == (1, 1)
    assert buf[0]["next_obs"][1:3].tolist() == [1, 1]


def test_no_final_obs_at_all() -> None:
    envs = Final(vector(short, 2, SAME_STEP), without)
    buf = untracked_for(envs)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    with pytest.raises(ValueError, match="slot 0") as caught:
        wrapped.step(Z)
    assert "2 slots could not be recorded" in caught.value.__notes__[0]
    assert buf.stats().rejected == 2


def test_a_final_obs_that_does_not_fit_is_not_cast() -> None:
    def widened(info: dict[str, Any]) -> dict[str, Any]:
        info["final_obs"][0] = info["final_obs"][0].astype(np.float64)
        return info

    envs = Final(vector(short, 2, SAME_STEP), widened)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    with pytest.raises(rc.SchemaError, match="slot 0: .*float64 of shape"):
        wrapped.step(Z)
    assert buf.stats().rejected == 1


def test_final_obs_as_dense_arrays() -> None:
    def dense(info: dict[str, Any]) -> dict[str, Any]:
        return {"final_obs": np.stack(list(info["final_obs"]))} if "final_obs" in info else info

    envs = Final(vector(short, 2, SAME_STEP), dense)
    buf = lanes_for(envs, 2)
    wrapped = Wrapper(envs, buf)
    wrapped.reset()
    wrapped.step(Z)
    assert buf[:]["next_obs"][:, 1:3].tolist() == [[1, 1], [1, 1]]
    wrapped.step(Z)  # recorded from the returned observation, not from the final one
    assert buf[:]["obs"][:, 1:3].tolist() == [[1, 0], [2, 0], [1, 0], [2, 0]]


class Same(Counting):
    """Resets in the step that ends an episode."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            return self.reset()[0], reward, terminated, truncated, {"final_obs": obs}
        return obs, reward, terminated, truncated, info


def test_an_env_that_resets_in_the_same_step() -> None:
    env = Same(longest=1)
    buf = tracked_for(env)
    wrapped = Wrapper(env, buf, autoreset_mode=SAME_STEP)
    wrapped.reset()
    wrapped.step(0)
    wrapped.step(0)
    assert buf[:]["obs"][:, 1:3].tolist() == [[1, 0], [2, 0]]
    assert buf[:]["next_obs"][:, 1:3].tolist() == [[1, 1], [2, 1]]


def test_an_env_that_overwrites_its_final_obs_is_warned_of_once() -> None:
    env = Same(longest=1, reuses=True)
    wrapped = Wrapper(env, tracked_for(env), autoreset_mode=SAME_STEP)
    wrapped.reset()
    with pytest.warns(UserWarning, match="final_obs.*next episode's first"):
        wrapped.step(0)
    wrapped.step(0)  # warnings are errors


# -- contexts


def test_contexts_of_an_env() -> None:
    env = Contextual(ident=4, longest=1)
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage,
        rc.transition_space(env, ["context", "obs"]),
        capacity=9,
        maintain_segment_metadata=True,
    )
    wrapped = Wrapper(env, buf)
    context, obs, info = wrapped.reset()
    assert context.tolist() == [4, 1] and obs.shape == (4,) and info == {}
    wrapped.step(0)
    wrapped.reset()
    wrapped.step(0)
    assert buf[:]["context"].tolist() == [[4, 1], [4, 2]]


def test_contexts_need_a_context_space() -> None:
    env = counting()
    space = spaces.Dict({"context": Contextual.context_space})
    with pytest.raises(ValueError, match="got 'context'"):
        Wrapper(env, rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=3))


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda m: m.name)
def test_contexts_after_an_automatic_reset_come_from_info(mode: Any) -> None:
    envs = ContextualVector(mode)
    space = rc.transition_space(envs, ["context", "obs"])
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=500)
    wrapped = Wrapper(envs, buf)
    wrapped.reset(seed=0)
    for _ in range(30):
        wrapped.step(Z)
    rows = buf[:]
    assert (rows["context"] == rows["obs"][:, :2]).all()  # ident and episode, of the same moment
    assert rows["context"][:, 1].max() > 3


def test_contexts_that_nobody_tells_are_not_guessed() -> None:
    envs = ContextualVector(NEXT_STEP, tells=False)
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(envs, ["context", "obs"]), capacity=500
    )
    wrapped = Wrapper(envs, buf)
    wrapped.reset(seed=0)
    with pytest.raises(ValueError, match=r'reset themselves: info\["context"\]'):
        for _ in range(30):
            wrapped.step(Z)
    with pytest.raises(rc.ResetNeeded):
        wrapped.step(Z)


def test_contexts_of_a_masked_reset() -> None:
    envs = ContextualVector(DISABLED)
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(envs, ["context", "obs"]), capacity=500
    )
    wrapped = Wrapper(envs, buf)
    wrapped.reset(seed=0)
    for _ in range(20):
        _, _, terminated, truncated, _ = wrapped.step(Z)
        if (terminated | truncated).any():
            wrapped.reset(mask=terminated | truncated)
    rows = buf[:]
    assert (rows["context"] == rows["obs"][:, :2]).all()

"""torchgfn's trajectories come back as they went in, from here and from a manager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import recollect as rc
from recollect.remote import Diversity, LocalCarrier

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # packages that torchgfn imports warn of torch
    pytest.importorskip("gfn.gym")

from gfn.containers import StatesContainer, Trajectories  # noqa: E402
from gfn.gym import HyperGrid, Line  # noqa: E402

from recollect.adapters.torchgfn import (  # noqa: E402
    GFNReplayBuffer,
    GFNReplayBufferManager,
    GFNTerminatingStateBuffer,
    final_states,
    from_torchgfn,
    state_space,
    to_torchgfn,
    trajectory_space,
)


def grid() -> Any:
    return HyperGrid(ndim=2, height=8)


def walks(env: Any, n: int, seed: int = 0) -> Any:
    """n walks of a grid, by torchgfn's own sampler with a policy that was never trained."""
    from gfn.estimators import DiscretePolicyEstimator
    from gfn.preprocessors import KHotPreprocessor
    from gfn.samplers import Sampler
    from gfn.utils.modules import MLP

    torch.manual_seed(seed)
    pre = KHotPreprocessor(height=env.height, ndim=env.ndim)
    policy = DiscretePolicyEstimator(MLP(pre.output_dim, env.n_actions), env.n_actions, preprocessor=pre)
    return Sampler(policy).sample_trajectories(env, n=n, save_logprobs=False)


def assert_equal(a: Any, b: Any) -> None:
    assert torch.equal(a.states.tensor, b.states.tensor) and a.states.tensor.dtype == b.states.tensor.dtype
    assert torch.equal(a.actions.tensor, b.actions.tensor)
    assert torch.equal(a.terminating_idx, b.terminating_idx)
    assert torch.equal(a.log_rewards, b.log_rewards)


def test_trajectories_there_and_back_are_equal() -> None:
    env = grid()
    theirs = walks(env, 32)
    ours = from_torchgfn(theirs)
    assert ours.lengths.tolist() == theirs.terminating_idx.tolist()
    assert torch.equal(torch.from_numpy(ours.fields["final_state"]), theirs.terminating_states.tensor)
    assert_equal(theirs, to_torchgfn(env, ours))
    assert trajectory_space(env)["steps"].feature_space["state"].shape == (2,)


def test_conditions_come_back() -> None:
    env = grid()
    theirs = walks(env, 5)
    one_each = torch.rand(5, 3)
    theirs.states.conditions = one_each.expand(theirs.max_length + 1, 5, 3)
    back = to_torchgfn(env, from_torchgfn(theirs))
    assert torch.equal(back.states.conditions, theirs.states.conditions)
    assert "condition" in trajectory_space(env, condition_dim=3).spaces


def test_states_that_are_not_discrete() -> None:
    env = Line(mus=[2.0, 5.0], sigmas=[0.5, 0.5], init_value=0, n_sd=4.5, n_steps_per_trajectory=3)
    states = torch.rand(4, 2, 2)
    states[3] = env.sf
    actions = torch.rand(3, 2, 1)
    rewards = torch.tensor([-1.0, 0.5])
    args = env.states_from_tensor(states), env.actions_from_tensor(actions), torch.tensor([3, 3])
    theirs = Trajectories(env, *args, log_rewards=rewards)
    assert_equal(theirs, to_torchgfn(env, from_torchgfn(theirs)))


def test_a_local_buffer_keeps_the_newest_or_the_best() -> None:
    env = grid()
    theirs = walks(env, 40)
    with (
        GFNReplayBuffer(env, capacity=10, seed=0) as newest,
        GFNReplayBuffer(env, capacity=10, prioritized_capacity=True, seed=0) as best,
    ):
        for first in range(0, 40, 8):
            newest.add(theirs[range(first, first + 8)])
            best.add(theirs[range(first, first + 8)])
        assert len(newest) == len(best) == 10
        kept = sorted(newest.training_container.terminating_idx.tolist())
        assert kept == sorted(theirs.terminating_idx[-10:].tolist())
        highest = theirs.log_rewards.sort().values[-10:]
        assert torch.equal(best.training_container.log_rewards.sort().values, highest)


def test_drawing_takes_no_more_than_there_are_and_by_reward_if_asked() -> None:
    env = grid()
    theirs = walks(env, 4)
    with GFNReplayBuffer(env, seed=0) as plain, GFNReplayBuffer(env, prioritized_sampling=True, seed=0) as by:
        with pytest.raises(rc.EmptyError, match="add some first"):
            plain.sample(1)
        plain.add(theirs)
        by.add(theirs)
        assert len(plain.sample(9)) == 4 and len(by.sample(9)) == 9
        assert isinstance(plain.sample(3), Trajectories)


def test_longer_trajectories_make_room_and_nothing_is_lost() -> None:
    env = HyperGrid(ndim=2, height=32)
    n_steps = (3, 40, 60)
    with GFNReplayBuffer(env, seed=0) as buffer:
        for n in n_steps:
            states = torch.full((n + 1, 1, 2), -1)
            states[:n, 0, 0] = torch.arange(n) // 2
            states[:n, 0, 1] = (torch.arange(n) + 1) // 2
            actions = torch.zeros(n, 1, 1, dtype=torch.long)
            args = env.states_from_tensor(states), env.actions_from_tensor(actions), torch.tensor([n])
            buffer.add(Trajectories(env, *args, log_rewards=torch.tensor([float(n)])))
        assert sorted(buffer.training_container.terminating_idx.tolist()) == list(n_steps)
        one = next(t for t in (buffer.training_container[i] for i in range(3)) if len(t.states) == 61)
        assert torch.equal(one.states.tensor[:60], states[:60])
    with GFNReplayBuffer(env, max_length=8) as buffer, pytest.raises(ValueError, match="at least 60, got 8"):
        buffer.add(Trajectories(env, *args, log_rewards=torch.tensor([1.0])))


def test_a_diverse_buffer_keeps_each_final_state_once() -> None:
    env = grid()
    theirs = walks(env, 200)
    with GFNReplayBuffer(env, diversity=Diversity()) as buffer:
        buffer.add(theirs)
        kept = buffer.training_container.terminating_states.tensor
    assert len(kept) == len(kept.unique(dim=0)) == len(theirs.terminating_states.tensor.unique(dim=0))


@pytest.mark.parametrize("scoring_only", [False, True])
def test_one_object_stores_here_and_at_the_manager(scoring_only: bool) -> None:
    env = grid()
    theirs = walks(env, 16)
    seen: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        seen.append(obj)
        return {"score": float(len(obj)), "from": float(sender_rank)}

    ends = LocalCarrier.group(2)
    manager = GFNReplayBufferManager(
        env, 1, 1, score, communication_backend=ends[1], max_length=15, store_locally=not scoring_only
    ).start()
    try:
        with GFNReplayBuffer(env, 100, False, False, 1, 2, ends[0], scoring_only=scoring_only) as buffer:
            assert buffer.add(theirs[range(8)]) is None  # remote_buffer_freq=2
            scores = buffer.add(theirs[range(8, 16)])
            assert scores is not None and scores["score"] == 16 and scores["from"] == 0
            assert len(buffer) == 16
        if scoring_only:
            assert isinstance(seen[0], StatesContainer)
            assert torch.equal(seen[0].terminating_states.tensor, theirs.terminating_states.tensor)
            assert torch.equal(seen[0].log_rewards, theirs.log_rewards)
        else:
            assert_equal(seen[0], theirs)
            assert manager.stats().live == 16
    finally:
        manager.close()
        for end in ends:
            end.close()


def test_a_buffer_of_final_states_takes_trajectories_and_states() -> None:
    env = grid()
    theirs = walks(env, 12)
    with GFNTerminatingStateBuffer(env, 8, prioritized_capacity=True, seed=0) as buffer:
        buffer.add(theirs)
        kept = buffer.training_container
        assert isinstance(kept, StatesContainer) and len(buffer) == 8 and kept.is_terminating.all()
        assert torch.equal(kept.log_rewards.sort().values, theirs.log_rewards.sort().values[-8:])
        assert torch.equal(env.log_reward(kept.terminating_states), kept.log_rewards)
        buffer.add(theirs.to_states_container())  # of it the final states, which are there already
        drawn = buffer.sample(5)
        assert len(drawn) == 5 and torch.equal(env.log_reward(drawn.states), drawn.log_rewards)
    assert list(state_space(env, 2)) == ["condition", "final_state", "log_reward"]
    with pytest.raises(TypeError, match="got Transitions"):
        final_states(theirs.to_transitions())


def test_what_cannot_be_kept_is_refused_with_the_way_out() -> None:
    env = grid()
    theirs = walks(env, 3)
    with pytest.raises(TypeError, match="got Transitions; reverse them, or add the trajectories"):
        from_torchgfn(theirs.to_transitions())
    backward = Trajectories(env, theirs.states, theirs.actions, theirs.terminating_idx, is_backward=True)
    with pytest.raises(TypeError, match="must be forward Trajectories, got backward ones"):
        from_torchgfn(backward)
    with pytest.raises(ValueError, match="pass remote_manager_rank"):
        GFNReplayBuffer(env, baseline_filtering=True)

"""torchgfn on Recollect: its environments and containers both ways, its replay buffer and its manager.

An item is a trajectory: its steps are (state, action), without padding; beside them it has its final state, its log
reward and, of a conditional environment, its condition. What torchgfn itself drops when it stores (log_probs,
estimator_outputs) is not kept here either.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from recollect.errors import EmptyError, MissingExtraError
from recollect.remote.client.client import RemoteReplay
from recollect.remote.items.trajectories import Trajectories
from recollect.remote.manager.diversity import Diversity
from recollect.remote.manager.manager import ReplayBufferManager
from recollect.spaces import as_space

try:
    import torch
    from gfn import containers
except ImportError as error:
    # No extra: the package asks for numpy below 2 but runs with 2, and pip would refuse the two together.
    raise MissingExtraError(
        'recollect.adapters.torchgfn: needs torchgfn; run pip install torchgfn, then pip install "numpy>=2"'
    ) from error


def trajectory_space(env: Any, condition_dim: int = 0) -> spaces.Dict:
    """The space of one trajectory of a torchgfn environment, with a condition of so many numbers, if any."""
    if not isinstance(env.s0, torch.Tensor):
        raise TypeError(
            f"env: states must be tensors, got {type(env.s0).__name__}; "
            "graphs have no fixed size, keep them in torchgfn"
        )
    state, action = ((tuple(x.shape), _dtype(x.dtype)) for x in (env.s0, env.dummy_action))
    number = _dtype(torch.get_default_dtype())
    step = as_space({"state": state, "action": action})
    fields = {"final_state": as_space(state), "log_reward": as_space(((), number))}
    if condition_dim:
        fields["condition"] = as_space(((condition_dim,), number))
    return spaces.Dict({"steps": spaces.Sequence(step, stack=True), **fields})


def state_space(env: Any, condition_dim: int = 0) -> spaces.Dict:
    """The space of a final state of a torchgfn environment with its log reward, for buffers of final states alone."""
    fields = dict(trajectory_space(env, condition_dim).spaces)
    return spaces.Dict({name: space for name, space in fields.items() if name != "steps"})


def from_torchgfn(container: Any) -> Trajectories:
    """The trajectories of a torchgfn container, as the managers and clients of `recollect.remote` take them."""
    if not isinstance(container, containers.Trajectories) or container.is_backward:
        got = "backward ones" if isinstance(container, containers.Trajectories) else type(container).__name__
        raise TypeError(
            f"container: must be forward Trajectories, got {got}; reverse them, or add the trajectories and take "
            "to_transitions() or to_states_container() of what is drawn"
        )
    conditions = container.states.conditions
    fields = {} if conditions is None else {"condition": _numpy(conditions[0])}
    steps = {"state": _numpy(container.states.tensor[:-1]), "action": _numpy(container.actions.tensor)}
    return Trajectories.from_padded(
        steps, _numpy(container.terminating_idx), time_major=True, log_rewards=_numpy(container.log_rewards),
        final_state=_numpy(container.terminating_states.tensor), **fields,
    )  # fmt: skip


def final_states(container: Any) -> dict[str, Any]:
    """The final states of a torchgfn container with their log rewards, as a block of `state_space(env)`."""
    if isinstance(container, containers.Transitions) or container.log_rewards is None:
        raise TypeError(
            f"container: must be Trajectories or a StatesContainer with log_rewards, got {type(container).__name__}"
        )
    states, rewards = container.terminating_states, container.log_rewards
    if isinstance(container, containers.StatesContainer):
        rewards = rewards[container.is_terminating]
    fields = {} if states.conditions is None else {"condition": _numpy(states.conditions)}
    return {"final_state": _numpy(states.tensor), "log_reward": _numpy(rewards), **fields}


def to_torchgfn(env: Any, items: Trajectories) -> Any:
    """The torchgfn container of such trajectories, equal to the one they came from, on the device of `env`."""
    n, longest = len(items), int(items.lengths.max(initial=0))
    states = env.sf.expand(longest + 1, n, *env.sf.shape).clone()
    actions = env.dummy_action.expand(longest, n, *env.dummy_action.shape).clone()
    which = np.repeat(np.arange(n), items.lengths)
    when = np.arange(len(which)) - np.repeat(np.cumsum(items.lengths) - items.lengths, items.lengths)
    states[when, which] = torch.from_numpy(items.steps["state"]).to(env.device)
    actions[when, which] = torch.from_numpy(items.steps["action"]).to(env.device)
    wrapped = env.states_from_tensor(states)
    if "condition" in items.fields:
        condition = torch.from_numpy(items.fields["condition"]).to(env.device)
        wrapped.conditions = condition.expand(longest + 1, *condition.shape).clone()
    return containers.Trajectories(
        env, wrapped, env.actions_from_tensor(actions), torch.from_numpy(items.lengths).to(env.device),
        log_rewards=None if items.log_rewards is None else torch.from_numpy(items.log_rewards).to(env.device),
    )  # fmt: skip


class GFNReplayBufferManager(ReplayBufferManager):
    """A `ReplayBufferManager` of a torchgfn environment, whose scoring function is given torchgfn's containers.

    Those are Trajectories, or a StatesContainer of final states if a worker sends `scoring_only`. `max_length` is the
    most steps of a trajectory, the exit action included. Ownership and Concurrency: as `ReplayBufferManager`.
    """

    def __init__(self, env: Any, rank: int, num_training_ranks: int | None, scoring_function: Any = None,
                 *args: Any, max_length: int, condition_dim: int = 0, **kwargs: Any) -> None:  # fmt: skip
        """Make the buffer; the other arguments are those of `ReplayBufferManager`."""

        def score(scored: Any, sender_rank: int) -> Any:
            return scoring_function(_scored(env, scored), sender_rank=sender_rank)

        space = trajectory_space(env, condition_dim)
        function = None if scoring_function is None else score
        super().__init__(space, rank, num_training_ranks, function, *args, max_length=max_length, **kwargs)


class GFNReplayBuffer:
    """torchgfn's `ReplayBuffer` for Trajectories, under its names: a local buffer and, if wanted, a remote manager.

    `add` stores here and sends to the manager, whose scores it returns; `sample` draws here, without replacement where
    there are enough. `max_length` grows by itself unless given. `local` is the manager that holds the rows here, and
    `remote` the `RemoteReplay`, or None.

    Ownership: owns both and closes them; a container that is drawn is the caller's own.
    Concurrency: one thread adds; a carrier has one client per manager.
    """

    remote: RemoteReplay | None = None
    _space_of = staticmethod(trajectory_space)

    def __init__(self, env: Any, capacity: int = 1000, prioritized_capacity: bool = False,
                 prioritized_sampling: bool = False, remote_manager_rank: int | None = None,
                 remote_buffer_freq: int = 1, communication_backend: Any = "mpi", *, async_score: bool = False,
                 async_comm: bool = False, baseline_filtering: bool = False, scoring_only: bool = False,
                 baseline_refresh_after: int = 10, max_length: int | None = None, condition_dim: int = 0,
                 diversity: Diversity | None = None, seed: int | None = None) -> None:  # fmt: skip
        """Make an empty buffer; the manager is greeted at the first `add`."""
        self.env, self.capacity = env, capacity
        self.prioritized_capacity, self.prioritized_sampling = prioritized_capacity, prioritized_sampling
        self._space, self._diversity, self._seed = self._space_of(env, condition_dim), diversity, seed
        self.local = self._made(max_length or 16)
        self._max_length, self._may_grow = max_length or 16, max_length is None
        if remote_manager_rank is None:
            if baseline_filtering:
                raise ValueError("baseline_filtering: needs a manager, got none; pass remote_manager_rank")
            return
        mode = "async_comm" if async_comm else "async_score" if async_score else "sync"
        self.remote = RemoteReplay(
            self._space, remote_manager_rank, communication_backend, mode=mode, window=1,
            send_every=remote_buffer_freq, baseline_filtering=baseline_filtering, scoring_only=scoring_only,
            refresh_after=baseline_refresh_after,
        )  # fmt: skip

    def _made(self, max_length: int) -> ReplayBufferManager:
        evict = "lowest" if self.prioritized_capacity or self._diversity else "oldest"
        return ReplayBufferManager(
            self._space, 0, 1, capacity=self.capacity, max_length=max_length or None, evict=evict, seed=self._seed,
            diverse_replay_buffer=self._diversity is not None, diversity=self._diversity,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.local.stats().live

    def add(self, training_container: Any) -> dict[str, float] | None:
        """Store trajectories here and send them to the manager; return its scores, None if there are none (yet)."""
        items = self._items(training_container)
        self.local.add(items)
        return None if self.remote is None else self.remote.add(items)

    def _items(self, container: Any) -> Any:
        items = from_torchgfn(container)
        longest = int(items.lengths.max(initial=0))
        if longest > self._max_length:
            self._grow(longest)
        return items

    def _container(self, items: Any) -> Any:
        return to_torchgfn(self.env, items)

    def _grow(self, longest: int) -> None:
        if not self._may_grow:
            raise ValueError(f"max_length: must be at least {longest}, got {self._max_length}; raise it")
        old, self._max_length = self.local, max(longest, 2 * self._max_length)
        self.local = self._made(self._max_length)
        if old.buffer is not None and len(old.buffer):
            self.local.add(old.buffer)
        old.close()

    def sample(self, n_samples: int) -> Any:
        """Draw trajectories: all alike, or by their reward if `prioritized_sampling`."""
        n = len(self)
        if not n:
            raise EmptyError("sample: needs trajectories, got none; add some first")
        by, replace = ("log_reward", n_samples > n) if self.prioritized_sampling else ("uniform", False)
        wanted = n_samples if self.prioritized_sampling else min(n_samples, n)  # as in torchgfn
        return self._container(self.local.sample(wanted, by=by, replace=replace))

    @property
    def training_container(self) -> Any:
        """All trajectories that are here, as a copy; None if there are none."""
        n = len(self)
        return self._container(self.local.sample(n, replace=False)) if n else None

    def close(self) -> None:
        """Deliver what waits, leave the manager, and release the rows; may be called twice."""
        try:
            if self.remote is not None:
                self.remote.close()
        finally:
            self.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()


class GFNTerminatingStateBuffer(GFNReplayBuffer):
    """torchgfn's `TerminatingStateBuffer`: of what is added only the final states are kept, and sent, with rewards.

    `sample` gives a StatesContainer. Takes Trajectories and StatesContainers; the arguments are those of
    `GFNReplayBuffer`, whose Ownership and Concurrency it has.
    """

    _space_of = staticmethod(state_space)

    def _made(self, max_length: int) -> ReplayBufferManager:
        return super()._made(0)

    def _items(self, container: Any) -> Any:
        return final_states(container)

    def _container(self, items: Any) -> Any:
        fields = dict(items)
        return _states(self.env, fields, fields.pop("log_reward"))


def _scored(env: Any, scored: Any) -> Any:
    fields = dict(scored.fields)
    rewards = fields.pop("log_reward")
    if len(scored.lengths) and scored.lengths.any():
        return to_torchgfn(env, Trajectories(scored.steps, scored.lengths, rewards, **fields))
    return _states(env, fields, rewards)


def _states(env: Any, fields: Any, rewards: Any) -> Any:
    """torchgfn's container of final states."""
    states = env.states_from_tensor(torch.from_numpy(fields["final_state"]).to(env.device))
    if "condition" in fields:
        states.conditions = torch.from_numpy(fields["condition"]).to(env.device)
    is_final = torch.ones(len(rewards), dtype=torch.bool, device=env.device)
    return containers.StatesContainer(env, states, is_final, torch.from_numpy(rewards).to(env.device))


def _numpy(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy()


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

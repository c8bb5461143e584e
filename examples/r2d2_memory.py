"""Recurrent Q-learning with burn-in, as in R2D2, on a task that only a memory can solve.

Every fifth step a cue is shown, four steps later it is asked for. The network sees single steps; windows of them come
from `SequenceSampler`, which first gives some steps to warm the recurrent state up, without learning from them.

    python examples/r2d2_memory.py
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import recollect as rc

TRIALS, WAIT = 4, 5  # questions in an episode, steps from cue to cue
EPISODES, UPDATES, BATCH, LENGTH, BURN_IN, GAMMA = 200, 3, 32, 10, 5, 0.8


class Recall(gym.Env[Any, int]):
    """Shows a cue of -1 or 1, then nothing, then asks which it was; the right action is worth 1, the wrong one -1."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        is_asked = self.time % WAIT == WAIT - 1
        reward = (1.0 if action == (self.cue > 0) else -1.0) if is_asked else 0.0
        self.time += 1
        return self._obs(), reward, self.time == TRIALS * WAIT, False, {}

    def _obs(self) -> Any:
        if is_shown := self.time % WAIT == 0:
            self.cue = float(self.np_random.choice([-1, 1]))
        return np.array([self.cue if is_shown else 0, self.time % WAIT == WAIT - 1], np.float32)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, obs: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        seen, state = self.memory(obs, state)
        return self.head(seen), state


def warmed(network: Recurrent, obs: torch.Tensor) -> torch.Tensor:
    """Values of the steps after the burn-in, with the state that the burn-in leaves."""
    with torch.no_grad():
        _, state = network(obs[:, :BURN_IN])
    return network(obs[:, BURN_IN:], state)[0]


def main(seed: int = 0) -> float:
    """Train; return the share of right answers in the last 50 episodes, of which every fifth is a guess."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    env: Any = Recall()
    space = rc.transition_space(env, keys=["obs", "action", "reward", "terminated"])
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=10_000, maintain_segment_metadata=True)
    env = rc.ReplayBufferCollectionWrapper(env, buf)
    # No window leaves its episode. Where an episode had not begun, the burn-in is zeros, as is its first state.
    windows = rc.SequenceSampler(
        rc.ToBackendOrDeviceBatch(buf, "torch"), BATCH, length=LENGTH, burn_in=BURN_IN, seed=seed
    )
    online = Recurrent()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)
    answers: list[bool] = []
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        state, terminated = None, False
        while not terminated:
            with torch.no_grad():
                q, state = online(torch.from_numpy(obs)[None, None], state)
            action = int(q[0, 0].argmax()) if rng.random() > 0.2 else int(rng.integers(2))
            obs, reward, terminated, _, _ = env.step(action)
            if reward:
                answers.append(reward > 0)

        for _ in range(UPDATES):
            batch = windows.sample()
            steps = {key: batch[key][:, BURN_IN:] for key in ("action", "reward", "terminated")}
            q = warmed(online, batch["obs"])
            with torch.no_grad():
                best = q.argmax(-1, keepdim=True)
                ahead = warmed(target, batch["obs"]).gather(2, best)[:, 1:, 0]
                # The last step of a window has no next one here: other windows have it, unless it ends the episode.
                ahead = nn.functional.pad(ahead, (0, 1))
                goal = steps["reward"] + GAMMA * ahead * ~steps["terminated"]
            error = q.gather(2, steps["action"][:, :, None])[:, :, 0] - goal
            known = torch.ones_like(error)
            known[:, -1] = steps["terminated"][:, -1].float()
            loss = (known * error**2).sum() / known.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if episode % 10 == 0:
            target.load_state_dict(online.state_dict())
    env.close()
    return float(np.mean(answers[-50 * TRIALS :]))


if __name__ == "__main__":
    share = main()
    print(f"right answers in the last 50 episodes: {share:.0%}")
    assert (
        share > 0.75
    )  # who forgets the cue is right half of the time; who guesses every fifth time, at most 90%

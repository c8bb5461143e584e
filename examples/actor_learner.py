"""An actor-learner of your own: two processes act, this one learns, with nothing but multiprocessing between them.

Transitions go through a replay buffer in shared memory, one lane for each actor; weights come back through
`SharedWeightSync`. A limiter keeps acting and learning in proportion, so that the result does not depend on which side
of the machine is faster. Actors need no torch.

    python examples/actor_learner.py
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import gymnasium as gym
import numpy as np

import recollect as rc

ACTORS, STEPS, WARM_UP = 2, 4_000, 500
BATCH, DRAWS_PER_ROW = 64, 32  # one update for every two steps
GAMMA = 0.99


def act(actor: int, buf: rc.ReplayBuffer, weights: rc.ipc.SharedWeightSync, shapes: dict[str, Any]) -> None:
    """Runs in each actor: step an environment with the newest weights."""
    rng = np.random.default_rng(actor)
    q = {name: np.zeros(shape, "float32") for name, shape in shapes.items()}
    version = 0
    env = rc.ReplayBufferCollectionWrapper(gym.make("CartPole-v1"), buf)  # its first row claims a free lane
    obs, _ = env.reset(seed=actor)
    for step in range(STEPS):
        if weights.version > version:
            version = weights.read_weights_into(q)  # one whole version, never a mixture
        hidden = np.maximum(q["0.weight"] @ obs + q["0.bias"], 0)
        action = int((q["2.weight"] @ hidden + q["2.bias"]).argmax())
        if rng.random() < max(0.05, 1.0 - step / 2_000):
            action = int(rng.integers(2))
        obs, _, terminated, truncated, _ = env.step(action)  # waits here if the learner is too far behind
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    buf.close()


def learn(buf: rc.ReplayBuffer, weights: rc.ipc.SharedWeightSync, online: Any, n_updates: int) -> None:
    """Runs here: DQN updates, and after every tenth the new weights for all."""
    import copy

    import torch

    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    sampler = rc.StepSampler(rc.ToBackendOrDeviceBatch(buf, "torch"), BATCH, seed=0)
    for update in range(n_updates):
        batch = sampler.sample()  # waits here if the actors are too far behind
        with torch.no_grad():
            best = target(batch["next_obs"]).amax(dim=1)
            goal = batch["reward"] + GAMMA * best * ~batch["terminated"]
        value = online(batch["obs"]).gather(1, batch["action"][:, None])[:, 0]
        loss = torch.nn.functional.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 10 == 0:
            weights.write_weights(online.state_dict())
        if update % 100 == 0:
            target.load_state_dict(online.state_dict())


def main() -> float:
    """Train; return how long the episodes were that began in an actor's last 1,000 steps."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    online = torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    weights = rc.ipc.SharedWeightSync.from_state_dict(online.state_dict())
    env = gym.make("CartPole-v1")
    buf = rc.ReplayBuffer.create(
        rc.SharedMemoryStorage,
        rc.transition_space(env),
        capacity=ACTORS * STEPS,
        multiprocessing=True,
        num_lanes=ACTORS,
        maintain_segment_metadata=True,
        limiter=rc.RateLimiter(DRAWS_PER_ROW, min_size=WARM_UP, band=WARM_UP * DRAWS_PER_ROW),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in online.state_dict().items()}
    spawn = multiprocessing.get_context("spawn")
    actors = [spawn.Process(target=act, args=(i, buf, weights, shapes), daemon=True) for i in range(ACTORS)]
    for actor in actors:
        actor.start()
    # Both sides have their share of one budget, so that both come to their end and nobody has to be stopped.
    learn(buf, weights, online, n_updates=ACTORS * STEPS * DRAWS_PER_ROW // BATCH)
    for actor in actors:
        actor.join()
        assert actor.exitcode == 0, "an actor failed; its traceback is above"

    assert buf.stats().live == ACTORS * STEPS  # every row that was acted is there
    lengths = [end - start for start, end in buf.get_segments() if start % STEPS > STEPS - 1_000]
    buf.close()
    weights.cleanup()
    return float(np.mean(lengths))


if __name__ == "__main__":  # actors are spawned, and import this file again
    steps = main()
    print(f"mean length of the last episodes: {steps:.0f}")
    assert steps > 50  # a policy that knows nothing falls after about 20

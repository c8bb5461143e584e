"""A GFlowNet on an 8 x 8 HyperGrid: two workers share what they found through one replay manager.

Trajectory balance with a tabular policy, in numpy alone. Each update trains on 16 fresh trajectories and on 16 drawn
from the manager. The distribution of the policy is computed exactly, over all 64 states.

    python examples/gflownet_hypergrid.py                              # two worker processes and a manager
    mpiexec -n 3 python examples/gflownet_hypergrid.py --carrier mpi
    python examples/gflownet_hypergrid.py --carrier ray
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np
from gymnasium import spaces

import recollect as rc

SIDE, R0, BATCH = 8, 0.1, 16
STOP = 2  # actions: 0 and 1 move along an axis


class HyperGrid:
    """Start at (0, 0), add one to a coordinate or stop; the reward is high near the four corners."""

    max_length = 2 * SIDE - 1
    trajectory_space = spaces.Dict(
        {
            "steps": spaces.Sequence(
                spaces.Dict({"state": spaces.Box(0, SIDE - 1, (2,), np.int64), "action": spaces.Discrete(3)}),
                stack=True,
            ),
            "final_state": spaces.Box(0, SIDE - 1, (2,), np.int64),
            "log_reward": spaces.Box(-np.inf, np.inf, (), np.float64),
        }
    )

    @staticmethod
    def log_reward(state):
        far = np.abs(state / (SIDE - 1) - 0.5)
        inner = (far > 0.25).all(-1)
        band = ((far > 0.3) & (far < 0.4)).all(-1)
        return np.log(R0 + 0.5 * inner + 2.0 * band)


STATES = np.array(list(product(range(SIDE), repeat=2)))
TARGET = np.exp(HyperGrid.log_reward(STATES))
TARGET /= TARGET.sum()


class Policy:
    """Logits of the three actions in each state, and log Z; trained by Adam on trajectory balance."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.theta = np.zeros(SIDE * SIDE * 3 + 1)  # the last is log Z / 10
        self.m, self.v, self.t = np.zeros_like(self.theta), np.zeros_like(self.theta), 0

    def log_probs(self):
        logits = self.theta[:-1].reshape(SIDE, SIDE, 3).copy()
        logits[-1, :, 0] = logits[:, -1, 1] = -np.inf
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def sample(self, n):
        """Roll out n trajectories together."""
        probs = np.exp(self.log_probs())
        state, alive = np.zeros((n, 2), np.int64), np.ones(n, bool)
        states, actions, lengths = [], [], np.zeros(n, np.int64)
        while alive.any():
            u = self.rng.random(n)[:, None]
            action = np.minimum((u > probs[state[:, 0], state[:, 1]].cumsum(-1)).sum(-1), STOP)
            states.append(state.copy())
            actions.append(action)
            lengths += alive
            alive = alive & (action != STOP)
            for axis in (0, 1):
                state[:, axis] += alive & (action == axis)
        steps = {"state": np.stack(states, 1), "action": np.stack(actions, 1)}
        return rc.remote.Trajectories.from_padded(
            steps, lengths, log_rewards=HyperGrid.log_reward(state), final_state=state
        )

    def update(self, batch, lr=0.05):
        """One step on the mean square of log Z + log PF - log R - log PB."""
        s, a = batch.steps["state"], batch.steps["action"]
        who = np.repeat(np.arange(len(batch)), batch.lengths)
        log_pf = self.log_probs()
        moved = s.sum(-1) > 0
        log_pb = np.where(moved, -np.log(np.maximum((s > 0).sum(-1), 1)), 0.0)  # backward: any of the parents
        delta = 10 * self.theta[-1] - batch.log_rewards
        delta += np.bincount(who, log_pf[s[:, 0], s[:, 1], a] - log_pb, len(batch))
        one_hot = np.eye(3)[a] - np.exp(log_pf[s[:, 0], s[:, 1]])
        gradient = np.zeros((SIDE, SIDE, 3))
        np.add.at(gradient, (s[:, 0], s[:, 1]), (2 * delta / len(batch))[who, None] * one_hot)
        self._step(np.append(gradient.ravel(), 10 * 2 * delta.mean()), lr)

    def _step(self, g, lr):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.theta -= lr * m / (np.sqrt(v) + 1e-8)

    def distance(self):
        """L1 distance of the exact distribution over final states to the true one."""
        probs, reach = np.exp(self.log_probs()), np.zeros((SIDE, SIDE))
        reach[0, 0] = 1.0
        for x, y in STATES:
            if x:
                reach[x, y] += reach[x - 1, y] * probs[x - 1, y, 0]
            if y:
                reach[x, y] += reach[x, y - 1] * probs[x, y - 1, 1]
        return float(np.abs((reach * probs[:, :, STOP]).ravel() - TARGET).sum())


def assert_true(batch):
    """Every drawn trajectory follows its actions from the origin, and has the reward of its end."""
    s, a, ends = batch.steps["state"], batch.steps["action"], np.cumsum(batch.lengths)
    move = np.stack([a == 0, a == 1], -1)
    inner = np.ones(len(s), bool)
    inner[ends - 1] = False
    assert (a[ends - 1] == STOP).all() and (a[inner] != STOP).all()
    assert (s[ends - batch.lengths] == 0).all() and (s[1:] == s[:-1] + move[:-1])[inner[:-1]].all()
    assert (s[ends - 1] == batch.fields["final_state"]).all()
    assert np.array_equal(batch.log_rewards, HyperGrid.log_reward(batch.fields["final_state"]))


def worker(ctx, updates=1000):
    policy = Policy(ctx.seed)
    curve = [policy.distance()]
    with ctx.replay(HyperGrid()) as replay:
        for i in range(updates):
            fresh = policy.sample(BATCH)
            replay.add(fresh)
            drawn = replay.sample(BATCH)
            assert_true(drawn)
            policy.update(rc.remote.Trajectories.concat([fresh, drawn]), lr=0.05 * (1 - i / updates) + 0.001)
            if i % 25 == 24:
                curve.append(policy.distance())
    return curve


def manager(ctx):
    return rc.remote.ReplayBufferManager(
        HyperGrid(),
        ctx.rank,
        len(ctx.layout.workers),
        capacity=2000,
        communication_backend=ctx.carrier,
        evict="oldest",
    )


def plot(curve, height=8):
    """The distances as a small chart of characters."""
    top = max(curve)
    rows = [
        "".join("█" if value > top * (height - 1 - r) / height else " " for value in curve)
        for r in range(height)
    ]
    return "\n".join(f"{top * (height - r) / height:5.2f} |{row}" for r, row in enumerate(rows))


def main():
    options = argparse.ArgumentParser(description="A GFlowNet on a HyperGrid, over any carrier.")
    options.add_argument("--carrier", default="local", choices=["local", "tcp", "mpi", "torch", "ray"])
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    out = rc.remote.launch(worker, manager, n_workers=2, carrier=chosen.carrier, seed=chosen.seed)
    for rank, curve in out.results.items():
        print(f"worker {rank}: L1 distance {curve[0]:.2f} before, {curve[-1]:.4f} after\n{plot(curve)}")
        assert 1.2 < curve[0] < 1.6 and curve[-1] < 0.05
    for rank, stats in out.stats.items():
        print(f"manager {rank}: {stats.offered} items offered, {stats.live} live, {stats.evicted} evicted")
        assert stats.offered == 32_000


if __name__ == "__main__":
    main()

"""A GFlowNet on an 8 x 8 HyperGrid: two workers share what they found through one replay manager.

Trajectory balance, a tabular policy, numpy alone. An update trains on 16 fresh trajectories and 16 from the manager.

    python examples/gflownet_hypergrid.py                              # or --carrier tcp, --carrier ray
    mpiexec -n 3 python examples/gflownet_hypergrid.py --carrier mpi
    python examples/gflownet_hypergrid.py --plot learning.png          # with and without baseline filtering
"""

import argparse
from functools import partial

import numpy as np
from gymnasium import spaces

from recollect.remote import ReplayBufferManager, Trajectories, launch

SIDE, R0, BATCH, STOP = 8, 0.1, 16, 2  # actions 0 and 1 move along an axis, 2 stops
STATES = np.indices((SIDE, SIDE)).reshape(2, -1).T
STEP = spaces.Dict({"state": spaces.Box(0, SIDE - 1, (2,), np.int64), "action": spaces.Discrete(3)})
REWARD, STEPS = spaces.Box(-np.inf, np.inf, (), np.float64), spaces.Sequence(STEP, stack=True)
SPACE = spaces.Dict({"steps": STEPS, "final_state": STEP["state"], "log_reward": REWARD})


def log_reward(state):
    """High near the four corners, highest in a small square of each: the modes."""
    far = np.abs(state / (SIDE - 1) - 0.5)
    return np.log(R0 + 0.5 * (far > 0.25).all(-1) + 2.0 * ((far > 0.3) & (far < 0.4)).all(-1))


TARGET = np.exp(log_reward(STATES)) / np.exp(log_reward(STATES)).sum()
MODES = set(map(tuple, STATES[log_reward(STATES) > 0].tolist()))


class Policy:
    """Logits of the three actions in each state, and log Z; trained by Adam on trajectory balance."""

    def __init__(self, seed):
        self.rng, self.t = np.random.default_rng(seed), 0
        self.theta, self.m, self.v = np.zeros((3, SIDE * SIDE * 3 + 1))  # the last is log Z / 10

    def log_probs(self):
        logits = self.theta[:-1].reshape(SIDE, SIDE, 3).copy()
        logits[-1, :, 0] = logits[:, -1, 1] = -np.inf
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def sample(self, n):
        """Roll out n trajectories together."""
        states, actions, probs = [], [], np.exp(self.log_probs())
        state, lengths, alive = np.zeros((n, 2), np.int64), np.zeros(n, np.int64), np.ones(n, bool)
        while alive.any():
            below = self.rng.random(n)[:, None] > probs[state[:, 0], state[:, 1]].cumsum(-1)
            states, actions = [*states, state], [*actions, np.minimum(below.sum(-1), STOP)]
            lengths, alive = lengths + alive, alive & (actions[-1] != STOP)
            state = state + (alive[:, None] & (actions[-1][:, None] == [0, 1]))
        steps = {"state": np.stack(states, 1), "action": np.stack(actions, 1)}
        return Trajectories.from_padded(steps, lengths, log_rewards=log_reward(state), final_state=state)

    def update(self, batch, lr):
        """One step on the mean square of log Z + log PF - log R - log PB; backward, all parents are alike."""
        (x, y), a = batch.steps["state"].T, batch.steps["action"]
        who, log_pf = np.arange(len(batch)).repeat(batch.lengths), self.log_probs()
        log_ratio = log_pf[x, y, a] + np.log(np.maximum((x > 0).astype(int) + (y > 0), 1))
        delta = 10 * self.theta[-1] - batch.log_rewards + np.bincount(who, log_ratio, len(batch))
        gradient, score = np.zeros((SIDE, SIDE, 3)), np.eye(3)[a] - np.exp(log_pf[x, y])
        np.add.at(gradient, (x, y), (2 * delta / len(batch))[who, None] * score)
        g, self.t = np.append(gradient.ravel(), 20 * delta.mean()), self.t + 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        self.theta -= lr * self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)

    def distance(self):
        """L1 distance of the exact distribution over final states to the true one."""
        probs, reach = np.exp(self.log_probs()), np.pad([[1.0]], (0, SIDE))  # row and column -1 stay empty
        for x, y in STATES[1:]:
            reach[x, y] = reach[x - 1, y] * probs[x - 1, y, 0] + reach[x, y - 1] * probs[x, y - 1, 1]
        return float(np.abs((reach[:SIDE, :SIDE] * probs[:, :, STOP]).ravel() - TARGET).sum())


def checked(batch):
    """Every drawn trajectory follows its actions from the origin, and has the reward of its end."""
    s, a, ends = batch.steps["state"], batch.steps["action"], np.cumsum(batch.lengths)
    inner = ~np.isin(np.arange(len(s)), ends - 1)
    assert (a[ends - 1] == STOP).all() and (a[inner] != STOP).all() and (s[ends - batch.lengths] == 0).all()
    assert (s[1:] == s[:-1] + (a[:-1, None] == [0, 1]))[inner[:-1]].all()
    assert np.array_equal(s[ends - 1], batch.fields["final_state"])
    assert np.array_equal(log_reward(s[ends - 1]), batch.log_rewards)
    return batch


def worker(ctx, updates, filtering):
    """Train; every 25 updates note the distance, and how many modes the manager has seen."""
    policy, curve, n_modes = Policy(ctx.seed), [], 0.0
    with ctx.replay(SPACE, baseline_filtering=filtering) as replay:
        for i in range(updates):
            if i % 25 == 0:
                curve.append((i, policy.distance(), n_modes))
            fresh = policy.sample(BATCH)
            n_modes = (replay.add(fresh) or {"n_modes": n_modes})["n_modes"]
            both = Trajectories.concat([fresh, checked(replay.sample(BATCH))])
            policy.update(both, lr=0.05 * (1 - i / updates) + 0.001)
        return [*curve, (updates, policy.distance(), n_modes)], replay.stats()


def manager(ctx, filtering):
    found = set()

    def score(obj, sender_rank):
        found.update(MODES & set(map(tuple, obj.fields["final_state"].tolist())))
        return {"n_modes": len(found)}

    kind = {"capacity": 2000, "evict": "lowest" if filtering else "oldest", "max_length": 2 * SIDE - 1}
    return ReplayBufferManager(SPACE, ctx.rank, 2, score, communication_backend=ctx.carrier, **kind)


def run(carrier="local", updates=1000, filtering=False):
    work = partial(worker, updates=updates, filtering=filtering), partial(manager, filtering=filtering)
    out = launch(*work, n_workers=2, carrier=carrier)
    for rank, (curve, stats) in out.results.items():
        before, (_, after, n_modes) = curve[0][1], curve[-1]
        print(f"worker {rank}: L1 distance {before:.2f} before, {after:.4f} after, {n_modes:.0f} modes found")
        assert 1.2 < before < 1.6 and after < (0.05 if updates >= 1000 else before)
        assert stats.offered == stats.kept + stats.rejected + stats.filtered == BATCH * updates
    for rank, stats in out.stats.items():
        print(f"manager {rank}: {stats.offered} items offered, {stats.live} live, {stats.evicted} evicted")
        assert filtering or stats.offered == 2 * BATCH * updates
    return out.results


def plot(path, **options):
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for filtering in (False, True):
        curve, stats = run(filtering=filtering, **options)[0]
        label = f"filtering {'on' if filtering else 'off'}: {stats.offered - stats.filtered:,} items sent"
        for axis, values, name in zip(axes, np.transpose(curve)[1:], ("L1 distance", "modes found")):
            axis.plot(np.transpose(curve)[0], values, label=label)
            axis.set(xlabel="updates", ylabel=name, ylim=0)
            axis.legend()
    plt.savefig(path, dpi=110)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--carrier", default="local", choices=["local", "tcp", "mpi", "torch", "ray"])
    options.add_argument("--updates", type=int, default=1000)
    options.add_argument("--plot", help="draw with and without baseline filtering into this file")
    o = options.parse_args()
    plot(o.plot, carrier=o.carrier, updates=o.updates) if o.plot else run(o.carrier, o.updates)

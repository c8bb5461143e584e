"""What a collector process does: act with the newest weights, step, hand rows or rollouts over, report.

Both loops follow one order, so that a run is repeatable where it is asked to be: take leave (or go on, running free),
read the weights and statistics of one version, make the steps, publish the report.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.errors import DeadlineError, EnvContractError
from recollect.learners.environment import Array, EnvDriver, EnvSpaces, Step
from recollect.learners.episodes import EpisodeBoard, Tally
from recollect.learners.normalization import normalize
from recollect.learners.rollout import RolloutWriter
from recollect.observe.phases import Phases
from recollect.replay import RateLimiter

_WAIT_S = 1.0  # between looks at the word that says stop


@dataclass(frozen=True, slots=True)
class CollectorPlan:
    """What a collector must know: small, picklable, the same for all lanes.

    `network` is the pickled policy module. With `sync` it waits for permits. While it acts on version
    `random_version`, actions are drawn uniformly; 0 is never. `limiter` is the configuration of a RateLimiter.
    """

    spec: EnvSpaces
    network: bytes
    steps: int
    sync: bool
    nan_policy: str
    salt: int
    random_version: int = 0
    limiter: dict[str, Any] | None = None


def pack_network(network: Any) -> bytes:
    """Return a module as bytes for `Plan`: plain pickle, since torch's own way between processes leaves files."""
    import copy

    return pickle.dumps(copy.deepcopy(network).cpu())


class Policy:
    """A collector's copy of the network, its version, and its own generator."""

    def __init__(self, plan: CollectorPlan, weights: Any, stats: Any, device: str, seed: int) -> None:
        import torch

        self.network = pickle.loads(plan.network).to(device)
        self.version, self._weights, self._stats, self._pair = 0, weights, stats, None
        self._state, self._device = self.network.state_dict(), device
        self._generator = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._plan = plan

    def refresh(self) -> None:
        """Take the newest weights and statistics."""
        if self._weights.version > self.version:
            self.version = self._weights.read_weights_into(self._state)
        if self._stats is not None:
            self._pair = self._stats.latest()

    def transition_actions(self, obs: Array) -> Array:
        """Draw an off-policy actor's actions `[n, action_dim]`."""
        import torch

        n, spec = len(obs), self._plan.spec
        if self.version == self._plan.random_version:
            low, high = spec.action_bounds()
            return self._rng.uniform(low, high, (n, spec.action_dim)).astype(np.float32)
        seen = torch.from_numpy(normalize(obs, self._pair)).to(self._device)
        noise = torch.randn((n, spec.action_dim), generator=self._generator).to(self._device)
        actions = self.network.act(seen, noise).cpu().numpy()
        bounded: Array = np.clip(actions, *spec.action_bounds())  # what is stored is what the environment got
        return bounded

    def rollout_actions(self, obs: Array) -> tuple[Array, Array]:
        """Draw actions `[n, action_dim]` and their log probabilities `[n]`."""
        import torch

        actions, log_probs = self.network.act(torch.from_numpy(obs).to(self._device), self._generator)
        return actions.cpu().numpy(), log_probs.cpu().numpy()


class _Collector:
    """The parts of a collector that both loops share."""

    def __init__(
        self,
        ctx: Any,
        weights: Any,
        stats: Any,
        board: EpisodeBoard,
        plan: CollectorPlan,
        trace: Any,
        **names: str,
    ) -> None:
        seed = int(np.random.SeedSequence([ctx.seed, plan.salt]).generate_state(1, np.uint64)[0])
        self.ctx, self.plan = ctx, plan
        self.driver = EnvDriver(ctx.make_env(), seed=seed, nan_policy=plan.nan_policy)
        try:
            self._check(ctx.num_envs)
            self.policy = Policy(plan, weights, stats, ctx.device, seed)
            phases = Phases(trace, f"collector {ctx.lane}", weight_sync="weight_sync/read", **names)
            self.tally = Tally(board, self.driver.n, phases)
        except BaseException:
            self.driver.close()
            raise

    def _check(self, num_envs: int) -> None:
        if self.driver.n != num_envs:
            raise EnvContractError(
                f"num_envs: the environment must have {num_envs} slots, got {self.driver.n}"
            )
        if self.driver.spec != self.plan.spec:
            raise EnvContractError(
                f"env: must have the spaces the learner saw, {self.plan.spec}, got {self.driver.spec}; "
                "a factory must make the same environment in every process"
            )

    def begin(self, pack: Any = None) -> bool:
        """Wait for leave to make a chunk, and take its weights; False when it is time to stop."""
        while not self.ctx.stopping():
            if not self.plan.sync:
                self.policy.refresh()
            elif not self._take(pack):
                continue
            self.tally.lap("weight_sync")
            return True
        return False

    def _take(self, pack: Any) -> bool:
        """Take the next permit. The weights are read before the learner hears of it and may publish the next."""
        if pack is not None:
            pack(0.02)
        permit = self.ctx.permit(
            0.0 if pack is not None else _WAIT_S, on_take=lambda _: self.policy.refresh()
        )
        self.tally.lap("wait")
        if permit is None:
            return False
        if self.policy.version != permit.version:
            raise RuntimeError(
                f"permit: names version {permit.version} but the weights are of {self.policy.version}; "
                "the learner must publish after every collector has taken its permit"
            )
        return True

    def step(self, actions: Array) -> Step:
        """Step, count and beat."""
        self.tally.lap("action_select")
        step = self.driver.step(actions)
        self.tally.count(step)
        self.tally.lap("env_step")
        self.ctx.beat("env_step", env_steps=step.n_steps)
        return step

    def end(self) -> None:
        """Publish the report of a chunk."""
        totals = self.tally.report.totals
        totals["chunks"] += 1
        totals["version"] = self.policy.version
        self.tally.publish()


def collect_transitions(
    ctx: Any,
    *,
    replay: Any,
    weights: Any,
    board: EpisodeBoard,
    plan: CollectorPlan,
    stats: Any = None,
    pack: Any = None,
    trace: Any = None,
) -> None:
    """Be a collector of an off-policy learner: rows with their true next observations into `replay`."""
    serve = None
    if pack is not None:
        from recollect.ipc.replay_pipelines import serve_pack_requests

        def serve(timeout: float) -> None:
            request, ready, slots = pack
            serve_pack_requests(replay, request, ready, slots, timeout=timeout, trace_recorder=trace)

    limiter = None if plan.limiter is None else RateLimiter(**plan.limiter)
    if limiter is not None:
        replay.attach_limiter(limiter)
        limiter.watch(ctx.look)
    work = _Collector(ctx, weights, stats, board, plan, trace)
    try:
        while work.begin(serve):
            if serve is not None:
                serve(0.0)
            for _ in range(plan.steps):
                if ctx.stopping():
                    return
                step = work.step(work.policy.transition_actions(work.driver.acting_obs()))
                with _leave_to_add(limiter, int(step.valid.sum())):
                    if limiter is not None:
                        work.tally.lap("wait")
                    _add(replay, step)
                work.tally.lap("replay")
            work.end()
    finally:
        work.driver.close()


def _leave_to_add(limiter: RateLimiter | None, n: int) -> ExitStack:
    """Wait until the learner has drawn enough for n rows more, as long as it lives; they are added within."""
    leave = ExitStack()
    while limiter is not None:
        with suppress(DeadlineError):
            leave.enter_context(limiter.inserting(n))
            break
    return leave


def _add(replay: Any, step: Step) -> None:
    keep = slice(None) if step.valid.all() else step.valid
    critic = {}
    if step.critic is not None and step.next_critic is not None:
        critic = {"critic": step.critic[keep], "next_critic": step.next_critic[keep]}
    replay.add(
        step.obs[keep], step.actions[keep], step.rewards[keep], step.next_obs[keep], step.dones[keep],
        step.truncated[keep], **critic, envs=np.arange(len(step.valid))[keep],
    )  # fmt: skip
    if step.rejected:  # the row after a hole does not follow the one before it
        replay.mark_segment_end(np.flatnonzero(step.is_step & ~step.valid))


def collect_rollouts(
    ctx: Any, *, ring: Any, weights: Any, board: EpisodeBoard, plan: CollectorPlan, trace: Any = None
) -> None:
    """Be a collector of an on-policy learner: whole rollouts, each by one version of the weights, into `ring`."""
    work = _Collector(ctx, weights, None, board, plan, trace, wait="ring/write_wait")
    try:
        while work.begin():
            slot = _claim(ctx, ring)
            work.tally.lap("wait")
            if slot is None:
                return
            writer = RolloutWriter(slot)
            for _ in range(plan.steps):
                if ctx.stopping():
                    return
                actions, log_probs = work.policy.rollout_actions(work.driver.acting_obs())
                writer.write(work.step(actions), log_probs)
                work.tally.lap("replay")
            writer.finish(work.driver.obs, work.driver.critic)
            ring.signal_write_done(version=work.policy.version)
            work.end()
    finally:
        work.driver.close()


def _claim(ctx: Any, ring: Any) -> Any:
    """A slot to fill; waits for one as long as the learner lives. None when it is time to stop."""
    while not ctx.stopping():
        try:
            return ring.write_buffer
        except DeadlineError:
            ctx.beat("ring is full")
    return None

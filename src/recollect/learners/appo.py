"""APPORunner: asynchronous PPO with V-trace, over a ring of rollouts."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, ClassVar

from recollect.ipc import memory_budget
from recollect.ipc.rollout_ring_buffer import RolloutRingBuffer
from recollect.ipc.weight_sync import SharedWeightSync
from recollect.learners.collectors import CollectorPlan, collect_rollouts, pack_network
from recollect.learners.config import APPOConfig
from recollect.learners.environment import EnvSpaces
from recollect.learners.episodes import EpisodeBoard
from recollect.learners.rollout import VALID, StagingPool, has_finals
from recollect.learners.run import ReferenceRunner, as_runner

__all__ = ["APPOConfig", "APPORunner"]
_WAIT_S = 1.0


class APPORunner(ReferenceRunner):
    """Asynchronous PPO: collectors fill rollouts with whatever weights are newest, the learner corrects by V-trace.

    Ownership: ring, weights, staging pool and collectors are this runner's and end with it.

    >>> APPORunner("CartPole-v1", {}, {"steps_per_env": 8}, num_envs=4, device="cpu").rl_cfg.steps_per_env
    8
    """

    algorithm = "appo"
    _phase_names: ClassVar[dict[str, str]] = {"wait": "ring/read_wait"}
    config_type: ClassVar[Any] = APPOConfig
    rl_cfg: APPOConfig

    @as_runner
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As AsyncRunner."""
        super().__init__(*args, **kwargs)
        self._ring: Any = None
        self._pool: Any = None
        self._round = self._stale = 0
        self._lags: list[float] = []
        self._ages_ms: list[float] = []

    # -- setting up

    def _make(self, spaces: EnvSpaces) -> None:
        from recollect.learners.ppo_learner import PPOLearner

        config, lanes, self._spaces = self.rl_cfg, self.num_collectors, spaces
        self._learner = PPOLearner(spaces, config, self.device, self.seed)
        state = self._learner.network.state_dict()
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
        finals = has_finals(spaces)
        estimate = memory_budget.estimate_appo_bytes(
            self.num_envs, config.steps_per_env, spaces.obs_dim, spaces.action_dim, spaces.critic_dim, config.num_slots,
            num_lanes=lanes, staging=config.staging, finals=finals, fields=VALID, param_shapes=shapes,
        )  # fmt: skip
        memory_budget.raise_if_shared_memory_over_budget(estimate, type(self).__name__)
        memory_budget.warn_if_over_budget(estimate, type(self).__name__)
        self._ring = self.own(
            RolloutRingBuffer(
                self.envs_per_collector, config.steps_per_env, spaces.obs_dim, spaces.action_dim,
                critic_dim=spaces.critic_dim, num_slots=config.num_slots, policy=config.ring_policy, order="time",
                num_lanes=lanes, finals=finals, fields=VALID, deadline=self.deadline,
            )
        )  # fmt: skip
        self._weights = self.own(SharedWeightSync.from_state_dict(state))
        self._board = self.own(EpisodeBoard(lanes))
        dtypes = {name: dtype.name for name, dtype in self._ring.slot_dtypes.items()}
        self._pool = StagingPool(self._ring.slot_shapes, dtypes, config.staging * lanes, self.device)

    def _begin(self, first: int, resumed: bool) -> None:
        config = self.rl_cfg
        plan = CollectorPlan(
            self._spaces, pack_network(self._learner.network), config.steps_per_env, config.sync_collection,
            config.nan_policy, first,
        )  # fmt: skip
        self.start_collectors(
            collect_rollouts,
            {
                "ring": self._ring,
                "weights": self._weights,
                "board": self._board,
                "plan": plan,
                "trace": self._trace,
            },
        )
        if config.sync_collection:
            self._permit()

    def _permit(self) -> None:
        self.grant_permits(int(self._weights.version), self.rl_cfg.steps_per_env)

    # -- iterating

    def _iterate(self, iteration: int, is_last: bool) -> dict[str, float]:
        watch = self._watch
        while not self._stage():
            pass
        watch.lap("batch")
        losses: dict[str, float] = self._learner.train(self._pool.batch())
        watch.lap("train")
        self._weights.write_weights(self._learner.network.state_dict())
        if self.rl_cfg.sync_collection and not is_last:
            self._permit()
        watch.lap("weight_sync")
        return losses

    def _stage(self) -> int:
        """Wait for rollouts and copy those there are, the newest kept; how many were fresh enough."""
        self.check_collectors()  # also while the others keep the ring full
        sync = self.rl_cfg.sync_collection
        if sync:
            self.wait_permits_done()  # then every live lane has published its rollout
        while not self._ring.wait_for_data(timeout=_WAIT_S):
            self.check_collectors()
            if sync and not self._ring.available():
                self._permit()  # a lane died with its permit; whoever lives goes on
                self.wait_permits_done()
        self._watch.lap("wait")
        for _ in range(self._ring.available() - self._pool.size):
            self._ring.advance_read()  # more than the pool holds: the oldest are skipped, and counted by the ring
        staged = 0
        for _ in range(self._ring.available()):
            staged += self._take()
        self._round += 1
        return staged

    def _take(self) -> bool:
        """Copy the oldest rollout, unless it is of too old weights."""
        ring, config = self._ring, self.rl_cfg
        info = ring.read_info
        lag = int(self._weights.version) - int(info.version)
        is_fresh = config.max_lag is None or lag <= config.max_lag
        if is_fresh:
            ring.copy_read_slot_to_torch(self._pool.slot(self._place(int(info.lane))))
            self._lags.append(float(lag))
            self._ages_ms.append((monotonic_ns() - info.committed_ns) / 1e6)
        else:
            self._stale += 1
        ring.advance_read()
        return is_fresh

    def _place(self, lane: int) -> int:
        """Where in the pool: in step with the collectors by lane, which is repeatable; else in the order of arrival."""
        if self.rl_cfg.sync_collection:
            return (self._round % self.rl_cfg.staging) * self.num_collectors + lane
        place, self._next = self._next, (self._next + 1) % self._pool.size
        return place

    _next = 0

    # -- state

    def _publish_restored(self) -> None:
        self._weights.write_weights(self._learner.network.state_dict())
        self._version_base -= 1  # the same weights again are no new version

    def _more_metrics(self) -> dict[str, float]:
        lags, ages, self._lags, self._ages_ms = self._lags, self._ages_ms, [], []
        stats = self._ring.stats()
        found = {
            "ring/dropped": float(stats.dropped), "ring/skipped": float(stats.skipped),
            "ring/stale": float(self._stale),
        }  # fmt: skip
        if lags:
            found |= {
                "lag/weight_versions": sum(lags) / len(lags),
                "lag/rollout_age_ms": sum(ages) / len(ages),
            }
        return found

    def _loss_counts(self) -> tuple[int, int]:
        stats = self._ring.stats()
        return int(stats.dropped + stats.skipped + self._stale), 0

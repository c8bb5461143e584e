"""SACRunner: soft actor-critic with collectors beside the learner and batches packed one tick ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from recollect import replay as plain_replay
from recollect.errors import DeadlineError, FormatError, class_name
from recollect.files.record import damage_in
from recollect.ipc import memory_budget
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline, make_collector_pack
from recollect.ipc.shared_obs_stats import SharedObsNormStats
from recollect.ipc.weight_sync import SharedWeightSync
from recollect.learners.checkpoint import replay_path
from recollect.learners.collectors import CollectorPlan, collect_transitions, pack_network
from recollect.learners.config import SACConfig
from recollect.learners.environment import EnvSpaces
from recollect.learners.episodes import EpisodeBoard
from recollect.learners.run import ReferenceRunner, as_runner
from recollect.replay import RateLimiter

__all__ = ["OffPolicyRunner", "SACConfig", "SACRunner"]
TOTAL_ROWS = 10**6
LearnerFactory = Callable[[EnvSpaces, SACConfig, str, int], Any]


class OffPolicyRunner(ReferenceRunner):
    """Runs any off-policy learner: `learner(spaces, config, device, seed)` makes it.

    A learner has `.actor` (a module with `act(obs, noise) -> actions` on the environment's scale), `.update_critic(
    batch)` and `.update_actor(batch)` returning losses, `.soft_update_target()`, `.update_count`, `.get_state_dict()`,
    `.load_state_dict(d)`, and `.obs_normalizer` if the configuration asks for normalisation.

    With `sync_collection=False`, a RateLimiter as `limiter` holds rows drawn for each row added in its band: whoever is
    ahead waits. Its counts are in the checkpoints.

    Ownership: replay, weights, statistics and collectors are this runner's and end with it.
    """

    algorithm = "off_policy"
    config_type: ClassVar[Any] = SACConfig
    rl_cfg: SACConfig

    @as_runner
    def __init__(
        self, *args: Any, learner: LearnerFactory, limiter: RateLimiter | None = None, **kwargs: Any
    ) -> None:
        """As AsyncRunner; ValueError for a configuration that these environments and collectors cannot have."""
        super().__init__(*args, **kwargs)
        self._factory = learner
        config = self.rl_cfg
        if config.pack == "collector" and self.num_collectors > 1:
            raise ValueError(
                f"pack: 'collector' needs num_collectors=1, got {self.num_collectors}; use 'learner'"
            )
        per_env = config.replay_buffer_n or TOTAL_ROWS // self.num_envs
        self._capacity = per_env * self.num_envs
        self._chunk = config.env_steps_per_sync * self.envs_per_collector
        self._fill = max(config.batch_size, config.learning_starts)
        if self._fill > self._capacity - self._chunk * self.num_collectors:
            raise ValueError(
                f"replay_buffer_n: {per_env} rows of each of {self.num_envs} environments must hold more than a chunk "
                f"of {config.env_steps_per_sync} steps and {self._fill} rows to start with; raise it, or lower "
                "learning_starts and batch_size"
            )
        self._n_samples = config.batch_size * config.updates_per_step
        self._limiter = limiter
        if limiter is not None:
            self._check_limiter(limiter)
        self._replay: Any = None
        self._pipe: Any = None
        self._stats: Any = None

    def _check_limiter(self, limiter: RateLimiter) -> None:
        if not isinstance(limiter, RateLimiter):
            raise TypeError(f"limiter: must be a RateLimiter or None, got {class_name(limiter)}")
        if self.rl_cfg.sync_collection:
            raise ValueError("limiter: is for collectors that run free, got one with sync_collection=True")
        limiter.check_free()
        if not self._fill <= limiter.min_size <= self._capacity:
            raise ValueError(
                f"limiter: min_size must be in [{self._fill}, {self._capacity}], from the rows that learning starts "
                f"with to those that fit, got {limiter.min_size}"
            )
        limiter.check_possible(self.envs_per_collector, "insert")
        limiter.check_possible(self._n_samples, "draw")

    # -- setting up

    def _make(self, spaces: EnvSpaces) -> None:
        config, self._spaces = self.rl_cfg, spaces
        spaces.action_bounds()
        self._learner = self._factory(spaces, config, self.device, self.seed)
        if config.obs_normalization and getattr(self._learner, "obs_normalizer", None) is None:
            raise ValueError("obs_normalization: needs a learner with an obs_normalizer, got none")
        state = self._learner.actor.state_dict()
        shapes = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
        estimate = memory_budget.estimate_offpolicy_bytes(
            self.num_envs, self._capacity // self.num_envs, spaces.obs_dim, spaces.action_dim, spaces.critic_dim,
            config.batch_size, config.updates_per_step, num_lanes=self.num_collectors, device=self.device,
            param_shapes=shapes, envs_per_lane=self.envs_per_collector,
        )  # fmt: skip
        memory_budget.raise_if_shared_memory_over_budget(estimate, type(self).__name__)
        memory_budget.warn_if_over_budget(estimate, type(self).__name__)
        self._replay = self.own(self._new_replay())
        if self._limiter is not None:
            self._replay.attach_limiter(self._limiter)
            self._limiter.watch(self._look)
        self._weights = self.own(SharedWeightSync.from_state_dict(state))
        self._stats = self.own(SharedObsNormStats(None)) if config.obs_normalization else None
        self._board = self.own(EpisodeBoard(self.num_collectors))

    def _new_replay(self) -> ReplayBuffer:
        s = self._spaces
        return ReplayBuffer(
            self._capacity, s.obs_dim, s.action_dim, self.device, critic_dim=s.critic_dim,
            num_lanes=self.num_collectors, envs_per_lane=self.envs_per_collector, seed=self.seed,
        )  # fmt: skip

    def _make_pipe(self) -> Any:
        """The pipeline, and what a packing collector needs for it."""
        queues: dict[str, Any] = {"trace_recorder": self._trace}
        pack = None
        if self.rl_cfg.pack == "collector":
            pack = make_collector_pack(self._replay, self._n_samples)
            names = ("request_queue", "ready_queue", "shared_slots")
            queues |= {f"collector_pack_{name}": x for name, x in zip(names, pack)}
            self.own(pack[-1])  # the slots; the bells are words of theirs
        self._pipe = self.own(
            CPUPinnedDoubleBufferReplayPipeline(
                self._replay, device=self.device, sample_count=self._n_samples, base_seed=self.seed % 2**32,
                deadline=self.deadline, **queues,
            )
        )  # fmt: skip
        return pack

    def _begin(self, first: int, resumed: bool) -> None:
        config = self.rl_cfg
        pack = self._make_pipe()
        # Before the first update the actor knows nothing: uniform actions show more. A resumed one knows.
        random_version = 0 if resumed else int(self._weights.version)
        plan = CollectorPlan(
            self._spaces, pack_network(self._learner.actor), config.env_steps_per_sync, config.sync_collection,
            config.nan_policy, first, random_version,
            None if self._limiter is None else self._limiter.configuration(),
        )  # fmt: skip
        self.start_collectors(
            collect_transitions,
            {"replay": self._replay, "weights": self._weights, "board": self._board, "plan": plan,
             "stats": self._stats, "pack": pack, "trace": self._trace},
        )  # fmt: skip
        self._fill_replay(first)

    def _fill_replay(self, first: int) -> None:
        """Collect until there is enough to start with; DeadlineError if no row is kept for the deadline."""
        if self.rl_cfg.sync_collection:
            kept, since = self._replay.ptr, monotonic()
            while self._replay.size < self._fill:
                self.wait_permits_wanted()
                self._permit()
                self.wait_permits_done()
                if self._replay.ptr > kept:
                    kept, since = self._replay.ptr, monotonic()
                elif monotonic() - since > self.deadline:
                    raise _nothing_kept(self.deadline)
            self._permit()
            return
        # Running free: the first tick waits for the rows on their cursor.
        while True:
            kept = self._replay.ptr
            try:
                with self._drawing():
                    self._pipe.start_prepare(
                        first,
                        self._n_samples,
                        min_snapshot_ptr=self._fill,
                        headroom=self.rl_cfg.env_steps_per_sync,
                    )
                    while not self._pipe.wait_until_ready(first, self._n_samples, timeout=0.5):
                        self.check_collectors()
                return
            except DeadlineError:
                if self._replay.ptr == kept:
                    raise _nothing_kept(self.deadline) from None

    def _drawing(self) -> AbstractContextManager[object]:
        """The limiter's leave to draw a batch, waited for if there is one."""
        return nullcontext() if self._limiter is None else self._limiter.drawing(self._n_samples)

    def _permit(self) -> None:
        self.grant_permits(int(self._weights.version), self.rl_cfg.env_steps_per_sync)

    # -- iterating

    def _iterate(self, iteration: int, is_last: bool) -> dict[str, float]:
        watch, sync = self._watch, self.rl_cfg.sync_collection
        if sync:
            self.wait_permits_done()
        else:
            self.check_collectors()
        watch.lap("wait")
        batch = self._pipe.sample_large_batch(iteration, self._n_samples)
        if not is_last:
            with self._drawing():
                self._pipe.start_prepare(
                    iteration + 1, self._n_samples, headroom=self.rl_cfg.env_steps_per_sync
                )
            if sync:
                self._pipe.wait_asked()  # else a packing collector might go on first and pack later rows too
                self._permit()
        watch.lap("batch")
        losses = self._update(batch)
        self._pipe.after_tick()
        watch.lap("train")
        if sync and not is_last:
            self.wait_permits_taken()
        self._publish()
        watch.lap("weight_sync")
        return losses

    def _update(self, batch: Any) -> dict[str, float]:
        config, learner = self.rl_cfg, self._learner
        losses: dict[str, float] = {}
        for k in range(config.updates_per_step):
            part = slice(k * config.batch_size, (k + 1) * config.batch_size)
            rows = {name: x[part] for name, x in batch.items()}
            losses |= learner.update_critic(rows) or {}
            if learner.update_count % config.policy_frequency == 0:
                losses |= learner.update_actor(rows) or {}
            learner.soft_update_target()
        return losses

    def _publish(self) -> None:
        if self._stats is not None:
            pair = self._learner.obs_normalizer.pair()
            if pair is not None:
                self._stats.put(pair)
        self._weights.write_weights(self._learner.actor.state_dict())

    def _publish_restored(self) -> None:
        self._publish()
        self._version_base -= 1  # the same weights again are no new version

    # -- state

    def _more_metrics(self) -> dict[str, float]:
        pipe = self._pipe.stats()
        return {
            "replay/size": float(self._replay.size),
            "replay/redrawn": float(pipe.redrawn),
            "pipeline/misses": float(pipe.misses),
        }

    def _loss_counts(self) -> tuple[int, int]:
        return 0, int(self._pipe.stats().misses) if self._pipe is not None else 0

    def _dump_replay(self) -> Callable[[Path], None] | None:
        wanted = self.rl_cfg.save_replay if self._save_replay is None else self._save_replay
        if not wanted:
            return None
        dump: Callable[[Path], None] = self._replay.dumps
        return dump

    def _own_state(self) -> dict[str, Any]:
        return {} if self._limiter is None else {"limiter": self._limiter.state_dict()}

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        super()._restore(state, path)
        saved = replay_path(path)
        if saved is not None:
            self._restore_replay(saved)
        if self._limiter is not None and "limiter" in state:
            with damage_in(path):
                self._limiter.load_state_dict(dict(state["limiter"]))

    def _restore_replay(self, path: Path) -> None:
        """Add the saved rows, ring by ring if there are as many rings, else spread over those there are.

        Segments stay segments, cut where they are spread. Rows that were saved without segments have one each.
        """
        with plain_replay.ReplayBuffer.load_from(path) as saved:
            names = [f.name for f in saved.inner_storage.layout.fields]
            wanted = [f.name for f in self._replay.layout.fields]
            if names != wanted or saved.inner_storage.layout.hash != self._replay.layout.hash:
                raise FormatError(
                    f"{path}: must hold rows of {wanted} as these spaces have them, got {names}"
                )
            shares, ends = _shares(saved, self.num_envs), _ends(saved)
            for lane in range(self.num_collectors):
                target = self._replay.on_lane(lane)
                for env in range(self.envs_per_collector):
                    rows = shares[lane * self.envs_per_collector + env]
                    for start in range(rows.start, rows.stop, 1 << 16):
                        part = slice(start, min(start + (1 << 16), rows.stop))
                        block = {name: np.asarray(x) for name, x in saved[part].items()}
                        envs = np.full(part.stop - start, env)
                        target.add(**block, envs=envs, ends=ends[part])
                target.release_lane()  # ends what is open
                target.close()


class SACRunner(OffPolicyRunner):
    """Soft actor-critic: twin critics, tanh Gaussian policy, automatic temperature.

    >>> SACRunner("Pendulum-v1", {}, {"batch_size": 64}, num_envs=4, device="cpu").rl_cfg.batch_size
    64
    """

    algorithm = "sac"

    @as_runner
    def __init__(
        self,
        *args: Any,
        learner: LearnerFactory | None = None,
        limiter: RateLimiter | None = None,
        **kwargs: Any,
    ) -> None:
        """As OffPolicyRunner, with SACLearner."""
        super().__init__(*args, learner=learner or _sac_learner, limiter=limiter, **kwargs)


def _sac_learner(spaces: EnvSpaces, config: SACConfig, device: str, seed: int) -> Any:
    from recollect.learners.sac_learner import SACLearner

    return SACLearner(spaces, config, device, seed)


def _nothing_kept(deadline: float) -> DeadlineError:
    return DeadlineError(
        f"replay: must get a row within {deadline:g} s, got none; are collectors stuck, or all their rows rejected?"
    )


def _shares(saved: plain_replay.ReplayBuffer, parts: int) -> list[range]:
    """The rows in order, cut into their rings if there are so many, else into parts of nearly one size."""
    storage: Any = saved.inner_storage
    counts = [cursor - low for low, cursor, _ in storage.rows.native.windows()]
    ends = list(accumulate(counts)) if len(counts) == parts else []
    ends = ends or [len(saved) * (k + 1) // parts for k in range(parts)]
    return [range(a, b) for a, b in zip([0, *ends], ends)]


def _ends(saved: plain_replay.ReplayBuffer) -> Any:
    """Which rows are the last of a segment; all of them where none were kept."""
    segments = saved.get_segments()
    ends = np.full(len(saved), segments is None)
    ends[[end - 1 for _, end in segments or ()]] = True
    return ends

"""Configurations of the reference learners: frozen records, read from mappings, wrong keys named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from recollect import checks

NAN_POLICIES = ("raise", "reject")
RING_POLICIES = ("block", "drop_oldest", "drop_newest")
PACKERS = ("learner", "collector")


@dataclass(frozen=True, slots=True)
class SACConfig:
    """Soft actor-critic: twin critics, tanh Gaussian, automatic temperature.

    >>> SACConfig(batch_size=64).batch_size
    64
    """

    batch_size: int = 256  # transitions in one update
    updates_per_step: int = 1  # updates in one iteration
    policy_frequency: int = 1  # critic updates for each update of the actor
    gamma: float = 0.99
    tau: float = 0.005  # how far the target critics move in one update
    lr: float = 3e-4
    hidden: tuple[int, ...] = (256, 256)
    learning_starts: int = 1000  # rows before the first update
    replay_buffer_n: int | None = None  # rows for each environment; None: 10⁶ in all
    env_steps_per_sync: int = 1  # steps of each environment in one iteration
    sync_collection: bool = True  # collectors in step with the learner: repeatable
    pack: str = "learner"  # who packs batches: learner or collector
    obs_normalization: bool = False  # scale observations by their running mean and deviation
    nan_policy: str = "raise"  # values that are not finite: raise or reject
    save_replay: bool = False  # put the replay into checkpoints

    def __post_init__(self) -> None:
        _hidden(self)
        _counts(self, 1, "batch_size", "updates_per_step", "policy_frequency", "env_steps_per_sync")
        _counts(self, 0, "learning_starts")
        _numbers(self, checks.fraction, "gamma", "tau")
        _numbers(self, _above_zero, "lr")
        _flags(self, "sync_collection", "obs_normalization", "save_replay")
        checks.choice("pack", self.pack, PACKERS)
        checks.choice("nan_policy", self.nan_policy, NAN_POLICIES)
        if self.replay_buffer_n is not None:
            _counts(self, 1, "replay_buffer_n")
            if self.env_steps_per_sync >= self.replay_buffer_n:
                raise ValueError(
                    f"env_steps_per_sync: must be below replay_buffer_n {self.replay_buffer_n}, got "
                    f"{self.env_steps_per_sync}; a chunk would overwrite the whole replay"
                )


@dataclass(frozen=True, slots=True)
class APPOConfig:
    """Asynchronous PPO with V-trace over rollouts of `steps_per_env` steps.

    >>> APPOConfig(steps_per_env=8).clip
    0.2
    """

    steps_per_env: int = 24  # steps of each environment in a rollout
    num_slots: int = 4  # rollouts that each collector may be ahead
    ring_policy: str = "block"  # when the ring is full: block, drop_oldest or drop_newest
    staging: int = 1  # newest rollouts of each collector to train on at a time; older ones are skipped
    max_lag: int | None = None  # skip rollouts of weights older than so many versions
    epochs: int = 5  # passes over the staged rollouts
    minibatches: int = 4  # updates in one pass
    clip: float = 0.2
    gamma: float = 0.99
    lam: float = 0.95  # decay of traces, as in GAE
    rho_bar: float = 1.0  # most that a probability ratio counts in a target
    c_bar: float = 1.0  # most that it counts in a trace
    lr: float = 3e-4
    entropy_coef: float = 0.0
    value_coef: float = 1.0
    max_grad_norm: float = 1.0
    sync_collection: bool = False  # collectors in step with the learner: repeatable
    hidden: tuple[int, ...] = (64, 64)
    nan_policy: str = "raise"  # values that are not finite: raise or reject

    def __post_init__(self) -> None:
        _hidden(self)
        _counts(self, 1, "steps_per_env", "staging", "epochs", "minibatches")
        _counts(self, 2, "num_slots")
        _numbers(self, checks.fraction, "gamma", "lam")
        _numbers(self, _above_zero, "lr", "clip", "rho_bar", "c_bar", "max_grad_norm")
        _numbers(self, checks.number, "entropy_coef", "value_coef")
        _flags(self, "sync_collection")
        checks.choice("ring_policy", self.ring_policy, RING_POLICIES)
        checks.choice("nan_policy", self.nan_policy, NAN_POLICIES)
        if self.max_lag is not None:
            _counts(self, 0, "max_lag")
        if self.sync_collection and self.ring_policy != "block":
            raise ValueError(f"ring_policy: must be 'block' with sync_collection, got {self.ring_policy!r}")


def config_json(config: Any) -> dict[str, Any]:
    """Return a configuration as JSON can say it."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}


# -- the rules; each names the field, the rule and the value


def _hidden(config: Any) -> None:
    hidden = config.hidden
    if not isinstance(hidden, tuple | list) or not hidden:
        raise ValueError(f"hidden: must be a tuple of layer sizes, got {hidden!r}")
    for size in hidden:
        checks.count("hidden", size, advice="give the size of each layer")
    object.__setattr__(config, "hidden", tuple(map(int, hidden)))


def _counts(config: Any, least: int, *names: str) -> None:
    for name in names:
        object.__setattr__(config, name, checks.count(name, getattr(config, name), least))


def _numbers(config: Any, check: Callable[[str, Any], float], *names: str) -> None:
    for name in names:
        check(name, getattr(config, name))


def _above_zero(name: str, value: Any) -> float:
    return checks.number(name, value, above=True)


def _flags(config: Any, *names: str) -> None:
    for name in names:
        checks.flag(name, getattr(config, name))

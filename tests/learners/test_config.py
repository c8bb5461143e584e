"""Configurations: a wrong key or value is an error that names it, before anything is made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from recollect.ipc.async_runner import read_config
from recollect.learners.config import APPOConfig, SACConfig, config_json


def test_defaults_are_those_of_the_contract() -> None:
    sac, appo = SACConfig(), APPOConfig()
    assert (sac.batch_size, sac.updates_per_step, sac.policy_frequency, sac.learning_starts) == (
        256,
        1,
        1,
        1000,
    )
    assert (sac.gamma, sac.tau, sac.lr, sac.hidden) == (0.99, 0.005, 3e-4, (256, 256))
    assert (sac.replay_buffer_n, sac.env_steps_per_sync, sac.sync_collection, sac.pack) == (
        None,
        1,
        True,
        "learner",
    )
    assert (sac.obs_normalization, sac.nan_policy, sac.save_replay) == (False, "raise", False)
    assert (appo.steps_per_env, appo.num_slots, appo.ring_policy, appo.staging, appo.max_lag) == (
        24,
        4,
        "block",
        1,
        None,
    )
    assert (appo.epochs, appo.minibatches, appo.clip, appo.gamma, appo.lam) == (5, 4, 0.2, 0.99, 0.95)
    assert (appo.rho_bar, appo.c_bar, appo.lr, appo.entropy_coef, appo.value_coef) == (
        1.0,
        1.0,
        3e-4,
        0.0,
        1.0,
    )
    assert (appo.max_grad_norm, appo.sync_collection) == (1.0, False)
    assert (appo.hidden, appo.nan_policy) == ((64, 64), "raise")


@pytest.mark.parametrize(
    ("cls", "key", "near"),
    [
        (SACConfig, "learning_start", "learning_starts"),
        (APPOConfig, "lambda", "lam"),
    ],
)
def test_unknown_key_names_the_nearest(cls: Any, key: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"keys of {cls.__name__}, got '{key}'; did you mean '{near}'"):
        read_config(cls, {key: 1})


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (SACConfig, {"batch_size": 0}, "batch_size: must be an int of at least 1, got 0"),
        (SACConfig, {"batch_size": True}, "batch_size"),
        (SACConfig, {"gamma": 1.5}, r"gamma: must be a number in \[0, 1\], got 1.5"),
        (SACConfig, {"gamma": float("nan")}, "gamma"),
        (SACConfig, {"lr": 0}, "lr: must be a finite number above 0"),
        (SACConfig, {"hidden": ()}, "hidden"),
        (SACConfig, {"hidden": (8, 0)}, "hidden"),
        (SACConfig, {"pack": "both"}, "pack: must be one of"),
        (SACConfig, {"nan_policy": "ignore"}, "nan_policy"),
        (SACConfig, {"sync_collection": 1}, "sync_collection"),
        (SACConfig, {"replay_buffer_n": 4, "env_steps_per_sync": 4}, "env_steps_per_sync: must be below"),
        (APPOConfig, {"num_slots": 1}, "num_slots: must be an int of at least 2"),
        (APPOConfig, {"ring_policy": "drop"}, "ring_policy"),
        (APPOConfig, {"max_lag": -1}, "max_lag"),
        (APPOConfig, {"entropy_coef": -0.1}, "entropy_coef"),
        (APPOConfig, {"sync_collection": True, "ring_policy": "drop_oldest"}, "ring_policy: must be 'block'"),
        (APPOConfig, [("lr", 1)], "rl_cfg: must be a mapping"),
        *((SACConfig, {name: 0}, f"{name}: must be an int of at least 1, got 0") for name in
          ("updates_per_step", "policy_frequency", "env_steps_per_sync", "replay_buffer_n")),
        *((APPOConfig, {name: 0}, f"{name}: must be an int of at least 1, got 0") for name in
          ("steps_per_env", "staging", "epochs", "minibatches")),
        *((APPOConfig, {name: x}, f"{name}: must be a finite number above 0") for x in (0.0, float("inf")) for name in
          ("lr", "clip", "rho_bar", "c_bar", "max_grad_norm")),
        (SACConfig, {"learning_starts": -1}, "learning_starts: must be an int of at least 0"),
        (SACConfig, {"tau": -0.1}, "tau"),
        (SACConfig, {"lr": "fast"}, "lr: must be a finite number above 0"),
        (SACConfig, {"obs_normalization": 1}, "obs_normalization: must be True or False"),
        (SACConfig, {"save_replay": "yes"}, "save_replay: must be True or False"),
        (SACConfig, {"hidden": (True,)}, "hidden"),
        (APPOConfig, {"gamma": 2}, "gamma"),
        (APPOConfig, {"lam": 1.1}, "lam"),
        (APPOConfig, {"value_coef": float("inf")}, "value_coef: must be a finite"),
        (APPOConfig, {"sync_collection": "no"}, "sync_collection"),
        (APPOConfig, {"nan_policy": "ignore"}, "nan_policy"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(cls: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_config(cls, given)


def test_records_pass_and_lists_become_tuples() -> None:
    config = SACConfig(hidden=(8,))
    assert read_config(SACConfig, config) is config
    assert read_config(SACConfig, {"hidden": [8, 8]}).hidden == (8, 8)
    assert SACConfig(**config_json(config)) == config


def test_runners_are_reached_from_the_package_without_torch() -> None:
    """`rc.learners.sac.SACRunner`, as the contract's example has it; torch comes with `learn`, not with the name."""
    code = (
        "import sys, recollect as rc; rc.learners.sac.SACRunner, rc.learners.appo.APPORunner; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr

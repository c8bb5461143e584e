"""The names of recollect.remote, what their arguments are called and default to, and what importing them loads."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

from recollect import remote
from recollect.remote import frame as wire

PUBLIC = """
ANY Carrier Checkpoint ClientStats DATA_TAG Diversity Limits LocalCarrier METADATA_TAG ManagerStats MpiCarrier
RayCarrier RemoteReplay ReplayBufferManager Shards TcpCarrier TorchCarrier Trajectories launch rank_layout
""".split()

SIGNATURES = {
    "ReplayBufferManager": "env, rank, num_training_ranks, scoring_function=None, diverse_replay_buffer=False, "
    "capacity=10000, remote_manager_rank=None, communication_backend='mpi', timing=False, store_locally=True, "
    "baseline_strategy='min', baseline_percentile=0.1, baseline_ema_alpha=0.1, *, evict=None, max_length=None, "
    "storage='memory', worker_ranks=None, diversity=None, shards=None, checkpoint=None, limits=None, seed=None",
    "ReplayBufferManager.add": "container, sender_rank=-1",
    "ReplayBufferManager.default_scoring_function": "obj, sender_rank=-1",
    "ReplayBufferManager.get_metadata": "manager_rank, backend, *, timeout=30.0",
    "ReplayBufferManager.run": "async_send=True",
    "ReplayBufferManager.sample": "n, *, by='uniform', replace=True",
    "ReplayBufferManager.send_termination_signal": "manager_rank, backend",
    "RemoteReplay": "env, manager_rank, communication_backend='mpi', *, mode='sync', window=4, send_every=1, "
    "baseline_filtering=False, refresh_after=10, scoring_only=False, deadline=30.0, retry_s=5.0, reconnect_s=30.0, "
    "when_down='raise'",
    "RemoteReplay.sample": "n, *, by='uniform', replace=True",
    "Trajectories": "steps, lengths, log_rewards=None, **fields",
    "Trajectories.from_padded": "steps, lengths, time_major=False, *, log_rewards=None, **fields",
    "Trajectories.to_padded": "max_length=None",
    "LocalCarrier.group": "n, *, max_frame=67108864",
    "LocalCarrier.recv": "source=-1, tag=-1, timeout=30.0",
    "LocalCarrier.send": "dest, tag, parts, timeout=30.0",
    "TcpCarrier.serve": "rank, address='127.0.0.1:0', token=None, *, max_frame=67108864, ssl_context=None",
    "TcpCarrier.join": "addresses, token=None, rank=None, *, max_frame=67108864, ssl_context=None, timeout=30.0",
    "MpiCarrier": "comm=None, *, max_frame=67108864, open_s=300.0",
    "MpiCarrier.recv": "source=-1, tag=-1, timeout=30.0",
    "MpiCarrier.send": "dest, tag, parts, timeout=30.0",
    "TorchCarrier": "group=None, *, max_frame=67108864",
    "launch": "worker, manager, *, n_workers=2, n_managers=1, carrier='local', max_restarts=0, seed=0",
    "rank_layout": "size, n_managers=1",
    "Diversity": "key='final_state', cutoff=0.0, p=1.0",
    "Shards": "manager_ranks, sync_s=1.0",
    "Checkpoint": "path, every_s=300.0, resume=False, power_safe=False",
    "Limits": "max_window=64, join_s=300.0, rejoin_s=10.0, silence_s=300.0, send_s=30.0, drain_s=5.0",
}


def test_all_is_pinned_and_resolves() -> None:
    assert sorted(remote.__all__) == sorted(PUBLIC)
    assert all(getattr(remote, name) is not None and name in dir(remote) for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'RemoteReply'"):
        remote.RemoteReply


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_those_promised(name: str) -> None:
    found: Any = remote
    for part in name.split("."):
        found = getattr(found, part)
    shown = inspect.signature(found)
    arguments = [p.replace(annotation=p.empty) for p in shown.parameters.values() if p.name != "self"]
    shown = shown.replace(parameters=arguments, return_annotation=shown.empty)
    assert str(shown) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize(
    "name", ["Checkpoint", "ClientStats", "Diversity", "Limits", "ManagerStats", "Shards"]
)
def test_records_are_frozen(name: str) -> None:
    assert getattr(remote, name).__dataclass_params__.frozen and dataclasses.is_dataclass(
        getattr(remote, name)
    )


def test_the_numbers_of_the_protocol() -> None:
    assert (remote.DATA_TAG, remote.METADATA_TAG, remote.ANY) == (0, 1, -1)
    assert (wire.MAX_FRAME, wire.MOST_FRAME) == (64 << 20, 1 << 30)


@pytest.mark.process
def test_no_name_loads_an_optional_package() -> None:
    code = f"""if True:
        import sys
        import recollect.remote as remote
        for name in {PUBLIC!r}:
            getattr(remote, name)
        print(sorted({{"mpi4py", "torch", "ray"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr

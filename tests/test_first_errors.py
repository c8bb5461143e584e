"""What a newcomer gets wrong first: the message names the way out, and the way out works."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import recollect as rc

SPACE = {"obs": ((4,), "float32"), "reward": ((), "float32"), "terminated": ((), "bool")}
OBS = np.ones(4, "float32")


def buffer(space: Any = SPACE, **options: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=100, **options)


def sample(**other: Any) -> dict[str, Any]:
    return {"obs": OBS, "reward": 1.0, "terminated": False, **other}


def block(n: int, **other: Any) -> dict[str, Any]:
    return {
        "obs": np.ones((n, 4), "f4"),
        "reward": np.ones(n, "f4"),
        "terminated": np.zeros(n, bool),
        **other,
    }


def tracked() -> rc.ReplayBuffer:
    return buffer(maintain_segment_metadata=True)


def recorded() -> rc.ReplayBuffer:
    return buffer(rc.transition_space(gym.make("CartPole-v1")))


def wrapped_twice(buf: rc.ReplayBuffer) -> Any:
    env = rc.ReplayBufferCollectionWrapper(gym.make("CartPole-v1"), buf)
    return rc.ReplayBufferCollectionWrapper(env, buf)


def episode(n: int, last_frame: bool = False) -> rc.ReplayBuffer:
    """A buffer with an episode of `n` steps that terminates, and a row of where it led."""
    buf = tracked()
    buf.extend(block(n, terminated=np.arange(n) == n - 1), ends=np.zeros(n, bool))
    if last_frame:
        buf.append(sample())
    buf.mark_segment_end()
    return buf


MISTAKES: list[tuple[str, Callable[[], Any], str, Callable[[], Any]]] = [
    (
        "a shape that is a number",
        lambda: buffer({"obs": (4, "float32")}),
        r"^obs: shape must be a tuple, got 4; write \(\(4,\), 'float32'\)$",
        lambda: buffer({"obs": ((4,), "float32")}),
    ),
    (
        "a dtype without a shape",
        lambda: buffer({"reward": np.float32}),
        r"^reward: must have a shape .*; write \(\(\), 'float32'\) for one number$",
        lambda: buffer({"reward": ((), "float32")}),
    ),
    (
        "a float64 reward",
        lambda: buffer().append(sample(reward=np.float64(1.0))),
        r"^reward: dtype must be float32, got float64; .*create the buffer with cast=True",
        lambda: buffer(cast=True).append(sample(reward=np.float64(1.0))),
    ),
    (
        "extend of one sample",
        lambda: buffer().extend(sample()),
        r"^obs: must have a leading batch axis, got shape \(4,\); write one sample with append\(\)",
        lambda: buffer().append(sample()),
    ),
    (
        "extend of one sample of lists",
        lambda: buffer().extend(sample(obs=[1.0, 2.0, 3.0, 4.0])),
        r"^obs: must have a leading batch axis, got shape \(4,\); write one sample with append\(\)",
        lambda: buffer().append(sample(obs=[1.0, 2.0, 3.0, 4.0])),
    ),
    (
        "append of several samples",
        lambda: buffer().append(block(3)),
        r"^obs: shape must be \(4,\), got \(3, 4\); write several samples with extend\(\)",
        lambda: buffer().extend(block(3)),
    ),
    (
        "extend of a list of samples",
        lambda: buffer().extend([sample(), sample()]),
        r"^sample: must be a dict .* got list; pass a dict, of arrays \(n, ...\) for several",
        lambda: buffer().extend(block(2)),
    ),
    (
        "n-step returns without next_obs",
        lambda: rc.NStepBatch(buffer(maintain_segment_metadata=True), 3, 0.99),
        r"^NStepBatch: next_obs must name a part of a sample, got 'next_obs', and there are \['obs', 'reward', "
        r"'terminated'\]; pass next_obs=\.\.\. as yours is called",
        lambda: rc.NStepBatch(buffer(maintain_segment_metadata=True), 3, 0.99, next_obs="obs"),
    ),
    (
        "a misspelt keyword of a sampler",
        lambda: rc.StepSampler(buffer(), 64, sead=0),  # type: ignore[call-arg]
        r"^StepSampler: must be given arguments that it has, got 'sead'; did you mean 'seed'\?$",
        lambda: rc.StepSampler(buffer(), 64, seed=0),
    ),
    (
        "a misspelt keyword of a buffer",
        lambda: buffer(max_length={}),
        r"^ReplayBuffer\.create: must be given arguments that it has, got 'max_length'; did you mean 'max_lengths'\?$",
        lambda: buffer(max_lengths={}),
    ),
    (
        "a buffer's lanes that do not divide its capacity",
        lambda: buffer(num_lanes=3),
        r"^num_lanes: .* divide the capacity 100, got 3; take capacity=102$",
        lambda: rc.ReplayBuffer.create("memory", SPACE, capacity=102, num_lanes=3),
    ),
    (
        "the name of an environment in its place",
        lambda: rc.transition_space("CartPole-v1"),
        r"^env: must be an environment, got the str 'CartPole-v1'; pass gym\.make\('CartPole-v1'\)$",
        lambda: rc.transition_space(gym.make("CartPole-v1")),
    ),
    (
        "buffer and environment in the wrong order",
        lambda: rc.ReplayBufferCollectionWrapper(recorded(), gym.make("CartPole-v1")),  # type: ignore[arg-type]
        r"^env: .* got recollect\.replay\.buffer\.ReplayBuffer; pass the environment, then the buffer$",
        lambda: rc.ReplayBufferCollectionWrapper(gym.make("CartPole-v1"), recorded()),
    ),
    (
        "a cell of a notebook that wraps once more",
        lambda: wrapped_twice(recorded()),
        r"^env: must not be recorded into this buffer already, .*; go on with the wrapper that there is",
        lambda: rc.ReplayBufferCollectionWrapper(gym.make("CartPole-v1"), recorded()),
    ),
    (
        "nested keys as a path",
        lambda: buffer({"obs": {"image": ((2,), "uint8")}}).get_column("obs/image"),
        r"keys here are one of \['obs'\], got 'obs/image'; pass \('obs', 'image'\)",
        lambda: buffer({"obs": {"image": ((2,), "uint8")}}).get_column(("obs", "image")),
    ),
    (
        "priorities inside another sampler",
        lambda: rc.SequenceSampler(rc.PrioritizedSampler(tracked(), 8), 8, 4),
        r"^SequenceSampler: .* got a PrioritizedSampler, .*; write PrioritizedSampler\(SequenceSampler\(data",
        lambda: rc.PrioritizedSampler(rc.SequenceSampler(tracked(), 8, 4), 8),
    ),
    (
        "frames once, without the last one",
        lambda: rc.StepSampler(rc.TransitionBatch(episode(10)), 4).sample(),
        r"^TransitionBatch: an episode that ended must have one more row, .* got none after row 9; record with "
        r"record_final_obs=True",
        lambda: rc.StepSampler(rc.TransitionBatch(episode(10, last_frame=True)), 4).sample(),
    ),
    (
        "a path at which nothing is",
        lambda: rc.ReplayBuffer.load_from("nowhere/at/all"),
        r"must be the directory of a dump, got a path at which nothing is",
        lambda: None,
    ),
    (
        "a keyword that the storage has and the buffer sets",
        lambda: buffer(segments=True),
        r"got 'segments'; did you mean 'maintain_segment_metadata'\?$",
        lambda: buffer(maintain_segment_metadata=True),
    ),
]


@pytest.mark.parametrize(("wrong", "says", "right"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_the_message_names_the_way_out(wrong: Callable[[], Any], says: str, right: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=says):
        wrong()
    right()


def test_a_storage_of_ones_own_may_take_any_keyword() -> None:
    class Noted(rc.MemoryStorage):
        short_name = "noted"

        @classmethod
        def create(cls, *args: Any, note: str = "", **kwargs: Any) -> Any:
            storage = super().create(*args, **kwargs)
            storage.note = note  # type: ignore[attr-defined]
            return storage

    made: Any = rc.ReplayBuffer.create(Noted, SPACE, capacity=4, note="mine")
    assert made.storage.note == "mine"


@pytest.mark.parametrize("view", ["steps", "n-step", "priorities", "sequences", "epoch"])
def test_no_sampler_leaves_out_last_steps_in_silence(view: str) -> None:
    """Rows without the frame that an episode ends with: its last step would never be drawn, however it ended."""
    rows = rc.TransitionBatch(episode(10), stack=2)
    draws: dict[str, Callable[[], Any]] = {
        "steps": lambda: rc.StepSampler(rows, 4).sample(),
        "n-step": lambda: rc.StepSampler(rc.NStepBatch(rows, 3, 0.9), 4).sample(),
        "priorities": lambda: rc.PrioritizedSampler(rows, 4).sample(),
        "sequences": lambda: rc.SequenceSampler(rows, 4, 3).sample(),
        "epoch": lambda: list(rc.StepSampler(rows, 4).epoch_iter()),
    }
    with pytest.raises(ValueError, match="record_final_obs=True"):
        draws[view]()


@pytest.mark.parametrize(
    ("name", "instead"), [("save", "dumps"), ("load", "load_from"), ("size", "len"), ("reset", "clear")]
)
def test_a_method_of_other_buffers_is_told_what_it_is_called_here(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"has no {name}.*use .*{instead}"):
        getattr(buffer(), name)
    assert not hasattr(buffer(), name)


def test_a_misspelt_name_is_told_with_the_nearest() -> None:
    code = "import recollect as rc; rc.PrioritisedSampler"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Did you mean: 'PrioritizedSampler'?" in done.stderr


def test_a_buffer_of_one_process_says_how_it_is_saved() -> None:
    with pytest.raises(
        TypeError, match=r"cannot be pickled .*; save it with dumps\(path\), or create it with Shared"
    ):
        pickle.dumps(buffer())


def test_a_device_that_is_not_here_is_refused_at_once() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(ValueError, match="device: .* got 'cuda' without CUDA; use 'cpu'"):
        rc.StepSampler(buffer(), 4, backend="torch", device="cuda")


def test_jax_names_the_leaf_that_it_would_narrow() -> None:
    pytest.importorskip("jax")
    wide, narrow = (
        buffer({"a": {"b": gym.spaces.Discrete(2, dtype=dtype)}}) for dtype in (np.int64, np.int32)
    )
    for buf in (wide, narrow):
        buf.append({"a": {"b": 1}})
    with pytest.raises(
        ValueError, match=r"^a/b dtype: must be one that jax keeps, got int64.*Discrete\(n, dtype=np.int32\)"
    ):
        rc.StepSampler(wide, 4, backend="jax").sample()
    assert rc.StepSampler(narrow, 4, backend="jax").sample()["a"]["b"].tolist() == [1] * 4


def test_a_workflow_that_returns_something_else_is_told_what_to_return() -> None:
    import recollect.rollout as rr

    async def run() -> None:
        async with rc.RolloutCoordinator(rr.Config(), []) as c:
            tasks = [rr.Task(lambda task, models: 5, max_retries=0)]
            await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
            await c.finalize_train_batch(1, timeout=30)

    with pytest.raises(
        rc.BatchFailed, match=r"workflow: must return an rr.Experience, .* got int; return g.experience"
    ):
        asyncio.run(run())


@pytest.mark.process
def test_workers_without_a_main_guard_say_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, recollect as rc\n"
        "buf = rc.ReplayBuffer.create('shared', ((), 'int64'), capacity=8, multiprocessing=True)\n"
        "buf.append(1)\n"
        "ctx = multiprocessing.get_context('spawn')\n"
        "rc.MultiprocessingSampler(rc.StepSampler(buf, 4), n_workers=1, ctx=ctx).sample()\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and 'put what runs below if __name__ == "__main__":' in done.stderr

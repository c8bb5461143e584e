"""What a newcomer gets wrong first: the message names the way out, and the way out works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

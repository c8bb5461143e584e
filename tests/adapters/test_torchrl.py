"""TorchRL's own collectors, buffers and samplers on our rows: the data equal those of its own, element by element."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrl")
pytest.importorskip("tensordict")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of TorchRL about itself
    import torch
    from tensordict import TensorDict
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, SliceSampler
    from torchrl.envs import PendulumEnv, SerialEnv

import recollect as rc
from recollect.adapters.torchrl import TorchRLReplayBuffer, TorchRLStorage

logging.getLogger("torchrl").setLevel(logging.WARNING)
pytestmark = pytest.mark.filterwarnings("ignore:::torchrl", "ignore:::tensordict")


def rows(n: int, first: int = 0) -> Any:
    """`n` rows of many dtypes, nested, which tell by `id` which they are."""
    made = torch.Generator().manual_seed(first)
    return TensorDict(
        {
            "id": torch.arange(first, first + n),
            "observation": torch.randn(n, 4, generator=made),
            "done": (torch.arange(first, first + n) % 10 == 9)[:, None],
            "next": {
                "reward": torch.randn(n, 1, generator=made, dtype=torch.float64),
                "pixels": torch.randint(0, 255, (n, 3, 5), generator=made, dtype=torch.uint8),
                "deeper": {"half": torch.randn(n, 2, generator=made).half()},
            },
            "collector": {"traj_ids": torch.arange(first, first + n) // 10},
        },
        batch_size=[n],
    )


def same(a: Any, b: Any) -> bool:
    """Whether two TensorDicts have the same keys, dtypes, batch sizes and values."""
    keys = set(a.keys(True, True))
    if keys != set(b.keys(True, True)) or a.batch_size != b.batch_size:
        return False
    return all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in keys)


def test_a_sample_is_made_of_the_newest_rows_as_they_came() -> None:
    everything = rows(301)
    buffer = TorchRLReplayBuffer(100, batch_size=512, seed=0)
    for part in everything[:300].split(60):
        buffer.extend(part)
    buffer.add(everything[300])
    assert (len(buffer), buffer.write_count) == (100, 301)
    batch = buffer.sample()
    assert same(batch, everything[batch["id"]])
    assert set(batch["id"].tolist()) <= set(range(201, 301)) and batch["id"].unique().numel() > 90
    assert buffer.sample(3).batch_size == (3,)
    buffer.empty()
    assert len(buffer) == 0


@pytest.mark.parametrize("form", ["a gradient", "a stack", "two dimensions"])
def test_rows_are_taken_in_any_form(form: str) -> None:
    td = rows(24)
    buffer = TorchRLReplayBuffer(24, batch_size=64, seed=0)
    if form == "a gradient":
        td["observation"].requires_grad_()
        buffer.extend(td)
    elif form == "a stack":
        buffer.extend(TensorDict.lazy_stack(list(td)))
    else:
        buffer.extend(td.reshape(4, 6))
    batch = buffer.sample()
    assert same(batch, rows(24)[batch["id"]])


def test_bfloat16_comes_back_as_it_went_in() -> None:
    pytest.importorskip("ml_dtypes")
    buffer = TorchRLReplayBuffer(8, batch_size=8)
    buffer.extend(TensorDict({"x": torch.full((8, 2), 1.5, dtype=torch.bfloat16)}, batch_size=[8]))
    assert (buffer.sample()["x"] == torch.full((8, 2), 1.5, dtype=torch.bfloat16)).all()


def test_priorities_choose_the_rows() -> None:
    buffer = TorchRLReplayBuffer(100, batch_size=64, prioritized=True, alpha=1.0, seed=0)
    buffer.extend(rows(100))
    for _ in range(50):  # until every row was drawn and judged
        batch = buffer.sample()
        batch["td_error"] = (batch["id"] == 7).float()[:, None]
        buffer.update_tensordict_priority(batch)
    batch = buffer.sample()
    assert (batch["id"] == 7).float().mean() > 0.9
    assert same(batch.exclude("priority_weight", "index"), rows(100)[batch["id"]])
    assert batch["priority_weight"].dtype == torch.float32


def test_what_cannot_be_a_row_is_refused() -> None:
    buffer = TorchRLReplayBuffer(10)
    with pytest.raises(rc.EmptyError, match="extend it first"):
        buffer.sample(4)
    with pytest.raises(rc.SchemaError, match="name: must be a tensor"):
        buffer.extend(TensorDict({"name": "a string", "x": torch.ones(3)}, batch_size=[3]))
    buffer.extend(rows(5))
    with pytest.raises(ValueError, match="batch_size: must be given once"):
        buffer.sample()
    with pytest.raises(rc.SchemaError, match="other"):
        buffer.extend(rows(5).set("other", torch.ones(5)))
    assert len(buffer) == 5


SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "slices": lambda: SliceSampler(slice_len=5, traj_key=("collector", "traj_ids")),
    "slices by their end": lambda: SliceSampler(slice_len=5, end_key="done", truncated_key=None),
    "prioritized": lambda: PrioritizedSampler(100, alpha=0.7, beta=0.5),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_torchrls_own_buffer_draws_the_same_from_our_storage(sampler: str) -> None:
    try:
        SAMPLERS[sampler]()
    except RuntimeError as error:
        pytest.skip(f"TorchRL's compiled part does not load beside this torch: {error}")

    def drawn(storage: Any) -> Any:
        buffer = ReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=20)
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        found = []
        for first in range(0, 6 * 37, 37):  # round the end of the ring, and in the midst of a trajectory
            index = buffer.extend(rows(37, first))
            if sampler == "prioritized":
                buffer.update_priority(index, torch.rand(37))
            found += [buffer.sample() for _ in range(3)]
        buffer.add(rows(1, 6 * 37)[0])
        return [*found, buffer[:], buffer[3], buffer[[5, -1]]]

    ours, theirs = drawn(TorchRLStorage(100)), drawn(LazyTensorStorage(100))
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("in_place_of", ["the buffer", "the storage"])
def test_a_collector_fills_it_with_what_it_would_give_torchrl(in_place_of: str) -> None:
    def collected(buffer: Any) -> Any:
        torch.manual_seed(0)
        env = SerialEnv(2, PendulumEnv)
        env.set_seed(0)
        collector = Collector(env, None, frames_per_batch=40, total_frames=120, replay_buffer=buffer)
        for _ in collector:
            pass
        collector.shutdown()
        return buffer

    theirs = collected(ReplayBuffer(storage=LazyTensorStorage(100)))[:]
    if in_place_of == "the storage":
        ours = collected(ReplayBuffer(storage=TorchRLStorage(100)))[:]
    else:
        buffer = collected(TorchRLReplayBuffer(1_000))
        assert buffer.write_count == len(buffer) == 120
        whole = rc.ToBackendOrDeviceBatch(buffer.data, "torch")[:]
        ours = TensorDict(whole, batch_size=[120]).reshape(6, 20)
    assert same(ours, theirs)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_loaded_buffer_is_gone_on_with(prioritized: bool, tmp_path: Path) -> None:
    old, new = (TorchRLReplayBuffer(50, batch_size=8, prioritized=prioritized, seed=0) for _ in range(2))
    old.extend(rows(20))
    old.data.dumps(tmp_path / "dump")
    new.extend(rows(5, first=30))  # another buffer is there already, and its sampler
    new.data = rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False)
    assert len(new) == 20
    assert same(new.sample(), old.sample())
    for buffer in (old, new):
        buffer.extend(rows(9, first=20))
    assert same(new.sample(), old.sample())


def test_rows_are_saved_and_loaded(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=TorchRLStorage(100), batch_size=4)
    buffer.extend(rows(130))
    buffer.dumps(tmp_path / "dump")
    again = ReplayBuffer(storage=TorchRLStorage(100), batch_size=4)
    again.loads(tmp_path / "dump")
    copied = ReplayBuffer(storage=TorchRLStorage(100), batch_size=4)
    copied.load_state_dict(buffer.state_dict())
    for other in (again, copied):
        assert same(other[:], buffer[:])
        other.extend(rows(10, 500))  # goes on where the other was
    buffer.extend(rows(10, 500))
    assert same(again[:], buffer[:]) and same(copied[:], buffer[:])
    assert len(rc.ReplayBuffer.load_from(tmp_path / "dump" / "storage")) == 100


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "torchrl.md"
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "__main__"})

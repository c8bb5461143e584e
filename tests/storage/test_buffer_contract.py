"""A replay buffer over every row storage is a batch like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.storage.rows import SPACE, block

import recollect as rc
from recollect.testing import BatchContract
from recollect.testing.batch_contract import Make

# Each storage, and each form of a buffer over one of them; the rest is the same code.
CASES = ["memory-untracked", "memory-tracked", "memory-unbounded", "memory-lowest", "shared-gone round", "shared-lanes",
         "memmap-gone round", "memmap-unbounded"]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "untracked": {"capacity": 16},
    "tracked": {"capacity": 16, "maintain_segment_metadata": True},
    "gone round": {"capacity": 16, "maintain_segment_metadata": True},
    "unbounded": {"capacity": None, "maintain_segment_metadata": True},
    "lanes": {"capacity": 32, "num_lanes": 2},
    "lowest": {"capacity": 16, "evict": "lowest", "evict_key": "id"},
}


def filled(kind: str, form: str, n: int, path: Path) -> rc.ReplayBuffer:
    place = {"cache_path": path} if kind == "memmap" else {}
    buffer = rc.ReplayBuffer.create(kind, SPACE, **FORMS[form], **place)
    if form == "gone round":
        buffer.extend(block(100, 12))
        buffer.remove_at(...)  # the cursor stays where it is, so the rows that follow go round the end
    for first, end in ((0, n // 2), (n // 2, n)):
        buffer.extend(block(first, end - first))
    return buffer


@pytest.fixture
def close() -> Iterator[list[rc.ReplayBuffer]]:
    """What is put here is closed at the end."""
    made: list[rc.ReplayBuffer] = []
    yield made
    for buffer in made:
        buffer.close()


@pytest.mark.parametrize("case", CASES)
class TestReplayBuffer(BatchContract):
    @pytest.fixture
    def make_batch(self, case: str, tmp_path: Path, close: list[rc.ReplayBuffer]) -> Make:
        def make(n: int) -> rc.ReplayBuffer:
            close.append(filled(*case.split("-"), n, tmp_path / f"live-{len(close)}"))
            return close[-1]

        return make


LOADED: dict[str, dict[str, Any]] = {
    "mapped": {"storage": "memmap"},
    "shared": {"multiprocessing": True, "read_only": False},
    "torch": {"backend": "torch"},
}


@pytest.mark.parametrize("case", LOADED)
class TestLoadedReplayBuffer(BatchContract):
    @pytest.fixture
    def make_batch(self, case: str, tmp_path: Path, close: list[rc.ReplayBuffer]) -> Make:
        if case == "torch":
            pytest.importorskip("torch")

        def make(n: int) -> rc.ReplayBuffer:
            path = tmp_path / f"dump-{len(close)}"
            with filled("memory", "gone round", n, path) as source:
                source.dumps(path)
            close.append(rc.ReplayBuffer.load_from(path, **LOADED[case]))
            return close[-1]

        return make

    def test_append_and_extend(self, make_batch: Make) -> None:
        batch = make_batch(3)
        if batch.is_mutable:
            super().test_append_and_extend(make_batch)
            return
        flat = batch.get_flattened_at([0, 1])
        for write, value in (
            (batch.append, batch[0]),
            (batch.extend, batch[:]),
            (batch.append_flattened, flat[0]),
            (batch.extend_flattened, flat),
        ):
            with pytest.raises(rc.ReadOnlyError, match="read_only=False"):
                write(value)
        assert len(batch) == 3

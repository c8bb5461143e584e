"""The works that are timed: what a row holds, how many there are, and how many one call moves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Block = dict[str, np.ndarray[Any, Any]]
"""Rows as one array per leaf, each with a leading row axis."""

BLOCK_NBYTES = 1 << 20
INDEX_MARK = 256


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named array of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to time, the same for everybody: `batch` rows per call, of `rows` in the buffer.

    `kind` is the name of the adapter method that does it, so a new kind of work needs an entry in WORKS and
    one method in each adapter that can do it; the others are skipped with a line.
    """

    name: str
    kind: str
    batch: int
    rows: int
    leaves: tuple[Leaf, ...]

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one row, without padding."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def call_nbytes(self) -> int:
        return self.batch * self.payload_nbytes

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """One packed row: leaves aligned to their item size, the row padded to 8 bytes."""
        offsets, end = [], 0
        for leaf in self.leaves:
            end = -(-end // leaf.itemsize) * leaf.itemsize
            offsets.append(end)
            end += leaf.nbytes
        formats = [(leaf.dtype, leaf.shape) for leaf in self.leaves]
        names = [leaf.name for leaf in self.leaves]
        return np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": -(-end // 8) * 8}
        )

    @property
    def row_nbytes(self) -> int:
        return self.row_dtype.itemsize

    @property
    def title(self) -> str:
        verbs = {
            "draw": f"draw {self.batch} of",
            "add": f"add {self.batch} to a full buffer of",
            "prioritized": f"draw and update {self.batch} of",
            "prioritized_many": f"draw and update {self.batch} of",
        }
        verbs |= dict.fromkeys(("sequence", "flat"), f"draw {self.batch // 50} sequences of 50 of")
        verbs["stack"] = f"draw {self.batch // 8} stacks of 8 of"
        verb = verbs.get(self.kind, f"{self.kind} of")
        return f"{verb} {self.rows:,} rows of {self.payload_nbytes:,} B"

    def has(self, leaf_name: str) -> bool:
        return any(leaf.name == leaf_name for leaf in self.leaves)

    def resized(self, rows: int) -> Work:
        return replace(self, rows=rows)


def transition(obs: int, action: int) -> tuple[Leaf, ...]:
    """The usual continuous-control transition."""
    return (
        Leaf("obs", (obs,), "float32"),
        Leaf("action", (action,), "float32"),
        Leaf("reward", (), "float32"),
        Leaf("next_obs", (obs,), "float32"),
        Leaf("done", (), "bool"),
    )


IMAGE = (
    Leaf("obs", (84, 84, 4), "uint8"),
    Leaf("action", (), "int64"),
    Leaf("reward", (), "float32"),
    Leaf("done", (), "bool"),
)

MILLION = 1_000_000

WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work("uniform-256", "draw", 256, MILLION, transition(17, 6)),
        Work("uniform-4096", "draw", 4096, MILLION, transition(48, 12)),
        Work("uniform-8192", "draw", 8192, MILLION, transition(48, 12)),
        Work("add-1", "add", 1, MILLION, transition(17, 6)),
        Work("add-256", "add", 256, MILLION, transition(17, 6)),
        Work("add-4096", "add", 4096, MILLION, transition(17, 6)),
        Work("image-32", "draw", 32, 20_000, IMAGE),
        Work("sequences", "sequence", 64 * 50, MILLION, transition(17, 6)),
        Work("sequences-flat", "flat", 64 * 50, 100 * MILLION, transition(17, 6)),
        Work("stack-8x256", "stack", 256 * 8, MILLION, transition(17, 6)),
        Work("peak-memory", "memory", 1, MILLION, transition(17, 6)),
    )
}


def quick(work: Work) -> Work:
    """The same work, small enough for a smoke test (memory less so: noise would drown it)."""
    if work.kind == "memory":
        return work.resized(work.rows // 5)
    return work.resized(512 if work.row_nbytes > 10_000 else 20_480)


def rows_that_fit(work: Work, budget_nbytes: float) -> Work:
    """The same work with fewer rows if the budget for one buffer asks for it (a sparse one needs little)."""
    if work.kind == "flat":
        return work
    return work.resized(min(work.rows, max(work.batch, int(budget_nbytes // work.row_nbytes))))


def random_block(work: Work, n: int, seed: int = 0) -> Block:
    rng = np.random.default_rng(seed)
    block: Block = {}
    for leaf in work.leaves:
        shape = (n, *leaf.shape)
        if leaf.dtype == "float32":
            block[leaf.name] = rng.random(shape, np.float32)
        else:
            block[leaf.name] = rng.integers(0, 2, shape).astype(leaf.dtype)
    return block


def mark(block: Block, first_row: int) -> None:
    """Write row numbers into the rows: a batch then tells which rows it holds and whether they are whole."""
    numbers = np.arange(first_row, first_row + len(block["reward"]))
    block["reward"][:] = numbers
    for shift, name in enumerate(("obs", "next_obs")):
        if name in block:
            block[name].reshape(len(numbers), -1)[:, 0] = (numbers + shift) % INDEX_MARK


def blocks(work: Work) -> Iterator[tuple[int, Block]]:
    """All rows of a full buffer, as (first row, block); each block is valid until the next is asked for."""
    n = max(1, min(work.rows, BLOCK_NBYTES // work.payload_nbytes))
    block = random_block(work, n)
    for first in range(0, work.rows, n):
        part = {name: array[: work.rows - first] for name, array in block.items()}
        mark(part, first)
        yield first, part


def pool(work: Work) -> list[Block]:
    """What an add work adds, over and over: blocks whose rewards are negative, unlike those in the buffer."""
    made = []
    for k in range(64 if work.batch == 1 else 8):
        block = random_block(work, work.batch, seed=1 + k)
        block["reward"][:] = -1 - k
        made.append(block)
    return made


def one(block: Block) -> dict[str, Any]:
    """The first row as an environment hands it over: arrays, a Python float and a Python bool."""
    return {name: array[0] if array.ndim > 1 else array[0].item() for name, array in block.items()}


def check_batch(work: Work, batch: Block, n: int) -> None:
    """Raise unless the batch holds n whole rows from all over the buffer."""
    rows = batch["reward"].reshape(-1).astype(np.int64)
    if len(rows) != n:
        raise ValueError(f"batch: must hold {n} rows, got {len(rows)}")
    for leaf in work.leaves:
        got = batch[leaf.name].size
        if got != n * math.prod(leaf.shape):
            raise ValueError(f"{leaf.name}: must hold {n} x {leaf.shape}, got {got} values")
    for shift, name in enumerate(("obs", "next_obs")):
        if work.has(name) and (batch[name].reshape(n, -1)[:, 0] != (rows + shift) % INDEX_MARK).any():
            raise ValueError(f"{name}: does not belong to the same rows as reward")
    if n >= 32 and (rows.min() > work.rows // 4 or rows.max() < work.rows * 3 // 4):
        raise ValueError(f"batch: must come from all over the buffer, got rows {rows.min()} to {rows.max()}")


def check_added(work: Work, batch: Block, n_added: int) -> None:
    """Raise unless at least as many rows of the buffer are new as were added."""
    expected = min(1.0, n_added / work.rows)
    new = float((batch["reward"].reshape(-1) < 0).mean())
    slack = 0.02 + 5 * math.sqrt(expected * (1 - expected) / batch["reward"].size)
    if new < expected - slack:
        raise ValueError(f"add: a share {expected:.3f} of the rows must be new, got {new:.3f}")

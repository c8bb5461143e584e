"""The baselines: memcpy of the same bytes, and a C gather of the same packed rows (gather.c).

They work on the memory of the buffer that Recollect has open in this process. Where a buffer happens to lie costs
or saves a quarter of a draw; on the same rows that is the same for both.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from adapters import Turn
from adapters.recollect import open_rows
from works import Block, Work, pool

SOURCE = Path(__file__).parent.parent / "gather.c"
N_INDICES = 1 << 22
N_PLACES = 1 << 12
LINE = 64

Array = np.ndarray[Any, Any]


def compiled(work: Work) -> ctypes.CDLL:
    """gather.c as a library for this work's row."""
    dtype = work.row_dtype
    leaves = ",".join(f"{{{dtype.fields[leaf.name][1]},{leaf.nbytes}}}" for leaf in work.leaves)  # type: ignore[index]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "gather.so")
        flags = ["-O3", "-shared", "-fPIC", f"-DROW_NBYTES={work.row_nbytes}", f"-DLEAVES={leaves}"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, str(SOURCE), "-o", library], check=True)
        loaded = ctypes.CDLL(library)
    for name in ("time_packed", "time_leaves", "time_memcpy"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def address(array: Array, byte: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + byte)


class InC:
    """The loops run in C: no Python is paid for."""

    lib: ctypes.CDLL
    rows: Array

    def create(self, work: Work) -> None:
        self.lib, self.kind = compiled(work), work.kind
        self.rows = open_rows().view(work.row_dtype)
        self.at = ctypes.c_size_t(0)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        """Nothing to do: before they are drawn, look whether the rows are what we take them for."""
        for first, block in blocks if self.kind == "draw" else ():
            for name, array in block.items():
                if not np.array_equal(self.rows[name][first : first + len(array)], array):
                    raise ValueError(f"{name}: rows {first} and on are not where they should be")

    def look(self, n: int) -> Block | None:
        return None

    def random_rows(self) -> Array:
        return np.random.default_rng(0).integers(0, len(self.rows), N_INDICES)


class CPacked(InC):
    """Random rows into one packed block, which stays warm."""

    def draw(self, work: Work) -> Turn:
        self.out = np.zeros(work.batch, work.row_dtype)
        self.index = self.random_rows()
        sizes = ctypes.c_size_t(work.batch)

        def turn(calls: int) -> float:
            count, at = ctypes.c_size_t(self.index.size), ctypes.byref(self.at)
            where = address(self.rows), address(self.index), count, at
            return float(self.lib.time_packed(*where, sizes, ctypes.c_size_t(calls), address(self.out)))

        return turn

    def look(self, n: int) -> Block | None:
        """What the last call gathered, if it was of this size."""
        out: Array | None = getattr(self, "out", None)
        if out is None or len(out) != n:
            return None
        return {name: out[name].copy() for name in out.dtype.names or ()}


class CLeaves(InC):
    """Random rows into one contiguous array per leaf, as a learner wants them; they stay warm."""

    def draw(self, work: Work) -> Turn:
        self.outs = {leaf.name: np.zeros((work.batch, *leaf.shape), leaf.dtype) for leaf in work.leaves}
        self.index = self.random_rows()
        places = (ctypes.c_void_p * len(self.outs))(*(out.ctypes.data for out in self.outs.values()))
        sizes = ctypes.c_size_t(work.batch)

        def turn(calls: int) -> float:
            count, at = ctypes.c_size_t(self.index.size), ctypes.byref(self.at)
            where = address(self.rows), address(self.index), count, at
            return float(self.lib.time_leaves(*where, sizes, ctypes.c_size_t(calls), places))

        return turn

    def look(self, n: int) -> Block | None:
        outs = getattr(self, "outs", None)
        return outs if outs and len(outs["reward"]) == n else None


class Memcpy(InC):
    """The same number of bytes in one piece, with the same side cold as in the work itself."""

    def draw(self, work: Work) -> Turn:
        """From anywhere in the rows to a warm block."""
        room = self.rows.nbytes - work.call_nbytes
        places = np.random.default_rng(0).integers(0, room // LINE + 1, N_PLACES) * LINE
        self.block = np.zeros(work.call_nbytes, np.uint8)
        return self.copying(self.block, np.zeros_like(places), self.rows, places, work.call_nbytes)

    def add(self, work: Work) -> Turn:
        """From a small pool to the next place of the ring."""
        items = pool(work)
        self.block = np.concatenate([a.reshape(-1).view(np.uint8) for item in items for a in item.values()])
        to = np.arange(work.rows // work.batch) * work.call_nbytes
        source = np.arange(len(to)) % len(items) * work.call_nbytes
        return self.copying(self.rows, to, self.block, source, work.call_nbytes)

    def copying(self, dst: Array, to: Array, src: Array, source: Array, nbytes: int) -> Turn:
        def turn(calls: int) -> float:
            ends = address(dst), address(to), address(src), address(source)
            walk = ctypes.c_size_t(len(to)), ctypes.byref(self.at)
            return float(self.lib.time_memcpy(*ends, *walk, ctypes.c_size_t(nbytes), ctypes.c_size_t(calls)))

        return turn

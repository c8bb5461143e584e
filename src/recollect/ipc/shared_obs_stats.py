"""SharedObsNormStats: the newest observation statistics of the learner, for any number of collectors."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from recollect import _core, checks
from recollect.errors import AttachError, DtypeError, SchemaError
from recollect.ipc.mailbox import Mailbox
from recollect.memory.latest import Latest
from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import dtype_from, dtype_kind

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]

# What stands before each pair: the dtype's name, the number of axes, their sizes.
_HEAD = struct.Struct("<24sQ12Q")
_MOST_AXES = 12
_HEAD_NBYTES = 128


@dataclass(frozen=True, slots=True)
class ObsNormStats:
    """What was put, and what this process got."""

    version: int
    nbytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    writer_pid: int | None
    reads: int


class SharedObsNormStats(Mailbox):
    """Pairs (mean, std) from the learner to the collectors; only the newest is kept, nobody waits.

    Ownership: `put` copies in; what `get` and `latest` return is the caller's.
    Concurrency: one writer process, any number of readers, no locks. Each unpickled copy remembers for itself what it
    has returned; one object belongs to one reading thread.

    >>> import numpy as np, recollect as rc
    >>> stats = rc.ipc.SharedObsNormStats(None)
    >>> stats.put((np.zeros(3, "float32"), np.ones(3, "float32")))
    >>> stats.get()[1].tolist(), stats.get(), stats.version
    ([1.0, 1.0, 1.0], None, 1)
    >>> stats.cleanup()
    """

    def __init__(self, ctx: Any = None, *, max_bytes: int = 1 << 20) -> None:
        """Make the memory for pairs of at most `max_bytes`; `ctx` is any multiprocessing context and is not used."""
        checks.count("max_bytes", max_bytes)
        self._setup(Latest.create([_HEAD_NBYTES + max_bytes]))

    def _setup(self, box: Latest) -> None:
        super()._setup(box)
        self._returned = 0
        self._form: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # shape and dtype, once known
        self._block: _SlotBytes | None = None
        self._lock = threading.Lock()

    def stats(self) -> ObsNormStats:
        """Return a frozen record of what was put, and of this process's reads."""
        s, form = self._box.stats(), self._known_form()
        shape, dtype = (None, None) if form is None else (form[0], form[1].name)
        return ObsNormStats(s.version, s.nbytes, shape, dtype, s.writer_pid, s.reads)

    # -- values

    def put(self, stats: tuple[Any, Any]) -> None:
        """Publish a pair; the first one fixes shape and dtype. After an error the last good pair stays."""
        mean, std = self._checked(stats)
        with self._lock:
            if self._block is None:
                self._block = _SlotBytes(mean, self._box.sizes[0])
            self._box.publish_at([self._block.filled(mean, std)], [0])
            self._form = (mean.shape, mean.dtype)

    def get(self) -> Pair | None:
        """Return the newest pair that this object has not returned yet, else None."""
        if self._box.version == self._returned:
            return None
        return self.latest()

    def latest(self) -> Pair | None:
        """Return the newest pair, every time; None before the first."""
        form = self._known_form()
        if form is None:
            return None
        shape, dtype = form
        mean, std = np.empty(shape, dtype), np.empty(shape, dtype)
        offsets = [_HEAD_NBYTES, _HEAD_NBYTES + mean.nbytes]
        self._returned = self._box.latest_at([_bits(mean), _bits(std)], offsets)
        return mean, std

    def _known_form(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of all pairs; they never change, so they are read once."""
        if self._form is None:
            head = np.empty(_HEAD.size, np.uint8)
            if not self._box.latest_at([head], [0]):
                return None
            self._form = _form_of(head.tobytes(), self._box.sizes[0])
        return self._form

    def _checked(self, stats: Any) -> Pair:
        if not isinstance(stats, tuple | list) or len(stats) != 2:
            raise SchemaError(f"stats: must be a pair (mean, std), got {type(stats).__name__}")
        mean, std = as_numpy(stats[0]), as_numpy(stats[1])
        form = self._known_form()
        if form is not None and mean.shape == std.shape == form[0] and mean.dtype == std.dtype == form[1]:
            return mean, std
        for label, x in (("mean", mean), ("std", std)):
            if dtype_kind(x.dtype) != "float" or not x.dtype.isnative:
                raise DtypeError(f"{label}: dtype must be a float of this machine, got {x.dtype}; cast it")
        if mean.shape != std.shape:
            raise SchemaError(f"std: shape must be the mean's {mean.shape}, got {std.shape}")
        if mean.dtype != std.dtype:
            raise DtypeError(f"std: dtype must be the mean's {mean.dtype}, got {std.dtype}; cast one")
        if form is not None and form[0] != mean.shape:
            raise SchemaError(f"mean: shape must be {form[0]}, as in the first put, got {mean.shape}")
        if form is not None:
            raise DtypeError(f"mean: dtype must be {form[1]}, as in the first put, got {mean.dtype}")
        return mean, std


class _SlotBytes:
    """The bytes of one slot, kept from put to put: head, mean, std."""

    def __init__(self, mean: Array, limit: int) -> None:
        if _HEAD_NBYTES + 2 * mean.nbytes > limit:
            most = limit - _HEAD_NBYTES
            raise SchemaError(
                f"stats: a pair must have at most {most} bytes, got {2 * mean.nbytes}; raise max_bytes"
            )
        if mean.ndim > _MOST_AXES:
            raise SchemaError(f"mean: must have at most {_MOST_AXES} axes, got {mean.ndim}; flatten it")
        sizes = (*mean.shape, *[0] * (_MOST_AXES - mean.ndim))
        self.bytes = np.zeros(_HEAD_NBYTES + 2 * mean.nbytes, np.uint8)
        head = _HEAD.pack(mean.dtype.name.encode(), mean.ndim, *sizes)
        self.bytes[: _HEAD.size] = np.frombuffer(head, np.uint8)
        self.pair = self.bytes[_HEAD_NBYTES:].view(mean.dtype).reshape(2, *mean.shape)
        self.flat, self.std = self.pair.reshape(-1), self.pair[1, ...].reshape(-1)
        self.is_native = mean.dtype in (np.float32, np.float64)

    def filled(self, mean: Array, std: Array) -> Array:
        """The slot for this pair; SchemaError if its values cannot be statistics."""
        self.pair[0], self.pair[1] = mean, std
        if self.is_native:
            are_right = _core.first_not_finite(self.flat) < 0 and _core.first_below_zero(self.std) < 0
        else:
            are_right = np.isfinite(self.flat).all() and not (self.std < 0).any()
        if not are_right:
            self._refuse(mean, std)
        return self.bytes

    @staticmethod
    def _refuse(mean: Array, std: Array) -> None:
        for label, x in (("mean", mean), ("std", std)):
            if not np.isfinite(x).all():
                raise SchemaError(f"{label}: values must be finite, got {_first(x, ~np.isfinite(x))}")
        raise SchemaError(f"std: values must be at least 0, got {_first(std, std < 0)}")


def _form_of(head: bytes, limit: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype that stand before a pair; AttachError if no `put` of ours wrote them."""
    name, n_axes, *sizes = _HEAD.unpack(head)
    try:
        dtype = dtype_from(name.rstrip(b"\0").decode(), "stats")
        fits = n_axes <= _MOST_AXES and _HEAD_NBYTES + 2 * prod(sizes[:n_axes]) * dtype.itemsize <= limit
    except (ValueError, TypeError):
        fits = False
    if not fits:
        raise AttachError(
            f"stats: shape and dtype must be those of a pair of at most {limit - _HEAD_NBYTES} bytes, got "
            f"{name!r} with {n_axes} axes; the memory was overwritten: create it again"
        )
    return tuple(sizes[:n_axes]), dtype


def _bits(x: Array) -> Array:
    """The same memory as bytes: not every float dtype lends its memory under its own name."""
    return x.reshape(-1).view(np.uint8)


def _first(x: Array, wrong: Array) -> str:
    at = np.unravel_index(int(np.argmax(wrong)), x.shape)
    return f"{x[at]} at {tuple(int(i) for i in at)}" if x.ndim else f"{x[()]}"

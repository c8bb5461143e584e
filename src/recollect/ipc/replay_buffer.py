"""ReplayBuffer: packed transitions that several processes add and sample.

The ring is the one of `recollect.ReplayBuffer`, over the same `Rows`; this is its face for transitions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

import numpy as np

from recollect import _core, checks, replay
from recollect.backends import get_backend
from recollect.budget import check_fits
from recollect.errors import AttachError, ClosedError, ContentionError, EmptyError, FormatError, SchemaError
from recollect.ipc.shared_buffer import NUMPY, SharedBufferBase, check_lane
from recollect.ipc.transitions import Checker, dtypes_as_text, dtypes_of_text, fields_of, row_layout
from recollect.memory import rows as memory_rows
from recollect.memory.rows import (
    CLOSED_AT,
    LIMITER_AT,
    Geometry,
    Handle,
    Rows,
    RowSegment,
    check_same,
    packed_codec,
)
from recollect.sampling.stream import IndexStream
from recollect.spaces import Layout, as_numpy
from recollect.spaces.tree import brief
from recollect.storage import SharedMemoryStorage
from recollect.storage.contract import PathName

_PREFIX = "recollect-replay"
_WORD = 2**64 - 1
_CONTENTION_S = 1.0
_WORTH_A_LOOK = 1 << 30  # a batch of so many bytes may be more than there is memory


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane: rows ever added, and where they are now. ptr = size + evicted + dropped."""

    lane: int
    ptr: int
    size: int
    evicted: int
    dropped: int
    writer_pid: int | None


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Totals over all lanes: offered = size + evicted + dropped + rejected, and ptr = offered - rejected."""

    capacity: int
    nbytes: int
    ptr: int
    size: int
    offered: int
    evicted: int
    dropped: int
    rejected: int
    lanes: tuple[LaneStats, ...]


class ReplayBuffer(SharedBufferBase):
    """Transitions in shared memory: collectors `add`, a learner `sample`s whole rows, uniformly.

    Ownership: `add` copies in, batches are the caller's. The memory goes with its last user.
    Concurrency: readers anywhere, without locks. One writer process for each lane: several collectors use
    `on_lane(i)`. A killed writer costs its uncommitted rows and blocks nobody. Pickles to a small handle.

    >>> import numpy as np, recollect as rc
    >>> buf = rc.ipc.ReplayBuffer(1000, 3, 2, "numpy", seed=0)
    >>> obs, no = np.ones((4, 3), "float32"), np.zeros(4, bool)
    >>> buf.add(obs, np.zeros((4, 2), "float32"), np.arange(4.0), obs, no, no)
    >>> buf.ptr, buf.size, buf.sample(8)["obs"].shape
    (4, 4, (8, 3))
    >>> buf.cleanup()
    """

    def __init__(
        self,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        device: Any,
        defer_gpu: bool = False,
        critic_dim: int = 0,
        packed_cpu_storage: bool = False,
        *,
        num_lanes: int = 1,
        lane: int | None = None,
        seed: int | None = None,
        cast: bool = False,
        dtypes: Mapping[str, Any] | None = None,
        envs_per_lane: int = 0,
    ) -> None:
        """Make the memory. `critic_dim=0` means the critic sees obs; `dtypes` replaces float32 by field name.

        `num_lanes` cuts it into equal rings, one writer each; `lane` binds this object to one. `cast` allows casts
        within a kind. `defer_gpu` and `packed_cpu_storage` change nothing: rows are packed on the host.
        `envs_per_lane` cuts each lane into equal rings, one for each environment, which keep the episodes apart as
        segments: dumps have them. It costs 16 bytes a row.
        """
        super().__init__(capacity, device, defer_gpu)
        layout = row_layout(obs_dim, action_dim, critic_dim, dtypes)
        checks.count("num_lanes", num_lanes)
        checks.count("envs_per_lane", envs_per_lane, 0)
        n_rings = num_lanes * max(1, envs_per_lane)
        if capacity % n_rings:
            label = "num_lanes × envs_per_lane" if envs_per_lane else "num_lanes"
            raise ValueError(f"{label}: must divide the capacity {capacity}, got {n_rings}")
        geometry = Geometry(capacity, n_rings, layout.row_nbytes, envs_per_lane > 0, layout.hash)
        stream = IndexStream(seed)
        check_lane(lane, num_lanes)
        rows = Rows(memory_rows.in_shared(geometry, "capacity"), layout)
        self._setup(_ring(rows), lane, stream, cast, envs_per_lane)
        self._owner = _core.own_word()

    def _setup(
        self, ring: replay.ReplayBuffer, lane: int | None, stream: IndexStream, cast: bool, envs_per_lane: int
    ) -> None:
        storage: Any = ring.inner_storage
        rows: Rows = storage.rows
        self._ring, self._rows, self._segment = ring, rows, _segment_of(rows)
        self._lane, self._stream, self._cast = lane, stream, cast
        self.layout: Layout = rows.layout
        self.envs_per_lane, self._rings = envs_per_lane, max(1, envs_per_lane)  # of each lane
        self.num_lanes = rows.geometry.n_lanes // self._rings
        sizes = {f.name: f.shape for f in self.layout.fields}
        self.obs_dim, self.action_dim = sizes["obs"][0], sizes["actions"][0]
        self.critic_dim = sizes["critic"][0] if "critic" in sizes else 0
        self._codec, self._checker = storage.codec, Checker(self.layout, cast)
        self._owner = 0  # the process that made it, in objects of that process
        self._lock = threading.Lock()

    # -- what it is

    @property
    def name(self) -> str:
        """The handle as text; `ReplayBuffer.attach(name, device)` in any process of the same user."""
        fd = self._segment.fd  # before the look whether it is open: it is none afterwards
        self._native()
        nonce = self._segment.nonce.hex()
        numbers = (
            os.getpid(),
            fd,
            self.capacity,
            self.num_lanes,
            self.obs_dim,
            self.action_dim,
            self.critic_dim,
            self.envs_per_lane,
        )
        return "-".join((_PREFIX, *map(str, numbers), nonce, dtypes_as_text(self.layout)))

    @property
    def ptr(self) -> int:
        """Rows ever added, all lanes."""
        counters = self._native().counters()
        return int(counters["offered"] - counters["rejected"])

    @property
    def size(self) -> int:
        """Rows held now, all lanes."""
        return int(self._native().count())

    def __repr__(self) -> str:
        try:
            held = f"{self.size:,} of {self.capacity:,} rows"
        except ClosedError:
            held = "closed"
        return f"{type(self).__name__}({held}: {brief(self.layout.space)})"

    def attach_limiter(self, limiter: replay.RateLimiter) -> None:
        """Let a limiter count this buffer's rows, in words beside them that all processes with the buffer share.

        Whoever adds or draws asks it, with `limiter.inserting(n)` or `limiter.drawing(n)`; this buffer itself does not.
        """
        self._native()
        limiter.attach(self._rows.header, LIMITER_AT, lambda: (self.ptr, self.size))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one packed row."""
        return self.layout.row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; untouched pages cost nothing."""
        self._native()
        return self._rows.nbytes

    def stats(self) -> ReplayStats:
        """Return a frozen record: what was added, and by which door rows left."""
        c = self._native().counters()
        lanes = tuple(self._lane_stats(k) for k in range(self.num_lanes))
        return ReplayStats(
            self.capacity, self.nbytes, c["offered"] - c["rejected"], c["live"], c["offered"],
            c["evicted"], c["dropped"], c["rejected"], lanes,
        )  # fmt: skip

    def _lane_stats(self, k: int) -> LaneStats:
        native, load = self._native(), self._segment.mapping.load
        windows, ptr, live, dropped, pid = native.windows(), 0, 0, 0, 0
        for ring in self._rings_of(k):
            at = _core.HEADER_NBYTES + _core.LANE_NBYTES * ring
            low, cursor, _ = windows[ring]
            ptr += (cursor + load(at + 40)) & _WORD  # what an oversized block skipped counts as added
            dropped, live = dropped + load(at + 120), live + cursor - low
            pid = pid or _core.pid_of(native.owner(ring))
        return LaneStats(k, ptr, live, max(0, ptr - live - dropped), dropped, pid or None)

    def _rings_of(self, lane: int) -> range:
        return range(lane * self._rings, (lane + 1) * self._rings)

    # -- writing

    def add(
        self,
        obs: Any,
        actions: Any,
        rewards: Any,
        next_obs: Any,
        dones: Any,
        truncated: Any,
        terminal_mask: Any = None,
        terminal_next_obs: Any = None,
        critic: Any = None,
        next_critic: Any = None,
        terminal_next_critic: Any = None,
        *,
        envs: Any = None,
        ends: Any = None,
    ) -> None:
        """Add n rows (arrays or tensors `[n, ...]`); readers see each once it is whole, never before.

        `dones` = terminated | truncated. Where `terminal_mask` is set, the row is stored with `terminal_next_obs` (and
        `terminal_next_critic`) from the start. Nothing is written unless everything fits.

        With `envs_per_lane`, `envs` says for each row which environment of the lane it is from, and `ends` (default:
        `dones`) which of them end a segment. Without `envs` the rows are one segment.
        """
        native = self._native()
        leaves = {
            "obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards, "dones": dones,
            "truncated": truncated, "critic": critic, "next_critic": next_critic,
        }  # fmt: skip
        try:
            n, arrays, patches = self._checker.block(
                leaves, terminal_mask, {"next_obs": terminal_next_obs, "next_critic": terminal_next_critic}
            )
        except SchemaError:
            native.reject(len(obs) if np.ndim(obs) else 1)
            raise
        if envs is None and ends is None:
            ring = -1 if self._lane is None else self._lane * self._rings
            native.write(self._codec, arrays, n, ring, None, False, patches)
            return
        rings = self._checked_envs(envs, n) + (self._lane or 0) * self._rings
        flags = np.asarray(as_numpy(dones) if ends is None else ends).astype(bool)
        if flags.shape != (n,):
            raise ValueError(f"ends: shape must be {(n,)}, got {flags.shape}")
        if patches is not None:
            raise ValueError(
                "terminal_mask: must be None with envs, got a mask; put the true next_obs in its place"
            )
        native.write_lanes(self._codec, arrays, rings, flags)

    def mark_segment_end(self, envs: Any) -> None:
        """Close the open segments of these environments of the lane: what comes next does not follow on."""
        native = self._native()
        chosen = np.atleast_1d(np.asarray(envs, np.int64))
        for ring in self._checked_envs(chosen, len(chosen)) + (self._lane or 0) * self._rings:
            native.end_segment(int(ring))

    def _checked_envs(self, envs: Any, n: int) -> Any:
        if not self.envs_per_lane:
            raise ValueError("envs: this buffer keeps no segments; create it with envs_per_lane")
        found = np.asarray(envs)
        if found.shape != (n,) or found.dtype.kind not in "iu":
            raise ValueError(
                f"envs: must be {n} whole numbers, one for each row, got {found.dtype} of {found.shape}"
            )
        if n and not (found.min() >= 0 and found.max() < self.envs_per_lane):
            raise ValueError(
                f"envs: must be in [0, {self.envs_per_lane}), got {found.min()} to {found.max()}"
            )
        return np.ascontiguousarray(found, np.int64)

    def on_lane(self, number: int) -> ReplayBuffer:
        """Return the handle for collector `number`: the same rows, writing to that lane (claimed at its first add)."""
        self._native()
        if number is None:
            raise ValueError(f"lane: must be in [0, {self.num_lanes}), got None")
        return _attach(self.name, self.device, number, None, self._cast, type(self))

    def release_lane(self) -> None:
        """Let another process write to the lane that this one has; nothing happens if it has none."""
        native = self._native()
        held = native.held_lane()
        lane = (held // self._rings if held >= 0 else -1) if self._lane is None else self._lane
        if lane >= 0:
            for ring in self._rings_of(lane):
                native.release(ring)

    def _give_up_lane_below(self, n: int) -> None:
        """Let another process have the lane that this one was given by its first `add`, if it is among the first n."""
        if 0 <= self._native().held_lane() < n * self._rings:
            self.release_lane()

    # -- reading

    def sample(self, batch_size: int, *, seed: int | None = None, out: Any = None) -> dict[str, Any]:
        """Draw `batch_size` rows, uniformly with replacement, as a dict of arrays or tensors on the device.

        `seed` makes this one draw repeatable; otherwise the buffer's own generator goes on. `out` is a batch to fill.
        """
        n = _checked_size("batch_size", batch_size, self.row_nbytes)
        if seed is not None:
            return self._sample(IndexStream(seed), n, out)
        stream = self._reserved(n)
        try:
            return self._sample(stream, n, out)
        except BaseException:
            self._give_back(n, stream.counter)
            raise

    def newest(self, n: int, *, lane: int | None = None) -> dict[str, Any]:
        """Return the newest `n` rows of a lane, oldest first, or all it has if they are fewer; on the device.

        Lanes have no order among each other, so of several one must be named, unless this object is bound to one.
        """
        n = _checked_size("n", n, self.row_nbytes)
        check_lane(lane, self.num_lanes)
        lane = self._lane if lane is None else lane
        if lane is None and self.num_lanes > 1:
            raise ValueError(
                f"lane: must be in [0, {self.num_lanes}) where there are several, got None; name one"
            )
        if self._rings > 1:
            raise ValueError(
                f"newest: rows of {self._rings} environments have no order among each other; use envs_per_lane=0"
            )
        block = self._newest(n, lane or 0)
        if self.device == NUMPY:
            return {name: np.ascontiguousarray(x) for name, x in fields_of(block, self.layout).items()}
        torch = get_backend("torch")
        batch = fields_of(torch.from_numpy(block, self.device), self.layout)
        return {name: x.contiguous() for name, x in batch.items()}

    def _newest(self, n: int, lane: int) -> Any:
        codec, end = packed_codec(self.row_nbytes), monotonic() + _CONTENTION_S
        while True:
            native = self._native()
            counts = [cursor - low for low, cursor, _ in native.windows()]
            stop = sum(counts[: lane + 1])
            index = np.arange(stop - min(n, counts[lane]), stop)
            if not len(index):
                raise EmptyError("newest: there are no rows yet; wait until collectors have added some")
            try:
                return native.read(codec, index, False, None, counted=sum(counts))
            except IndexError:  # rows came between the count and the read
                if monotonic() >= end:
                    raise ContentionError("newest: rows came during every try of 1 s; ask again") from None

    def _sample(self, stream: IndexStream, n: int, out: Any) -> dict[str, Any]:
        if self.device == NUMPY:
            data: dict[str, Any] = self._drawn(self._native().draw(self._codec, stream, n, out))
            return data
        torch = get_backend("torch")
        if torch.as_device(self.device).type == "cpu":
            return self._sample_tensors(torch, stream, n, out)
        block = self._drawn(self._native().draw(packed_codec(self.row_nbytes), stream, n))
        batch = fields_of(torch.from_numpy(block, self.device), self.layout)
        return batch if out is None else _fill(out, batch)

    def _reserved(self, n: int) -> IndexStream:
        """A stream for one draw: other threads may draw meanwhile."""
        with self._lock:
            stream = copy(self._stream)
            self._stream.counter += n
        return stream

    def _give_back(self, n: int, start: int) -> None:
        """Let the next draw be what the one from `start`, which was refused, would have been."""
        with self._lock:
            if self._stream.counter == start + n:  # else another thread has drawn meanwhile
                self._stream.counter = start

    def _drawn(self, data: Any) -> Any:
        if data is None:
            raise EmptyError("sample: there are no rows yet; wait until collectors have added some")
        return data

    def _sample_tensors(self, torch: Any, stream: IndexStream, n: int, out: Any) -> dict[str, Any]:
        arrays = None if out is None else {name: torch.to_numpy(x) for name, x in out.items()}
        data = self._drawn(self._native().draw(self._codec, stream, n, arrays))
        return {name: torch.from_numpy(x) for name, x in data.items()} if out is None else out

    # -- disk

    def dumps(self, path: PathName) -> None:
        """Write the rows to a directory; a crash at any point leaves the old dump or the new one."""
        self._native()
        self._ring.dumps(path, cut_open=self._rows.geometry.tagged)

    @classmethod
    def load_from(
        cls,
        path: PathName,
        device: Any = NUMPY,
        *,
        lane: int | None = None,
        seed: int | None = None,
        cast: bool = False,
    ) -> Self:
        """Load what `dumps` wrote into new shared memory; `ptr` goes on from the rows there are.

        Each environment of a buffer with `envs_per_lane` has a lane of its own then.
        """
        ring = replay.ReplayBuffer.load_from(path, read_only=False, multiprocessing=True, storage="shared")
        try:
            layout = ring.inner_storage.layout
            names = [f.name for f in layout.fields]
            if names[:6] != ["obs", "next_obs", "actions", "rewards", "dones", "truncated"]:
                raise FormatError(
                    f"{path}: must hold transitions, got rows of {names}; use rc.ReplayBuffer.load_from"
                )
            buffer = cls.__new__(cls)
            SharedBufferBase.__init__(buffer, ring.capacity or 0, device)
            buffer._setup(ring, lane, IndexStream(seed), cast, int(ring.engine.tracked))
            check_lane(lane, buffer.num_lanes)
            buffer._owner = _core.own_word()
        except BaseException:
            ring.close()
            raise
        return buffer

    # -- life

    def close(self) -> None:
        """Detach this object; may be called twice."""
        self._ring.close()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody: any later call anywhere raises ClosedError."""
        if self._is_open() and self._owner == _core.own_word():
            self._segment.close_for_all()
        self.close()

    def _is_open(self) -> bool:
        try:
            self._rows.check_open()
        except ClosedError:
            return False
        return True

    def _open(self) -> RowSegment:
        self._rows.check_open()
        return self._segment

    def _native(self) -> Any:
        """The rows, if neither this object nor their owner has closed them."""
        native = self._rows.native
        if self._open().mapping.load(CLOSED_AT) & 0xFFFFFFFF:
            raise ClosedError("this object was closed by its owner; create it again")
        return native

    @classmethod
    def attach(
        cls, name: str, device: Any, *, lane: int | None = None, seed: int | None = None, cast: bool = False
    ) -> ReplayBuffer:
        """Attach to the buffer of that `name`."""
        return _attach(name, device, lane, seed, cast, cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name, self.device, self._lane, None, self._cast, type(self))


def _attach(
    name: str, device: Any, lane: int | None, seed: int | None, cast: bool, kind: type[ReplayBuffer]
) -> ReplayBuffer:
    handle, layout, envs_per_lane = _parse(name)
    check_lane(lane, handle.geometry.n_lanes // max(1, envs_per_lane))
    buffer = kind.__new__(kind)
    SharedBufferBase.__init__(buffer, handle.geometry.capacity or 0, device)
    segment = memory_rows.attach(handle)
    check_same(handle.geometry, segment.geometry, f"replay buffer of process {handle.pid}")
    buffer._setup(_ring(Rows(segment, layout)), lane, IndexStream(seed), cast, envs_per_lane)
    return buffer


def _parse(name: Any) -> tuple[Handle, Layout, int]:
    try:
        head, tail = name[: len(_PREFIX) + 1], name[len(_PREFIX) + 1 :]
        *numbers, nonce, types = tail.split("-")
        pid, fd, capacity, n_lanes, obs_dim, action_dim, critic_dim, envs = map(int, numbers)
        if head != _PREFIX + "-":
            raise ValueError("prefix")
        layout = row_layout(obs_dim, action_dim, critic_dim, dtypes_of_text(types))
        geometry = Geometry(capacity, n_lanes * max(1, envs), layout.row_nbytes, envs > 0, layout.hash)
        return Handle(pid, fd, None, bytes.fromhex(nonce), geometry, True), layout, envs
    except (ValueError, TypeError, LookupError):
        raise AttachError(
            f"name: must be the `name` of a ReplayBuffer, got {name!r}; pass it unchanged"
        ) from None


def _ring(rows: Rows) -> replay.ReplayBuffer:
    """The replay buffer of the ground floor over these rows."""
    storage = SharedMemoryStorage(rows, rows.layout.space, capacity=rows.geometry.capacity)
    return replay.ReplayBuffer._over(
        storage, tracked=rows.geometry.tagged, evict={"by": "oldest", "key": None}, multiprocessing=True,
        cache_path=None, state=None,
    )  # fmt: skip


def _segment_of(rows: Rows) -> RowSegment:
    return rows.segment()  # its header word says for all processes that the owner has closed it


def _checked_size(name: str, n: Any, row_nbytes: int) -> int:
    size = checks.count(name, n)
    if size * row_nbytes > _WORTH_A_LOOK:
        check_fits(size * row_nbytes, f"{name} {size}", "draw fewer at a time", when="")
    return size


def _fill(out: Any, batch: dict[str, Any]) -> Any:
    if set(out) != set(batch) or any(
        out[k].shape != v.shape or out[k].dtype != v.dtype for k, v in batch.items()
    ):
        raise ValueError("out: must have the batch's fields with the exact shapes and dtypes")
    for name, x in batch.items():
        out[name].copy_(x)
    return out

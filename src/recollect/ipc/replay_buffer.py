"""ReplayBuffer: packed transitions that several processes add and sample.

The ring is the one of `recollect.ReplayBuffer`, over the same `Rows`; this is its face for transitions.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any, Self

import numpy as np

from recollect import _core, replay
from recollect.backends import get_backend
from recollect.budget import check_fits
from recollect.errors import AttachError, ClosedError, ContentionError, EmptyError, FormatError, SchemaError
from recollect.ipc.shared_buffer import NUMPY, SharedBufferBase, check_count
from recollect.ipc.transitions import Checker, dtypes_as_text, dtypes_of_text, fields_of, row_layout
from recollect.memory import segment as segments
from recollect.memory.geometry import LIMITER_AT, Geometry, check_same
from recollect.memory.rows import Rows, packed_codec
from recollect.memory.segment import Handle, Segment
from recollect.sampling.stream import IndexStream
from recollect.spaces import Layout
from recollect.storage import SharedMemoryStorage
from recollect.storage.base import PathName

_PREFIX = "recollect-replay"
_CLOSED_AT = _core.SHARED_WORDS
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
    ) -> None:
        """Make the memory. `critic_dim=0` means the critic sees obs; `dtypes` replaces float32 by field name.

        `num_lanes` cuts it into equal rings, one writer each; `lane` binds this object to one. `cast` allows casts
        within a kind. `defer_gpu` and `packed_cpu_storage` change nothing: rows are packed on the host.
        """
        super().__init__(capacity, device, defer_gpu)
        layout = row_layout(obs_dim, action_dim, critic_dim, dtypes)
        check_count("num_lanes", num_lanes)
        if capacity % num_lanes:
            raise ValueError(f"num_lanes: must divide the capacity {capacity}, got {num_lanes}")
        geometry = Geometry(capacity, num_lanes, layout.row_nbytes, False, layout.hash)
        stream = IndexStream(seed)
        self._check_lane(lane, num_lanes)
        self._setup(_ring(Rows(segments.in_shared(geometry, "capacity"), layout)), lane, stream, cast)
        self._owner = _core.own_word()

    def _setup(self, ring: replay.ReplayBuffer, lane: int | None, stream: IndexStream, cast: bool) -> None:
        storage: Any = ring.inner_storage
        rows: Rows = storage.rows
        self._ring, self._rows, self._segment = ring, rows, _segment_of(rows)
        self._lane, self._stream, self._cast = lane, stream, cast
        self.layout: Layout = rows.layout
        self.num_lanes = rows.geometry.n_lanes
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
        g, nonce = self._rows.geometry, self._segment.nonce.hex()
        numbers = (
            os.getpid(),
            fd,
            self.capacity,
            g.n_lanes,
            self.obs_dim,
            self.action_dim,
            self.critic_dim,
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
        load, at = self._segment.mapping.load, _core.HEADER_NBYTES + _core.LANE_NBYTES * k
        low, cursor, _ = self._native().windows()[k]
        ptr = (cursor + load(at + 40)) & _WORD  # what an oversized block skipped counts as added
        dropped, live = load(at + 120), cursor - low
        return LaneStats(
            k, ptr, live, max(0, ptr - live - dropped), dropped, _core.pid_of(self._native().owner(k)) or None
        )

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
    ) -> None:
        """Add n rows (arrays or tensors `[n, ...]`); readers see each once it is whole, never before.

        `dones` = terminated | truncated. Where `terminal_mask` is set, the row is stored with `terminal_next_obs` (and
        `terminal_next_critic`) from the start. Nothing is written unless everything fits.
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
        lane = -1 if self._lane is None else self._lane
        native.write(self._codec, arrays, n, lane, None, False, patches)

    def on_lane(self, number: int) -> ReplayBuffer:
        """Return the handle for collector `number`: the same rows, writing to that lane (claimed at its first add)."""
        self._native()
        if number is None:
            raise ValueError(f"lane: must be in [0, {self.num_lanes}), got None")
        return _attach(self.name, self.device, number, None, self._cast)

    def release_lane(self) -> None:
        """Let another process write to the lane that this one has; nothing happens if it has none."""
        native = self._native()
        lane = native.held_lane() if self._lane is None else self._lane
        if lane >= 0:
            native.release(lane)

    @staticmethod
    def _check_lane(lane: Any, num_lanes: int) -> None:
        if lane is not None and (
            isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < num_lanes
        ):
            raise ValueError(f"lane: must be None or in [0, {num_lanes}), got {lane!r}")

    # -- reading

    def sample(self, batch_size: int, *, seed: int | None = None, out: Any = None) -> dict[str, Any]:
        """Draw `batch_size` rows, uniformly with replacement, as a dict of arrays or tensors on the device.

        `seed` makes this one draw repeatable; otherwise the buffer's own generator goes on. `out` is a batch to fill.
        """
        n = _checked_batch_size(batch_size, self.row_nbytes)
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
        n = _checked_batch_size(n, self.row_nbytes)
        self._check_lane(lane, self.num_lanes)
        lane = self._lane if lane is None else lane
        if lane is None and self.num_lanes > 1:
            raise ValueError(
                f"lane: must be in [0, {self.num_lanes}) where there are several, got None; name one"
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
        self._ring.dumps(path)

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
        """Load what `dumps` wrote into new shared memory; `ptr` goes on from the rows there are."""
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
            buffer._setup(ring, lane, IndexStream(seed), cast)
            cls._check_lane(lane, buffer.num_lanes)
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
            self._segment.mapping.store(_CLOSED_AT, 1)
            self._segment.mapping.wake(_CLOSED_AT + 4)  # who waits for rows sleeps on the word beside it
        self.close()

    def _is_open(self) -> bool:
        try:
            self._rows.check_open()
        except ClosedError:
            return False
        return True

    def _open(self) -> Segment:
        self._rows.check_open()
        return self._segment

    def _native(self) -> Any:
        """The rows, if neither this object nor their owner has closed them."""
        native = self._rows.native
        if self._open().mapping.load(_CLOSED_AT) & 0xFFFFFFFF:
            raise ClosedError("this object was closed by its owner; create it again")
        return native

    @classmethod
    def attach(
        cls, name: str, device: Any, *, lane: int | None = None, seed: int | None = None, cast: bool = False
    ) -> ReplayBuffer:
        """Attach to the buffer of that `name`."""
        return _attach(name, device, lane, seed, cast)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name, self.device, self._lane, None, self._cast)


def _attach(name: str, device: Any, lane: int | None, seed: int | None, cast: bool) -> ReplayBuffer:
    handle, layout = _parse(name)
    ReplayBuffer._check_lane(lane, handle.geometry.n_lanes)
    buffer = ReplayBuffer.__new__(ReplayBuffer)
    SharedBufferBase.__init__(buffer, handle.geometry.capacity or 0, device)
    segment = segments.attach(handle)
    check_same(handle.geometry, segment.geometry, f"replay buffer of process {handle.pid}")
    buffer._setup(_ring(Rows(segment, layout)), lane, IndexStream(seed), cast)
    return buffer


def _parse(name: Any) -> tuple[Handle, Layout]:
    try:
        head, tail = name[: len(_PREFIX) + 1], name[len(_PREFIX) + 1 :]
        *numbers, nonce, types = tail.split("-")
        pid, fd, capacity, n_lanes, obs_dim, action_dim, critic_dim = map(int, numbers)
        if head != _PREFIX + "-":
            raise ValueError("prefix")
        layout = row_layout(obs_dim, action_dim, critic_dim, dtypes_of_text(types))
        geometry = Geometry(capacity, n_lanes, layout.row_nbytes, False, layout.hash)
        return Handle(pid, fd, None, bytes.fromhex(nonce), geometry, True), layout
    except (ValueError, TypeError, LookupError):
        raise AttachError(
            f"name: must be the `name` of a ReplayBuffer, got {name!r}; pass it unchanged"
        ) from None


def _ring(rows: Rows) -> replay.ReplayBuffer:
    """The replay buffer of the ground floor over these rows."""
    storage = SharedMemoryStorage(rows, rows.layout.space, capacity=rows.geometry.capacity)
    return replay.ReplayBuffer._over(
        storage, tracked=False, evict={"by": "oldest", "key": None}, multiprocessing=True, cache_path=None, state=None
    )  # fmt: skip


def _segment_of(rows: Rows) -> Segment:
    return rows._open()  # its header word says for all processes that the owner has closed it


def _checked_batch_size(n: Any, row_nbytes: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__") or operator.index(n) < 1:
        raise ValueError(f"batch_size: must be an int of at least 1, got {n!r}")
    n = operator.index(n)
    if n * row_nbytes > _WORTH_A_LOOK:
        check_fits(n * row_nbytes, f"batch_size {n}", "draw fewer at a time", when="")
    return int(n)


def _fill(out: Any, batch: dict[str, Any]) -> Any:
    if set(out) != set(batch) or any(
        out[k].shape != v.shape or out[k].dtype != v.dtype for k, v in batch.items()
    ):
        raise ValueError("out: must have the batch's fields with the exact shapes and dtypes")
    for name, x in batch.items():
        out[name].copy_(x)
    return out

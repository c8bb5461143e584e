"""RolloutRingBuffer: whole rollouts from collectors to the learner, in order, never torn, counted if dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from recollect import _core, checks, interrupts
from recollect.backends import get_backend
from recollect.errors import AttachError, DtypeError, EmptyError, MissingLeafError, SchemaError
from recollect.ipc.parameters import is_on_device, is_tensor, tensor_dtype_name
from recollect.ipc.rollout_slots import ORDERS, SlotPlan, plan_slot
from recollect.ipc.shared_buffer import NUMPY, check_lane
from recollect.memory.ring import Ring, RingStats, ring_nbytes
from recollect.spaces.dtypes import dtype_name, is_extended

Array = np.ndarray[Any, Any]
_RAW = {"bytes": ((0,), "uint8")}  # the ring's own layout: this module knows better what a slot holds


class ReadInfo(NamedTuple):
    """What stands beside the rollout being read."""

    sequence: int
    lane: int
    version: int
    committed_ns: int


class RolloutRingBuffer:
    """Rollouts `[N, T, ...]` (or `[T, N, ...]`) in shared slots: collectors fill them, one learner empties them.

    Collector: fill the arrays of `write_buffer`, then `signal_write_done(version=...)`. Learner: `wait_for_data()`,
    `copy_read_slot_to_torch(staging)` or `read_torch(device)`, then `advance_read()`. When a lane is full, policy
    `block` waits (the default: a rollout was paid for), `drop_oldest` keeps the freshest, `drop_newest` the oldest.

    Ownership: write arrays are lent until `signal_write_done`, read views until `advance_read`; `read_torch` gives
    copies. The memory goes with its last user.
    Concurrency: one writer process for each lane (`on_lane(i)`), one reader process; threads of one take turns. A
    killed collector costs the rollout it was writing; a killed reader's rollout is delivered again.

    >>> import recollect as rc
    >>> ring = rc.ipc.RolloutRingBuffer(2, 3, 4, 1, order="time")
    >>> for name, array in ring.write_buffer.items():
    ...     array[...] = 7
    >>> ring.signal_write_done(version=5)
    >>> ring.wait_for_data(0.0), ring.available(), ring.read_info.version
    (True, 1, 5)
    >>> ring.read_numpy_views()["obs"].shape
    (3, 2, 4)
    >>> ring.advance_read(); ring.available()
    0
    >>> ring.cleanup()
    """

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_dim: int | tuple[int, ...],
        action_dim: int,
        *,
        critic_dim: int = 0,
        num_slots: int = 4,
        create: bool = True,
        shm_name_prefix: Mapping[str, str] | str | None = None,
        policy: str = "block",
        deadline: float = 60.0,
        order: str = "env",
        num_lanes: int = 1,
        lane: int | None = None,
        finals: bool = False,
        fields: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the ring, or attach to one (`create=False`, with its `name` as `shm_name_prefix`).

        `num_envs`: of one rollout, so of one collector. `order`: "env" for `[N, T, ...]`, "time" for `[T, N, ...]`;
        either side may choose. `fields` adds per-step fields, name → (shape, dtype); `finals` adds a block for the
        true last observations of episodes that ended inside. `dtypes` replaces float32 by field name.
        """
        checks.choice("order", order, ORDERS)
        plan = plan_slot(num_envs, num_steps, obs_dim, action_dim, critic_dim, finals, fields, dtypes)
        if create:
            check_lane(lane, num_lanes)
            ring = Ring.create(
                _RAW, num_slots, num_lanes, policy=policy, deadline=deadline, least_nbytes=plan.stride,
                about=plan.to_json(),
            )  # fmt: skip
            ring.lane = lane
        else:
            ring = _attached_ring(shm_name_prefix, plan, num_slots, num_lanes, lane, deadline)
        self._setup(ring, plan, order)

    def _setup(self, ring: Ring, plan: SlotPlan, order: str) -> None:
        self._ring, self._plan, self.order = ring, plan, order
        obs = plan.fields[0].shape
        self.num_steps, self.num_envs = obs[0], obs[1]
        # What a destination must have; the name of a dtype costs numpy more than all other checks.
        self._targets = [(f.name, f.shape_in(order), dtype_name(f.dtype)) for f in plan.fields]
        self._write: tuple[int, dict[str, Array]] | None = None
        self._mine: dict[int, dict[str, Array]] = {}  # writable views of slots, for copies out of them

    # -- what it is

    @property
    def name(self) -> dict[str, str]:
        """Field → handle as text; pass it as `shm_name_prefix` with `create=False`."""
        return dict.fromkeys((f.name for f in self._plan.fields), self._ring.name)

    @property
    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """Field → shape of everything in a slot."""
        return self._plan.shapes(self.order)

    @property
    def slot_dtypes(self) -> dict[str, np.dtype[Any]]:
        """Field → dtype of everything in a slot."""
        return {f.name: f.dtype for f in self._plan.fields}

    @property
    def num_slots(self) -> int:
        """Slots of each lane."""
        return self._ring.num_slots

    @property
    def num_lanes(self) -> int:
        """How many collectors can write at a time."""
        return self._ring.num_lanes

    @property
    def policy(self) -> str:
        """What happens when a lane is full."""
        return self._ring.policy

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; untouched pages cost nothing."""
        return self._ring.nbytes

    def stats(self) -> RingStats:
        """Return a frozen record, per lane too: written = delivered + dropped + skipped + available."""
        return self._ring.stats()

    def attach_sync_primitives(self, write_ptr: Any = None, read_ptr: Any = None) -> None:
        """Do nothing: the counters live in the segment."""

    def watch(self, look: Callable[[], bool] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise. While it says True a dead peer is waited for."""
        self._ring.watch(look)

    # -- writing

    @property
    def write_slot(self) -> int:
        """The index of the slot being written; claims one on first use, and waits for it under `block`."""
        return self._claimed()[0]

    @property
    def write_buffer(self) -> dict[str, Array]:
        """The arrays of the slot being written, the same until `signal_write_done`; fill all of them."""
        return self._claimed()[1]

    def _claimed(self) -> tuple[int, dict[str, Array]]:
        slot = self._ring.claim_slot()
        if self._write is None or self._write[0] != slot:
            raw = self._ring.slot_bytes(slot)
            views = self._plan.views(raw, self.order)
            if "final_count" in views:
                views["final_count"][...] = 0  # of the rollout that was here before
            self._ring.lend([raw, *views.values()])
            self._write = slot, views
        return self._write

    def signal_write_done(self, *, version: int = 0) -> None:
        """Publish the slot with the weight version it was acted with; its arrays turn read-only."""
        with interrupts.deferred():  # what is published is no longer written
            try:
                self._ring.commit(version)
            except EmptyError:
                raise EmptyError(
                    "signal_write_done: a slot must be claimed first, got none; fill the arrays of write_buffer"
                ) from None
            self._write = None

    def on_lane(self, number: int) -> RolloutRingBuffer:
        """Return the handle for collector `number`: the same ring, writing to that lane."""
        return _over(self._ring.on_lane(number), self._plan, self.order)

    def release_lane(self) -> None:
        """Let another process write to this lane; a slot claimed and not published is free again."""
        self._write = None
        self._ring.release_lane()

    # -- reading

    def available(self) -> int:
        """How many rollouts are published and not released, all lanes, the one being read included."""
        return self._ring.available()

    def wait_for_data(self, timeout: float | None = 60.0) -> bool:
        """Wait for a rollout to read; False when the time is over, PeerDiedError if all who wrote are dead."""
        return self._ring.wait(timeout)

    @property
    def read_slot(self) -> int:
        """The index of the slot being read: the oldest rollout, kept until `advance_read`."""
        return self._taken()

    @property
    def read_info(self) -> ReadInfo:
        """Sequence number, lane, weight version and commit time (monotonic ns) of the rollout being read."""
        sequence, lane, committed_ns, info = self._ring.native.about(self._taken())
        return ReadInfo(sequence, lane, info[0], committed_ns)

    def read_numpy_views(self) -> dict[str, Array]:
        """Read-only views of the slot being read; borrowed: copy what you need before `advance_read()`."""
        raw = self._ring.slot_bytes(self._taken())
        raw.flags.writeable = False
        return self._plan.views(raw, self.order)

    def read_torch(self, device: Any) -> dict[str, Any]:
        """New contiguous tensors on `device` of the rollout being read; numpy arrays for "numpy"."""
        views = self._views(self._taken())
        if str(device) == NUMPY:
            return {name: view.copy() for name, view in views.items()}
        torch = get_backend("torch")
        wanted = torch.as_device(device)
        if wanted.type == "cpu":
            return {name: torch.from_numpy(view.copy()) for name, view in views.items()}
        return {name: torch.from_numpy(np.ascontiguousarray(v), wanted) for name, v in views.items()}

    def copy_read_slot_to_torch(self, destination: Mapping[str, Any]) -> None:
        """Copy the rollout being read into tensors (or arrays) of its fields; complete on return.

        Every field must be there with its shape and dtype, which is checked before the first byte; any strides, any
        device. Other keys are left alone.
        """
        slot = self._taken()
        for name, shape, dtype in self._targets:
            _check_target(name, destination.get(name), shape, dtype)
        _copy_all(self._views(slot), destination)

    def advance_read(self) -> None:
        """Free the slot being read and wake a waiting writer; with none taken, skip the oldest rollout, counted."""
        if self._is_reading():
            self._ring.release()
            return
        try:
            self._ring.skip()
        except EmptyError:
            raise EmptyError(
                "advance_read: the ring must hold a rollout, got none; call wait_for_data() first"
            ) from None

    def _is_reading(self) -> bool:
        return self._ring.native.reading() >= 0

    def _taken(self) -> int:
        slot = self._ring.try_take_slot()
        if slot < 0:
            raise EmptyError("read: the ring must hold a rollout, got none; call wait_for_data() first")
        return slot

    def _views(self, slot: int) -> dict[str, Array]:
        if slot not in self._mine:
            self._mine[slot] = self._plan.views(self._ring.slot_bytes(slot), self.order)
        return self._mine[slot]

    # -- life

    def close(self) -> None:
        """Detach this object; may be called twice."""
        self._write, self._mine = None, {}
        self._ring.close()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody: whoever waits gets ClosedError."""
        self._write, self._mine = None, {}
        self._ring.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._ring.name, self._ring.lane, self._ring.deadline, self.order)


def rollout_ring_nbytes(plan: SlotPlan, num_slots: int, num_lanes: int) -> int:
    """Bytes of the segment of a ring of such slots."""
    return ring_nbytes(_RAW, num_slots, num_lanes, least_nbytes=plan.stride, about=plan.to_json())


def _attach(name: str, lane: int | None, deadline: float, order: str) -> RolloutRingBuffer:
    ring = Ring.attach(name, lane=lane, deadline=deadline)
    return _over(ring, SlotPlan.from_json(ring.about), order)


def _over(ring: Ring, plan: SlotPlan, order: str) -> RolloutRingBuffer:
    made = RolloutRingBuffer.__new__(RolloutRingBuffer)
    made._setup(ring, plan, order)
    return made


def _attached_ring(
    name: Any, plan: SlotPlan, num_slots: int, num_lanes: int, lane: int | None, deadline: float
) -> Ring:
    if isinstance(name, Mapping):
        texts = set(name.values())
        name = texts.pop() if len(texts) == 1 else None
    if name is None:
        raise ValueError("shm_name_prefix: must be the `name` of a ring with create=False, got none; pass it")
    ring = Ring.attach(name, lane=lane, deadline=deadline)
    try:
        if ring.about is None:
            raise AttachError(
                "shm_name_prefix: must name a ring of rollouts, found another ring; pass its `name`"
            )
        check_lane(lane, ring.num_lanes)
        counts = (("num_slots", num_slots, ring.num_slots), ("num_lanes", num_lanes, ring.num_lanes))
        found = plan.first_difference(SlotPlan.from_json(ring.about))
        for what, ours, theirs in (*([found] if found else []), *counts):
            if ours != theirs:
                raise AttachError(f"{what} must be {ours}, found {theirs}; attach with what it was made with")
    except BaseException:
        ring.close()
        raise
    return ring


def _check_target(name: str, x: Any, shape: tuple[int, ...], dtype: str) -> None:
    if x is None:
        raise MissingLeafError(f"{name}: must be in the destination, got none of that name; see slot_shapes")
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise SchemaError(f"{name}: must be a tensor or an array, got {type(x).__name__}; see slot_shapes")
    if tuple(x.shape) != shape:
        raise SchemaError(f"{name}: shape must be {shape}, got {tuple(x.shape)}; see slot_shapes")
    found = tensor_dtype_name(x) or np.dtype(x.dtype).name
    if found != dtype:
        raise DtypeError(f"{name}: dtype must be {dtype}, got {found}; see slot_dtypes")
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise SchemaError(f"{name}: must be writable, got a read-only array; pass another")


def _copy_all(views: Mapping[str, Array], destination: Mapping[str, Any]) -> None:
    """Copy each field; blocks on the host in one native call, at the speed of memory."""
    targets, sources = [], []
    for name, view in views.items():
        target = destination[name]
        if is_tensor(target):
            if is_on_device(target) or target.is_neg() or is_extended(view.dtype):
                target.detach().copy_(get_backend("torch").from_numpy(view))
                continue
            target = target.detach().numpy()
        if target.flags.c_contiguous and view.flags.c_contiguous and not is_extended(view.dtype):
            targets.append(target)
            sources.append(view)
        else:
            np.copyto(target, view)
    _core.copy_arrays(targets, sources)

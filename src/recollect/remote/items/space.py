"""What one item is: a sample of a space or a whole trajectory, and its way into packed rows and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from json import loads
from math import prod
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from recollect.batch import BatchBase
from recollect.errors import SchemaError, class_name
from recollect.remote.frame import Shapes
from recollect.remote.items.packed import PackedItems, RowPacker
from recollect.remote.items.trajectories import LOG_REWARD, Array, Trajectories
from recollect.spaces import (
    Layout,
    as_space,
    canonical,
    compile_layout,
    space_from_json,
    space_to_json,
    transition_space,
)
from recollect.spaces.tree import make_dict


@dataclass(slots=True)
class ItemSpace:
    """The space of one item, compiled; make it with `item_space`."""

    space: Space[Any]
    max_length: int  # 0: not a trajectory, or not known (yet)
    is_trajectory: bool
    rows: RowPacker  # of a sample, or of a step
    fields: RowPacker | None
    has_log_reward: bool
    text: str
    id: bytes
    shapes: Shapes = field(init=False)
    _reward: tuple[bool, int] | None = field(init=False, default=None)  # in fields?, number of the column

    def __post_init__(self) -> None:
        field_nbytes = self.fields.layout.row_nbytes if self.fields else 0
        self.shapes = Shapes(self.rows.layout.row_nbytes, field_nbytes, self.is_trajectory)
        if self.has_log_reward:
            home = self.fields if self.is_trajectory else self.rows
            if home is not None:
                names = [f.name for f in home.layout.fields]
                self._reward = (self.is_trajectory, names.index(LOG_REWARD))

    # -- in

    def encode(self, container: Any) -> PackedItems:
        """Check and pack what `add` takes; SchemaError names the leaf."""
        if isinstance(container, BatchBase):
            container = container[:]
        if isinstance(container, Trajectories):
            return self._from_trajectories(container)
        if isinstance(container, np.ndarray) and container.dtype == np.uint8 and container.ndim == 2:
            return self._from_packed(container)
        if self.is_trajectory:
            return self._from_block(container)
        rows, crc = self.rows.pack_block(container)
        return self._with_rewards(PackedItems(len(rows), rows, rows_crc=crc))

    def _from_trajectories(self, container: Trajectories) -> PackedItems:
        if not self.is_trajectory:
            raise SchemaError(
                f"container: must be a block of {self.space}, got Trajectories; send their steps"
            )
        rows, crc = self.rows.pack_block(container.steps)
        fields = dict(container.fields)
        if container.log_rewards is not None:
            fields[LOG_REWARD] = container.log_rewards
        packed_fields = np.empty((len(container), 0), np.uint8)
        if self.fields is not None:
            packed_fields, _ = self.fields.pack_block(fields)
            if len(packed_fields) != len(container):
                raise SchemaError(
                    f"container: fields must have {len(container)} rows, got {len(packed_fields)}"
                )
        elif fields:
            raise SchemaError(f"{next(iter(fields))}: is no field of {self.space}; drop it")
        lengths = container.lengths.astype(np.int32)
        rewards = None
        if container.log_rewards is not None:
            rewards = container.log_rewards.astype(np.float64)
        return PackedItems(len(container), rows, lengths, packed_fields, rewards, rows_crc=crc)

    def _from_block(self, block: Any) -> PackedItems:
        """A block of the trajectory space, as `extend` takes it: a sequence of steps for each item."""
        keys = list(self.space.spaces)  # type: ignore[attr-defined]
        if not isinstance(block, dict) or set(block) != set(keys):
            got = sorted(block) if isinstance(block, dict) else class_name(block)
            raise SchemaError(
                f"container: must be recollect.remote.Trajectories or a dict with keys {keys}, got {got}"
            )
        each = [self._steps_of(one) for one in block["steps"]]
        lengths = np.array([n for n, _ in each], np.int32)
        if len(lengths) and lengths.min() < 1:
            raise SchemaError("steps: each trajectory must have at least 1 step, got 0; leave it out")
        columns = [np.concatenate(c) for c in zip(*(a for _, a in each))] if each else self._no_steps()
        fields = np.empty((len(each), 0), np.uint8)
        if self.fields is not None:
            n, arrays = self.fields.layout.encode_batch({k: v for k, v in block.items() if k != "steps"})
            if n != len(each):
                raise SchemaError(f"steps: length must be {n} as that of the fields, got {len(each)}")
            fields, _ = self.fields.pack(n, arrays)
        rows, crc = self.rows.pack(int(lengths.sum()), columns)
        return self._with_rewards(PackedItems(len(each), rows, lengths, fields, rows_crc=crc))

    def _steps_of(self, one: Any) -> tuple[int, list[Array]]:
        layout = self.rows.layout
        if isinstance(one, list | tuple) and layout.template[0] != "leaf":
            samples = [layout.encode_one(sample) for sample in one]
            return len(samples), [np.stack(c) for c in zip(*samples)]
        return layout.encode_batch(one)

    def _no_steps(self) -> list[Array]:
        return [np.empty((0, *f.shape), f.dtype) for f in self.rows.layout.fields]

    def _from_packed(self, block: Array) -> PackedItems:
        """Rows as `get_packed_at` of a buffer of this space gives them."""
        if not self.is_trajectory:
            if block.shape[1] != self.shapes.row_nbytes:
                raise SchemaError(
                    f"container: packed rows must have {self.shapes.row_nbytes} bytes, got {block.shape[1]}"
                )
            return self._with_rewards(PackedItems(len(block), block.copy()))
        layout = compile_layout(self.space, {"steps": self._room_of(block.shape[1])})
        return self.from_stored(layout, RowPacker(layout).columns(block))

    def _room_of(self, row_nbytes: int) -> int:
        most = self.max_length or 1
        if compile_layout(self.space, {"steps": most}).row_nbytes != row_nbytes:
            raise SchemaError(
                f"container: packed rows must be those of max_length={most}, got {row_nbytes} bytes"
            )
        return most

    def from_stored(self, layout: Layout, columns: list[Array]) -> PackedItems:
        """Trajectories out of the padded columns of stored rows."""
        places = stored_places(layout)
        lengths = columns[places.length].astype(np.int32)
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= self.max_length:
            raise SchemaError(f"steps: lengths must be in [1, {self.max_length}], got others")
        width = int(lengths.max(initial=0))
        mask = np.arange(width) < lengths[:, None]
        steps = [columns[i][:, :width][mask] for i in places.steps]
        fields = np.empty((len(lengths), 0), np.uint8)
        if self.fields is not None:
            fields, _ = self.fields.pack(len(lengths), [columns[i] for i in places.fields])
        rows, crc = self.rows.pack(int(lengths.sum()), steps)
        return self._with_rewards(PackedItems(len(lengths), rows, lengths, fields, rows_crc=crc))

    def _with_rewards(self, packed: PackedItems) -> PackedItems:
        packed.log_rewards = self.rewards_of(packed)
        return packed

    def rewards_of(self, packed: PackedItems) -> Array | None:
        """The log rewards of packed items as float64, None if they have none."""
        if self._reward is None:
            return None
        in_fields, number = self._reward
        home, rows = (self.fields, packed.fields) if in_fields else (self.rows, packed.rows)
        return None if home is None or rows is None else home.numbers(rows, number)

    # -- out

    def decode(self, packed: PackedItems) -> Any:
        """Return items as a block, or as Trajectories; fresh arrays, the caller's own."""
        if not self.is_trajectory:
            return self.rows.layout.decode_batch(self.rows.columns(packed.rows), packed.n)
        fields = self.decode_fields(packed)
        rewards = fields.pop(LOG_REWARD, None)
        lengths = packed.lengths if packed.lengths is not None else np.empty(0, np.int32)
        return Trajectories(self.decode_steps(packed), lengths, rewards, **fields)

    def decode_steps(self, packed: PackedItems) -> Any:
        return self.rows.layout.decode_batch(self.rows.columns(packed.rows), len(packed.rows))

    def decode_fields(self, packed: PackedItems) -> dict[str, Any]:
        if self.fields is None or packed.fields is None:
            return {}
        return dict(self.fields.layout.decode_batch(self.fields.columns(packed.fields), packed.n))


@dataclass(frozen=True, slots=True)
class StoredPlaces:
    """Which columns of a stored trajectory are its length, its steps and its fields."""

    length: int
    steps: tuple[int, ...]
    fields: tuple[int, ...]


def stored_places(layout: Layout) -> StoredPlaces:
    """Find the parts of a trajectory among the columns of its row."""
    steps = next(leaf for leaf in layout.leaves if leaf.path == ("steps",)).fields
    others = tuple(i for leaf in layout.leaves if leaf.path != ("steps",) for i in leaf.fields)
    return StoredPlaces(steps[0], steps[1:], others)


def item_space(env: Any, max_length: int | None = None, *, needs_length: bool = True) -> ItemSpace:
    """Return what one item is, from a space, a short form, an environment, or what has a `trajectory_space`."""
    space = _of_env(env, "trajectory_space")
    if space is None:
        is_env = isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv)
        space = transition_space(env) if is_env else env
    space = as_space(space)
    step = space.spaces.get("steps") if isinstance(space, spaces.Dict) else None
    if not isinstance(space, spaces.Dict) or not isinstance(step, spaces.Sequence):
        if max_length is not None:
            raise ValueError(f"max_length: is for trajectories, got {max_length} for items of {space}")
        return _sample_space(space)
    if max_length is None:
        max_length = _of_env(env, "max_length")
    if max_length is None and needs_length:
        raise ValueError("max_length: trajectories need the most steps of one, got none; pass max_length=")
    if max_length is not None and (isinstance(max_length, bool) or not 1 <= int(max_length) < 2**31):
        raise ValueError(f"max_length: must be at least 1, got {max_length!r}")
    return _trajectory_space(space, step, 0 if max_length is None else int(max_length))


def _of_env(env: Any, name: str) -> Any:
    """An attribute of an object, or of what it wraps; None if there is none."""
    found = getattr(env, name, None)
    if found is None and hasattr(env, "get_wrapper_attr") and env.has_wrapper_attr(name):
        found = env.get_wrapper_attr(name)
    return found


def _sample_space(space: Space[Any]) -> ItemSpace:
    layout = compile_layout(space)
    rewarded = _has_log_reward(space)
    text = canonical(space_to_json(space))
    return ItemSpace(space, 0, False, RowPacker(layout), None, rewarded, text, bytes.fromhex(layout.hash))


def _trajectory_space(space: spaces.Dict, steps: spaces.Sequence, max_length: int) -> ItemSpace:
    step = compile_layout(steps.feature_space)
    if not step.is_fixed:
        raise TypeError(
            f"steps: leaves must have a fixed size, got {step}; keep Text and Sequence out of steps"
        )
    rest = [(key, child) for key, child in space.spaces.items() if key != "steps"]
    fields = compile_layout(make_dict(rest)) if rest else None
    text = canonical(space_to_json(space))
    identity = blake2b(text.encode(), digest_size=16).digest()
    rewarded = _has_log_reward(space)
    held = RowPacker(fields) if fields else None
    return ItemSpace(space, max_length, True, RowPacker(step), held, rewarded, text, identity)


def _has_log_reward(space: Space[Any]) -> bool:
    if not isinstance(space, spaces.Dict) or LOG_REWARD not in space.spaces:
        return False
    leaf = space.spaces[LOG_REWARD]
    if leaf.shape != () or leaf.dtype is None or np.dtype(leaf.dtype).kind != "f":
        raise ValueError(
            f"log_reward: must be a scalar float leaf, got {leaf}; rename it or change its space"
        )
    return True


# -- spaces as a peer describes them: made with care, or only compared

MOST_LEAF_NBYTES = 1 << 30


def space_of_text(text: str) -> Space[Any]:
    """The space that a manager described; SchemaError if it is none, or beyond reason."""
    try:
        obj = loads(text)
        _check_sizes(obj)
        return space_from_json(obj)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"space: must be what the manager wrote, got an error: {error!r}") from None


def _check_sizes(obj: Any) -> None:
    """Refuse shapes that would take memory before anything is made of them."""
    if isinstance(obj, dict):
        for key in ("shape", "n", "nvec"):
            shape = obj.get(key)
            if isinstance(shape, list) and all(isinstance(d, int) for d in shape):
                if key != "nvec" and prod(shape) * 8 > MOST_LEAF_NBYTES:
                    raise SchemaError(
                        f"space: a leaf must have at most {MOST_LEAF_NBYTES} bytes, got {shape}"
                    )
            elif (
                key == "n" and obj.get("type") == "multibinary" and isinstance(shape, int) and shape > 1 << 27
            ):
                raise SchemaError(f"space: a leaf must have at most {MOST_LEAF_NBYTES} bytes, got {shape}")
        for child in obj.values():
            _check_sizes(child)
    elif isinstance(obj, list):
        for child in obj:
            _check_sizes(child)


def text_difference(mine: str, theirs: str) -> str | None:
    """The first leaf in which a manager's space and a worker's differ, without making the latter; None if none does."""
    if mine == theirs:
        return None
    try:
        return _difference(loads(mine), loads(theirs), "")
    except (ValueError, RecursionError):
        return "the whole: it is no JSON"


def _difference(a: Any, b: Any, path: str) -> str | None:
    here = path or "the whole"
    if not isinstance(a, dict) or not isinstance(b, dict) or a.get("type") != b.get("type"):
        return None if a == b else f"{here}: {_short(a)} at the manager, {_short(b)} at the worker"
    if a["type"] in ("dict", "tuple"):
        ours, others = _named(a), _named(b)
        for name in [*ours, *(n for n in others if n not in ours)]:
            inner = f"{path}/{name}" if path else str(name)
            if name not in ours or name not in others:
                return f"{inner}: only at the {'manager' if name in ours else 'worker'}"
            if found := _difference(ours[name], others[name], inner):
                return found
        return None if a == b else f"{here}: another order of keys"
    if a["type"] == "sequence":
        return _difference(a.get("feature"), b.get("feature"), here) or (None if a == b else f"{here}: stack")
    return None if a == b else f"{here}: {_short(a)} at the manager, {_short(b)} at the worker"


def _named(obj: dict[str, Any]) -> dict[Any, Any]:
    items = obj.get("items")
    if not isinstance(items, list):
        return {}
    if obj["type"] == "tuple":
        return dict(enumerate(items))
    return {str(pair[0]): pair[1] for pair in items if isinstance(pair, list) and len(pair) == 2}


def _short(obj: Any) -> str:
    if isinstance(obj, dict):
        return " ".join(str(obj[key])[:60] for key in ("type", "dtype", "shape", "n") if key in obj)
    return repr(obj)[:60]

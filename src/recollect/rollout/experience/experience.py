"""Experience: one row as an object, and many as a read-only batch in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from recollect.batch import BatchBase
from recollect.errors import SchemaError
from recollect.indexing import normalize, positions
from recollect.replay import ReplayBuffer
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.ragged import RaggedColumn, join_columns
from recollect.rollout.experience.space import Array, ExperiencePlan, experience_space, plan_of

__all__ = ["Experience", "Experiences", "RaggedColumn", "experience_buffer", "experience_space"]


class Experience:
    """One row of experience: its leaves as attributes, `metrics` (numbers) and `info` (JSON-like).

    >>> e = Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[-0.5], reward=1.0)
    >>> e.reward, e.prompt_length
    (1.0, 2)
    """

    __slots__ = ("info", "leaves", "metrics")

    def __init__(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
        **leaves: Any,
    ) -> None:
        self.leaves = leaves
        self.metrics = dict(metrics) if metrics else {}
        self.info = dict(info) if info else {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.leaves[name]
        except KeyError:
            raise AttributeError(
                f"Experience has no leaf {name!r}; there are {sorted(self.leaves)}"
            ) from None

    def __repr__(self) -> str:
        return f"Experience({', '.join(sorted(self.leaves))})"

    def __reduce__(self) -> Any:
        return _rebuild, (self.leaves, self.metrics, self.info)


def _rebuild(leaves: dict[str, Any], metrics: dict[str, float], info: dict[str, Any]) -> Experience:
    return Experience(metrics=metrics, info=info, **leaves)


class Experiences(BatchBase):
    """A read-only batch of experience in columns: `x.reward` (N,), ragged `x.tokens`, and views by mask.

    Ownership: arrays are read-only and may be views of the payload they came in; `where` and `replace` make new
    ones and leave this one as it is. `x[i]` copies.

    >>> from recollect.rollout import Experience, decode, encode
    >>> x = decode(encode([Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[-0.5], reward=1.0)]))
    >>> x.reward.tolist(), x.tokens.values.tolist(), x.response_length.tolist()
    ([1.0], [1, 2, 3], [1])
    """

    def __init__(
        self,
        plan: ExperiencePlan,
        rows: Array,
        ragged: Mapping[str, RaggedColumn],
        metrics: Sequence[Mapping[str, float]] | None = None,
        info: Sequence[Mapping[str, Any]] | None = None,
        tasks: Mapping[int, tuple[BatchId | None, BatchId | None]] | None = None,
    ) -> None:
        self.single_space, self.single_metadata_space = plan.space, None  # checked when the plan was made
        self.plan, self.rows, self.ragged = plan, rows, dict(ragged)
        self.row_metrics = tuple(metrics) if metrics is not None else ({},) * len(rows)
        self.info = tuple(info) if info is not None else ({},) * len(rows)
        self.tasks = dict(tasks or {})

    # -- a batch

    def __len__(self) -> int:
        return len(self.rows)

    def get_at(self, idx: Any) -> Any:
        """Fetch rows as samples of the space."""
        index = normalize(idx, len(self))
        if isinstance(index, int):
            return self._sample(index)
        rows = np.array(self.rows[index])
        batch = self.plan.fixed.decode_batch([rows[name].copy() for name in _names(rows)], len(rows))
        for name in self.ragged:
            values, offsets = self.ragged[name]
            batch[name] = tuple([values[offsets[i] : offsets[i + 1]].copy() for i in index])
        return {key: batch[key] for key in self.plan.space.spaces}

    def _sample(self, i: int) -> Any:
        row = np.array(self.rows[i : i + 1])
        sample = self.plan.fixed.decode_one([row[name][0] for name in _names(row)])
        for name, (values, offsets) in self.ragged.items():
            sample[name] = values[offsets[i] : offsets[i + 1]].copy()
        return {key: sample[key] for key in self.plan.space.spaces}

    def get_segments(self) -> list[tuple[int, int]]:
        """One run is one segment, its steps in order."""
        ends = np.flatnonzero(self.ends) + 1
        return list(zip([0, *ends[:-1].tolist()], ends.tolist()))

    # -- columns

    def __getattr__(self, name: str) -> Any:
        plan: ExperiencePlan | None = self.__dict__.get("plan")
        if plan is None:
            raise AttributeError(name)
        if name in self.ragged:
            return self.ragged[name]
        if name in self.plan.row_dtype.names:  # type: ignore[operator]
            return _frozen(self.rows[name])
        if name in plan.space.spaces:  # nested
            arrays = [self.rows[field] for field in self.plan.row_dtype.names or ()]
            return plan.fixed.decode_batch(arrays, len(self))[name]
        raise AttributeError(f"Experiences has no leaf {name!r}; there are {list(plan.space.spaces)}")

    @property
    def response_length(self) -> Array:
        """How many response tokens each row has."""
        if not self.plan.is_token:
            raise AttributeError("response_length: is of token experience; this space has no tokens")
        return np.asarray(self.ragged["tokens"].lengths() - self.rows["prompt_length"])

    @property
    def metrics(self) -> dict[str, Array]:
        """Each metric as (N,) float64; NaN where a row has none."""
        names = sorted({name for metrics in self.row_metrics for name in metrics})
        return {n: np.array([m.get(n, np.nan) for m in self.row_metrics], np.float64) for n in names}

    @property
    def uids(self) -> Array:
        """(group_id, run_id, step) of each row, as one structured array."""
        out = np.empty(len(self), [("group_id", "i8"), ("run_id", "i4"), ("step", "i4")])
        for name in ("group_id", "run_id", "step"):
            out[name] = self.rows[name]
        return out

    @property
    def ends(self) -> Array:
        """True at the last row of each run."""
        if not len(self):
            return np.zeros(0, bool)
        group, run = self.rows["group_id"], self.rows["run_id"]
        return np.append((group[1:] != group[:-1]) | (run[1:] != run[:-1]), True)

    def groups(self) -> tuple[Array, Array]:
        """Return the group ids, and for each row which of them is its own."""
        ids, index = np.unique(self.rows["group_id"], return_inverse=True)
        return ids, index.reshape(-1)

    def padded(self, name: str, fill: Any = 0) -> Array:
        """Return a ragged column as (N, L), filled up to the longest row."""
        if name not in self.ragged:
            raise KeyError(f"{name}: must be a Sequence leaf, {sorted(self.ragged)}")
        return self.ragged[name].padded(fill)

    def task_of(self, group_id: int) -> tuple[BatchId | None, BatchId | None]:
        """Return the batch id and task id that a group was made for."""
        return self.tasks[int(group_id)]

    # -- others made of it

    def where(self, mask: Any) -> Experiences:
        """Return the rows where `mask` (bool, or positions) says so."""
        index = positions(mask, len(self))
        if len(index) == len(self) and (index == np.arange(len(self))).all():
            return self
        return Experiences(
            self.plan,
            self.rows[index],
            {name: column.take(index) for name, column in self.ragged.items()},
            [self.row_metrics[i] for i in index],
            [self.info[i] for i in index],
            self.tasks,
        )

    def replace(self, **leaves: Any) -> Experiences:
        """Return a copy with other values for some leaves; a ragged one keeps its lengths."""
        rows, ragged = self.rows.copy(), dict(self.ragged)
        for name, value in leaves.items():
            if name in ragged:
                given = np.asarray(value.values if isinstance(value, RaggedColumn) else value)
                old = ragged[name]
                if given.shape != old.values.shape:
                    raise SchemaError(f"{name}: must keep its shape {old.values.shape}, got {given.shape}")
                ragged[name] = RaggedColumn(_cast(given, old.values.dtype, name), old.offsets)
            elif name in _names(rows):
                given = np.asarray(value)
                if given.shape not in ((), rows[name].shape):
                    raise SchemaError(f"{name}: shape must be {rows[name].shape}, got {given.shape}")
                rows[name] = _cast(given, rows[name].dtype, name)
            else:
                raise SchemaError(f"{name}: must be a leaf of the space, {list(self.plan.space.spaces)}")
        return Experiences(self.plan, rows, ragged, self.row_metrics, self.info, self.tasks)

    @classmethod
    def concat(cls, parts: Sequence[Experiences], plan: ExperiencePlan | None = None) -> Self:
        """Return all rows of `parts` one after another."""
        plan = plan or (parts[0].plan if parts else plan_of())
        rows = np.concatenate([x.rows for x in parts]) if parts else np.zeros(0, plan.row_dtype)
        ragged = {}
        for leaf in plan.ragged:
            ragged[leaf.name] = join_columns([x.ragged[leaf.name] for x in parts], leaf.dtype, leaf.shape)
        tasks = {group: task for x in parts for group, task in x.tasks.items()}
        metrics = [m for x in parts for m in x.row_metrics]
        return cls(plan, rows, ragged, metrics, [i for x in parts for i in x.info], tasks)

    def __repr__(self) -> str:
        return f"Experiences({len(self)} rows of {list(self.plan.space.spaces)})"


def _names(rows: Array) -> tuple[str, ...]:
    return rows.dtype.names or ()


def _frozen(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _cast(given: Array, dtype: np.dtype[Any], name: str) -> Array:
    if given.dtype == dtype:
        return given
    if not np.can_cast(given.dtype, dtype, "same_kind"):
        raise SchemaError(f"{name}: dtype must be {dtype}, got {given.dtype}; convert it")
    return given.astype(dtype)


def experience_buffer(
    storage: str = "memory", *, capacity: int, max_tokens: int | None = None, space: Any = None, **kwargs: Any
) -> ReplayBuffer:
    """Make a replay buffer that holds experience, one run per segment.

    >>> buf = experience_buffer("memory", capacity=100, max_tokens=64)
    >>> buf.capacity
    100
    """
    if space is None:
        space = experience_space() if max_tokens is None else experience_space(max_tokens=max_tokens)
    lengths = None if max_tokens is None else dict.fromkeys(plan_of(space).max_lengths, max_tokens)
    plan = plan_of(space, lengths)
    kwargs.setdefault("maintain_segment_metadata", True)
    if storage == "shared":
        kwargs.setdefault("multiprocessing", True)
    return ReplayBuffer.create(
        storage, plan.space, capacity=capacity, max_lengths=plan.max_lengths or None, **kwargs
    )

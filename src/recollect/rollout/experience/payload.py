"""Encoding: the experience of a run as bytes, checked leaf by leaf before any of it is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from recollect.errors import MissingLeafError, SchemaError, class_name
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.experience import Experience
from recollect.rollout.experience.frame import Head, body_of, framed
from recollect.rollout.experience.space import PER_RESPONSE, Array, Plan, Ragged, plan_of
from recollect.spaces.convert import to_batch
from recollect.text import encoded

INFO_NBYTES = 64 * 1024
_ACTED = np.ones(1 << 16, bool)
_ACTED.flags.writeable = False


def encode(
    experiences: Sequence[Experience] | Experience,
    *,
    space: Any = None,
    batch_id: BatchId | None = None,
    task_id: BatchId | None = None,
    group_id: int | None = None,
    run_id: int | None = None,
    attempt: int = 1,
    model_version: int = 0,
    version_drift: int = 0,
) -> bytes:
    """Return experiences as one payload; the ids are stamped on each, versions only where it has none.

    A value that is off the space raises SchemaError naming its leaf.
    """
    plan = space if isinstance(space, Plan) else plan_of(space)
    rows = [experiences] if isinstance(experiences, Experience) else list(experiences)
    for row in rows:
        if type(row) is not Experience and not isinstance(row, Experience):
            raise SchemaError(
                f"experience: must be an Experience, got {class_name(row)}; return rr.Experience"
            )
    versions = {"model_version": model_version, "version_drift": version_drift}
    stamps: dict[str, int] = {}
    if group_id is not None:
        stamps["group_id"] = group_id
    if run_id is not None:
        stamps["run_id"] = run_id
    base = {**plan.defaults, **versions}
    leaves = [row.leaves for row in rows]
    parts, nbytes, totals = plan.native.gather(leaves, base, stamps) or _gathered(plan, rows, base, stamps)
    run_ids = {own.get("run_id", 0) for own in leaves} if run_id is None else {run_id}
    head = Head(
        plan.layout.hash, batch_id, task_id, group_id or 0, attempt, sorted(map(int, run_ids)) if rows else [],
        len(rows), totals,
    )  # fmt: skip
    metrics, info = [row.metrics for row in rows], [row.info for row in rows]
    if any(metrics):
        head.metrics = list(map(_numbers, metrics))
    if any(info):
        head.info = list(map(_checked_info, info))
    return framed(head, parts, nbytes)


def _gathered(
    plan: Plan, rows: list[Experience], base: dict[str, Any], stamps: dict[str, int]
) -> tuple[list[Any], int, list[int]]:
    """The parts of a body, its bytes, and the elements of each ragged leaf; values are converted where they must be."""
    for name in {name for row in rows for name in row.leaves} - plan.names:
        raise SchemaError(f"{name}: must be a leaf of the space, {sorted(plan.names)}; remove it")
    lengths, totals, blocks = _sequences(plan, rows)
    fixed = _fixed(plan, rows, stamps, base)
    sizes = [len(fixed), lengths.nbytes, *[n * leaf.nbytes for n, leaf in zip(totals, plan.ragged)]]
    return *body_of([[fixed], [lengths], *blocks], sizes), totals


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Those that are numbers; the others are counted where the run is."""
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float | np.number)}


def _checked_info(info: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(encoded(msgspec.msgpack.encode, info))
    except TypeError as error:
        raise SchemaError(f"info: must be JSON-like, got {error}; convert it") from None
    if size > INFO_NBYTES:
        raise SchemaError(f"info: must be at most {INFO_NBYTES} bytes, got {size}; keep it elsewhere")
    return info


def _sequences(plan: Plan, rows: list[Experience]) -> tuple[Array, list[int], list[list[Array]]]:
    """Return the lengths `[ragged leaves * rows]`, their sums by leaf, and each leaf's values, row after row."""
    responses = [_response_length(row) for row in rows] if plan.is_token else []
    lengths: list[int] = []
    totals: list[int] = []
    blocks: list[list[Array]] = []
    for leaf in plan.ragged:
        name, dtype, shape, n_axes = leaf.name, leaf.dtype, leaf.shape, 1 + len(leaf.shape)
        block: list[Any] = [row.leaves.get(name) for row in rows]
        for i, value in enumerate(block):
            if (
                type(value) is not np.ndarray
                or value.dtype is not dtype
                or value.ndim != n_axes
                or not value.flags.c_contiguous
                or (shape and value.shape[1:] != shape)
            ):
                block[i] = _converted(leaf, value, rows[i])
        sizes = list(map(len, block))
        _check_sizes(leaf, sizes, responses if plan.is_token and name in PER_RESPONSE else sizes)
        lengths += sizes
        totals.append(sum(sizes))
        blocks.append(block)
    return np.array(lengths, np.int32), totals, blocks


def _check_sizes(leaf: Ragged, sizes: list[int], responses: list[int]) -> None:
    if sizes != responses:
        wrong, right = next((a, b) for a, b in zip(sizes, responses) if a != b)
        raise SchemaError(f"{leaf.name}: must have one element per response token, {right}, got {wrong}")
    if sizes and max(sizes) > leaf.most:
        raise SchemaError(
            f"{leaf.name}: must have at most {leaf.most} elements, got {max(sizes)}; raise max_tokens"
        )


def _converted(leaf: Ragged, value: Any, row: Experience) -> Array:
    """A value that is not yet an array of the leaf's dtype and shape, contiguous."""
    if value is None:
        if leaf.name == "action_mask":
            n = _response_length(row)
            return _ACTED[:n] if n <= len(_ACTED) else np.ones(n, bool)
        raise MissingLeafError(f"{leaf.name}: must be given, got nothing; add it to the Experience")
    if isinstance(value, list | tuple) and not value:
        return np.zeros((0, *leaf.shape), leaf.dtype)
    return np.ascontiguousarray(to_batch(value, leaf.dtype, leaf.shape, leaf.name, False))


def _response_length(row: Experience) -> int:
    tokens, prompt = row.leaves.get("tokens"), row.leaves.get("prompt_length", 0)
    if tokens is None:
        raise MissingLeafError("tokens: must be given, got nothing; add it to the Experience")
    n = len(tokens)
    if type(prompt) is not int and (isinstance(prompt, bool) or not isinstance(prompt, int | np.integer)):
        prompt = -1
    if not 0 <= prompt <= n:
        given = row.leaves["prompt_length"]
        raise SchemaError(f"prompt_length: must be an int from 0 to {n} (tokens), got {given!r}")
    return n - int(prompt)


def _fixed(plan: Plan, rows: list[Experience], stamps: dict[str, int], base: dict[str, Any]) -> bytes:
    """The packed rows, each value checked by the layout."""
    out = np.zeros(len(rows), plan.row_dtype)
    ragged = {leaf.name for leaf in plan.ragged}
    for i, row in enumerate(rows):
        sample = {**base, "step": i, **row.leaves, **stamps}
        sample = {name: _plain(value) for name, value in sample.items() if name not in ragged}
        arrays = plan.fixed.encode_one(sample)
        for field, array in zip(plan.fixed.fields, arrays):
            out[field.name][i] = array
    return out.tobytes()


def _plain(value: Any) -> Any:
    """Rewards come as numpy scalars of any width; as Python numbers they are checked by value."""
    return value.item() if isinstance(value, np.generic) else value

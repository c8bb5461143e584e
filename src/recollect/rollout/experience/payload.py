"""Payloads: the experience of a run as bytes, and back.

Encoding checks leaf by leaf before any of it is copied; decoding returns views of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from recollect.errors import FormatError, MissingLeafError, SchemaError, class_name
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.experience import Experience, Experiences
from recollect.rollout.experience.frame import Head, aligned, body_of, framed, opened
from recollect.rollout.experience.ragged import RaggedColumn, offsets_of
from recollect.rollout.experience.space import (
    PER_RESPONSE,
    Array,
    ExperiencePlan,
    Ragged,
    known_plan,
    plan_of,
)
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
    plan = space if isinstance(space, ExperiencePlan) else plan_of(space)
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
    plan: ExperiencePlan, rows: list[Experience], base: dict[str, Any], stamps: dict[str, int]
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


def _sequences(plan: ExperiencePlan, rows: list[Experience]) -> tuple[Array, list[int], list[list[Array]]]:
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
            f"{leaf.name}: must have at most {leaf.most} elements, got {max(sizes)}; raise max_tokens: "
            "Config(space=rr.experience_space(max_tokens=...))"
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


def _fixed(
    plan: ExperiencePlan, rows: list[Experience], stamps: dict[str, int], base: dict[str, Any]
) -> bytes:
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


def decode(payload: bytes | memoryview, *, space: Any = None) -> Experiences:
    """Return the experience in a payload, as views of it; FormatError if it is not whole.

    Without `space` the layout must be one that this process has made or met.
    """
    plan = space if space is None or isinstance(space, ExperiencePlan) else plan_of(space)
    head, body = opened(payload)
    plan = _plan_for(head, plan)
    sizes = _block_sizes(head, plan, len(body))
    rows = np.frombuffer(body, plan.row_dtype, head.n)
    ragged = _columns(head, plan, body, sizes, rows)
    tasks = {}
    if head.n:
        tasks = dict.fromkeys(rows["group_id"].tolist(), (head.batch_id, head.task_id))
    return Experiences(plan, rows, ragged, head.metrics or None, head.info or None, tasks)


def _plan_for(head: Head, plan: ExperiencePlan | None) -> ExperiencePlan:
    found = plan if plan is not None else known_plan(head.layout)
    if found is None or found.layout.hash != head.layout:
        raise FormatError(
            f"payload: layout must be that of the space, got {head.layout}; give the same space"
        )
    return found


def _block_sizes(head: Head, plan: ExperiencePlan, nbytes: int) -> list[int]:
    """The bytes of rows, lengths and ragged blocks; they must fill the body exactly."""
    if len(head.blocks) != len(plan.ragged) or min(head.blocks, default=0) < 0:
        raise FormatError(f"payload: must have {len(plan.ragged)} blocks, got {len(head.blocks)}")
    sizes = [head.n * plan.row_dtype.itemsize, head.n * len(plan.ragged) * 4]
    sizes += [count * leaf.nbytes for count, leaf in zip(head.blocks, plan.ragged)]
    if sum(map(aligned, sizes)) != nbytes:
        raise FormatError(f"payload: blocks must fill its {nbytes} bytes, got sizes {sizes}")
    return sizes


def _columns(
    head: Head, plan: ExperiencePlan, body: memoryview, sizes: list[int], rows: Array
) -> dict[str, RaggedColumn]:
    n, at = head.n, aligned(sizes[0])
    lengths = np.frombuffer(body, np.int32, n * len(plan.ragged), at).reshape(len(plan.ragged), n)
    offsets = np.zeros((len(plan.ragged), n + 1), np.int64)
    np.add.accumulate(lengths, axis=1, out=offsets[:, 1:], dtype=np.int64)
    _check_lengths(head, plan, lengths, offsets, rows)
    at += aligned(sizes[1])
    columns = {}
    for i, (leaf, count) in enumerate(zip(plan.ragged, head.blocks)):
        values = np.frombuffer(body, leaf.dtype, count * leaf.n_elements, at)
        columns[leaf.name] = RaggedColumn(
            values.reshape(-1, *leaf.shape) if leaf.shape else values, offsets[i]
        )
        at += aligned(sizes[2 + i])
    return columns


def _check_lengths(head: Head, plan: ExperiencePlan, lengths: Array, offsets: Array, rows: Array) -> None:
    """Lengths fit the space and add up; read as unsigned, a negative one is too great."""
    if not head.n:
        if any(head.blocks):
            raise FormatError("payload: blocks must be empty without rows")
        return
    if (lengths.view(np.uint32) > plan.most).any():
        raise FormatError("payload: lengths must be at least 0 and fit the space")
    if offsets[:, -1].tolist() != head.blocks:
        raise FormatError("payload: lengths must add up to their blocks")
    if plan.is_token:
        tokens, prompts = lengths[plan.tokens_at], rows["prompt_length"]
        if (prompts.view(np.uint32) > tokens.view(np.uint32)).any():
            raise FormatError("payload: prompt_length must be from 0 to the number of tokens")
        if (lengths[plan.responses_at] != tokens - prompts).any():
            raise FormatError("payload: leaves of the response must have one element per response token")


# -- many at once


def decode_many(payloads: Sequence[bytes], plan: ExperiencePlan) -> Experiences:
    """Return the experience of many payloads as one batch; FormatError if any is not whole.

    The blocks of all of them are joined and looked at once: for small payloads most of the time is in their number.
    """
    rows: list[memoryview] = []
    lengths: list[list[memoryview]] = [[] for _ in plan.ragged]
    values: list[list[memoryview]] = [[] for _ in plan.ragged]
    metrics: list[dict[str, float]] = []
    info: list[dict[str, Any]] = []
    tasks: dict[int, tuple[BatchId | None, BatchId | None]] = {}
    row_nbytes = plan.row_dtype.itemsize
    for payload in payloads:
        head, body = opened(payload)
        _plan_for(head, plan)
        n, at = head.n, aligned(head.n * row_nbytes)
        rows.append(body[: n * row_nbytes])
        for leaf in lengths:
            leaf.append(body[at : at + 4 * n])
            at += 4 * n
        at = aligned(n * row_nbytes) + aligned(4 * n * len(lengths))
        for part, count, ragged in zip(values, head.blocks, plan.ragged):
            part.append(body[at : at + count * ragged.nbytes])
            at += aligned(count * ragged.nbytes)
        metrics += head.metrics or [{}] * n
        info += head.info or [{}] * n
        tasks[head.group_id] = (head.batch_id, head.task_id)
    return _joined(plan, rows, lengths, values, metrics, info, tasks)


def _joined(
    plan: ExperiencePlan,
    rows: list[memoryview],
    lengths: list[list[memoryview]],
    values: list[list[memoryview]],
    metrics: Any,
    info: Any,
    tasks: Any,
) -> Experiences:
    packed = np.frombuffer(b"".join(rows), plan.row_dtype)
    ragged = {}
    for leaf, sizes, parts in zip(plan.ragged, lengths, values):
        offsets = offsets_of(np.frombuffer(b"".join(sizes), np.int32))
        column = np.frombuffer(b"".join(parts), leaf.dtype).reshape(-1, *leaf.shape)
        if int(offsets[-1]) != len(column):
            raise FormatError(f"payload: lengths of {leaf.name} must add up to its block")
        ragged[leaf.name] = RaggedColumn(column, offsets)
    return Experiences(plan, packed, ragged, metrics, info, tasks)

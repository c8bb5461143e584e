"""Decoding: payloads as batches of experience, in views of the bytes they came in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recollect.errors import FormatError
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.experience import Experiences, RaggedColumn
from recollect.rollout.experience.frame import Head, aligned, opened
from recollect.rollout.experience.space import Array, Plan, known_plan, plan_of


def decode(payload: bytes | memoryview, *, space: Any = None) -> Experiences:
    """Return the experience in a payload, as views of it; FormatError if it is not whole.

    Without `space` the layout must be one that this process has made or met.
    """
    plan = space if space is None or isinstance(space, Plan) else plan_of(space)
    head, body = opened(payload)
    plan = _plan_for(head, plan)
    sizes = _block_sizes(head, plan, len(body))
    rows = np.frombuffer(body, plan.row_dtype, head.n)
    ragged = _columns(head, plan, body, sizes, rows)
    tasks = {}
    if head.n:
        tasks = dict.fromkeys(rows["group_id"].tolist(), (head.batch_id, head.task_id))
    return Experiences(plan, rows, ragged, head.metrics or None, head.info or None, tasks)


def _plan_for(head: Head, plan: Plan | None) -> Plan:
    found = plan if plan is not None else known_plan(head.layout)
    if found is None or found.layout.hash != head.layout:
        raise FormatError(
            f"payload: layout must be that of the space, got {head.layout}; give the same space"
        )
    return found


def _block_sizes(head: Head, plan: Plan, nbytes: int) -> list[int]:
    """The bytes of rows, lengths and ragged blocks; they must fill the body exactly."""
    if len(head.blocks) != len(plan.ragged) or min(head.blocks, default=0) < 0:
        raise FormatError(f"payload: must have {len(plan.ragged)} blocks, got {len(head.blocks)}")
    sizes = [head.n * plan.row_dtype.itemsize, head.n * len(plan.ragged) * 4]
    sizes += [count * leaf.nbytes for count, leaf in zip(head.blocks, plan.ragged)]
    if sum(map(aligned, sizes)) != nbytes:
        raise FormatError(f"payload: blocks must fill its {nbytes} bytes, got sizes {sizes}")
    return sizes


def _columns(
    head: Head, plan: Plan, body: memoryview, sizes: list[int], rows: Array
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


def _check_lengths(head: Head, plan: Plan, lengths: Array, offsets: Array, rows: Array) -> None:
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


def decode_many(payloads: Sequence[bytes], plan: Plan) -> Experiences:
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


def _joined(plan: Plan, rows: list[memoryview], lengths: list[list[memoryview]], values: list[list[memoryview]],
            metrics: Any, info: Any, tasks: Any) -> Experiences:  # fmt: skip
    packed = np.frombuffer(b"".join(rows), plan.row_dtype)
    ragged = {}
    for leaf, sizes, parts in zip(plan.ragged, lengths, values):
        offsets = np.zeros(len(packed) + 1, np.int64)
        np.cumsum(np.frombuffer(b"".join(sizes), np.int32), out=offsets[1:])
        column = np.frombuffer(b"".join(parts), leaf.dtype).reshape(-1, *leaf.shape)
        if int(offsets[-1]) != len(column):
            raise FormatError(f"payload: lengths of {leaf.name} must add up to its block")
        ragged[leaf.name] = RaggedColumn(column, offsets)
    return Experiences(plan, packed, ragged, metrics, info, tasks)

"""Payloads: the experience of a run as bytes, checked whole before any of it is used.

A prefix of 32 bytes (magic, version, sizes, crc32c of head and body), a msgpack head, and blocks that start at
multiples of 64: the packed rows of the fixed leaves, the lengths of the ragged ones, one unpadded block each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from recollect._core import crc32c
from recollect.errors import FormatError, MissingLeafError, SchemaError
from recollect.rollout.experience import Experience, Experiences, RaggedColumn
from recollect.rollout.schema import PER_RESPONSE, Array, Plan, Ragged, known_plan, plan_of
from recollect.rollout.state import BatchId
from recollect.spaces.convert import to_batch

MAGIC, VERSION = b"RCXP", 1
PREFIX = struct.Struct("<4sHHIQII4x")
ALIGNMENT = 64
INFO_NBYTES = 64 * 1024
SMALL_NBYTES = 16 * 1024
_ACTED = np.ones(1 << 16, bool)
_ACTED.flags.writeable = False
_PADS = [bytes(n) for n in range(ALIGNMENT)]
_FITS = 3.4e38  # what float32 holds for certain


class Head(msgspec.Struct, array_like=True):
    """What a payload says of itself."""

    layout: str
    batch_id: BatchId | None
    task_id: BatchId | None
    group_id: int
    attempt: int
    run_ids: list[int]
    n: int
    blocks: list[int]
    metrics: list[dict[str, float]] = []
    info: list[dict[str, Any]] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


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
        if not isinstance(row, Experience):
            raise SchemaError(
                f"experience: must be an Experience, got {type(row).__name__}; return rr.Experience"
            )
    versions = {"model_version": model_version, "version_drift": version_drift}
    stamps: dict[str, int] = {}
    if group_id is not None:
        stamps["group_id"] = group_id
    if run_id is not None:
        stamps["run_id"] = run_id
    lengths, blocks = _sequences(plan, rows)
    fixed = _fixed(plan, rows, stamps, versions)
    head = Head(
        plan.layout.hash, batch_id, task_id, group_id or 0, attempt,
        [] if not rows else [run_id] if run_id is not None else np.unique(fixed["run_id"]).tolist(),
        len(rows), [sum(map(len, block)) for block in blocks],
    )  # fmt: skip
    if any(row.metrics for row in rows):
        head.metrics = [_numbers(row.metrics) for row in rows]
    if any(row.info for row in rows):
        head.info = [_checked_info(row.info) for row in rows]
    return _framed(_encoder.encode(head), [[fixed], [lengths], *blocks])


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Those that are numbers; the others are counted where the run is."""
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float | np.number)}


def _checked_info(info: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(_encoder.encode(info))
    except TypeError as error:
        raise SchemaError(f"info: must be JSON-like, got {error}; convert it") from None
    if size > INFO_NBYTES:
        raise SchemaError(f"info: must be at most {INFO_NBYTES} bytes, got {size}; keep it elsewhere")
    return info


def _framed(head: bytes, blocks: list[list[Array]]) -> bytes:
    """Join the parts. Small ones are checked after they are joined, large ones before, so as to copy them once."""
    pad = _PADS[-(PREFIX.size + len(head)) % ALIGNMENT]
    parts: list[Any] = []
    nbytes = 0
    for block in blocks:
        parts += block
        nbytes += sum([array.nbytes for array in block])
        if nbytes % ALIGNMENT:
            parts.append(_PADS[-nbytes % ALIGNMENT])
            nbytes += len(parts[-1])
    if nbytes <= SMALL_NBYTES:
        parts = [b"".join(parts)]
        crc = crc32c(parts[0])
    else:
        crc = 0
        for part in parts:
            crc = crc32c(part.view(np.uint8) if isinstance(part, np.ndarray) else part, crc)
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(head), nbytes, crc32c(head), crc)
    return b"".join([prefix, head, pad, *parts])


def _sequences(plan: Plan, rows: list[Experience]) -> tuple[Array, list[list[Array]]]:
    """Return the lengths `[ragged leaves * rows]` and each leaf's values, row after row."""
    responses = [_response_length(row) for row in rows] if plan.is_token else []
    lengths: list[int] = []
    blocks: list[list[Array]] = []
    for leaf in plan.ragged:
        follows = plan.is_token and leaf.name in PER_RESPONSE
        block = [_values(leaf, row.leaves.get(leaf.name), row) for row in rows]
        sizes = [len(array) for array in block]
        if follows and sizes != responses:
            wrong, right = next((a, b) for a, b in zip(sizes, responses) if a != b)
            raise SchemaError(f"{leaf.name}: must have one element per response token, {right}, got {wrong}")
        if sizes and max(sizes) > leaf.most:
            raise SchemaError(
                f"{leaf.name}: must have at most {leaf.most} elements, got {max(sizes)}; raise max_tokens"
            )
        lengths += sizes
        blocks.append(block)
    return np.array(lengths, np.int32), blocks


def _values(leaf: Ragged, value: Any, row: Experience) -> Array:
    if (
        type(value) is np.ndarray
        and value.dtype == leaf.dtype
        and value.shape[1:] == leaf.shape
        and value.ndim
    ):
        return value if value.flags.c_contiguous else value.copy()
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
    if isinstance(prompt, bool) or not isinstance(prompt, int | np.integer) or not 0 <= prompt <= len(tokens):
        raise SchemaError(f"prompt_length: must be an int from 0 to {len(tokens)} (tokens), got {prompt!r}")
    return len(tokens) - int(prompt)


def _fixed(plan: Plan, rows: list[Experience], stamps: dict[str, int], versions: dict[str, int]) -> Array:
    """The packed rows: at once where all values are plain numbers of the right types, else one by one."""
    base = {**plan.defaults, **versions}
    packed = []
    for i, row in enumerate(rows):
        leaves = row.leaves
        if not leaves.keys() <= plan.names:
            unknown = next(name for name in leaves if name not in plan.names)
            raise SchemaError(f"{unknown}: must be a leaf of the space, {sorted(plan.names)}; remove it")
        base["step"] = i
        merged = {**base, **leaves, **stamps}
        try:
            values = tuple([merged[name] for name in plan.fixed_names])
        except KeyError:
            return _fixed_slowly(plan, rows, stamps, base)
        if tuple(map(type, values)) != plan.types or any(abs(values[at]) > _FITS for at in plan.floats):
            return _fixed_slowly(plan, rows, stamps, base)
        packed.append(values)
    try:
        return np.array(packed, plan.row_dtype)
    except OverflowError:
        return _fixed_slowly(plan, rows, stamps, base)


def _fixed_slowly(
    plan: Plan, rows: list[Experience], stamps: dict[str, int], defaults: dict[str, Any]
) -> Array:
    """Any values at all, each checked by the layout."""
    out = np.zeros(len(rows), plan.row_dtype)
    ragged = {leaf.name for leaf in plan.ragged}
    for i, row in enumerate(rows):
        sample = {**defaults, "step": i, **row.leaves, **stamps}
        sample = {name: _plain(value) for name, value in sample.items() if name not in ragged}
        arrays = plan.fixed.encode_one(sample)
        for field, array in zip(plan.fixed.fields, arrays):
            out[field.name][i] = array
    return out


def _plain(value: Any) -> Any:
    """Rewards come as numpy scalars of any width; as Python numbers they are checked by value."""
    return value.item() if isinstance(value, np.generic) else value


# -- reading


def decode(payload: bytes | memoryview, *, space: Any = None) -> Experiences:
    """Return the experience in a payload, as views of it; FormatError if it is not whole.

    Without `space` the layout must be one that this process has made or met.
    """
    plan = space if space is None or isinstance(space, Plan) else plan_of(space)
    head, rows, ragged, plan = _parsed(payload, plan)
    metrics = head.metrics if head.metrics else None
    tasks = {}
    if head.n:
        tasks = {int(group): (head.batch_id, head.task_id) for group in set(rows["group_id"].tolist())}
    return Experiences(plan, rows, ragged, metrics, head.info if head.info else None, tasks)


def read_head(payload: bytes | memoryview) -> Head:
    """Return what a payload says of itself; its body is not looked at."""
    head_nbytes, _, crc, _ = _prefix(payload)
    return _head(payload, head_nbytes, crc)


def _prefix(payload: bytes | memoryview) -> tuple[int, int, int, int]:
    if len(payload) < PREFIX.size:
        raise FormatError(f"payload: must have at least {PREFIX.size} bytes, got {len(payload)}")
    magic, version, _, head_nbytes, body_nbytes, head_crc, body_crc = PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise FormatError(f"payload: must begin with {MAGIC!r}, got {magic!r}; it is of something else")
    if version != VERSION:
        raise FormatError(f"payload: version must be {VERSION}, got {version}; update recollect")
    start = -(-(PREFIX.size + head_nbytes) // ALIGNMENT) * ALIGNMENT
    if start + body_nbytes != len(payload):
        raise FormatError(f"payload: must have {start + body_nbytes} bytes by its prefix, got {len(payload)}")
    return head_nbytes, body_nbytes, head_crc, body_crc


def _head(payload: bytes | memoryview, nbytes: int, crc: int) -> Head:
    data = memoryview(payload)[PREFIX.size : PREFIX.size + nbytes]
    if crc32c(data) != crc:
        raise FormatError("payload: head does not have its checksum; it was damaged on the way")
    try:
        head = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise FormatError(f"payload: head must be that of an experience, got {error}") from None
    if head.n < 0 or any(len(rows) not in (0, head.n) for rows in (head.metrics, head.info)):
        raise FormatError(f"payload: metrics and info must be of n rows, got n = {head.n}")
    return head


def _parsed(
    payload: bytes | memoryview, plan: Plan | None
) -> tuple[Head, Array, dict[str, RaggedColumn], Plan]:
    head_nbytes, body_nbytes, head_crc, body_crc = _prefix(payload)
    head = _head(payload, head_nbytes, head_crc)
    found = plan if plan is not None else known_plan(head.layout)
    if found is None or found.layout.hash != head.layout:
        raise FormatError(
            f"payload: layout must be that of the space, got {head.layout}; give the same space"
        )
    start = -(-(PREFIX.size + head_nbytes) // ALIGNMENT) * ALIGNMENT
    body = np.frombuffer(payload, np.uint8, body_nbytes, start)
    if crc32c(body) != body_crc:
        raise FormatError("payload: body does not have its checksum; it was damaged on the way")
    sizes = [head.n * found.row_dtype.itemsize, head.n * len(found.ragged) * 4]
    if len(head.blocks) != len(found.ragged) or min(head.blocks, default=0) < 0:
        raise FormatError(f"payload: must have {len(found.ragged)} blocks, got {len(head.blocks)}")
    counts = dict(zip([leaf.name for leaf in found.ragged], head.blocks))
    sizes += [counts[leaf.name] * _item_nbytes(leaf) for leaf in found.ragged]
    if sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) != body_nbytes:
        raise FormatError(f"payload: blocks must fill its {body_nbytes} bytes, got sizes {sizes}")
    rows = body[: sizes[0]].view(found.row_dtype)
    at = -(-sizes[0] // ALIGNMENT) * ALIGNMENT
    lengths = body[at : at + sizes[1]].view(np.int32).reshape(len(found.ragged), head.n)
    at += -(-sizes[1] // ALIGNMENT) * ALIGNMENT
    ragged = {}
    offsets = np.zeros((len(found.ragged), head.n + 1), np.int64)
    np.cumsum(lengths, axis=1, out=offsets[:, 1:])
    if head.n and lengths.size and int(lengths.min()) < 0:
        raise FormatError("payload: lengths must be at least 0")
    for i, leaf in enumerate(found.ragged):
        if int(offsets[i, -1]) != counts[leaf.name] or (head.n and int(lengths[i].max()) > leaf.most):
            raise FormatError(f"payload: lengths of {leaf.name} must add up to its block and fit its space")
        size = sizes[2 + i]
        values = body[at : at + size].view(leaf.dtype).reshape(-1, *leaf.shape)
        ragged[leaf.name] = RaggedColumn(values, offsets[i])
        at += -(-size // ALIGNMENT) * ALIGNMENT
    if found.is_token:
        _check_prompts(rows, lengths, found)
    return head, rows, ragged, found


def _check_prompts(rows: Array, lengths: Array, plan: Plan) -> None:
    if not len(rows):
        return
    index = {leaf.name: i for i, leaf in enumerate(plan.ragged)}
    responses = lengths[index["tokens"]] - rows["prompt_length"]
    if int(rows["prompt_length"].min()) < 0 or int(responses.min()) < 0:
        raise FormatError("payload: prompt_length must be from 0 to the number of tokens")
    for name in PER_RESPONSE:
        if name in index and not np.array_equal(lengths[index[name]], responses):
            raise FormatError(f"payload: {name} must have one element per response token")


def _item_nbytes(leaf: Ragged) -> int:
    return int(leaf.dtype.itemsize * np.prod(leaf.shape, dtype=np.int64))


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
    row_nbytes, items = plan.row_dtype.itemsize, [_item_nbytes(leaf) for leaf in plan.ragged]
    for payload in payloads:
        head_nbytes, body_nbytes, head_crc, body_crc = _prefix(payload)
        head = _head(payload, head_nbytes, head_crc)
        view = memoryview(payload)[len(payload) - body_nbytes :]
        if head.layout != plan.layout.hash or crc32c(view) != body_crc:
            decode(payload, space=plan)  # says what is wrong
        n, at = head.n, _aligned(head.n * row_nbytes)
        rows.append(view[: n * row_nbytes])
        for leaf in lengths:
            leaf.append(view[at : at + 4 * n])
            at += 4 * n
        at = _aligned(n * row_nbytes) + _aligned(4 * n * len(lengths))
        for leaf, count, item in zip(values, head.blocks, items):
            leaf.append(view[at : at + count * item])
            at += _aligned(count * item)
        metrics += head.metrics or [{}] * n
        info += head.info or [{}] * n
        tasks[head.group_id] = (head.batch_id, head.task_id)
    return _joined(plan, rows, lengths, values, metrics, info, tasks)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


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

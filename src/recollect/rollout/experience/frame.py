"""The frame of a payload: how experience lies in bytes, and what is checked before any of it is read.

A prefix of 32 bytes (magic, version, sizes, crc32c of head and body), a msgpack head, and blocks that start at
multiples of 64: the packed rows of the fixed leaves, the lengths of the ragged ones, one unpadded block each.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from recollect._core import crc32c, join_summed
from recollect.errors import FormatError
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.space import ALIGNMENT
from recollect.text import encoded

MAGIC, VERSION = b"RCXP", 1
PREFIX = struct.Struct("<4sHHIQII4x")
_CRC_AT = 24  # of the body, in the prefix
_PADS = [bytes(n) for n in range(ALIGNMENT)]


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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def aligned(n: int) -> int:
    """The next multiple of the alignment."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def body_of(blocks: list[list[Any]], sizes: list[int]) -> tuple[list[Any], int]:
    """Return the parts of a body and their bytes: blocks, each a list of buffers and of this size together."""
    parts: list[Any] = []
    nbytes = 0
    for block, size in zip(blocks, sizes):
        parts += block
        nbytes += aligned(size)
        if size % ALIGNMENT:
            parts.append(_PADS[-size % ALIGNMENT])
    return parts, nbytes


def framed(head: Head, parts: list[Any], nbytes: int) -> bytes:
    """Join head and body, which is copied and summed in one pass."""
    about = encoded(_encode, head)
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(about), nbytes, crc32c(about), 0)
    return join_summed(prefix + about + _PADS[-(PREFIX.size + len(about)) % ALIGNMENT], parts, _CRC_AT)


def opened(payload: bytes | memoryview) -> tuple[Head, memoryview]:
    """Return the head and the body of a payload; FormatError unless both are whole."""
    if len(payload) < PREFIX.size:
        raise FormatError(f"payload: must have at least {PREFIX.size} bytes, got {len(payload)}")
    magic, version, _, head_nbytes, body_nbytes, head_crc, body_crc = PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise FormatError(f"payload: must begin with {MAGIC!r}, got {magic!r}; it is of something else")
    if version != VERSION:
        raise FormatError(f"payload: version must be {VERSION}, got {version}; update recollect")
    start = aligned(PREFIX.size + head_nbytes)
    if start + body_nbytes != len(payload):
        raise FormatError(f"payload: must have {start + body_nbytes} bytes by its prefix, got {len(payload)}")
    view = memoryview(payload)
    body = view[start:]
    if crc32c(body) != body_crc:
        raise FormatError("payload: body does not have its checksum; it was damaged on the way")
    return _head(view[PREFIX.size : PREFIX.size + head_nbytes], head_crc), body


def _head(data: memoryview, crc: int) -> Head:
    if crc32c(data) != crc:
        raise FormatError("payload: head does not have its checksum; it was damaged on the way")
    try:
        head = _decode(data)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise FormatError(f"payload: head must be that of an experience, got {error}") from None
    n = head.n
    if n < 0 or len(head.metrics) not in (0, n) or len(head.info) not in (0, n):
        raise FormatError(f"payload: metrics and info must be of n rows, got n = {n}")
    return head

"""The frame of a payload: how experience lies in bytes, and what is checked before any of it is read.

A prefix of 32 bytes (magic, version, sizes, crc32c of head and body), a msgpack head, and blocks that start at
multiples of 64: the packed rows of the fixed leaves, the lengths of the ragged ones, one unpadded block each.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from recollect._core import crc32c
from recollect.errors import FormatError
from recollect.rollout.state import BatchId

MAGIC, VERSION = b"RCXP", 1
PREFIX = struct.Struct("<4sHHIQII4x")
ALIGNMENT = 64
SMALL_NBYTES = 16 * 1024
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


def framed(head: Head, blocks: list[list[Any]], sizes: list[int]) -> bytes:
    """Join head and blocks, each a list of contiguous buffers and of this size together.

    Small bodies are joined and then checked, which takes one call; of large ones the parts are, so that they are
    copied once and no second body has to be found in memory.
    """
    parts: list[Any] = []
    nbytes = 0
    for block, size in zip(blocks, sizes):
        parts += block
        nbytes += aligned(size)
        if size % ALIGNMENT:
            parts.append(_PADS[-size % ALIGNMENT])
    if nbytes <= SMALL_NBYTES:
        parts = [b"".join(parts)]
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    about = _encode(head)
    prefix = PREFIX.pack(MAGIC, VERSION, 0, len(about), nbytes, crc32c(about), crc)
    return b"".join([prefix, about, _PADS[-(PREFIX.size + len(about)) % ALIGNMENT], *parts])


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
    except msgspec.MsgspecError as error:
        raise FormatError(f"payload: head must be that of an experience, got {error}") from None
    n = head.n
    if n < 0 or len(head.metrics) not in (0, n) or len(head.info) not in (0, n):
        raise FormatError(f"payload: metrics and info must be of n rows, got n = {n}")
    return head

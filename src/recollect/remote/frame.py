"""Frames: a 32-byte prefix, a msgpack head, and 64-byte aligned blocks, little-endian.

`prefix = magic u32, protocol u16, tag u16, head bytes u32, crc32c of the head u32, body bytes u64, crc32c of the body
u32, zero u32`. Head and body are checked before they are used; sizes before memory is taken for them. Nothing here
makes an object by name, and nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from recollect import _core
from recollect.errors import BudgetError, FrameError
from recollect.remote.messages import PROTOCOL, AnyMessage, Data, Items, Metadata, Sync
from recollect.text import encoded

PREFIX = struct.Struct("<IHHIIQII")
MAGIC = 0x4C434552  # "RECL"
ALIGNMENT = 64
MAX_FRAME = 64 << 20
MOST_FRAME = 1 << 30
MAX_HEAD = 8 << 20
MOST_EMPTY = 1 << 16  # items or rows of no bytes in one container: nothing else bounds their number
MOST_DRAWN = 1 << 20  # items that one Sample may ask for, and
MOST_DRAWN_NBYTES = 1 << 28  # bytes that its answer may have: all others wait while they are copied

_ZEROS = [bytes(n) for n in range(ALIGNMENT)]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of blocks that an item space gives: bytes of a (step) row, and of a row of fields."""

    row_nbytes: int
    field_nbytes: int = 0
    is_trajectory: bool = False  # else items are samples, with neither lengths nor fields


def check_max_frame(max_frame: Any) -> int:
    """Return the size if it may be one; ValueError otherwise."""
    if isinstance(max_frame, bool) or not isinstance(max_frame, int) or not 4096 <= max_frame <= MOST_FRAME:
        raise ValueError(f"max_frame: must be in [4096, {MOST_FRAME}] bytes, got {max_frame!r}")
    return max_frame


def check_drawn(n: int, shapes: Shapes) -> None:
    """Raise BudgetError for more items than one Sample may ask for: the manager serves no other peer meanwhile."""
    most = MOST_DRAWN if shapes.row_nbytes else MOST_EMPTY
    if n > most:
        raise BudgetError(f"n: must be at most {most} items in one draw, got {n}; draw several times")


def encode(
    message: AnyMessage,
    blocks: Sequence[Array] = (),
    *,
    tag: int = 0,
    max_frame: int = MAX_FRAME,
    first_crc: int | None = None,
) -> list[Any]:
    """Return the parts of a frame: its prefix and head, then the blocks as they are, with padding between.

    `first_crc` is the crc32c of the first block, if it is known already.

    Ownership: the parts are views of the blocks; keep those unchanged until the carrier is done with them.
    """
    head = encoded(_encoder.encode, message)
    parts: list[Any] = [b""]
    crc = nbytes = 0
    at = PREFIX.size + len(head)
    for number, block in enumerate(blocks):
        size = block.nbytes
        if not size:  # no bytes, no padding
            continue
        pad = -nbytes % ALIGNMENT
        if pad:
            parts.append(_ZEROS[pad])
            crc = _core.crc32c(_ZEROS[pad], crc)
        crc = first_crc if first_crc is not None and number == 0 else _core.crc32c(block, crc)
        parts.append(block.data.cast("B"))
        nbytes += pad + size
    lead = _ZEROS[-at % ALIGNMENT] if nbytes else b""
    total = at + len(lead) + nbytes
    if total > max_frame or len(head) > MAX_HEAD:
        raise FrameError(
            f"container: must fit a frame of {max_frame} bytes, got {total}; send fewer items at once, "
            "or raise max_frame of the carrier"
        )
    prefix = PREFIX.pack(MAGIC, PROTOCOL, tag, len(head), _core.crc32c(head), nbytes, crc, 0)
    parts[0] = prefix + head + lead
    return parts


def decode(frame: Any, *, max_frame: int = MAX_FRAME) -> tuple[AnyMessage, int, memoryview]:
    """Return the message, the tag and the body of a frame; FrameError if anything about it is wrong."""
    view = memoryview(frame).cast("B") if not isinstance(frame, bytes) else memoryview(frame)
    if not PREFIX.size <= view.nbytes <= max_frame:
        raise FrameError(f"frame: must have {PREFIX.size} to {max_frame} bytes, got {view.nbytes}")
    magic, protocol, tag, n_head, crc_head, n_body, crc_body, zero = PREFIX.unpack_from(view)
    if magic != MAGIC or zero:
        raise FrameError(f"frame: must begin with {MAGIC:#x}, got {magic:#x}; the peer uses another protocol")
    if protocol != PROTOCOL:
        raise FrameError(f"frame: protocol must be {PROTOCOL}, got {protocol}; use one release everywhere")
    at = PREFIX.size + n_head
    start = at + (-at % ALIGNMENT if n_body else 0)
    if n_head > MAX_HEAD or start + n_body != view.nbytes:
        raise FrameError(f"frame: head and body must fill its {view.nbytes} bytes, got {n_head} and {n_body}")
    head, body = view[PREFIX.size : at], view[start:]
    if _core.crc32c(head) != crc_head or _core.crc32c(body) != crc_body:
        raise FrameError("frame: checksums must match, got others; it was damaged on its way")
    try:
        message: AnyMessage = _decoder.decode(head)
        if isinstance(message, Metadata):
            check_plain(message.values)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise FrameError(f"frame: head must be a message of this protocol, got an error: {error}") from None
    if n_body and not isinstance(message, Data | Items | Sync):
        raise FrameError(f"frame: {type(message).__name__} has no blocks, got {n_body} bytes")
    return message, tag, body


def is_frame(prefix: bytes, nbytes: int) -> bool:
    """Whether the first bytes of a frame fit one of this size."""
    if len(prefix) < PREFIX.size:
        return False
    magic, _, _, n_head, _, n_body, _, zero = PREFIX.unpack_from(prefix)
    at = PREFIX.size + n_head
    return bool(magic == MAGIC and not zero and at + (-at % ALIGNMENT if n_body else 0) + n_body == nbytes)


def check_plain(value: Any) -> None:
    """Raise ValidationError unless it is numbers, strings, and lists and dicts of them: msgpack has other types too."""
    if isinstance(value, dict):
        for key, child in value.items():
            check_plain(key)
            check_plain(child)
    elif isinstance(value, list | tuple):
        for child in value:
            check_plain(child)
    elif value is not None and not isinstance(value, bool | int | float | str | bytes):
        raise msgspec.ValidationError(f"values must be plain, got {type(value).__name__}")


def split(body: memoryview, shapes: Sequence[tuple[int, int]]) -> list[Array]:
    """Cut a body into its blocks of (rows, bytes of a row); FrameError, by arithmetic alone, unless they fill it."""
    starts, at = [], 0
    for n, nbytes in shapes:
        if n > MOST_EMPTY and not nbytes:
            raise FrameError(f"frame: rows of no bytes must be at most {MOST_EMPTY}, got {n}")
        at += -at % ALIGNMENT if n * nbytes else 0
        starts.append(at)
        at += n * nbytes
    # A block of no bytes has no padding before it, so what was encoded ends with the last one that has any.
    if at != body.nbytes:
        raise FrameError(f"frame: blocks must have {at} bytes together, got {body.nbytes}")
    return [np.ndarray(shape, np.uint8, body, start) for shape, start in zip(shapes, starts)]


def cut_items(
    message: Data | Items, body: memoryview, shapes: Shapes
) -> tuple[Array, Array | None, Array | None]:
    """Return rows (n_rows, row_nbytes), lengths (n,) and fields (n, field_nbytes) of a container, checked."""
    n, n_rows = message.n, message.n_rows
    has_steps = not (isinstance(message, Data) and message.scoring_only)
    if not shapes.is_trajectory:
        if n_rows != n:
            raise FrameError(f"frame: rows must be as many as items, {n}, got {n_rows}")
        (rows,) = split(body, [(n, shapes.row_nbytes)])
        return rows, None, None
    if not has_steps:
        if n_rows:
            raise FrameError(f"frame: a container to be scored only has no steps, got {n_rows}")
        (fields,) = split(body, [(n, shapes.field_nbytes)])
        return np.empty((0, shapes.row_nbytes), np.uint8), None, fields
    rows, lengths, fields = split(body, [(n_rows, shapes.row_nbytes), (n, 4), (n, shapes.field_nbytes)])
    numbers = lengths.reshape(-1).view(np.int32)
    if not numbers.flags.aligned:  # a carrier gave the frame at an odd address
        numbers = numbers.copy()
    least, total = _core.length_bounds(numbers)
    if n and least < 1:
        raise FrameError(f"frame: lengths must be at least 1, got {least}")
    if total != n_rows:
        raise FrameError(f"frame: lengths must add up to {n_rows} rows, got {total}")
    return rows, numbers, fields


def cut_values(message: Sync, body: memoryview) -> Array:
    """Return the values behind a summary."""
    (block,) = split(body, [(message.n, 8)])
    return block.reshape(-1).view(np.float64)


def joined(parts: Sequence[Any]) -> bytes:
    """The bytes of a frame in one piece."""
    return b"".join(parts)

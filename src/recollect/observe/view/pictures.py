"""Arrays as PNG, with nothing but zlib: colours as they are, other numbers as grey, stacks side by side."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from recollect.observe.view.leaves import is_channels_first

Array = np.ndarray[Any, Any]


def png(value: Array) -> bytes:
    """A picture of one sample as PNG; uint8 is exact."""
    return encode(as_pixels(value))


def as_pixels(value: Array) -> Array:
    """Bytes `[H, W]` or `[H, W, 3]` of a sample; a stack of other than 1 or 3 channels is laid side by side."""
    value = stretched(np.asarray(value))
    if value.ndim == 2:
        return value
    if is_channels_first(value.shape):
        value = np.moveaxis(value, 0, 2)
    if value.shape[2] == 3:
        return value
    return np.concatenate(list(np.moveaxis(value, 2, 0)), axis=1)


def stretched(value: Array) -> Array:
    """Any numbers as bytes: uint8 as it is, others from the least to the greatest of this very sample."""
    if value.dtype == np.uint8:
        return value
    numbers = value.astype(np.float64)
    fine = numbers[np.isfinite(numbers)]
    low, high = (float(fine.min()), float(fine.max())) if fine.size else (0.0, 1.0)
    scaled = (np.nan_to_num(numbers, nan=low, posinf=high, neginf=low) - low) * (255 / ((high - low) or 1.0))
    return np.rint(scaled).astype(np.uint8)


def encode(pixels: Array) -> bytes:
    """PNG of bytes `[H, W]` (grey) or `[H, W, 3]` (colour)."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.zeros((height, 1 + pixels[0].size), np.uint8)  # before each row its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def film_strip(values: Array, height: int = 72) -> bytes:
    """Some samples `[n, ...]` of a picture leaf side by side as one PNG, each about `height` pixels high."""
    frames = [_shrunk(as_pixels(value), height) for value in values]
    gap = np.full_like(frames[0][:, :2], 128)
    parts = [part for frame in frames for part in (frame, gap)][:-1]
    return encode(np.concatenate(parts, axis=1))


def _shrunk(pixels: Array, height: int) -> Array:
    step = max(1, pixels.shape[0] // height)
    return pixels[::step, ::step]

"""crc32c against published values, bit by bit in Python, and its implementations against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.make import byte_codec, random_blocks

from recollect._core import crc32c, crc32c_narrow, crc32c_portable, pack_fields

data = st.binary(max_size=300)


def bitwise(payload: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in payload:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("payload", "crc"),
    [
        (b"", 0),
        (b"a", 0xC1D04330),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next three: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_values(payload: bytes, crc: int) -> None:
    assert crc32c(payload) == crc32c_portable(payload) == crc


@given(data)
def test_both_implementations_are_the_definition(payload: bytes) -> None:
    assert crc32c(payload) == crc32c_portable(payload) == bitwise(payload)


@given(data, data)
def test_a_seed_continues(head: bytes, tail: bytes) -> None:
    assert crc32c(tail, crc32c(head)) == crc32c(head + tail)


@given(data, st.integers(0, 7))
def test_any_start_and_any_buffer(payload: bytes, skip: int) -> None:
    array = np.frombuffer(bytes(skip) + payload, np.uint8)[skip:]
    assert crc32c(array) == crc32c(memoryview(array)) == crc32c(bytearray(payload)) == crc32c(payload)


def test_large_buffers_and_wrong_ones() -> None:
    payload = np.random.default_rng(0).bytes(100_003)
    assert crc32c(payload) == crc32c_portable(payload)
    with pytest.raises((BufferError, ValueError)):
        crc32c(np.zeros(8, np.uint8)[::2])
    with pytest.raises(TypeError):
        crc32c("text")


def test_every_length_and_alignment_around_the_pieces() -> None:
    """Three pieces of 128 or 4,096 bytes side by side, wide chunks of 8,064, and what is left, at any address."""
    payload = np.random.default_rng(1).integers(0, 256, 40_000, np.uint8)
    joints = [128 * 3, 4096 * 3, 4096 * 3 + 128 * 3, 4096 * 6, 8064, 8064 * 2, 8064 + 384]
    lengths = [*range(800), *(n + d for n in joints for d in range(-17, 18))]
    for length in lengths:
        skip = length % 67
        piece = payload[skip : skip + length]
        plain = piece.tobytes()
        assert crc32c(piece) == crc32c_portable(plain) == crc32c_narrow(plain), (length, skip)


@given(st.integers(0, 30_000), st.integers(0, 30_000), st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_long_buffers_go_on_from_any_seed(n: int, cut: int, skip: int, seed: int) -> None:
    payload = np.random.default_rng(n).integers(0, 256, skip + n, np.uint8)[skip:]
    cut = min(cut, n)
    assert crc32c(payload[cut:], crc32c(payload[:cut], seed)) == crc32c(payload, seed)
    assert crc32c(payload) == crc32c_portable(payload.tobytes())


@pytest.mark.parametrize("n", [2 << 20, (2 << 20) + 1, 5_000_003, 9 << 20])
def test_what_is_summed_on_several_threads_is_the_sum_of_one(n: int) -> None:
    payload = np.random.default_rng(n).integers(0, 256, n, np.uint8)
    whole = 0
    for at in range(0, n, 1 << 19):
        whole = crc32c(payload[at : at + (1 << 19)], whole)
    assert crc32c(payload) == whole
    assert crc32c(payload, 7) != whole
    head = crc32c(payload[:1000])
    assert crc32c(payload[1000:], head) == whole


def test_packed_rows_have_the_sum_of_their_bytes_however_many_there_are() -> None:
    sizes = [40, 3, 17]
    codec = byte_codec(sizes)
    for n in (1, 1000, 100_003):
        blocks = random_blocks(sizes, n, n)
        rows, crc = pack_fields(codec, blocks, n)
        assert crc == crc32c(rows)
        packed = np.concatenate([*blocks, np.zeros((n, 4), np.uint8)], axis=1)
        np.testing.assert_array_equal(rows, packed)

"""Frames: what is encoded comes back, and nothing else gets through."""

from __future__ import annotations

import random
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect import _core
from recollect.errors import FrameError
from recollect.remote import frame as wire
from recollect.remote import messages
from recollect.remote.frame import Shapes, cut_items, decode, encode, joined
from recollect.remote.messages import Data, Failed, GetMetadata, Hello, Items, Metadata, Scores

ID = bytes(range(16))
TRAJECTORY = Shapes(24, 16, True)


def data_frame(n: int = 3, lengths: list[int] | None = None) -> tuple[Data, list[np.ndarray]]:
    numbers = np.array(lengths or [2, 1, 4][:n], np.int32)
    rows = np.arange(int(numbers.sum()) * 24, dtype=np.uint8).reshape(-1, 24)
    fields = np.arange(n * 16, dtype=np.uint8).reshape(n, 16)
    return Data(7, ID, 1, ID, n, len(rows), False), [rows, numbers, fields]


def test_a_container_comes_back() -> None:
    message, blocks = data_frame()
    frame = joined(encode(message, blocks, tag=1))
    got, tag, body = decode(frame)
    assert (got, tag) == (message, 1)
    for mine, theirs in zip(blocks, cut_items(got, body, TRAJECTORY)):
        assert np.array_equal(mine, theirs)


def test_blocks_are_aligned() -> None:
    message, blocks = data_frame()
    frame = joined(encode(message, blocks))
    assert frame.find(blocks[1].tobytes()) % 64 == 0
    assert frame.find(blocks[2].tobytes()) % 64 == 0


def test_a_frame_byte_by_byte() -> None:
    """Little-endian, on every machine."""
    block = np.arange(70, dtype=np.uint8)
    head = b"\x97\x06\x03\xc4\x10" + ID + b"\x01\x02\x00\x01"
    body = block.tobytes() + bytes(58) + b"end"
    prefix = (
        b"RECL" + b"\x01\x00" + b"\x05\x00" + len(head).to_bytes(4, "little")
        + _core.crc32c_portable(head).to_bytes(4, "little") + len(body).to_bytes(8, "little")
        + _core.crc32c_portable(body).to_bytes(4, "little") + bytes(4)
    )  # fmt: skip
    frame = joined(encode(Items(3, ID, 1, 2, 0, 1), [block, np.frombuffer(b"end", np.uint8)], tag=5))
    assert len(prefix) == 32 and frame == (prefix + head).ljust(64, b"\0") + body


@pytest.mark.parametrize("n", [1, 16, 1000])
def test_a_container_costs_at_most_512_bytes_more(n: int) -> None:
    message, blocks = data_frame(n, [1] * n)
    assert len(joined(encode(message, blocks))) <= sum(block.nbytes for block in blocks) + 512


@given(
    st.sampled_from(
        [
            Scores(1, {"score": float("inf"), "baseline_log_reward": -1.0}, 3, 0, {"too_low": 2}),
            Failed(2, "ScoringError", "naïve", 1, 5),
            GetMetadata(3),
            Metadata(4, {"length": 1, "nested": {"a": [1, None, "x"]}}),
            Hello(5, "worker", ID, 0, "host", 12, 1, "{}"),
        ]
    )
)
def test_messages_come_back(message: msgspec.Struct) -> None:
    got, _, body = decode(joined(encode(message)))
    assert got == message
    assert not body.nbytes


def test_sizes_are_checked_before_memory_is_taken() -> None:
    """A head that promises 2**60 rows is refused by arithmetic, not by the allocator."""
    for n, n_rows in [(2**60, 2**60), (2**40, 1), (1, 2**60)]:
        message = Data(1, ID, 1, ID, n, n_rows, False)
        got, _, body = decode(joined(encode(message, [np.zeros(64, np.uint8)])))
        with pytest.raises(FrameError):
            cut_items(got, body, TRAJECTORY)
        with pytest.raises(FrameError):
            cut_items(got, body, Shapes(8))


def test_blocks_fill_the_body_and_rows_are_as_many_as_items() -> None:
    message, blocks = data_frame()
    assert not refused(joined(encode(message, blocks)))
    assert refused(joined(encode(message, [*blocks, np.zeros(8, np.uint8)])))
    assert refused(joined(encode(message, blocks[:2])))
    for n_rows, is_refused in ((2, False), (3, True), (1, True)):
        frame = joined(encode(Data(1, ID, 1, ID, 2, n_rows, False), [np.zeros((2, 8), np.uint8)]))
        assert refused(frame, Shapes(8)) == is_refused


def test_items_of_no_bytes_are_bounded_too() -> None:
    """Of trajectories without fields nothing travels to be scored: no size tells how many there can be."""
    bare = Shapes(24, 0, True)
    for n, is_refused in ((1 << 16, False), ((1 << 16) + 1, True), (2**60, True)):
        frame = joined(encode(Data(1, ID, 1, ID, n, 0, True)))
        assert refused(frame, bare) == is_refused
    n = (1 << 16) + 1  # of those with fields the bytes tell
    got, _, body = decode(joined(encode(Data(1, ID, 1, ID, n, 0, True), [np.zeros((n, 4), np.uint8)])))
    assert cut_items(got, body, Shapes(24, 4, True))[2].shape == (n, 4)


def test_no_items_are_a_container_too() -> None:
    got, _, body = decode(joined(encode(Items(1, ID, 0, 0, 0, 1))))
    rows, lengths, fields = cut_items(got, body, TRAJECTORY)
    assert (rows.shape, lengths.shape, fields.shape) == ((0, 24), (0,), (0, 16))


def test_lengths_are_aligned_wherever_a_frame_lies() -> None:
    message, blocks = data_frame()
    frame = joined(encode(message, blocks))
    for shift in range(4):
        got, _, body = decode(memoryview(bytearray(shift) + frame)[shift:])
        _, lengths, _ = cut_items(got, body, TRAJECTORY)
        assert lengths.flags.aligned and lengths.tolist() == [2, 1, 4]


@pytest.mark.parametrize("lengths", [[0, 3], [-1, 4], [1, 1], [2, 2], [2**31 - 1, 2]])
def test_lengths_must_add_up(lengths: list[int]) -> None:
    rows, fields = np.zeros((3, 24), np.uint8), np.zeros((2, 16), np.uint8)
    message = Data(1, ID, 1, ID, 2, 3, False)
    got, _, body = decode(joined(encode(message, [rows, np.array(lengths, np.int32), fields])))
    with pytest.raises(FrameError, match="lengths"):
        cut_items(got, body, TRAJECTORY)


def test_too_large_a_container_names_both_sizes() -> None:
    message, blocks = data_frame(3)
    with pytest.raises(FrameError, match=r"4096 bytes, got \d+"):
        encode(message, [np.zeros(5000, np.uint8)], max_frame=4096)
    with pytest.raises(FrameError, match="4096"):
        decode(bytes(5000), max_frame=4096)
    assert joined(encode(message, blocks, max_frame=4096))


def test_a_frame_may_have_the_greatest_size_and_no_byte_more() -> None:
    message = Data(1, ID, 1, ID, 1, 1, False)
    most = len(joined(encode(message, [np.zeros(4096, np.uint8)])))
    assert len(joined(encode(message, [np.zeros(4096, np.uint8)], max_frame=most))) == most
    with pytest.raises(FrameError, match=f"{most - 1} bytes, got {most}"):
        encode(message, [np.zeros(4096, np.uint8)], max_frame=most - 1)
    with pytest.raises(FrameError):
        encode(Metadata(1, {"x": "y" * wire.MAX_HEAD}))  # no peer would read such a head
    assert [wire.check_max_frame(n) for n in (4096, 1 << 30)] == [4096, 1 << 30]
    for n in (4095, (1 << 30) + 1):
        with pytest.raises(ValueError, match="max_frame"):
            wire.check_max_frame(n)


def refused(frame: bytes, shapes: Shapes = TRAJECTORY) -> bool:
    """Whether a frame is refused by FrameError; any other error goes through."""
    try:
        message, _, body = decode(frame, max_frame=1 << 16)
        if isinstance(message, Data | Items):
            cut_items(message, body, shapes)
        if isinstance(message, messages.Sync):
            wire.cut_values(message, body)
    except FrameError:
        return True
    return False


@pytest.mark.parametrize("n", [10_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_wrong_frames_are_refused(n: int) -> None:
    """Random bytes, random bytes behind a good prefix, cut and lengthened frames, single bits turned."""
    rng = random.Random(0)
    good = joined(encode(*data_frame()))
    for i in range(n):
        kind = i % 4
        if kind == 0:
            frame = rng.randbytes(rng.randrange(200))
        elif kind == 1:
            body = rng.randbytes(rng.randrange(120))
            n_head = rng.randrange(len(body) + 1)
            from recollect import _core

            head = body[:n_head]
            prefix = wire.PREFIX.pack(wire.MAGIC, 1, 0, n_head, _core.crc32c(head), 0, 0, 0)
            frame = prefix + head
        elif kind == 2:
            at = rng.randrange(len(good))
            frame = good[:at] if i % 8 < 4 else good + rng.randbytes(1 + at)
        else:
            at = rng.randrange(len(good))
            frame = good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :]
            # The padding between head and body is the only part that no checksum covers.
            n_head = struct.unpack_from("<I", good, 8)[0]
            if 32 + n_head <= at < -(-(32 + n_head) // 64) * 64:
                continue
            if at in (6, 7):  # the tag is the carrier's affair
                continue
        assert refused(frame), (kind, frame)


def test_no_frame_makes_anything_but_messages_and_plain_values() -> None:
    """A pickle in every place where bytes or strings may stand stays bytes and strings."""
    evil = b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"
    frame = joined(encode(Metadata(1, {"x": evil.decode("latin1"), "y": evil})))
    got, _, _ = decode(frame)
    assert got.values == {"x": evil.decode("latin1"), "y": evil}
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises((FrameError, RecursionError)):
        decode(joined(encode(Metadata(1, {"x": deep}))))


def test_a_deep_head_is_a_frame_error() -> None:
    from recollect import _core

    head = b"\x93\x08\x01\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    prefix = wire.PREFIX.pack(wire.MAGIC, 1, 0, len(head), _core.crc32c(head), 0, 0, 0)
    with pytest.raises(FrameError):
        decode(prefix + head)


@pytest.mark.parametrize(
    "head",
    [
        b"\x93\x07\x01\x02",  # GetMetadata with one field too many
        b"\x92\x07\xff",  # a request of -1
        b"\x92\x63\x01",  # no such message
        b"\x94\x05\x01\x01\xa4luck",  # Sample without `replace`
        b"\x95\x05\x01\x01\xa4luck\xc3",  # drawn by luck
        b"\x95\x09\x01\xc4\x0fxxxxxxxxxxxxxxx\x00\xa0",  # Exit of a writer of 15 bytes
        msgspec.msgpack.encode([1, 1, "king", ID, 0, "host", 0, 1, ""]),
        msgspec.msgpack.encode([3, 1, ID, 0, ID, 1, 1, False]),  # numbers begin at 1
        msgspec.msgpack.encode([7, 2**62 + 1]),  # beyond any count
        msgspec.msgpack.encode([3, 1, ID, 2**62 + 1, ID, 1, 1, False]),
        msgspec.msgpack.encode([9, 1, ID + b"x", 0, ""]),  # a writer of 17 bytes
        msgspec.msgpack.encode([12, 1, "x" * 256, ""]),  # too long a name
        msgspec.msgpack.encode([9, 1, ID, 0, "x" * 65_537]),  # too long a reason
        msgspec.msgpack.encode([1, 1, "worker", ID, 0, "host", 0, 1, "x" * ((4 << 20) + 1)]),  # and space
        msgspec.msgpack.encode([1, 1, "worker", ID, -1, "host", 0, 1, ""]),  # no such rank
        msgspec.msgpack.encode([1, 1, "worker", ID, 2**31, "host", 0, 1, ""]),
        msgspec.msgpack.encode([6, 1, ID, 0, 0, 0, 0]),  # part 0 of none
        msgspec.msgpack.encode([11, 0, 1, "guess", None, 0, False, None, 0]),
        b"\x95\x09\x01\xc4\x10" + ID + b"\x00\xa2\xff\xfe",  # a reason that is no UTF-8
        b"\x93\x08\x01\x81\xa1x\xd4\x05\x00",  # Metadata with a type of its own
        b"\x93\x08\x01\x81\xa1x\x91\xd6\xff\x00\x00\x00\x05",  # and with a time, deep inside
    ],
)
def test_fields_have_the_types_they_should(head: bytes) -> None:
    prefix = wire.PREFIX.pack(wire.MAGIC, messages.PROTOCOL, 0, len(head), _core.crc32c(head), 0, 0, 0)
    with pytest.raises(FrameError, match="head must be a message"):
        decode(prefix + head)


def test_only_some_messages_have_blocks() -> None:
    frame = joined(encode(GetMetadata(1), [np.zeros(3, np.uint8)]))
    with pytest.raises(FrameError, match="GetMetadata has no blocks, got 3"):
        decode(frame)


def test_what_is_to_be_scored_only_has_no_steps() -> None:
    fields = np.zeros((2, 16), np.uint8)
    for n_rows, is_refused in ((0, False), (2, True)):
        frame = joined(encode(Data(1, ID, 1, ID, 2, n_rows, True), [fields]))
        assert refused(frame) == is_refused


def test_a_head_beyond_reason_is_refused_before_it_is_read() -> None:
    head = bytes(wire.MAX_HEAD + 1)
    prefix = wire.PREFIX.pack(wire.MAGIC, messages.PROTOCOL, 0, len(head), _core.crc32c(head), 0, 0, 0)
    with pytest.raises(FrameError, match="head and body must fill"):
        decode(prefix + head)

"""Every space of the catalogue goes through every storage, and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.replay.make import KINDS, ROW_KINDS, create

from recollect.backends import map_arrays
from recollect.errors import SchemaError
from recollect.replay import ReplayBuffer
from recollect.spaces.tree import make_dict
from recollect.testing import CATALOGUE, assert_same, max_lengths_of, samples
from recollect.testing.spaces import stack


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_space_round_trips(name: str, tmp_path: Path) -> None:
    space, lengths = CATALOGUE[name], max_lengths_of(name)
    items = samples(space, 7)
    for kind in KINDS if not lengths else ROW_KINDS:
        kwargs: dict[str, Any] = {"max_lengths": lengths} if kind in ROW_KINDS else {}
        with create(kind, space, directory=tmp_path, capacity=5, **kwargs) as buffer:
            for item in items[:2]:
                buffer.append(item)
            buffer.extend(stack(space, items[2:6]))
            buffer.set_at(0, items[6])
            check(buffer, [items[6], *items[2:6]])
            buffer.remove_at(1)
            kept = [items[6], *items[3:6]]
            check(buffer, kept)
            buffer.dumps(tmp_path / f"dump-{kind}")
        with ReplayBuffer.load_from(tmp_path / f"dump-{kind}") as loaded:
            assert loaded.single_space == space
            check(loaded, kept)


def check(buffer: ReplayBuffer, expected: list[Any]) -> None:
    space = buffer.single_space
    expected = map_arrays(
        native, expected
    )  # big-endian numbers are kept and read back in the machine's order
    assert len(buffer) == len(expected)
    for i, item in enumerate(expected):
        assert_same(buffer[i], item)
    assert_same(buffer[:], stack(space, expected))
    assert_same(buffer[[]], map_arrays(native, stack(space, [])))
    backwards = [expected[i] for i in (-1, 0, -1)]
    assert_same(buffer[[-1, 0, -1]], stack(space, backwards))
    for got, item in zip(buffer, expected, strict=True):
        assert_same(got, item)


def native(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("=")) if isinstance(array, np.ndarray) else array


WORDS = make_dict(
    [
        ("prompt", spaces.Text(10, min_length=0, charset="abcé漢😀 ")),
        ("tokens", spaces.Sequence(spaces.Discrete(100))),
        ("frames", spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True)),
        ("score", spaces.Box(-np.inf, np.inf, (), np.float32)),
    ]
)
LENGTHS = {"tokens": 6, "frames": 3}


def words(i: int) -> dict[str, Any]:
    return {
        "prompt": "é漢😀"[: i % 4] + "ab" * (i % 3),
        "tokens": tuple(np.int64(t) for t in range(i % 7)),
        "frames": np.full((i % 4, 2), i / 100, np.float32),
        "score": np.array(i, np.float32),
    }


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_text_and_sequences_end_to_end(kind: str, tmp_path: Path) -> None:
    space = WORDS
    kept: dict[str, Any] = {"max_lengths": LENGTHS, "maintain_segment_metadata": True}
    with create(kind, space, directory=tmp_path, capacity=6, **kept) as buffer:
        for i in range(3):
            buffer.append(words(i))
        buffer.mark_segment_end()
        buffer.extend(
            stack(space, [words(i) for i in range(3, 9)]), ends=[False, True, False, False, True, True]
        )
        expected = [words(i) for i in range(3, 9)]
        check(buffer, expected)
        assert buffer.get_segments() == [(0, 2), (2, 5), (5, 6)]
        assert buffer.get_column("prompt")[[0, 2]] == (words(3)["prompt"], words(5)["prompt"])
        assert buffer.get_column("tokens")[1] == words(4)["tokens"]
        with pytest.raises(TypeError, match="prompt|tokens|frames"):
            buffer.get_flattened_at(0)
        buffer.remove_at([0, 3])
        expected = [expected[i] for i in (1, 2, 4, 5)]
        check(buffer, expected)
        buffer.dumps(tmp_path / "dump")
        with create("memory", space, directory=tmp_path, capacity=None, max_lengths=LENGTHS) as copy:
            copy.extend_from(buffer, chunk_size=3)
            check(copy, expected)
    for other in ROW_KINDS:
        with ReplayBuffer.load_from(tmp_path / "dump", storage=other) as loaded:
            check(loaded, expected)
            assert loaded.get_segments() == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_too_long_text_and_sequences_are_refused() -> None:
    with create("memory", WORDS, directory="", capacity=4, max_lengths=LENGTHS) as buffer:
        buffer.append(words(6))
        wrong = [("prompt", "a" * 11), ("prompt", 3), ("tokens", (1,) * 7), ("tokens", (1, 2.5)),
                 ("frames", np.zeros((4, 2), np.float32)), ("frames", np.zeros((1, 3), np.float32))]  # fmt: skip
        for leaf, value in wrong:
            with pytest.raises(SchemaError, match=leaf):
                buffer.append({**words(1), leaf: value})
        batch = stack(WORDS, [words(1), words(2)])
        with pytest.raises(SchemaError, match="prompt"):
            buffer.extend({**batch, "prompt": ("a", "b" * 11)})
        with pytest.raises(SchemaError, match="prompt"):
            buffer.extend({**batch, "prompt": ("a",)})
        check(buffer, [words(6)])
        assert buffer.stats().rejected == len(wrong) + 2 + 1


def test_a_sequence_needs_its_greatest_length() -> None:
    with pytest.raises(ValueError, match="frames|tokens.*max_lengths"):
        create("memory", WORDS, directory="")

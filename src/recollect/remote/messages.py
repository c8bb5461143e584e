"""The messages between workers and managers: one schema on every carrier.

Each is a msgspec struct; behind Data, Items and Sync lie raw blocks whose sizes follow from the numbers in the
struct. Decoding makes these structs, numbers, strings and byte blocks, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from recollect.text import safe

DATA_TAG = 0
"""Carries everything but the answers to GetMetadata."""
METADATA_TAG = 1
"""Carries the answers to GetMetadata, so that they neither wait for scores nor are taken for them."""
PROTOCOL = 1

Count = Annotated[int, Meta(ge=0, le=2**62)]
Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=255)]
Note = Annotated[str, Meta(max_length=65_536)]
SpaceText = Annotated[str, Meta(max_length=4 << 20)]
Counts = dict[Name, Count]
_NOTE_CHARS = 60_000


def note(text: str) -> str:
    """Return as much of a text as a Note holds: cut once it is safe, for an escape is longer."""
    return safe(text)[:_NOTE_CHARS]


class NumberedMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What all messages have: the request that asks, or that is answered."""

    request: Count


class Hello(NumberedMessage, tag=1):
    """A peer introduces itself, with its space of an item (empty: it takes the manager's)."""

    role: Literal["worker", "manager", "reader"]
    writer: Id
    rank: Annotated[int, Meta(ge=0, lt=2**31)]
    host: Name
    process: Count  # pid and start time in one word, as the core has it
    protocol: Count
    space: SpaceText


class Welcome(NumberedMessage, tag=2):
    """The manager's answer to Hello."""

    incarnation: Id
    last_seq: Count
    max_window: Count
    baseline: float | None
    space: SpaceText
    max_length: Count  # 0: items are no trajectories
    host: Name
    process: Count


class Data(NumberedMessage, tag=3):
    """One container. Blocks: rows; of trajectories also lengths (int32) and rows of fields."""

    writer: Id
    seq: Annotated[int, Meta(ge=1, le=2**62)]
    layout: Id
    n: Count
    n_rows: Count
    scoring_only: bool


class Scores(NumberedMessage, tag=4):
    """The answer to Data."""

    scores: dict[Name, float]
    kept: Count
    passed: Count
    rejected: Counts


class Sample(NumberedMessage, tag=5):
    """Asks for a draw of items."""

    n: Count
    by: Literal["uniform", "log_reward"]
    replace: bool


class Items(NumberedMessage, tag=6):
    """Drawn items, part `part` of `n_parts`. Blocks as in Data."""

    layout: Id
    n: Count
    n_rows: Count
    part: Count
    n_parts: Annotated[int, Meta(ge=1, le=2**20)]


class GetMetadata(NumberedMessage, tag=7):
    """Asks a manager for its metadata."""


class Metadata(NumberedMessage, tag=8):
    """The answer to GetMetadata, on METADATA_TAG."""

    values: dict[Name, Any]


class Exit(NumberedMessage, tag=9):
    """A client leaves; so many of its items could not be delivered."""

    writer: Id
    undelivered: Count
    reason: Note


class Goodbye(NumberedMessage, tag=10):
    """The answer to Exit."""


class Sync(NumberedMessage, tag=11):
    """Between managers: a summary (block: finite log rewards, float64), or the agreed baseline of an epoch."""

    epoch: Count
    kind: Literal["summary", "agreed"]
    value: float | None
    n: Count
    is_full: bool
    ema: float | None
    containers: Count


class Failed(NumberedMessage, tag=12):
    """Stands for any answer: what went wrong. After a gap, `expected` is the seq to send again from."""

    error: Name
    text: Note
    kept: Count = 0
    expected: Count = 0


AnyMessage = (
    Hello | Welcome | Data | Scores | Sample | Items | GetMetadata | Metadata | Exit | Goodbye | Sync | Failed
)

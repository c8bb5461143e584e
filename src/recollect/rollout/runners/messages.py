"""What the coordinator and a runner elsewhere say to each other: msgspec structs, no code, no pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from recollect.rollout.models.base import WireGeneration
from recollect.rollout.models.openai import OpenAIHandle
from recollect.rollout.tasks import AttemptSpec, RunOutcome
from recollect.text import encoded


class RunnerMessage(msgspec.Struct, array_like=True, tag=True):
    """One message."""


class Setup(RunnerMessage):
    """The first message to a runner. A model without a handle is None: calls to it travel back."""

    layout: dict[str, Any]
    modules: list[str]
    rollout: list[OpenAIHandle | None]
    auxiliary: list[list[OpenAIHandle | None]]
    names: list[str]
    rest_s: float


class Start(RunnerMessage):
    """Begin an attempt."""

    spec: AttemptSpec


class Cancel(RunnerMessage):
    """Stop an attempt."""

    attempt_id: int


class Synced(RunnerMessage):
    """What the rollout models serve from now on."""

    versions: list[int]


class Answer(RunnerMessage):
    """What a model said."""

    call_id: int
    generations: list[WireGeneration] | None = None
    logprobs: bytes | None = None
    error: str | None = None


class Ready(RunnerMessage):
    """The runner takes attempts now."""


class Broken(RunnerMessage):
    """The runner cannot start."""

    why: str


class Ran(RunnerMessage):
    """A run ended; `last` says that its attempt did too."""

    attempt_id: int
    outcome: RunOutcome | None
    last: bool = False
    error: str = ""


class ModelCall(RunnerMessage, tag="Call"):
    """A model call that travels back; `role` -1 is the rollout model of the attempt."""

    call_id: int
    attempt_id: int
    role: int
    method: str
    args: bytes


class Uncall(RunnerMessage):
    """The attempt no longer waits for that call."""

    call_id: int


Down = Setup | Start | Cancel | Synced | Answer
Up = Ready | Broken | Ran | ModelCall | Uncall
_encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def encode(message: RunnerMessage) -> bytes:
    """Return a message as bytes, whatever its texts are."""
    return encoded(_encode, message)

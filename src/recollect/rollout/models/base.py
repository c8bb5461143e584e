"""The seam to models: what one must answer, and what an answer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from recollect.errors import SchemaError
from recollect.rollout.experience.experience import Experience

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]
MOST_WORDS = 4000  # characters of a prompt or an answer that an experience's info holds


told_of_tries: ContextVar[Callable[[str], None] | None] = ContextVar("told_of_tries", default=None)
"""What a model tells how the tries of a call go, so that `why_waiting` can say it."""


class Generation:
    """One answer of a model: its text and, where they are known, tokens and logprobs of prompt and response.

    >>> g = Generation("5", tokens=[50, 61, 53], prompt_length=2, logprobs=[-0.1])
    >>> g.experience(reward=1.0).reward
    1.0
    """

    __slots__ = (
        "finish_reason",
        "logprobs",
        "message",
        "prompt",
        "prompt_length",
        "text",
        "tokens",
        "version",
    )

    def __init__(
        self,
        text: str,
        *,
        tokens: Any = None,
        prompt_length: int = 0,
        logprobs: Any = None,
        finish_reason: str = "stop",
        version: int = 0,
        prompt: str = "",
        message: dict[str, Any] | None = None,
    ) -> None:
        self.message = message  # of a chat, as the server gave it: its `tool_calls`, say
        self.prompt = prompt  # in words, where they are known
        self.text, self.prompt_length, self.finish_reason, self.version = (
            text,
            prompt_length,
            finish_reason,
            version,
        )
        self.tokens = None if tokens is None else np.asarray(tokens, np.int32)
        self.logprobs = None if logprobs is None else np.asarray(logprobs, np.float32)

    def experience(self, reward: float = float("nan"), **leaves: Any) -> Experience:
        """Return a token-level experience of this answer; SchemaError if the server gave no tokens.

        The words of prompt and answer go along in `info`, for people; of long ones the beginning.
        """
        for name, known, way in (
            ("tokens", self.tokens, "give the model a tokenizer=, or ask the server to return them"),
            (
                "logprobs",
                self.logprobs,
                "ask the server to return them, or pass logprobs= of models.rollout.logprobs()",
            ),
        ):
            if known is None and leaves.get(name) is None:
                raise SchemaError(
                    f"{name}: must be known for token-level experience, got none from the model; {way}"
                )
        given: dict[str, Any] = {
            "tokens": self.tokens,
            "prompt_length": self.prompt_length,
            "logprobs": self.logprobs,
            "reward": reward,
            "truncated": self.finish_reason == "length",
            "model_version": self.version,
        }
        said = {name: text for name, text in (("prompt", self.prompt), ("answer", self.text)) if text}
        info = {name: _beginning(text) for name, text in said.items()} | dict(leaves.pop("info", None) or {})
        return Experience(info=info, **given | leaves)

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, finish_reason={self.finish_reason!r}, version={self.version})"


def _beginning(text: str) -> str:
    return text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 1] + "…"


def prompt_words(prompt: Any) -> str:
    """Return a prompt or messages in words; token ids have none.

    >>> prompt_words([{"role": "user", "content": "2+3?"}])
    'user: 2+3?'
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
        return ""
    return "\n".join(f"{message.get('role', '')}: {message.get('content') or ''}" for message in prompt)


@runtime_checkable
class InferenceModel(Protocol):
    """What a model must do; `recollect.testing.InferenceModelContract` is its suite."""

    @property
    def version(self) -> int: ...
    async def generate(self, prompt: Prompt, *, n: int = 1, **sampling: Any) -> list[Generation]: ...
    async def chat(self, messages: Messages, *, n: int = 1, **sampling: Any) -> list[Generation]: ...
    async def logprobs(self, tokens: Sequence[int], prompt_length: int = 0) -> Any: ...
    async def sync(self, version: int | None = None) -> int: ...
    async def close(self) -> None: ...


class WireGeneration(msgspec.Struct, array_like=True):
    """A generation between processes."""

    text: str
    tokens: bytes | None
    prompt_length: int
    logprobs: bytes | None
    finish_reason: str
    version: int
    message: dict[str, Any] | None = None


def to_wire(g: Generation) -> WireGeneration:
    """Return a generation as a message."""
    return WireGeneration(
        g.text,
        None if g.tokens is None else g.tokens.tobytes(),
        g.prompt_length,
        None if g.logprobs is None else g.logprobs.tobytes(),
        g.finish_reason,
        g.version,
        g.message,
    )


def from_wire(w: WireGeneration) -> Generation:
    """Return the generation of a message."""
    return Generation(
        w.text,
        tokens=None if w.tokens is None else np.frombuffer(w.tokens, np.int32),
        prompt_length=w.prompt_length,
        logprobs=None if w.logprobs is None else np.frombuffer(w.logprobs, np.float32),
        finish_reason=w.finish_reason,
        version=w.version,
        message=w.message,
    )

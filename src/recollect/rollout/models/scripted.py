"""ScriptedModel: a model for tests that says what it is told to, slowly or not at all if so told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recollect.rollout.models.base import Generation


class ScriptedModel:
    """Answers from a list (in a cycle), a mapping from prompt to text, or a function of the prompt.

    Tokens are UTF-8 bytes, logprobs -1 each. `failures` maps the number of a call (from 0) to `"hang"` or an
    exception. A hanging call answers only when it is cancelled.

    >>> import asyncio
    >>> [g] = asyncio.run(ScriptedModel(["5", "6"]).generate("2+3="))
    >>> g.text, g.prompt_length, len(g.tokens)
    ('5', 4, 5)
    """

    def __init__(
        self,
        script: Sequence[str] | Mapping[str, str] | Callable[[str], str],
        *,
        latency_s: float = 0.0,
        failures: Mapping[int, Any] | None = None,
        version: int = 0,
    ) -> None:
        self.script, self.latency_s = script, latency_s
        self.failures = dict(failures or {})
        self.version = version
        self.n_calls = self.n_answers = 0
        self.closed = False

    async def generate(self, prompt: Any, *, n: int = 1, **sampling: Any) -> list[Generation]:
        """Answer `n` times."""
        await self._call()
        text = prompt if isinstance(prompt, str) else bytes(prompt).decode(errors="replace")
        return [self._answer(text) for _ in range(n)]

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, n: int = 1, **sampling: Any
    ) -> list[Generation]:
        """Answer the last message."""
        return await self.generate(str(messages[-1]["content"]), n=n, **sampling)

    async def logprobs(self, tokens: Sequence[int], prompt_length: int = 0) -> Any:
        """Return -1 for each token after the prompt."""
        await self._call()
        return np.full(len(tokens) - prompt_length, -1.0, np.float32)

    async def sync(self, version: int | None = None) -> int:
        """Take over the version."""
        self.version = self.version + 1 if version is None else version
        return self.version

    async def close(self) -> None:
        """Nothing is open."""
        self.closed = True

    async def _call(self) -> None:
        number = self.n_calls
        self.n_calls += 1
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        failure = self.failures.get(number)
        if failure == "hang":
            await asyncio.get_running_loop().create_future()
        if failure is not None:
            raise failure

    def _answer(self, prompt: str) -> Generation:
        if callable(self.script):
            text = self.script(prompt)
        elif isinstance(self.script, Mapping):
            text = self.script[prompt]
        else:
            text = self.script[self.n_answers % len(self.script)]
        self.n_answers += 1
        before, after = prompt.encode(), text.encode()
        return Generation(
            text, tokens=np.frombuffer(before + after, np.uint8), prompt_length=len(before),
            logprobs=np.full(len(after), -1.0), version=self.version,
        )  # fmt: skip

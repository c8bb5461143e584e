"""The public suite of models: what `InferenceModel` promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

import recollect.rollout as rr


class InferenceModelContract:
    """Subclass it and give `serving()`, an async context manager of a model that answers."""

    chats = True
    prompt: Any = "abc"

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """A model for one test."""
        raise NotImplementedError

    def with_model(self, work: Callable[[Any], Any]) -> None:
        async def main() -> None:
            async with asyncio.timeout(30), self.serving() as model:
                await work(model)
                await model.close()

        asyncio.run(main())

    def test_it_is_a_model(self) -> None:
        async def work(model: Any) -> None:
            assert isinstance(model, rr.InferenceModel)
            assert type(model.version) is int

        self.with_model(work)

    def test_n_answers_of_which_each_makes_an_experience(self) -> None:
        async def work(model: Any) -> None:
            answers = await model.generate(self.prompt, n=3)
            assert len(answers) == 3
            for g in answers:
                assert g.version == model.version and type(g.text) is str
                row = g.experience(reward=0.5)
                assert len(row.logprobs) == len(row.tokens) - row.prompt_length
                assert len(rr.decode(rr.encode([row]))) == 1

        self.with_model(work)

    def test_chat(self) -> None:
        async def work(model: Any) -> None:
            if self.chats:
                [g] = await model.chat([{"role": "user", "content": "hello"}])
                assert isinstance(g.text, str)

        self.with_model(work)

    def test_logprobs_are_one_per_token_after_the_prompt(self) -> None:
        async def work(model: Any) -> None:
            found = await model.logprobs([1, 2, 3, 4, 5], 2)
            assert np.shape(found) == (3,) and np.isfinite(found).all()

        self.with_model(work)

    def test_sync_gives_the_version_served(self) -> None:
        async def work(model: Any) -> None:
            assert await model.sync(5) == 5 == model.version

        self.with_model(work)

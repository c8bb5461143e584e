"""flashbax: JAX arrays, pure functions, compiled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flashbax import make_item_buffer, make_prioritised_item_buffer

from adapters import Turn, turn_of, turn_over
from prioritized import ALPHA, first_priorities, new_priorities
from works import Block, Work, pool, random_block


class Flashbax:
    # Best usage: an item buffer (a flat one draws no faster), functions compiled, the state donated to `add`
    # so that it is changed in place, the key split inside the compiled draw.
    state: Any

    def create(self, work: Work) -> None:
        self.prioritised = work.kind == "prioritized"
        self.buffer = self.buffer_for(work.rows, work.batch)
        example = {name: jnp.asarray(array[0]) for name, array in random_block(work, 1).items()}
        self.rows = work.rows
        self.state = self.buffer.init(example)
        self.key = jax.random.PRNGKey(0)

    def buffer_for(self, rows: int, batch: int) -> Any:
        if self.prioritised:
            return make_prioritised_item_buffer(rows, 1, batch, add_batches=True, priority_exponent=ALPHA)
        return make_item_buffer(rows, 1, batch, add_batches=True)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        add = jax.jit(self.buffer.add, donate_argnums=0)
        for _, block in blocks:
            # Blocks are reused by their maker and JAX may alias them: wait until each is in.
            self.state = jax.block_until_ready(add(self.state, block))

    def look(self, n: int) -> Block:
        batch = self.buffer_for(self.rows, n).sample(self.state, self.key).experience
        return {name: np.asarray(array) for name, array in batch.items()}

    def one_draw(self, state: Any, key: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(key)
        return key, self.buffer.sample(state, now).experience

    def draw(self, work: Work) -> Turn:
        compiled = jax.jit(self.one_draw)

        def call() -> None:
            self.key, batch = compiled(self.state, self.key)
            jax.block_until_ready(batch)

        return turn_of(call)

    def add(self, work: Work) -> Turn:
        # Best usage: device arrays made beforehand; calls may overlap, only the turn's end waits for them.
        add = jax.jit(self.buffer.add, donate_argnums=0)
        items = [{name: jnp.array(array) for name, array in block.items()} for block in pool(work)]

        def turn(calls: int) -> float:
            start = time.perf_counter()
            for k in range(calls):
                self.state = add(self.state, items[k % len(items)])
            jax.block_until_ready(self.state)
            return time.perf_counter() - start

        return turn

    def prioritized(self, work: Work) -> Turn:
        # Best usage: draw and update in one compiled call with the state donated, so that the tree is changed in place.
        buffer = self.buffer
        every = jnp.arange(work.rows)
        first = jnp.asarray(first_priorities(work.rows), jnp.float32)
        self.state = jax.jit(buffer.set_priorities, donate_argnums=0)(self.state, every, first)

        def step(state: Any, key: Any, values: Any) -> tuple[Any, Any, Any]:
            key, now = jax.random.split(key)
            batch = buffer.sample(state, now)
            return buffer.set_priorities(state, batch.indices, values), key, batch

        compiled = jax.jit(step, donate_argnums=0)

        def call(values: Any) -> None:
            self.state, self.key, batch = compiled(self.state, self.key, values)
            jax.block_until_ready(batch)

        return turn_over(call, [(jnp.asarray(array, jnp.float32),) for array in new_priorities(work.batch)])


class FlashbaxScan(Flashbax):
    # A note, not a peer: 16 draws inside one compiled scan, as in a training loop that is JAX throughout. No
    # batch reaches the caller before all 16 are made: a larger draw shared out, not the same work.
    DRAWS = 16

    def draw(self, work: Work) -> Turn:
        def many(state: Any, key: Any) -> tuple[Any, Any]:
            return jax.lax.scan(lambda k, _: self.one_draw(state, k), key, None, length=self.DRAWS)

        compiled = jax.jit(many)

        def call() -> None:
            self.key, batches = compiled(self.state, self.key)
            jax.block_until_ready(batches)

        turn = turn_of(call)

        def shared(calls: int) -> float:
            n_scans = -(-calls // self.DRAWS)
            return turn(n_scans) * calls / (n_scans * self.DRAWS)

        return shared

    add = None  # type: ignore[assignment]  # the same as flashbax's own
    prioritized = None  # type: ignore[assignment]

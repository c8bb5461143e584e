"""Other replay buffers, made to do the works of `recollect bench`, each in the way that is fastest for it.

A peer is a function of the rows that its buffer shall hold, of blocks to add and of numbers to draw; it returns a call
for each. Transitions are `obs action reward next_obs done`; what goes in is made beforehand in the peer's own types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

Block = dict[str, Any]
Calls = dict[int, Callable[[], Any]]  # by how many samples a call adds or draws
Peer = Callable[[int, dict[int, Block], list[int]], tuple[Calls, Calls]]
_PART = 4096


def stable_baselines3(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    def make(n_envs: int) -> Any:  # several rows go in as one step of as many environments
        box = [spaces.Box(-np.inf, np.inf, blocks[1][name].shape[1:]) for name in ("obs", "action")]
        made = ReplayBuffer(rows, *box, device="cpu", n_envs=n_envs, handle_timeout_termination=False)
        made.timeouts[:] = 0
        for column in (made.observations, made.next_observations, made.actions, made.rewards, made.dones):
            column[:] = 1  # real memory, not the kernel's page of zeros
        made.full = True
        return made

    def adder(n: int) -> Callable[[], Any]:
        infos: list[Any] = [{} for _ in range(n)]
        return partial(make(n).add, *(blocks[n][name] for name in order), infos)

    order = ("obs", "next_obs", "action", "reward", "done")
    filled = make(1)
    return {n: adder(n) for n in blocks}, {n: partial(filled.sample, n) for n in draws}


def cpprb(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    from cpprb import ReplayBuffer

    env = {name: {"shape": a.shape[1:] or 1, "dtype": a.dtype} for name, a in blocks[1].items()}
    made = ReplayBuffer(rows, env)
    for block in _parts(rows, blocks):
        made.add(**block)
    one = {name: array[0] for name, array in blocks[1].items()}
    adders: Calls = {n: partial(made.add, **(one if n == 1 else block)) for n, block in blocks.items()}
    return adders, {n: partial(made.sample, n) for n in draws}


def torchrl(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    torch.set_num_threads(1)  # several only wait for one another at works of this size

    def tensors(block: Block) -> Any:
        n = len(block["reward"])
        return TensorDict({k: torch.from_numpy(a.copy()) for k, a in block.items()}, batch_size=[n])

    made = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=max(draws))
    for block in _parts(rows, blocks):
        made.extend(tensors(block))
    given = {n: tensors(block) for n, block in blocks.items()}
    adders: Calls = {n: partial(made.extend, block) for n, block in given.items()}
    adders[1] = partial(made.add, given[1][0].clone())
    return adders, {n: partial(made.sample, n) for n in draws}


def tianshou(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    from tianshou.data import Batch, ReplayBuffer

    names = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next", "done": "terminated"}

    def columns(block: Block) -> Block:
        found = {names[name]: array for name, array in block.items()}
        return found | {"truncated": np.zeros_like(found["terminated"]), "done": found["terminated"].copy()}

    def make(block: Block) -> Any:
        made = ReplayBuffer(len(block["reward"]))
        made.set_batch(Batch(columns(block)))
        made._size = made.maxsize
        return made

    made = make({name: np.ones((rows, *array.shape[1:]), array.dtype) for name, array in blocks[1].items()})
    one = Batch({name: array[0] for name, array in columns(blocks[1]).items() if name != "done"})
    small = {n: make(block) for n, block in blocks.items() if n > 1}
    adders: Calls = {1: partial(made.add, one), **{n: partial(made.update, b) for n, b in small.items()}}
    return adders, {n: partial(made.sample, n) for n in draws}


def flashbax(rows: int, blocks: dict[int, Block], draws: list[int]) -> tuple[Calls, Calls]:
    import jax
    from flashbax import make_item_buffer

    buffers = {n: make_item_buffer(rows, 1, n, add_batches=True) for n in draws}
    some = next(iter(buffers.values()))
    held = [some.init({name: jax.numpy.asarray(array[0]) for name, array in blocks[1].items()})]
    add = jax.jit(some.add, donate_argnums=0)

    def put(block: Any) -> None:
        held[0] = jax.block_until_ready(add(held[0], block))

    def drawer(n: int) -> Callable[[], Any]:
        compiled = jax.jit(lambda state, key: buffers[n].sample(state, key).experience)
        keys = iter(jax.random.split(jax.random.PRNGKey(0), 1 << 16))
        return lambda: jax.block_until_ready(compiled(held[0], next(keys)))

    for block in _parts(rows, blocks):
        put(block)
    given = {n: {k: jax.numpy.asarray(a) for k, a in block.items()} for n, block in blocks.items()}
    return {n: partial(put, block) for n, block in given.items()}, {n: drawer(n) for n in draws}


PEERS: dict[str, tuple[str, Peer]] = {
    "Stable-Baselines3": ("stable_baselines3", stable_baselines3),
    "cpprb": ("cpprb", cpprb),
    "TorchRL": ("torchrl", torchrl),
    "Tianshou": ("tianshou", tianshou),
    "flashbax": ("flashbax", flashbax),
}


def installed() -> dict[str, Peer]:
    """The peers whose packages are there."""
    return {name: peer for name, (package, peer) in PEERS.items() if find_spec(package) is not None}


def _parts(rows: int, blocks: dict[int, Block]) -> Iterator[Block]:
    """Blocks that fill a buffer of so many rows."""
    block = blocks[max(blocks)]
    for first in range(0, rows, _PART):
        n = min(_PART, rows - first)
        yield {name: np.resize(array, (n, *array.shape[1:])) for name, array in block.items()}

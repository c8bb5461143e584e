"""What the works that rest on segments have in common: sequences, and frame stacks.

`batch` of a work counts rows, as everywhere: 64 sequences of 50 are 3,200, 256 stacks of 8 are 2,048.
"""

from __future__ import annotations

from works import MILLION, Block

LENGTH = 50
STACK = 8
EPISODE = 1_000
SMALL = MILLION


def with_ends(first: int, block: Block) -> Block:
    """The block with `done` at each episode's last row; `first` is its first row."""
    n = len(block["done"])
    block["done"][:] = False
    block["done"][(EPISODE - 1 - first) % EPISODE : n : EPISODE] = True
    return block

"""IndexStream: random indices as a function of (key, counter), the same in Python and in the native core.

Index number c of a stream with key k is x = mix(k + (c + 1) * GOLDEN), mapped to [0, bound) by the high half
of x * bound, with x mixed again while the low half falls among the 2**64 % bound values that would bias it. A
stream therefore has no state but a counter: to save it, to resume it and to draw from it natively is the same
two numbers.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from recollect import checks
from recollect._core import Stream, draw_indices

Ints = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(z: int) -> int:
    """Return the SplitMix64 finaliser of a 64-bit word."""
    z &= _WORD
    z = ((z ^ (z >> 30)) * _M1) & _WORD
    z = ((z ^ (z >> 27)) * _M2) & _WORD
    return z ^ (z >> 31)


class IndexStream(Stream):
    """A stream of uniform indices that is restarted, saved and resumed by two numbers, `key` and `counter`.

    Concurrency: one thread at a time.

    Example:
        >>> from recollect.sampling import IndexStream
        >>> stream = IndexStream(0)
        >>> first = stream.indices(100, 4)
        >>> IndexStream(0).indices(100, 4).tolist() == first.tolist(), stream.counter
        (True, 4)
    """

    def __init__(self, seed: int | None = None) -> None:
        """Start at counter 0; `seed=None` takes a fresh one from the system."""
        super().__init__()
        self.seed = secrets.randbits(63) if seed is None else checks.seed("seed", seed)
        self.key = mix(self.seed)
        self.counter = 0

    def indices(self, bound: int, n: int) -> Ints:
        """Return the next `n` indices in [0, bound), with replacement; each uses one count."""
        found: Ints = draw_indices(self.key, self.counter, bound, n)
        self.counter += n
        return found

    def uniform(self, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return `n` numbers, uniform in [0, 1); each uses one count."""
        return (self._words(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def permutation(self, n: int) -> Ints:
        """Return the numbers below `n` in a random order; uses `n` counts."""
        return np.argsort(self._words(n), kind="stable")

    def shuffle_parts(self, order: Ints, ends: list[int]) -> Ints:
        """Put each part of `order`, up to the next of `ends`, in a random order, in place; uses one count for each."""
        for start, end in zip([0, *ends], ends):  # a part at a time, which stays in the processor's cache
            order[start:end] = order[start:end][_ranked(self._words(end - start))]
        return order

    def choice(self, bound: int, n: int) -> Ints:
        """Return `n` different indices in [0, bound), in random order."""
        if 2 * n > bound:
            return self.permutation(bound)[:n]
        found = self.indices(bound, n)
        while True:
            _, first = np.unique(found, return_index=True)
            if len(first) == n:
                return found
            kept = found[np.sort(first)]
            found = np.concatenate([kept, self.indices(bound, n - len(kept))])

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers from which the stream goes on."""
        return {"seed": self.seed, "key": self.key, "counter": self.counter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        seed, key, counter = (checks.seed(name, state[name]) for name in ("seed", "key", "counter"))
        self.seed, self.key, self.counter = seed, key, counter

    @classmethod
    def restored(cls, state: dict[str, Any]) -> IndexStream:
        """A new stream that goes on where `state_dict` was called."""
        found = cls(0)
        found.load_state_dict(state)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.load_state_dict(state)

    def _words(self, n: int) -> Words:
        start = (self.key + (self.counter + 1) * _GOLDEN) & _WORD
        z = np.arange(n, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
        self.counter += n
        words: Words = z ^ (z >> np.uint64(31))
        return words


def _ranked(words: Words) -> Ints:
    """The places of words in ascending order, by their high bits: to sort words that carry their place is faster."""
    low = np.uint64((1 << max(1, len(words) - 1).bit_length()) - 1)
    tagged = (words & ~low) | np.arange(len(words), dtype=np.uint64)
    tagged.sort()
    return (tagged & low).view(np.int64)


def unit_floats(key: int, counter: int, n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers `counter` to `counter + n` of a stream as floats in [0, 1), as the native core makes them."""
    stream = IndexStream(0)
    stream.key, stream.counter = key, counter
    return (stream._words(n) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)

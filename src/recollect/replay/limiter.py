"""RateLimiter: how often each sample is drawn, held within a band by making the faster side wait.

Three words beside the rows hold the counts, so every process that has the buffer sees and moves the same ones, and in
a file they outlive all of them: samples drawn, rows that writers were let in for, and what to add to the rows that the
lanes themselves have counted to get all there ever were. A writer is let in for its rows before it writes; if it dies
in between, the lanes never count them, and whoever waits next takes them back. Nothing is locked: a process that is
killed or stopped anywhere holds up nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from time import monotonic
from typing import Any, Self

from recollect import _core, checks
from recollect.errors import AttachError, DeadlineError
from recollect.memory.segment import Closed
from recollect.memory.waiting import LOOK_S, Watch

_SAMPLES, _ADMITTED, _BEFORE, _CHANGES, _WAITERS, _READY = range(0, 48, 8)
_QUIET_S = 1.0  # how long nothing may change before a waiter asks whether a writer died half way
_WORD = 1 << 64
_MOST = 1 << 62  # far more rows than can ever be counted


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """Rows written and drawn, where in the band that is, and how many calls wait now."""

    inserts: int
    samples: int
    difference: float
    band: float
    waiting: int
    blocked: str | None


class RateLimiter:
    """Keeps `inserts × samples_per_insert − samples` within ± `band`; draws wait for `min_size` samples.

    Given to `ReplayBuffer.create(limiter=…)`, it counts the rows of that buffer, in all processes. The side that is
    ahead waits for the other, at most `deadline` seconds, then DeadlineError. Rows that bring the buffer to at most
    `min_size` are always let in. A buffer loaded with `read_only=False` has its limiter again, counts and all.

    Ownership: one buffer's; its counts lie beside the rows.
    Concurrency: any thread, any process.

    Example:
        >>> import numpy as np, recollect as rc
        >>> limiter = rc.RateLimiter(samples_per_insert=4, min_size=10, band=64)
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=100, limiter=limiter)
        >>> buf.extend(np.arange(8))
        >>> limiter.can_sample(1), limiter.why_blocked()
        (False, 'draws wait for 2 more samples: there are 8 of min_size 10')
        >>> buf.extend(np.arange(8))
        >>> limiter.can_sample(32), limiter.can_insert(1)
        (True, False)
    """

    def __init__(self, samples_per_insert: float, min_size: int, band: float, deadline: float = 60.0) -> None:
        """Each row is to be drawn `samples_per_insert` times on average."""
        self.samples_per_insert = checks.number("samples_per_insert", samples_per_insert, above=True)
        self.band = checks.number("band", band, above=True)
        self.deadline = checks.number("deadline", deadline, above=True, advice="nothing waits for ever")
        self.min_size = checks.count("min_size", min_size, advice="1 draws at once")
        # The decimals as they are written, exactly: counts are compared without rounding, however many there are.
        self._ratio, self._band = Fraction(str(self.samples_per_insert)), Fraction(str(self.band))
        # In units of which one sample and one insert are whole numbers.
        self._unit = self._ratio.denominator * self._band.denominator
        self._insert = int(self._ratio * self._unit)
        self._most = int(self._band * self._unit)
        least = max(min_size * self._ratio, (1 + self._ratio) / 2)
        if self._band < least:
            raise ValueError(
                f"band: must be at least {_enough(least)} with samples_per_insert={self.samples_per_insert:g} and "
                f"min_size={min_size}, got {self.band:g}; below that neither side could ever move"
            )
        self._attach(_core.Mapping(-1, 0, 4096, True), 0, lambda: (0, 0))
        self._is_taken = False
        self._watch: Watch | None = None

    # What a buffer does

    def attach(self, mapping: _core.Mapping, at: int, counts: Callable[[], tuple[int, int]]) -> None:
        """Count for a buffer: words of `mapping` from `at` on; `counts()` is (rows ever written, rows there are)."""
        self.check_free()
        self._is_taken = True
        self._attach(mapping, at, counts)

    def check_free(self) -> None:
        """Raise ValueError if it counts for a buffer already."""
        if self._is_taken:
            raise ValueError("limiter: must limit one buffer, got one in use; make a RateLimiter for each")

    def _attach(self, mapping: _core.Mapping, at: int, counts: Callable[[], tuple[int, int]]) -> None:
        self._words: Any = mapping
        self._at, self._counts = at, counts

    def detach(self) -> None:
        """Wake every waiter; those of this process raise ClosedError, for the buffer was closed."""
        words, self._words = self._words, Closed()
        if not isinstance(words, Closed):
            words.add(self._at + _CHANGES, 1)
            words.wake(self._at + _CHANGES)

    def watch(self, look: Callable[[], object] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise."""
        self._watch = None if look is None else Watch(look)

    def begin(self) -> None:
        """Take the words as they are for counts: those of a new buffer are zeros."""
        self._words.store(self._at + _READY, 1)

    @property
    def is_ready(self) -> bool:
        """Whether the words hold counts already: in a file that was live, they do."""
        return bool(self._load(_READY))

    def inserting(self, n: int) -> Admission:
        """A block that waits until `n` rows may be written; what the block raises takes them back."""
        return Admission(self, n, "insert")

    def drawing(self, n: int) -> Admission:
        """A block that waits until `n` rows may be drawn; what the block raises takes them back."""
        return Admission(self, n, "draw")

    def around_write(
        self, write: Callable[..., Any], n_rows: Callable[[Any], int], turns_away: bool = False
    ) -> Callable[..., Any]:
        """Return `write` limited; `n_rows(value)` is how many a value has, of which it may have `turns_away` some."""

        def limited(value: Any, *args: Any, **kwargs: Any) -> None:
            with self.inserting(n_rows(value)):
                write(value, *args, **kwargs)
                if turns_away:
                    self._words.store(self._at + _ADMITTED, self.inserts)

        return limited

    # What it says

    @property
    def inserts(self) -> int:
        """Rows that were ever written."""
        return (self._load(_BEFORE) + self._counts()[0]) % _WORD

    @property
    def samples(self) -> int:
        """Rows that were ever drawn."""
        return self._count(_SAMPLES)

    def can_insert(self, n: int = 1) -> bool:
        """Tell whether `n` rows could be written now, without waiting."""
        return self._may_insert(n, self._admitted())

    def can_sample(self, n: int = 1) -> bool:
        """Tell whether `n` rows could be drawn now, without waiting."""
        return self._may_sample(n, self.samples)

    def why_blocked(self) -> str | None:
        """Say what the side that would have to wait is waiting for; None if one row can go in and one come out."""
        return self._why("draw", 1) or self._why("insert", 1)

    def stats(self) -> LimiterStats:
        """Return a frozen record of the counts."""
        inserts, samples = self.inserts, self.samples
        difference = float(inserts * self._ratio - samples)
        return LimiterStats(
            inserts, samples, difference, self.band, int(self._load(_WAITERS)), self.why_blocked()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: what it is, and its counts."""
        return {**self.configuration(), "inserts": self.inserts, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the counts of `state_dict`; another configuration raises ValueError."""
        for key, value in self.configuration().items():
            if key != "deadline" and state.get(key) != value:
                raise ValueError(
                    f"RateLimiter: {key} must be {value!r} to load this state, got {state.get(key)!r}; make it so"
                )
        inserts, samples = int(state["inserts"]), int(state["samples"])
        if inserts < 0 or samples < 0:
            raise ValueError(f"RateLimiter: counts must not be negative, got {inserts} and {samples}")
        for word, value in (
            (_BEFORE, inserts - self._counts()[0]),
            (_ADMITTED, inserts),
            (_SAMPLES, samples),
            (_READY, 1),
        ):
            self._words.store(self._at + word, value % _WORD)
        self._changed()

    def configuration(self) -> dict[str, Any]:
        """What it was made with."""
        return {
            "samples_per_insert": self.samples_per_insert,
            "min_size": self.min_size,
            "band": self.band,
            "deadline": self.deadline,
        }

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.configuration().items())
        return f"RateLimiter({arguments})"

    def __reduce__(self) -> Any:
        raise TypeError("RateLimiter: belongs to its buffer, got pickled; send the buffer, which has it")

    # Words

    def _load(self, word: int) -> int:
        return int(self._words.load(self._at + word))

    def words(self, *numbers: int) -> tuple[Any, ...]:
        """The memory that has the counts, and where some of them are."""
        if isinstance(self._words, Closed):
            self._words()
        return (self._words, *(self._at + number for number in numbers))

    def _count(self, word: int) -> int:
        n = self._load(word)
        if n >= _MOST:
            raise AttachError(
                f"RateLimiter: counts must be below 2**62, got {n}; the memory was overwritten: create it again"
            )
        return n

    def _add(self, word: int, n: int) -> None:
        self._words.add(self._at + word, n % _WORD)

    def _changed(self) -> None:
        self._add(_CHANGES, 1)
        if self._load(
            _WAITERS
        ):  # one that was killed leaves its count: then this wakes nobody, and costs a call
            self._words.wake(self._at + _CHANGES)

    def _admitted(self) -> int:
        # Never behind what was written: a writer that was thought dead may have been stopped, and gone on.
        return max(self._count(_ADMITTED), self.inserts)

    # Rules

    def _may_insert(self, n: int, admitted: int) -> bool:
        written, now = self._counts()
        pending = max(0, admitted - (self._load(_BEFORE) + written) % _WORD)
        if now + pending + n <= self.min_size:
            return True
        return (admitted + n) * self._insert - self.samples * self._unit <= self._most

    def _may_sample(self, n: int, samples: int) -> bool:
        if self._counts()[1] < self.min_size:
            return False
        return self.inserts * self._insert - (samples + n) * self._unit >= -self._most

    def _try(self, share: Admission) -> bool:
        n, verb = share.n, share.verb
        while True:
            word = self._count(share.word)
            count = max(word, self.inserts) if verb == "insert" else word
            if not (self._may_insert(n, count) if verb == "insert" else self._may_sample(n, count)):
                return False
            if share.take(word, count + n, n):
                return True

    # Waiting

    def let_in(self, share: Admission) -> None:
        """Take what a block asks for, as soon as the other side lets it."""
        if self._try(share):
            return
        n, verb, watch = share.n, share.verb, self._watch
        self.check_possible(n, verb)
        now = monotonic()
        end, quiet_until = now + self.deadline, now + _QUIET_S
        while True:
            seen = self._load(_CHANGES)
            if self._try(share):
                return
            left = end - monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"limiter: to {verb} {n} must be possible within {self.deadline:g} s; {self._why(verb, n)}"
                )
            slice_s = _QUIET_S if watch is None else LOOK_S
            if share.wait(seen % (1 << 32), min(left, slice_s)):
                quiet_until = monotonic() + _QUIET_S
            elif monotonic() >= quiet_until:
                self._take_back()
            if watch is not None:
                watch.look()

    def _take_back(self) -> None:
        """Nothing has moved for a while: rows that were let in and never came will not come."""
        word, inserts = self._load(_ADMITTED), self.inserts
        if word > inserts and self._words.swap_if(self._at + _ADMITTED, word, inserts):
            self._changed()

    def check_possible(self, n: int, verb: str) -> None:
        """Raise ValueError for a call that is too large for the band, whatever the other side does row by row.

        `verb` is "insert" or "draw".
        """
        need = (n * self._ratio + 1) / 2 if verb == "insert" else (n + self._ratio) / 2
        if need > self._band:
            rows = "rows at once" if verb == "insert" else "samples at once"
            raise ValueError(
                f"limiter: band must be at least {_enough(need)} to {verb} {n} {rows}, got {self.band:g}; "
                f"{verb} fewer or make it with a wider band"
            )

    def _why(self, verb: str, n: int) -> str | None:
        now, inserts, samples = self._counts()[1], self.inserts, self.samples
        ahead = inserts * self._ratio - samples
        sums = f"{inserts} inserts × {self.samples_per_insert:g} − {samples} samples = {_text(ahead)}"
        if verb == "insert" and not self.can_insert(n):
            missing = math.ceil((self._admitted() + n) * self._ratio - self._band - samples)
            return f"inserts wait for {missing} more samples to be drawn: {sums}, the band is ±{self.band:g}"
        if verb == "draw" and now < self.min_size:
            return f"draws wait for {self.min_size - now} more samples: there are {now} of min_size {self.min_size}"
        if verb == "draw" and not self.can_sample(n):
            missing = math.ceil((n - self._band - ahead) / self._ratio)
            return f"draws wait for {missing} more samples to be inserted: {sums}, the band is ±{self.band:g}"
        return None


class Admission(_core.Share):
    """The leave to write or draw `n` rows: counted from the beginning of a block on, unless the block raises.

    Concurrency: one thread, one block.
    """

    def __init__(self, limiter: RateLimiter, n: int, verb: str) -> None:
        self.limiter, self.n, self.verb = limiter, n, verb
        self.word = _ADMITTED if verb == "insert" else _SAMPLES
        super().__init__(*limiter.words(self.word, _CHANGES, _WAITERS))

    def __enter__(self) -> Self:
        if self.n:
            try:
                self.limiter.let_in(self)
            except BaseException:
                self.end(failed=True)
                raise
        return self


def _text(value: Fraction | float) -> str:
    return str(float(value)).removesuffix(".0")


def _enough(value: Fraction) -> str:
    """The smallest band that is no less, as one would write it."""
    nearest = float(value)
    return _text(nearest if Fraction(str(nearest)) >= value else math.nextafter(nearest, math.inf))

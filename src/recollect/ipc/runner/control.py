"""What a runner and its collectors share: the word that says stop, permits, and counters that are never lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np

from recollect.errors import ClosedError, DeadlineError
from recollect.ipc.mailbox import Mailbox
from recollect.memory import segment as segments
from recollect.memory.latest import Latest
from recollect.memory.segment import WORDS_AT, Closed, SharedSegment
from recollect.text import safe

KIND = "runner"
LOOK_S = 0.1  # between looks at signals and at the other side
MOST_COUNTERS = 128
_NAMES_NBYTES = 8192
_LINE = 64
_STOP_AT, _NEWS_AT = WORDS_AT, WORDS_AT + _LINE
# Of each lane: a line that the learner writes and one that the collector writes.
_TURN, _GRANTED, _VERSION, _STEPS, _GRANTED_NS = range(0, 40, 8)
_TAKEN, _DONE, _TOUCHED_NS, _READY = range(_LINE, _LINE + 32, 8)


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make `steps` calls of `env.step` with the weights of `version`; `number` counts a lane's permits."""

    number: int
    version: int
    steps: int


class Control:
    """Words between one learner and the collectors of its lanes.

    Ownership: made by the learner, attached by name in collectors; the memory goes with its last user.
    Concurrency: the learner grants and stops; a lane's collector takes and finishes. Waits are futex waits.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self.n_lanes = int(segment.schema["n_lanes"])
        self._segment: SharedSegment | None = segment.hold(lambda _: _Nothing())
        self._words = segment.mapping

    @classmethod
    def create(cls, n_lanes: int) -> Control:
        schema, nbytes = {"n_lanes": n_lanes}, 2 * _LINE * (1 + n_lanes)
        return cls(segments.create(KIND, schema, nbytes, 0, "collectors"))

    @classmethod
    def attach(cls, name: str) -> Control:
        return cls(segments.attach(name, KIND))

    @property
    def name(self) -> str:
        """The handle as text."""
        if self._segment is None:
            raise RuntimeError("control: was closed")
        return self._segment.name

    @property
    def mapping(self) -> Any:
        """The memory itself, for native watchers."""
        return self._words

    @property
    def stop_at(self) -> int:
        """Where the word is that says stop."""
        return _STOP_AT

    @property
    def wake_at(self) -> list[int]:
        """The words on which somebody may sleep."""
        return [_NEWS_AT, *(self._at(k, _TURN) for k in range(self.n_lanes))]

    def _at(self, lane: int, word: int) -> int:
        return WORDS_AT + 2 * _LINE * (1 + lane) + word

    def _load(self, lane: int, word: int) -> int:
        return self._words.load(self._at(lane, word))

    # -- stop

    @property
    def is_stopping(self) -> bool:
        """Whether everybody should stop."""
        return self._words.load(_STOP_AT) != 0

    def stop(self) -> None:
        """Tell everybody to stop, and wake who sleeps."""
        self._words.store(_STOP_AT, 1)
        for at in self.wake_at:
            self._change(at)

    def _change(self, at: int) -> None:
        self._words.add(at, 1)
        self._words.wake(at)

    # -- permits, the learner's side

    def join(self, lane: int) -> None:
        """A new collector of this lane: it owes nothing, and joins at the first permit after it is ready."""
        granted = self._load(lane, _GRANTED)
        for word, value in ((_READY, 0), (_TAKEN, granted), (_DONE, granted)):
            self._words.store(self._at(lane, word), value)

    def grant(self, lane: int, version: int, steps: int) -> None:
        """Give the lane its next permit; the one before must have been taken."""
        for word, value in ((_VERSION, version), (_STEPS, steps), (_GRANTED_NS, monotonic_ns())):
            self._words.store(self._at(lane, word), value)
        self._words.add(self._at(lane, _GRANTED), 1)
        self._change(self._at(lane, _TURN))

    def has_taken(self, lane: int) -> bool:
        """Whether the lane has taken its last permit."""
        return self._load(lane, _TAKEN) >= self._load(lane, _GRANTED)

    def has_done(self, lane: int) -> bool:
        """Whether the lane has done what its last permit allowed."""
        return self._load(lane, _DONE) >= self._load(lane, _GRANTED)

    def is_ready(self, lane: int) -> bool:
        """Whether the lane's collector has ever asked for a permit: it has imported and made what it needs."""
        return self._load(lane, _READY) != 0

    def has_permits(self, lane: int) -> bool:
        """Whether the lane was ever given a permit: it does not run free."""
        return self._load(lane, _GRANTED) > 0

    def times_ns(self, lane: int) -> tuple[int, int]:
        """When the lane's collector last showed that it goes on, and when its last permit was given; 0: never."""
        return self._load(lane, _TOUCHED_NS), self._load(lane, _GRANTED_NS)

    def wait_for(
        self, ready: Callable[[], bool], look: Callable[[], object], timeout: float, what: str
    ) -> None:
        """Wait until `ready()`; `look()` is called at every wake-up and at least every 100 ms."""
        end, words = monotonic() + timeout, self._words
        while True:
            seen = words.load(_NEWS_AT) & 0xFFFFFFFF
            if words.load(_STOP_AT):
                raise ClosedError("runner: was closed; make another one")
            look()
            if ready():
                return
            left = end - monotonic()
            if left <= 0:
                raise DeadlineError(f"{what} must come within {timeout:g} s, got nothing; see stats()")
            words.wait(_NEWS_AT, seen, min(left, LOOK_S))

    # -- permits, a collector's side

    def touch(self, lane: int) -> None:
        """Show that this lane's collector goes on."""
        self._words.store(self._at(lane, _TOUCHED_NS), monotonic_ns())

    def finish(self, lane: int) -> None:
        """Say that what the last permit allowed is done."""
        taken = self._load(lane, _TAKEN)
        if self._load(lane, _DONE) != taken:
            self._words.store(self._at(lane, _DONE), taken)
            self._change(_NEWS_AT)

    def take(
        self, lane: int, timeout: float, on_take: Callable[[Permit], object] | None = None
    ) -> Permit | None:
        """Wait for the lane's next permit; None when the time is over or everybody should stop.

        `on_take(permit)` is called before the learner sees that the permit was taken.
        """
        end = monotonic() + timeout
        if not self.is_ready(lane):
            self._words.store(self._at(lane, _READY), 1)
            self._change(_NEWS_AT)
        while not self.is_stopping:
            seen = self._load(lane, _TURN) & 0xFFFFFFFF
            granted = self._load(lane, _GRANTED)
            if granted > self._load(lane, _TAKEN):
                permit = Permit(granted, self._load(lane, _VERSION), self._load(lane, _STEPS))
                self.touch(lane)
                if on_take is not None:
                    on_take(permit)
                self._words.store(self._at(lane, _TAKEN), granted)
                self._change(_NEWS_AT)
                return permit
            left = end - monotonic()
            if left <= 0:
                return None
            self._words.wait(self._at(lane, _TURN), seen, min(left, LOOK_S))
        return None

    def close(self) -> None:
        """Detach this object; may be called twice."""
        if self._segment is not None:
            segment, self._segment = self._segment, None
            self._words = Closed()  # type: ignore[assignment]  # a thread that waits hears of it
            segment.release()


class _Nothing:
    def close(self) -> None:
        """There is no native object behind these words."""


class Counters(Mailbox):
    """Running totals of one lane, in a Latest: a slow reader loses none, and a restarted collector goes on from them.

    >>> counters = Counters()
    >>> counters.add({"env_steps": 16}, "env_step"); counters.add({"env_steps": 16})
    >>> reader = Counters.attach(counters.name)
    >>> reader.read().totals, reader.read().phase
    ({'env_steps': 32}, 'env_step')
    >>> reader.close(); counters.cleanup()
    """

    def _setup(self, box: Latest) -> None:
        super()._setup(box)
        self._head, self._values, self._names = _value()
        self._index: dict[str, int] = {}
        self._phase = ""
        self._loaded = False

    def __init__(self) -> None:
        self._setup(Latest.create([piece.nbytes for piece in _value()]))

    def add(self, counters: Mapping[str, Any], phase: str | None = None) -> None:
        """Add to the totals and publish them; ValueError for what is no number, TypeError for no name."""
        if not self._loaded:
            self._go_on()
        amounts = {name: _amount(name, x) for name, x in counters.items()}
        if (phase is not None and phase != self._phase) or not amounts.keys() <= self._index.keys():
            self._rename(phase if phase is not None else self._phase, amounts)
        for name, amount in amounts.items():
            self._values[self._index[name]] += amount
        self._head[0] = monotonic_ns()
        self._head[1] += 1
        self._head[2] += bool(amounts)
        self._box.publish([self._head, self._values, self._names])

    def _go_on(self) -> None:
        """Take over what an earlier collector of this lane counted."""
        if self._box.latest([self._head, self._values, self._names]):
            names = _names_in(self._names)
            self._phase, self._index = names[0], {name: i for i, name in enumerate(names[1:])}
        self._loaded = True

    def _rename(self, phase: str, amounts: Mapping[str, Any]) -> None:
        index = dict(self._index)
        for name in amounts:
            index.setdefault(name, len(index))
        text = safe("\n".join([phase.replace("\n", " "), *index])).encode()
        if len(index) > MOST_COUNTERS or len(text) >= _NAMES_NBYTES:
            raise ValueError(
                f"counters: must be at most {MOST_COUNTERS} names of {_NAMES_NBYTES} bytes in all, got "
                f"{len(index)} of {len(text)}; count less"
            )
        self._names[: len(text)] = np.frombuffer(text, np.uint8)
        self._names[len(text) :] = 0
        self._phase, self._index = phase, index

    def read(self) -> Counted:
        """The newest totals."""
        head, values, names = _value()
        if not self._box.latest([head, values, names]):
            return Counted({}, "", 0, 0, 0)
        phase, *keys = _names_in(names)
        totals = {key: _plain(x) for key, x in zip(keys, values.tolist())}
        return Counted(totals, phase, *(int(n) for n in head[:3]))


@dataclass(frozen=True, slots=True)
class Counted:
    """Totals of a lane over all its collectors, the phase it was last in, and when it last said so."""

    totals: dict[str, float]
    phase: str
    beat_ns: int
    n_beats: int
    n_steps: int  # beats that counted something


def _value() -> tuple[Any, Any, Any]:
    return np.zeros(4, np.int64), np.zeros(MOST_COUNTERS), np.zeros(_NAMES_NBYTES, np.uint8)


def _names_in(names: Any) -> list[str]:
    return bytes(names).rstrip(b"\0").decode().split("\n")


def _plain(x: float) -> float:
    return int(x) if x.is_integer() else x


def _amount(name: str, x: Any) -> float:
    try:
        amount = float(x)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: must be a number to add, got {x!r}; pass a number") from None
    if "\n" in name or not np.isfinite(amount):
        raise ValueError(f"{name}: must be a name of one line and a finite number, got {x!r}; pass those")
    return amount

"""Arguments, checked before anything changes: one function for each kind of value, and one form of message.

`<subject>: <rule>, got <value>; <what to do>`. Each function returns the value as a plain Python one. A value of
another kind raises `ArgumentError`, a value out of bounds ValueError.

>>> count("batch_size", 256), fraction("ratio", 1), choice("order", "fifo", ("fifo", "lifo"))
(256, 1.0, 'fifo')
>>> count("lane", 4, 0, most=3, advice="create more lanes")
Traceback (most recent call last):
ValueError: lane: must be an int in [0, 3], got 4; create more lanes
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeVar

Chosen = TypeVar("Chosen")
_SEEDS = 1 << 64
MOST_S = 1e9  # that a wait may last: what the core can count


class ArgumentError(TypeError, ValueError):
    """An argument is of another kind than it must be: the TypeError it is, and the ValueError that callers expect."""


def count(subject: str, value: Any, least: int = 1, *, most: int | None = None, advice: str = "") -> int:
    """Return an int of at least `least` and at most `most`; True and False are none."""
    found = value if type(value) is int else _as_int(value)
    if found is None or found < least or (most is not None and found > most):
        bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        raise _wrong(subject, f"must be an int {bounds}", value, found, advice)
    return found


def seed(subject: str, value: Any, *, below: int = _SEEDS) -> int:
    """Return an int that can be a seed: not negative, and below a power of two."""
    found = _as_int(value)
    if found is None or not 0 <= found < below:
        bits = below.bit_length() - 1
        advice = "pass an int" if found is None else f"take it modulo 2**{bits}"
        raise _wrong(subject, f"must be an int in [0, 2**{bits})", value, found, advice)
    return found


def number(subject: str, value: Any, least: float = 0.0, *, above: bool = False, advice: str = "") -> float:
    """Return a finite number of at least `least`, or `above` it."""
    found = _as_float(value)
    if found is None or not _is_within(found, least, math.inf, above):
        rule = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
        raise _wrong(subject, rule, value, found, advice)
    return found


def seconds(
    subject: str, value: Any, *, above: bool = False, most: float = math.inf, advice: str = ""
) -> float:
    """Return a finite number of seconds, of at least 0, or `above` it."""
    found = _as_float(value)
    if found is None or not _is_within(found, 0.0, most, above):
        rule = f"must be a finite number of seconds {'above' if above else 'of at least'} 0"
        raise _wrong(subject, rule, value, found, advice)
    return found


def timeout(value: Any, default: float) -> float:
    """Return the seconds of a wait, `default` for None; nothing waits for ever."""
    return default if value is None else seconds("timeout", value, most=MOST_S)


def fraction(subject: str, value: Any, *, above: bool = False, advice: str = "") -> float:
    """Return a number from 0 to 1; with `above` 0 is none."""
    found = _as_float(value)
    if found is None or not _is_within(found, 0.0, 1.0, above):
        raise _wrong(subject, f"must be a number in {'(' if above else '['}0, 1]", value, found, advice)
    return found


def choice(subject: str, value: Chosen, known: Iterable[Chosen], *, advice: str = "choose one") -> Chosen:
    """Return one of the values that there are."""
    known = list(known)
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        raise _wrong(subject, f"must be one of {', '.join(map(str, known))}", value, value, advice)
    return value


def flag(subject: str, value: Any) -> bool:
    """Return True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise _wrong(subject, "must be True or False", value, None, "pass one of them")
    return value


def _as_int(value: Any) -> int | None:
    """A value as an int, None if it is of another kind."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _as_float(value: Any) -> float | None:
    """A value as a float, None if it is of another kind."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of 400 digits
        return math.inf


def _is_within(found: float, least: float, most: float, above: bool) -> bool:
    return found < math.inf and (least < found if above else least <= found) and found <= most


def _wrong(subject: str, rule: str, value: Any, found: Any, advice: str) -> ValueError:
    """The error for a value; `found` is None if it is of another kind."""
    shown = repr(value) if found is None or isinstance(value, str) else value
    text = f"{subject}: {rule}, got {shown}{advice and f'; {advice}'}"
    return ArgumentError(text) if found is None else ValueError(text)

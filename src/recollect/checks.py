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
    bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    number = _as_int(value)
    if number is None:
        raise ArgumentError(_message(subject, f"must be an int {bounds}", repr(value), advice))
    if number < least or (most is not None and number > most):
        raise ValueError(_message(subject, f"must be an int {bounds}", number, advice))
    return number


def seed(subject: str, value: Any, *, below: int = _SEEDS) -> int:
    """Return an int that can be a seed: not negative, and below a power of two."""
    bits = below.bit_length() - 1
    rule, advice = f"must be an int in [0, 2**{bits})", f"take it modulo 2**{bits}"
    number = _as_int(value)
    if number is None:
        raise ArgumentError(_message(subject, rule, repr(value), "pass an int"))
    if not 0 <= number < below:
        raise ValueError(_message(subject, rule, number, advice))
    return number


def number(subject: str, value: Any, least: float = 0.0, *, above: bool = False, advice: str = "") -> float:
    """Return a finite number of at least `least`, or `above` it."""
    rule = f"must be a finite number {'above' if above else 'of at least'} {least:g}"
    return _bounded(subject, value, rule, least, above=above, advice=advice)


def seconds(
    subject: str, value: Any, *, above: bool = False, most: float = math.inf, advice: str = ""
) -> float:
    """Return a finite number of seconds, of at least 0, or `above` it."""
    rule = f"must be a finite number of seconds {'above' if above else 'of at least'} 0"
    return _bounded(subject, value, rule, 0.0, most, above=above, advice=advice)


def timeout(value: Any, default: float) -> float:
    """Return the seconds of a wait, `default` for None; nothing waits for ever."""
    return default if value is None else seconds("timeout", value, most=MOST_S)


def fraction(subject: str, value: Any, *, above: bool = False, advice: str = "") -> float:
    """Return a number from 0 to 1; with `above` 0 is none."""
    rule = f"must be a number in {'(' if above else '['}0, 1]"
    return _bounded(subject, value, rule, 0.0, 1.0, above=above, advice=advice)


def choice(subject: str, value: Chosen, known: Iterable[Chosen], *, advice: str = "choose one") -> Chosen:
    """Return one of the values that there are."""
    known = list(known)
    if not any(value is one or (type(value) is type(one) and value == one) for one in known):
        raise ValueError(
            _message(subject, f"must be one of {', '.join(map(str, known))}", repr(value), advice)
        )
    return value


def flag(subject: str, value: Any) -> bool:
    """Return True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise ArgumentError(_message(subject, "must be True or False", repr(value), "pass one of them"))
    return value


def _bounded(subject: str, value: Any, rule: str, least: float, most: float = math.inf, *, above: bool,
             advice: str) -> float:  # fmt: skip
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ArgumentError(_message(subject, rule, repr(value), advice or "pass a float"))
    try:
        found = float(value)
    except OverflowError:  # an int of 400 digits
        found = math.inf
    if not (least <= found <= most and math.isfinite(found)) or (above and found == least):
        raise ValueError(_message(subject, rule, value, advice))
    return found


def _as_int(value: Any) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _message(subject: str, rule: str, value: Any, advice: str) -> str:
    return f"{subject}: {rule}, got {value}{advice and f'; {advice}'}"

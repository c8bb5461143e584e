r"""Text that may travel: whatever a program says, UTF-8 can hold it, and every exception can be told.

A Python string may hold half of a surrogate pair: text cut inside an emoji does, and so does a file name that is not
UTF-8. No encoder of UTF-8 takes it. Here it becomes its escape, `\ud83d`, at the one place where text enters a message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import msgspec


def safe(text: str) -> str:
    r"""Return the text if UTF-8 can hold it, else the text with each lone surrogate escaped.

    >>> safe("cut \ud83d"), safe("whole 😀")
    ('cut \\ud83d', 'whole 😀')
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def is_safe(text: str) -> bool:
    """Whether UTF-8 can hold the text as it is."""
    return safe(text) is text


def safe_tree(value: Any) -> Any:
    """Return a message with all its texts safe: structs, dicts, lists and tuples of plain values."""
    match value:
        case str():
            return safe(value)
        case dict():
            return {safe_tree(key): safe_tree(child) for key, child in value.items()}
        case tuple():
            return tuple(map(safe_tree, value))
        case list():
            return list(map(safe_tree, value))
        case msgspec.Struct():
            fields = {name: safe_tree(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
    return value


def encoded(encode: Callable[[Any], bytes], message: Any) -> bytes:
    """Return `encode(message)`, its texts made safe if they must be; a message that is safe costs nothing more."""
    try:
        return encode(message)
    except UnicodeEncodeError:
        return encode(safe_tree(message))


def told(error: BaseException, limit: int | None = None) -> str:
    """Return the traceback of an exception as safe text, of its last `limit` calls if one is given."""
    try:
        return safe("".join(traceback.format_exception(error, limit=limit)))
    except Exception:  # whatever a class of the user's does when it is asked
        return safe("".join(traceback.format_tb(error.__traceback__, limit)) + type(error).__qualname__)


def told_briefly(error: BaseException) -> str:
    """Return the name and the message of an exception as safe text."""
    try:
        return safe(f"{type(error).__name__}: {error}")
    except Exception:
        return safe(f"{type(error).__name__}: it cannot be printed")

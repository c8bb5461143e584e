r"""Text that may travel and be shown: UTF-8 can hold it, a terminal only prints it, and every exception can be told.

A Python string may hold half of a surrogate pair: text cut inside an emoji does, and so does a file name that is not
UTF-8. No encoder of UTF-8 takes it. Here it becomes its escape, `\ud83d`, at the one place where text enters a message.
A name in a file, or what a model said, may also hold `\x1b]0;…`, which a terminal obeys: it becomes its escape where
text leaves for the terminal.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

# What a terminal obeys, but for tab and newline: C0, DEL, C1, and the marks that turn the direction of a line.
_OBEYED = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _OBEYED}


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


def printable(text: object) -> str:
    r"""Return a text with an escape for each character that a terminal would obey, or that UTF-8 cannot hold.

    >>> printable("\x1b[2J cut \ud83d")
    '\\x1b[2J cut \\ud83d'
    """
    return safe(str(text)).translate(_ESCAPES)


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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known one that was meant, or all of them.

    >>> nearest("sead", ["seed", "device"]), nearest("x", ["seed", "device"])
    ("; did you mean 'seed'?", "; there are ['device', 'seed']")
    """
    import difflib

    known = list(known)
    within = [word for word in known if len(name) > 3 and name.rstrip("s") in word]
    close = within or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {sorted(known)}"


def refuse_unknown(
    subject: str, given: Iterable[str], function: Callable[..., Any], own: Iterable[str] | None = None
) -> None:
    """Raise TypeError if a keyword is none that `function` names, and say which was meant.

    `own` are those that it passes on; a function that passes on any refuses none.
    """
    parameters = inspect.signature(function).parameters.values()
    if own is None and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [name for name in (*named, *(own or ())) if name != "self"]
    for name in given:
        if name not in known:
            raise TypeError(
                f"{subject}: must be given arguments that it has, got {name!r}{nearest(name, known)}"
            )


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

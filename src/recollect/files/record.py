"""Records: JSON that carries its own checksum, read without trust in its size, its depth or the kinds of its values.

Whatever a file says, reading it ends in a value or in FormatError (BudgetError if there is no memory for it): a text of
bounded size is taken from a plain file, parsed, compared with its checksum, and converted to a msgspec schema that says
of each field what it may be. What a schema cannot say is read within `damage_in`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from recollect import _core
from recollect.budget import check_fits
from recollect.errors import AttachError, FormatError, RecollectError, SchemaError
from recollect.files.names import open_inside

MOST_NBYTES = 1 << 30
_SMALL_NBYTES = 1 << 22
_TIMES = 24  # bytes of objects that a byte of JSON makes at most: "[]," is an empty list and its place
_BRIEF = 300
_WRONG = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, msgspec.MsgspecError,
)  # fmt: skip

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Positive = Annotated[int, Meta(ge=1, le=1 << 62)]
Checksum = Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]
Kind = TypeVar("Kind")


class FileAbout(msgspec.Struct):
    """Size and checksum of a file, as records have them."""

    bytes: Count
    crc32c: Checksum


class ArgumentTypeError(TypeError):
    """An argument of the caller is wrong, not the file: `damage_in` lets it through."""


@contextmanager
def damage_in(where: object) -> Iterator[None]:
    """Raise FormatError for whatever goes wrong within, because what was read from `where` cannot be.

    Only for code that works on what a file says: an error of the caller's own arguments would be told as damage.
    """
    try:
        yield
    except ArgumentTypeError:
        raise
    except _WRONG as error:
        if isinstance(error, RecollectError) and not isinstance(error, SchemaError | AttachError):
            raise
        raise FormatError(f"{where}: cannot be read ({brief(error)}); it is damaged or foreign") from None


def brief(value: object) -> str:
    """Show a value that a file gave, however long or deep it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # too many levels, or digits
        text = f"a {type(value).__name__} of too many levels or digits"
    return text if len(text) <= _BRIEF else text[: _BRIEF - 3] + "..."


def read_bytes(file: Path, *, most: int = MOST_NBYTES, follow: bool = False, times: int = 1) -> bytes:
    """Read a whole plain file of at most so many bytes. A link is refused unless `follow`; a FIFO holds nobody up.

    BudgetError unless memory has room for `times` its size.
    """
    with open_inside(file.parent, file.name, follow=follow) as f:
        found = os.fstat(f.fileno())
        if found.st_size > most:
            raise FormatError(f"{file}: must have at most {most} bytes, got {found.st_size}; it is damaged")
        if found.st_size > _SMALL_NBYTES:
            check_fits(times * found.st_size, str(file), "free memory", when=" to be read")
        return f.read(found.st_size)


def parse_json(data: str | bytes, where: object, *, strict: bool = True) -> Any:
    """Return the value of a JSON text; FormatError, whatever is wrong with it. NaN is none, unless not `strict`."""
    try:
        return json.loads(data, parse_constant=_refuse if strict else None)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: must be JSON, got {brief(error)}; it is damaged or foreign") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def read_json(file: Path, *, follow: bool = True) -> dict[str, Any]:
    """Read a JSON object; FileNotFoundError if there is no file, FormatError if it is anything else.

    Statistics of data sets may be NaN, which Python writes though JSON has no word for it.
    """
    found = parse_json(read_bytes(file, follow=follow, times=_TIMES), file, strict=False)
    if not isinstance(found, dict):
        raise FormatError(
            f"{file}: must be a JSON object, got {type(found).__name__}; it is damaged or foreign"
        )
    return found


def read_signed(file: Path, formats: tuple[str, ...], version: int) -> dict[str, Any]:
    """Read a record of one of these formats; FormatError unless it is, to the letter, what `signed_json` wrote."""
    data = read_bytes(file, times=_TIMES)
    record: Any = parse_json(data, file)
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found not in formats:
        raise FormatError(
            f"{file}: format must be one of {list(formats)}, got {brief(found)}; it is another program's"
        )
    newest = record.get("format_version")
    if isinstance(newest, bool) or not isinstance(newest, int) or not 0 < newest <= version:
        raise FormatError(
            f"{file}: format version {brief(newest)} needs a newer release; this one reads {version}"
        )
    check_signed(file, data, record)
    return dict(record)


def check_signed(file: Path, data: bytes, record: dict[str, Any]) -> None:
    """Take the checksum out of a record; FormatError unless its bytes are, to the letter, what `signed_json` wrote."""
    record.pop("crc32c", None)
    # To the letter: 1e5 and 1E5 are one number and two texts, and a flipped bit lies between them.
    try:
        is_same = data == signed_json(record).encode()
    except (ValueError, RecursionError):  # NaN, a lone surrogate, or too many levels: never written
        is_same = False
    if not is_same:
        raise FormatError(f"{file}: its checksum does not match; it is damaged")


def as_kind(value: Any, kind: type[Kind], where: object) -> Kind:
    """Return a value as the kind that a schema says; FormatError names the first field that is not."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, ValueError) as error:  # a lone surrogate is a ValueError
        raise FormatError(f"{where}: lacks or garbles a field: {brief(error)}; it is damaged") from None


def signed_json(record: dict[str, Any]) -> str:
    """Canonical JSON of a record with the checksum of itself."""
    body = canonical_json(record)
    return canonical_json({**json.loads(body), "crc32c": f"{_core.crc32c(body.encode()):08x}"})


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: one text for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

"""Text that may travel: every string fits UTF-8, and every exception can be told."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from recollect.text import encoded, safe, told, told_briefly

_TEXT = st.text(st.characters(), max_size=20)  # surrogates among them
_TREE = st.recursive(
    _TEXT | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


class Note(msgspec.Struct, array_like=True, frozen=True):
    text: str
    rest: object = None


@given(_TEXT)
def test_safe_text_fits_utf8_and_whole_text_stays_as_it_is(text: str) -> None:
    found = safe(text)
    assert found.encode().decode() == found
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert found is text


@given(_TEXT, _TREE)
def test_every_message_can_be_encoded_and_keeps_its_shape(text: str, tree: object) -> None:
    encode = msgspec.msgpack.Encoder().encode
    message = msgspec.msgpack.decode(encoded(encode, Note(text, tree)))
    assert message[0] == safe(text) and type(message[1]) is type(tree)


def test_an_exception_that_cannot_be_printed_can_be_told() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Odd" in told(Odd()) and told_briefly(Odd()).startswith("Odd")
    cut = ValueError("cut \ud83d")
    assert told(cut) == "ValueError: cut \\ud83d\n" and told_briefly(cut) == r"ValueError: cut \ud83d"

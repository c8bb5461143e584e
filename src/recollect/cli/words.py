"""Text for a console of rich: what models, peers, files and jobs said is shown as it is, and styles or drives nothing.

An error may quote what a model said, such as `[/INST]`, which rich would take for the end of a style, and raise. Every
text that this package did not write goes to rich as `words`, in a table too.
"""

from __future__ import annotations

from rich.text import Text

from recollect.text import printable


def words(*parts: str | tuple[str, str]) -> Text:
    """Return parts, each a text or a text and its style, as one text for a console; nothing in them is markup."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(text), style) for text, style in pairs))

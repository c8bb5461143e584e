"""What commands print through rich: text as it is, and a progress bar.

What models, peers, files and jobs said is shown as it is, and styles or drives nothing.

An error may quote what a model said, such as `[/INST]`, which rich would take for the end of a style, and raise. Every
text that this package did not write goes to rich as `words`, in a table too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.text import Text

from recollect.text import printable


def words(*parts: str | tuple[str, str]) -> Text:
    """Return parts, each a text or a text and its style, as one text for a console; nothing in them is markup."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(text), style) for text, style in pairs))


@contextmanager
def bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], Any]]:
    """Show a bar on stderr while the block runs; give the function that moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)

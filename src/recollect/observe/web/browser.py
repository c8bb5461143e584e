"""Open a page in the browser, without its secret address in any process's arguments."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from tempfile import mkdtemp

_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>Recollect</title>
<a href="{url}">Recollect</a>
"""


@contextmanager
def redirect_file(url: str) -> Iterator[Path]:
    """Yield a file that only this user can read and that leads a browser to an address; it is removed afterwards.

    Every user of a machine sees the arguments of every process: a browser is told the name of this file instead.
    """
    folder = _folder()
    path = folder / "open.html"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(_REDIRECT.format(url=escape(url)))
        yield path
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()


def _folder() -> Path:
    """A new folder for nobody else, where a browser may read.

    One that a snap or a flatpak confines sees neither /tmp nor hidden folders, but the downloads, or the home itself.
    """
    home = Path(os.path.expanduser("~"))
    for place in (home / "Downloads", home):
        with suppress(OSError):  # as where the home cannot be written
            return Path(mkdtemp(prefix="recollect-page-", dir=place))
    return Path(mkdtemp(prefix="recollect-page-"))


@contextmanager
def browsing(url: str, is_wanted: bool) -> Iterator[None]:
    """Open the browser at an address, if it is wanted; the file that leads there lives as long as the block."""
    if not is_wanted:
        yield
        return
    with redirect_file(url) as path:
        webbrowser.open(path.as_uri())
        yield

"""What a handler returns: a page in the common shell, or a stream of live events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, StreamingResponse

from recollect.text import encoded

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="{root}static/icon.svg">
<link rel="stylesheet" href="{root}static/uplot/uPlot.min.css">
<link rel="stylesheet" href="{root}static/style.css">
<script src="{root}static/page.js"></script>
<script src="{root}static/uplot/uPlot.iife.min.js" defer></script>
<script src="{root}static/chart.js" defer></script>
{scripts}
</head>
<body>
<header><h1>{title}</h1><span id="status" role="status"></span>
<button id="theme" type="button">light / dark</button></header>
<main>
{body}
</main>
</body>
</html>
"""


def page(title: str, body: str, *, scripts: Sequence[str] = (), root: str = "") -> HTMLResponse:
    """Return a page; `body` is HTML, `scripts` are addresses, `root` leads up to /<token>/ ("../" one level down)."""
    tags = "\n".join(f'<script src="{escape(root + address)}" defer></script>' for address in scripts)
    return HTMLResponse(_SHELL.format(title=escape(title), body=body, scripts=tags, root=escape(root)))


def event_stream(messages: Iterable[Any]) -> StreamingResponse:
    """Return server-sent events, one message of JSON for each item.

    `messages` is drawn from in a thread and may wait, for a second or so: then it yields None, which keeps the
    connection alive and lets the server notice that the page was closed.
    """
    return StreamingResponse(_lines(messages), media_type="text/event-stream")


def _lines(messages: Iterable[Any]) -> Iterator[bytes]:
    for message in messages:
        yield b": \n\n" if message is None else b"data: " + encoded(msgspec.json.encode, message) + b"\n\n"

"""Local web pages: an app behind a token, a server on loopback, a page shell, live events, charts.

    routes = [Route("/", lambda request: page("Hello", "<p>...</p>")), Route("/events", lambda r: event_stream(...))]
    with WebServer(make_app(routes)) as server:
        print(server.url)   # http://127.0.0.1:40123/<token>/

Everything a page needs is in `static/`; nothing is fetched from elsewhere. Links in pages are relative, so the token
goes with them. Handlers are plain functions, which starlette runs in threads.
"""

from __future__ import annotations

from recollect.errors import MissingExtraError

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        'web pages need starlette and uvicorn; run pip install "recollect[web]"'
    ) from error

from recollect.observe.web.app import make_app
from recollect.observe.web.browser import browsing
from recollect.observe.web.page import event_stream, page
from recollect.observe.web.server import WebServer

__all__ = ["WebServer", "browsing", "event_stream", "make_app", "page"]

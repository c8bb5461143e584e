"""The app of a local page: its routes and the static files behind a token that only its user was told."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "Referrer-Policy": "no-referrer",  # it would carry the token
    "X-Content-Type-Options": "nosniff",
}


def make_app(routes: Sequence[BaseRoute], *, token: str | None = None) -> Guard:
    """Return an ASGI app with these routes and /static, all under /<token>/; anything else is 403."""
    token = token or secrets.token_urlsafe(24)
    inside = [*routes, Mount("/static", StaticFiles(directory=STATIC))]
    handlers = {Exception: _failed}
    return Guard(Starlette(routes=[Mount(f"/{token}", routes=inside)], exception_handlers=handlers), token)


def _failed(request: Any, error: Exception) -> PlainTextResponse:
    logging.getLogger(__name__).error("%s failed", request.url.path.split("/", 2)[-1], exc_info=error)
    return PlainTextResponse(f"500: {type(error).__name__}: {error}\n", 500)


class Guard:
    """Lets in who names the token as the first part of the path, and adds the headers that keep it here."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, as ASGI calls it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        named = scope["path"].split("/")[1:2]
        is_let_in = bool(named) and secrets.compare_digest(named[0].encode(), self.token.encode())
        app = self._app if is_let_in and scope["type"] == "http" else _forbidden
        await app(scope, receive, send_with_headers)


_forbidden = PlainTextResponse(
    "403: the address must be the one that the command printed, token included.\n", 403
)

"""The page over a catalogue: thin routes that read a query, ask, and answer with JSON or PNG.

A query names episodes by number and leaves by name, never a file: what is not in the set cannot be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from recollect import checks
from recollect.errors import RecollectError
from recollect.observe.view.catalogue import Catalogue
from recollect.observe.view.episodes import ENDS, Filter
from recollect.observe.web import page
from recollect.text import encoded

STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("list.js", "frames.js", "curves.js", "view.js")
_SORTS = ("episode", "length", "return")


class Query:
    """The query of a request, read with errors that name the part."""

    def __init__(self, request: Any) -> None:
        self._given = request.query_params

    def text(self, name: str, default: str | None = None) -> str:
        """A part as it is; ValueError if it must be there and is not."""
        found = self._given.get(name, default)
        if found is None:
            raise ValueError(f"{name}: must be given")
        return str(found)

    def word(self, name: str, words: tuple[str, ...]) -> str:
        """One of some words, the first by default."""
        found = self.text(name, words[0])
        return checks.choice(name, found, words)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return int(self.text(name, None if default is None else str(default)))

    def number(self, name: str) -> float | None:
        """A number, or None where nothing was filled in."""
        given = self.text(name, "")
        return float(given) if given else None


def site_routes(catalogue: Catalogue) -> list[BaseRoute]:
    """The routes of the page for `recollect.observe.web.make_app`."""

    def episodes(q: Query) -> Any:
        bounds = {name: q.number(name) for name in ("min_length", "max_length", "min_return", "max_return")}
        wanted = Filter(**bounds, end=q.word("end", ENDS), task=q.text("task", ""), sort=q.word("sort", _SORTS),
                        descending=q.text("descending", "") == "1")  # fmt: skip
        return catalogue.episodes(wanted, max(0, q.whole("offset", 0)), min(1000, q.whole("limit", 200)))

    def curves(q: Query) -> Any:
        end = q.text("end", "")
        return catalogue.curves(
            q.whole("episode"), q.text("leaf"), width=min(4000, q.whole("width", 800)), first=q.whole("first", 0),
            end=int(end) if end else None, component=q.whole("component", 0),
        )  # fmt: skip

    answers: dict[str, Callable[[Query], Any]] = {
        "about": lambda q: catalogue.about(),
        "episodes": episodes,
        "curves": curves,
        "step": lambda q: catalogue.step(q.whole("episode"), q.whole("step")),
        "frame": lambda q: catalogue.frame(q.whole("episode"), q.whole("step"), q.text("leaf")),
        "strip": lambda q: catalogue.strip(q.whole("episode"), q.text("leaf")),
    }
    return [
        Route("/", lambda request: _front(catalogue)),
        *[Route(f"/{name}", _answering(ask)) for name, ask in answers.items()],
        Mount("/view", StaticFiles(directory=STATIC)),
    ]


def _front(catalogue: Catalogue) -> Response:
    body = (STATIC / "body.html").read_text(encoding="utf-8")
    return page(f"{catalogue.name} · recollect view", body, scripts=[f"view/{name}" for name in _SCRIPTS])


def _answering(ask: Callable[[Query], Any]) -> Callable[[Any], Response]:
    def answer(request: Any) -> Response:
        try:
            found = ask(Query(request))
        except (KeyError, IndexError) as error:
            return PlainTextResponse(str(error.args[0]), 404)
        except RecollectError as error:
            return PlainTextResponse(str(error), 500)
        except ValueError as error:
            return PlainTextResponse(str(error), 400)
        if isinstance(found, bytes):
            return Response(found, media_type="image/png")
        return Response(encoded(msgspec.json.encode, found), media_type="application/json")

    return answer

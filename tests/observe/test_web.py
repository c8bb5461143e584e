"""Local pages: who does not know the token gets nothing; pages, files and live events work for who does."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from tests.observe.browser import chromium

from recollect.observe.web import WebServer, browsing, event_stream, make_app, page
from recollect.observe.web.app import STATIC

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.usefixtures("leaves_nothing")


def broken(request: Any) -> Any:
    raise ValueError("no such thing")


def counting(stop: threading.Event) -> Iterator[Any]:
    n = 0
    while not stop.wait(0.01):
        n += 1
        yield None if n % 2 else {"n": n}


@pytest.fixture
def server() -> Iterator[WebServer]:
    stop = threading.Event()
    routes = [
        Route("/", lambda request: page("A <title>", "<p id=x>body</p>", scripts=["mine.js"])),
        Route("/broken", broken),
        Route("/events", lambda request: event_stream(counting(stop))),
    ]
    with WebServer(make_app(routes)) as made:
        yield made
        stop.set()


def test_without_the_token_nothing_is_there(server: WebServer) -> None:
    base = f"http://127.0.0.1:{server.port}/"
    token = server.url.rstrip("/").rsplit("/", 1)[1]
    for path in (
        "",
        "static/style.css",
        "x/",
        f"{token[:-1]}/",
        f"{token}x/",
        f"x/{token}/",
        "?token=" + token,
    ):
        assert httpx.get(base + path).status_code == 403, path
    assert len(token) >= 32 and make_app([]).token != make_app([]).token


def test_pages_and_files(server: WebServer) -> None:
    got = httpx.get(server.url)
    assert got.status_code == 200 and "A &lt;title&gt;" in got.text and "<p id=x>body</p>" in got.text
    assert got.headers["Referrer-Policy"] == "no-referrer" and "default-src 'self'" in str(got.headers)
    for part in ("style.css", "page.js", "chart.js", "uplot/uPlot.iife.min.js", "uplot/LICENSE"):
        assert httpx.get(server.url + "static/" + part).status_code == 200
    assert httpx.get(server.url + "nowhere").status_code == 404
    assert httpx.get(server.url + "static/%2e%2e/app.py").status_code == 404


def test_pages_name_only_files_that_are_there() -> None:
    assert (STATIC / "uplot" / "LICENSE").read_text().startswith("The MIT License")
    for file in STATIC.glob("*.*"):
        assert "http://" not in file.read_text().replace("http://www.w3.org/2000/svg", ""), file
        assert "https://" not in file.read_text(), file


def test_a_failing_page_says_why(server: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    got = httpx.get(server.url + "broken")
    assert got.status_code == 500 and "ValueError: no such thing" in got.text
    assert "Traceback" in caplog.text


def test_live_events_come_as_they_are_made_and_end_with_the_server(server: WebServer) -> None:
    with httpx.stream("GET", server.url + "events", timeout=20.0) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in stream.iter_lines() if line.startswith("data"))
        assert [next(lines), next(lines)] == ['data: {"n":2}', 'data: {"n":4}']


def test_a_port_in_use_is_an_error(server: WebServer) -> None:
    with pytest.raises(OSError, match="in use"):
        WebServer(make_app([]), server.port)


@pytest.mark.process
@pytest.mark.parametrize("place", ["home/Downloads", "home", "nowhere"])
def test_a_browser_is_told_a_private_file_that_leads_to_the_page(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """Every user of a machine sees the arguments of a browser: the secret is in none of them.

    The file is where a confined browser may read, if there is such a place.
    """
    if place != "nowhere":
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / place.partition("/")[0]))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    with browsing(server.url, True):
        (address,) = opened
        path = Path(address.removeprefix("file://"))
        secret = server.url.rstrip("/").rpartition("/")[2]
        assert secret not in address and secret in path.read_text()
        assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
        assert (path.parent.parent == tmp_path / place) == (place != "nowhere")
        monkeypatch.undo()  # the browser has a home of its own
        with chromium() as browser:
            page = browser.new_page()
            page.goto(address)
            page.wait_for_url(server.url)
    assert not path.parent.exists()
    with browsing(server.url, False):  # and nothing is opened
        assert len(opened) == 1

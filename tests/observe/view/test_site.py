"""The viewer's routes: who lacks the token gets nothing, and nothing outside the set can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.observe.view.catalogue import Catalogue
from recollect.observe.view.site import STATIC, site_routes
from recollect.observe.web import WebServer, make_app

httpx = pytest.importorskip("httpx")

SPACE = {"image": ((12, 16, 3), "uint8"), "reward": ((), "float32")}
LENGTHS = (4, 6)


def pictured() -> rc.ReplayBuffer:
    n = sum(LENGTHS)
    ends = np.isin(np.arange(n), np.cumsum(LENGTHS) - 1)
    buf = rc.ReplayBuffer.create("memory", SPACE, capacity=n, maintain_segment_metadata=True)
    grey = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None] * 20, (n, 12, 16, 3))
    buf.extend({"image": grey, "reward": np.arange(n, dtype="float32")}, ends=ends)
    return buf


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with Catalogue(pictured(), name="set") as catalogue, WebServer(make_app(site_routes(catalogue))) as made:
        catalogue.list.finish()
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with httpx.Client(trust_env=False, verify=False) as made:
        yield made


def test_every_route_needs_the_token(server: WebServer, client: Any) -> None:
    for route in ("", "about", "episodes", "frame?episode=0&step=0&leaf=image", "view/view.js"):
        assert client.get(f"http://127.0.0.1:{server.port}/{route}").status_code == 403
        assert client.get(f"http://127.0.0.1:{server.port}/wrong/{route}").status_code == 403
        assert client.get(server.url + route).status_code == 200, route


@pytest.mark.parametrize(
    "address",
    [
        "view/%2e%2e/site.py",
        "view/..%2fsite.py",
        "view/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "etc/passwd",
        "frame?episode=0&step=0&leaf=../../../etc/passwd",
        "frame?episode=0&step=0&leaf=/etc/passwd",
        "strip?episode=0&leaf=..",
        "curves?episode=0&leaf=../manifest.json",
        "curves?episode=2&leaf=reward",
        "curves?episode=-1&leaf=reward",
        "step?episode=0&step=4",
    ],
)
def test_what_is_not_in_the_set_is_refused(server: WebServer, client: Any, address: str) -> None:
    found = client.get(server.url + address)
    assert found.status_code == 404 and "root:" not in found.text


def test_a_garbled_question_is_refused_and_says_why(server: WebServer, client: Any) -> None:
    assert client.get(server.url + "episodes?end=nowhere").status_code == 400
    assert "end: must be one of" in client.get(server.url + "episodes?end=nowhere").text
    assert client.get(server.url + "curves?episode=x&leaf=reward").status_code == 400
    assert client.get(server.url + "curves?leaf=reward").text == "episode: must be given"


def test_answers(server: WebServer, client: Any) -> None:
    assert client.get(server.url + "about").json()["episodes"] == 2
    rows = client.get(server.url + "episodes?sort=return&descending=1&min_length=5").json()["rows"]
    assert rows == [{"episode": 1, "length": 6, "return": 39.0, "end": "", "task": ""}]
    assert client.get(server.url + "curves?episode=1&leaf=reward&first=1&end=3").json()["values"] == [
        [5.0, 6.0]
    ]
    assert client.get(server.url + "step?episode=1&step=0").json() == {"reward": "4.0"}
    for address in ("frame?episode=1&step=5&leaf=image", "strip?episode=1&leaf=image"):
        found = client.get(server.url + address)
        assert found.headers["content-type"] == "image/png" and found.content.startswith(b"\x89PNG")


def test_the_page_needs_no_internet(server: WebServer, client: Any) -> None:
    for file in STATIC.iterdir():
        assert "://" not in file.read_text(encoding="utf-8"), file
    assert "://" not in client.get(server.url + "").text

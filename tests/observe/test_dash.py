"""The live page: what it is sent, and what a browser makes of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.observe.browser import chromium

from recollect.cli import run
from recollect.observe import Beacon
from recollect.observe.dash import Watched, dash_routes, messages
from recollect.observe.web import WebServer, make_app

pytestmark = pytest.mark.usefixtures("runtime_dir")
CHARTS = {"mean return": ["reward/mean"], "learner, ms": ["time/learner_*"]}
FIGURES = {
    "iteration": 20.0,
    "reward/mean": -150.5,
    "time/learner_wait_ms": 0.5,
    "time/learner_train_ms": 8.0,
}
TABLES = {"collectors": [{"lane": 0, "state": "<b>stepping</b>"}]}


def lit(title: str = "sac Pendulum-v1", charts: Any = CHARTS) -> Beacon:
    beacon = Beacon("train", title, charts=charts, facts={"iterations": 100, "device": "cpu"})
    beacon.publish(FIGURES, TABLES)
    return beacon


def test_messages_come_when_something_is_new() -> None:
    stream = messages(None, pace_s=0.0)
    first = next(stream)
    assert first == {"jobs": [], "job": None}
    with lit() as beacon:
        seen = next(stream)
        assert seen is not None and [job["title"] for job in seen["jobs"]] == ["sac Pendulum-v1"]
        assert seen["job"]["charts"]["learner, ms"] == ["time/learner_wait_ms", "time/learner_train_ms"]
        assert seen["job"]["tiles"] == ["mean return"] and seen["job"]["history"]["values"][
            "reward/mean"
        ] == [-150.5]
        assert next(stream) is None
        beacon.publish({**FIGURES, "iteration": 30.0})
        seen = next(stream)
        assert seen is not None and seen["job"]["figures"]["iteration"] == 30.0
    seen = next(stream)
    assert seen is not None and seen["jobs"] == [] and seen["job"]["state"] == "completed"
    stream.close()


def test_the_newest_job_is_shown_unless_one_is_chosen() -> None:
    newest, chosen = Watched(None), Watched(1)
    with lit("first"):
        assert newest.look()["job"]["title"] == "first" and chosen.look()["job"] is None
        with lit("second"):
            assert newest.look()["job"]["title"] == "second"
    newest.close()
    chosen.close()


def test_a_port_in_use_is_one_line() -> None:
    with WebServer(make_app([])) as server, pytest.raises(SystemExit, match="choose another --port"):
        run(["dash", "--port", str(server.port), "--no-browser"])


DRAWN = "[...shown.charts.values()].map((chart) => chart.plot.data.slice(1).map((line) => [...line]))"
OTHER = """
import sys
from recollect.observe import Beacon
with Beacon("serve", "another job") as beacon:
    print("lit", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other_job(runtime_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of another process, until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "lit\n"
        yield child
        child.communicate("")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all pages: it takes seconds to start."""
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of its own visitor; at its end there must have been no error on it."""
    page = browser.new_page(color_scheme="dark")
    page.set_default_timeout(60_000)
    problems: list[Any] = []
    page.on("pageerror", lambda error: problems.append(error))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    gone = "Failed to load resource: net::"  # what a browser says of a server that has ended
    assert [x for x in problems if not str(x).startswith(gone)] == []


@pytest.mark.timeout(120)
def test_the_page_in_a_browser(page: Any) -> None:
    with WebServer(make_app(dash_routes())) as server:
        page.goto(server.url)
        page.get_by_text("No job is running").wait_for()
        with lit() as beacon:
            page.locator(".tile b", has_text="-150.5").wait_for()
            assert page.locator(".card canvas").count() == 2
            assert page.evaluate(DRAWN) == [[[-150.5]], [[0.5], [8.0]]]
            assert page.locator("progress").get_attribute("value") == "20"
            assert "device cpu" in page.locator(".head").inner_text()
            assert "<b>stepping</b>" in page.locator(".scroll table").first.inner_text()  # text, never HTML
            assert page.locator("#jobs a").count() == 0  # nothing to choose from
            beacon.publish({**FIGURES, "reward/mean": -99.5}, TABLES)
            page.locator(".tile b", has_text="-99.5").wait_for()
            assert page.evaluate(DRAWN) == [[[-150.5, -99.5]], [[0.5, 0.5], [8.0, 8.0]]]
        page.locator(".state", has_text="completed").wait_for()
        assert page.locator(".card canvas").count() == 2
        with lit("the next one", {"steps": ["iteration"]}):  # its charts, and no other's
            page.locator(".tile b", has_text="20").wait_for()
            assert page.evaluate(DRAWN) == [[[20.0]]] and page.locator(".card canvas").count() == 1
        hosts = page.evaluate("performance.getEntriesByType('resource').map((e) => new URL(e.name).host)")
        assert set(hosts) == {f"127.0.0.1:{server.port}"}


@pytest.mark.timeout(120)
def test_the_page_changes_theme_and_job_and_says_when_nobody_serves_it(
    page: Any, other_job: subprocess.Popen[str]
) -> None:
    theme = "document.documentElement.dataset.theme"
    with lit() as beacon, WebServer(make_app(dash_routes())) as server:
        page.goto(server.url)
        page.locator(".head b", has_text="sac Pendulum-v1").wait_for()  # the one that began last
        page.locator("#jobs a").first.evaluate("(link) => link.classList.add('same')")
        beacon.publish({**FIGURES, "reward/mean": -99.5}, TABLES)
        page.locator(".tile b", has_text="-99.5").wait_for()
        assert page.locator("#jobs a.same").count() == 1  # a click on it is not lost while figures change
        assert page.evaluate(theme) == "dark"
        page.locator("#theme").click()
        assert page.evaluate(theme) == "light"
        page.locator("#jobs a", has_text=f"pid {other_job.pid}").click()
        page.locator(".head b", has_text="another job").wait_for()
        assert page.locator("#jobs a[aria-current]").inner_text().startswith("another job")
        assert page.evaluate(theme) == "light"  # on the next page too
        other_job.communicate("")
        page.locator(".state", has_text="completed").wait_for()
    page.locator("#status", has_text="not connected").wait_for()

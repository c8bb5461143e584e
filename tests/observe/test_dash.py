"""The live page: what it is sent, and what a browser makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
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


def titles(watched: Watched) -> list[str]:
    return [job["title"] for job in watched.look()["shown"]]


def write_run(directory: Path, n: int = 4, gain: float = 1.0, first: int = 1) -> Path:
    """A run that ended: a line every ten iterations, sixteen steps each."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "metrics.jsonl", "a", encoding="utf-8") as f:
        for k in range(first, first + n):
            figures = {"axis/env_steps_total": 160.0 * k, "reward/mean": gain * k, "loss/actor": -float(k)}
            f.write(json.dumps({"iteration": 10 * k, **figures}) + "\n")
    return directory


def test_messages_come_when_something_is_new() -> None:
    stream = messages(None, pace_s=0.0)
    first = next(stream)
    assert first == {"jobs": [], "shown": []}
    with lit() as beacon:
        seen = next(stream)
        assert seen is not None and [job["title"] for job in seen["jobs"]] == ["sac Pendulum-v1"]
        assert seen["shown"][0]["charts"]["learner, ms"] == ["time/learner_wait_ms", "time/learner_train_ms"]
        assert seen["shown"][0]["tiles"] == ["mean return"] and seen["shown"][0]["history"]["values"][
            "reward/mean"
        ] == [-150.5]
        assert next(stream) is None
        beacon.publish({**FIGURES, "iteration": 30.0})
        seen = next(stream)
        assert seen is not None and seen["shown"][0]["figures"]["iteration"] == 30.0
    seen = next(stream)
    assert seen is not None and seen["jobs"] == [] and seen["shown"][0]["state"] == "completed"
    stream.close()


def test_the_newest_job_is_shown_unless_one_is_chosen() -> None:
    newest, chosen = Watched(), Watched(pid=1)
    with lit("first"):
        assert titles(newest) == ["first"] and titles(chosen) == []
        with lit("second"):
            assert titles(newest) == ["second"]
    newest.close()
    chosen.close()


def test_jobs_of_one_process_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with lit("first"), lit("second"), closing(Watched()) as newest:
        listed = newest.look()["jobs"]
        assert [job["title"] for job in listed] == ["first", "second"]
        assert listed[0]["pid"] == listed[1]["pid"] and listed[0]["id"] != listed[1]["id"]
        with (
            closing(Watched([listed[0]["id"]])) as chosen,
            closing(Watched([x["id"] for x in listed])) as both,
        ):
            assert titles(chosen) == ["first"] and titles(both) == ["first", "second"]
        run(["top", listed[0]["id"], "--once"])
        assert "first" in capsys.readouterr().out
        run(["top", "--once"])
        out = capsys.readouterr().out
        assert all(job["id"] in out for job in listed)


def test_a_run_that_ended_is_shown_from_its_metrics(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    with closing(Watched(paths=[path], charts=CHARTS)) as watched:
        seen = watched.look()
        assert [(job["kind"], job["title"]) for job in seen["jobs"]] == [("run", str(path))]
        (job,) = seen["shown"]
        assert job["state"] == "recorded" and job["charts"] == {"mean return": ["reward/mean"]}
        assert job["history"]["values"]["axis/env_steps_total"] == [160.0, 320.0, 480.0, 640.0]
        with open(path / "metrics.jsonl", "a", encoding="utf-8") as f:
            f.write('no line\n[1]\n{"reward/mean": 3.0}\n{"iteration": 50, "rew')
        assert watched.look()["shown"][0]["figures"] == job["figures"]
    with closing(Watched(paths=[write_run(tmp_path / "b")])) as watched:  # charts by the names of the figures
        watched.look()
        write_run(tmp_path / "b", 2, gain=7.0, first=3)  # taken up again from iteration 20: that counts
        (job,) = watched.look()["shown"]
        assert job["history"]["values"]["reward/mean"] == [1.0, 2.0, 21.0, 28.0]
        assert job["charts"]["loss"] == ["loss/actor"]


def test_a_long_run_has_a_bounded_number_of_points(tmp_path: Path) -> None:
    path = write_run(tmp_path / "long", 5000)
    with closing(Watched(paths=[path])) as watched:
        (job,) = watched.look()["shown"]
    seen = job["history"]["values"]["iteration"]
    assert 200 < len(seen) <= 501 and seen == sorted(seen) and (seen[0], seen[-1]) == (10, 50_000)


def test_paths_that_are_no_runs_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"must be given directories with a metrics.jsonl, got .*nothing"):
        run(["dash", str(tmp_path / "nothing")])


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
def test_several_runs_are_in_one_plot_over_steps(page: Any, tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", 2, gain=5.0)]
    with lit(), WebServer(make_app(dash_routes(paths, CHARTS))) as server:
        page.goto(server.url)
        page.locator(".scroll table", has_text=str(paths[1])).wait_for()
        assert page.evaluate("[...shown.charts.values()].map((chart) => [...chart.plot.data[0]])") == [
            [160, 320, 480, 640]
        ]
        drawn = "[...shown.charts.values()][0].plot.data.slice(1).map((line) => [...line].filter((y) => y != null))"
        assert page.evaluate(drawn) == [[1, 2, 3, 4], [5, 10]]
        page.select_option("#axis", "iterations")
        assert page.evaluate("[...[...shown.charts.values()][0].plot.data[0]]") == [10, 20, 30, 40]
        page.locator("#jobs .tab", has_text=str(paths[0])).locator(".add").click()  # leave it out
        page.locator(".head b", has_text=str(paths[1])).wait_for()
        page.locator("#jobs .tab", has_text="sac Pendulum-v1").locator(".add").click()  # a job beside a run
        page.locator(".scroll table", has_text="running").wait_for()
        assert page.locator("#jobs a[aria-current]").count() == 2


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

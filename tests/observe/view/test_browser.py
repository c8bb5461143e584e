"""The viewer in a real browser: the list, curves, frames, keys, filters, two episodes, dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.datasets import sets
from tests.observe.browser import chromium
from tests.observe.view.test_catalogue import recorded
from tests.observe.view.test_site import pictured

import recollect as rc
from recollect.datasets import from_lerobot
from recollect.observe.view.catalogue import Catalogue
from recollect.observe.view.site import site_routes
from recollect.observe.web import WebServer, make_app


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def robot(directory: Path) -> Any:
    """A LeRobot set of ten steps a second."""
    root = sets.lerobot_v2(directory, "v2.1")
    return from_lerobot(root, features=["observation.state", "task_index"])


@pytest.fixture
def opened(browser: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The page of a set, ready; whatever goes wrong in it fails the test."""
    buf, scheme = request.param
    made = buf(tmp_path) if buf is robot else buf()
    with Catalogue(made, name="set") as catalogue, WebServer(make_app(site_routes(catalogue))) as server:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 800})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("response", lambda found: found.ok or wrong.append(found.url))
        page.on("request", lambda asked: asked.url.startswith(server.url) or wrong.append(asked.url))
        page.goto(server.url)
        page.wait_for_selector(".leaf[data-ready='0'], canvas[data-step='0']")
        yield page
        page.close()
    assert not wrong


def cameras() -> rc.ReplayBuffer:
    """Two pictures a step, and nothing else."""
    buf = rc.ReplayBuffer.create(
        "memory", dict.fromkeys(("top", "wrist"), ((12, 16, 3), "uint8")), capacity=4
    )
    buf.extend(dict.fromkeys(("top", "wrist"), np.zeros((4, 12, 16, 3), np.uint8)))
    return buf


numbers = pytest.mark.parametrize("opened", [(recorded, "light")], indirect=True)
pictures = pytest.mark.parametrize("opened", [(pictured, "dark")], indirect=True)


def listed(page: Any) -> list[str]:
    return [line.split("\t")[0] for line in page.locator("#list tbody tr").all_inner_texts()]


@numbers
def test_list_keys_filters_and_two_side_by_side(opened: Any) -> None:
    page = opened
    assert "13 steps in 4 episodes" in page.inner_text("#summary")
    page.locator("#list tbody tr", has_text="15").wait_for()
    assert " ".join(page.inner_text("#heads").split()).startswith("Episode 0 · 3 steps")
    head = page.locator("#heads > *").first  # its style is the viewer's own, not that of the dash
    assert head.evaluate("e => [getComputedStyle(e).display, getComputedStyle(e).marginBottom]") == [
        "block",
        "0px",
    ]
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#now table[data-step='1']")
    assert "[3, 4, 5]" in page.inner_text("#now")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("[data-leaf=obs][data-ready='1']")
    page.keyboard.press("c")
    page.wait_for_selector("[data-leaf=obs][data-ready='1 2']")
    assert page.locator("[data-leaf=obs] .uplot").count() == 2
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-leaf=obs][data-ready='1']")
    page.fill("[name=min_return]", "10")
    page.locator("#more", has_text="2 of 2 listed").wait_for()
    page.click("[data-sort=return]")
    page.wait_for_selector("[data-sort=return][data-way=down]")
    assert listed(page) == ["3", "2"]
    page.fill("#leaves", "rew")
    assert page.locator(".leaf:visible").count() == 1


@numbers
def test_a_click_goes_to_a_step_and_a_drag_zooms(opened: Any) -> None:
    page = opened
    page.click("#list tbody tr:nth-child(3)")
    page.wait_for_selector("[data-leaf=obs][data-ready='2']")
    box = page.locator("[data-leaf=obs] .u-over").bounding_box()
    y = box["y"] + 50
    page.mouse.click(box["x"] + box["width"] / 2, y)
    assert page.inner_text("#at") == "step 2 / 4"
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, y, steps=3)
    page.mouse.up()
    page.wait_for_selector("#unzoom", state="visible")
    assert page.evaluate("view.state.zoom") == [1, 3]


@pictures
def test_frames_are_shown_exactly_and_play(opened: Any) -> None:
    page = opened
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#list tbody tr:nth-child(2)")
    page.wait_for_selector("canvas[aria-label*='episode 1'][data-step='0']")
    pixel = "[...document.querySelector('canvas').getContext('2d').getImageData(3, 3, 1, 1).data].slice(0, 3)"
    assert page.evaluate(pixel) == [80, 80, 80]
    page.select_option("#speed", "60")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(" ")
    page.wait_for_selector("canvas[data-step='5']")
    assert page.evaluate(pixel) == [180, 180, 180]
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


@pytest.mark.parametrize("opened", [(robot, "light")], indirect=True)
def test_a_lerobot_set_has_names_tasks_and_time(opened: Any) -> None:
    page = opened
    assert "10 steps a second" in page.inner_text("#summary")
    labels = page.locator("[data-leaf='observation.state'] .u-legend .u-label").all_inner_texts()
    assert [label.strip(": ") for label in labels] == ["step", "x", "y", "z"]
    assert page.locator(".leaf").count() == 1 and page.input_value("#speed") == "10"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#now table[data-step='1']")
    assert page.inner_text("#at") == "step 1 / 3 · 0.10 s"
    page.fill("[name=task]", "vu")
    page.locator("#more", has_text="1 of 1 listed").wait_for()
    page.click("#list tbody tr")
    assert "déjà vu" in page.inner_text("#heads")


@pytest.mark.parametrize("opened", [(cameras, "light")], indirect=True)
def test_cameras_are_side_by_side_and_a_set_of_pictures_has_no_empty_cards(opened: Any) -> None:
    one, other = (card.bounding_box() for card in opened.locator(".picture").all())
    assert one["y"] == other["y"] and one["x"] + one["width"] < other["x"]
    assert not opened.is_visible("#now") and not opened.is_visible("#leaf-filter")

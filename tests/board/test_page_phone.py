"""The page on a phone, by touch alone: a run is begun, watched, compared and asked about a picture."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.board.browsing import SECONDS, opened, until

WIDTH = 360
COVERED = """(selector) => {
  const { left, top, width, height } = document.querySelector(selector).getBoundingClientRect();
  return !document.elementFromPoint(left + width / 2, top + height / 2)?.closest(selector);
}"""


@pytest.fixture(params=["zh-CN", pytest.param("en-US", marks=pytest.mark.slow)])
def phone(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    settings = {"viewport": {"width": WIDTH, "height": 740}, "has_touch": True, "is_mobile": True}
    with opened(browser, address, locale=request.param, **settings) as found:
        yield found


def picture() -> bytes:
    written = io.BytesIO()
    Image.frombytes("L", (8, 8), bytes([0, 0, 80, 200, 200, 80, 0, 0] * 8)).save(written, "PNG")
    return written.getvalue()


def test_every_page_is_a_tap_away(phone: Any) -> None:
    links = phone.locator("header nav a")
    boxes = [links.nth(place).bounding_box() for place in range(links.count())]
    assert len(boxes) == 7
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= WIDTH for box in boxes)
    assert all(box["height"] >= 32 for box in boxes)


def test_what_has_to_be_put_right_is_a_tap_away(phone: Any) -> None:
    """The list of problems stands below the form, which is many screens high; the bar with Start is always seen."""
    phone.tap("[data-recipe=hotel-bert]")
    phone.tap("[data-field='loop.epochs'] label")
    phone.locator(".start [role=status] button").tap()
    until(phone, lambda: phone.evaluate("scrollY") == 0)
    shown = phone.wait_for_selector("[data-field='workload.data.train'] .error").bounding_box()
    assert 0 < shown["y"] < 600


@pytest.mark.long
def test_a_run_is_begun_watched_compared_and_asked_by_touch(phone: Any, trained: str) -> None:
    assert phone.locator("[data-recipe]").first.get_attribute("data-recipe") == "digits", "it needs no data"
    phone.tap("[data-recipe=digits]")
    phone.wait_for_selector("[data-start]:not(:disabled)")
    assert not phone.evaluate(COVERED, "[data-start]")
    phone.fill("#field-loop-epochs", "1")
    phone.wait_for_selector("[data-ready]", state="attached")
    phone.wait_for_selector("[data-start]:not(:disabled)")
    phone.tap("[data-start]")
    phone.wait_for_url("**/#/runs/*")
    name = phone.url.rsplit("/", 1)[1]
    phone.wait_for_selector("main .badge.good", timeout=SECONDS * 1000)
    phone.wait_for_selector("[data-chart=loss] canvas")
    phone.tap("header nav a[href='#/runs']")
    for each in (name, trained):
        phone.locator(f"tr:has(a[href='#/runs/{each}']) input[type=checkbox]").tap()
    assert not phone.evaluate(COVERED, "[data-chosen] a"), "what was ticked can be compared without scrolling back"
    phone.tap("[data-chosen] a")
    phone.wait_for_selector("[data-chart=accuracy] canvas")
    labels = phone.locator("table.cards tbody tr").first.locator("td[data-label]")
    assert all(labels.nth(place).get_attribute("data-label") for place in range(labels.count()))
    phone.tap(f"table.cards a[href='#/runs/{name}']")
    phone.tap("a.button[href*='evaluate?run']")
    phone.set_input_files("#upload", {"name": "one.png", "mimeType": "image/png", "buffer": picture()})
    phone.wait_for_selector("main table tbody td", timeout=SECONDS * 1000)
    assert "one.png" in phone.inner_text("main table")
    assert phone.evaluate("document.documentElement.scrollWidth") <= WIDTH


def act(phone: Any, what: str) -> None:
    """Taps an action of a run, and the button that confirms it."""
    phone.tap(f"[data-action={what}]")
    phone.locator("dialog .buttons button").last.tap()
    phone.wait_for_selector("dialog", state="detached")


@pytest.mark.long
def test_a_run_is_stopped_saved_resumed_and_ended_by_touch(phone: Any, folder: Path) -> None:
    phone.tap("[data-recipe=digits]")
    phone.wait_for_selector("[data-start]:not(:disabled)")
    phone.fill("#field-loop-epochs", "2000")
    phone.fill("#field-name", f"stopped-{phone.get_attribute('html', 'lang')}")
    phone.wait_for_selector("[data-ready]", state="attached")
    phone.wait_for_selector("[data-start]:not(:disabled)")
    phone.tap("[data-start]")
    phone.wait_for_url("**/#/runs/*")
    run = folder / "runs" / phone.url.rsplit("/", 1)[1]
    phone.wait_for_selector("[data-chart=loss] canvas", timeout=2 * SECONDS * 1000)
    act(phone, "stop")
    phone.wait_for_selector("[data-action=resume]", timeout=2 * SECONDS * 1000)
    saved = max((run / "checkpoints").iterdir()).name
    act(phone, "resume")
    phone.wait_for_selector("main .badge.live:text-matches('^(running|运行中)$')", timeout=3 * SECONDS * 1000)
    until(phone, lambda: f"went on from step {int(saved.rpartition('-')[2])}" in marks_of(phone, run.name))
    assert phone.evaluate("document.documentElement.scrollWidth") <= WIDTH
    act(phone, "kill")
    phone.wait_for_selector("[data-action=delete]", timeout=SECONDS * 1000)


def marks_of(phone: Any, name: str) -> str:
    return str(phone.evaluate("name => fetch(`api/runs/${name}/curve`).then(answer => answer.text())", name))

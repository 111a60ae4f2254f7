"""A board that runs, and Chromium to look at it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ADDRESS = re.compile(r"https?://\S+/login#\S+")
SECONDS = 60  # until the board answers, and until a page shows what a test waits for


@contextlib.contextmanager
def board(folder: Path) -> Iterator[str]:
    """Runs `drivetrain board` on folder/runs; yields the address that it prints."""
    log = folder / "board.txt"
    command = [sys.executable, "-m", "drivetrain", "board", "--runs", str(folder / "runs"), "--data", str(folder)]
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "--port", "0"], cwd=folder, stderr=written, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield _address(process, log)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=SECONDS)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(SECONDS * 10):
        if found := ADDRESS.search(log.read_text()):
            return found[0]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail(f"the board did not start: {log.read_text()}")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yields a browser of Playwright's; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev has it)")
    if CHROMIUM is None:
        pytest.skip("no Chromium was found")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: Any, address: str, **settings: Any) -> Iterator[Any]:
    """Yields a page that is logged in; fails if anything on it raised an error."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-US", **settings})
    context.set_default_timeout(SECONDS * 1000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    page.goto(address)
    page.wait_for_selector("h1:not(:has(img))")  # the login has one too
    yield page
    context.close()
    assert not errors


def until(page: Any, holds: Callable[[], bool]) -> None:
    """Waits until something holds; the page's policy forbids Playwright's own waiting by a text of JavaScript."""
    for _ in range(SECONDS * 10):
        if holds():
            return
        page.wait_for_timeout(100)
    pytest.fail("what the test waited for did not come")


def begin(page: Any, recipe: str = "digits") -> None:
    """Begins a new run with a recipe, until it is checked."""
    page.click(f"[data-recipe={recipe}]")
    page.wait_for_selector("[data-ready]")


def visit(page: Any, place: str) -> None:
    """Follows a link within the page."""
    page.goto(f"{page.url.split('#')[0]}{place}")


def yaml_of(page: Any) -> str:
    """Returns the text in the editor of YAML, once it is there."""
    page.wait_for_selector("#yaml")
    return str(page.evaluate("document.querySelector('[data-editor]').view.state.doc.toString()"))


def write_yaml(page: Any, text: str) -> None:
    """Pastes a text over all that is in the editor of YAML."""
    page.click("#yaml")
    page.keyboard.press("Control+a")
    page.evaluate(
        """(text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          const content = document.querySelector("[data-editor]").shadowRoot.querySelector("#yaml");
          content.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }""",
        text,
    )
    assert yaml_of(page) == text

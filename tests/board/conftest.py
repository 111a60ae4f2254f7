"""A board in a folder of each file of tests, Chromium, and a run that was trained by clicks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.board.browsing import begin, board, chromium, opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("board")


@pytest.fixture(scope="module")
def address(browser: Any, folder: Path) -> Iterator[str]:  # noqa: ARG001  without a browser there is nothing to start
    with board(folder) as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address) as found:
        yield found


@pytest.fixture(scope="module")
def trained(browser: Any, address: str) -> str:
    """Trains a run by clicks alone, Start clicked twice; returns its name."""
    with opened(browser, address) as page:
        begin(page)
        page.fill("#field-loop-epochs", "2")
        page.fill("#field-name", "clicked")
        page.wait_for_selector("[data-start]:not(:disabled)")
        page.dblclick("[data-start]")
        page.wait_for_url("**/#/runs/clicked")
        page.wait_for_selector("main .badge.good:has-text('completed')")
    return "clicked"

"""The board's page as a whole in a real browser: languages, screen readers, phones, size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from tests.board.boards import DIGITS
from tests.board.browsing import SECONDS, begin, opened, until, visit

STATIC = Path(drivetrain.__file__).parent / "board" / "static"
GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 16}
BUDGET_BYTES = 100_000  # of the first page: all its files and answers, compressed
BUDGET_SECONDS = 1.5
BUDGET_REQUESTS = 40
PAGES = [
    "#/new",
    "#/new?recipe=digits",
    "#/new?recipe=digits&tab=yaml",
    "#/runs",
    "#/compare",
    "#/evaluate",
    "#/chat",
    "#/export",
    "#/machine",
]


@pytest.fixture(scope="module")
def others(folder: Path) -> str:
    """A language model's run, beside the one of pictures."""
    text = folder / "rhymes.txt"
    text.write_text("one two, buckle my shoe. three four, shut the door.\n" * 60)
    model = {"tokenizer": "characters", "config": GPT}
    block = {"type": "language_model", "model": model, "data": {"train": str(text), "length": 16}}
    own = {"batch_size": 8, "loop": {"steps": 12}, "optimizer": {"name": "adamw", "lr": 0.01}, "name": "rhymes"}
    file = folder / "rhymes.yaml"
    file.write_text(json.dumps({"workload": {**block, "data": {**block["data"], "evaluation_fraction": 0.2}}, **own}))
    _run("train", str(file), f"output={folder / 'runs' / 'rhymes'}", "--quiet")
    return "rhymes"


@pytest.fixture(scope="module")
def compared(folder: Path) -> str:
    """A comparison of two precisions."""
    file = folder / "digits.yaml"
    file.write_text(DIGITS)
    _run("compare", str(file), "precision=fp32,bf16-mixed", f"--output={folder / 'runs' / 'precisions'}")
    return "precisions"


def _run(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "drivetrain", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("theme", "locale"),
    [
        ("light", "en-US"),
        ("dark", "zh-CN"),
        pytest.param("light", "zh-CN", marks=pytest.mark.slow),
        pytest.param("dark", "en-US", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing(browser: Any, address: str, trained: str, theme: str, locale: str) -> None:
    places = [*PAGES, f"#/runs/{trained}", f"#/runs/{trained}?tab=log", f"#/runs/{trained}?tab=checkpoints"]
    with opened(browser, address, color_scheme=theme, locale=locale) as page:
        look_with_axe(page, places)


@pytest.mark.long
@pytest.mark.parametrize(("theme", "locale"), [("light", "zh-CN"), ("dark", "en-US")])
def test_axe_finds_nothing_where_runs_and_comparisons_are_used(
    browser: Any, address: str, trained: str, others: str, compared: str, theme: str, locale: str
) -> None:
    """Two runs that were trained, the page that compares them, and a comparison of settings that was run."""
    of_runs = [f"#/runs/{trained}?tab=config", f"#/runs/{trained}?tab=notes", f"#/runs/{others}", "#/runs/nothing"]
    used = [f"#/evaluate?run={trained}", f"#/export?run={trained}", f"#/chat?left={others}"]
    both = [f"#/compare?runs={trained}/{others}", f"#/compare?matrix={compared}"]
    with opened(browser, address, color_scheme=theme, locale=locale) as page:
        look_with_axe(page, [*of_runs, *used, *both])
        visit(page, both[0])
        page.wait_for_selector("[data-chart=loss] canvas")
        names = page.locator("table.cards tbody a").all_inner_texts()
    assert names == [trained, others]


def look_with_axe(page: Any, places: Sequence[str]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for place in places:
        visit(page, place)
        page.wait_for_selector("h1")
        page.wait_for_load_state("networkidle")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, f"{place}: {found.generate_report()}"


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_axe_finds_nothing_in_what_is_folded_and_it_fits_a_phone(browser: Any, address: str, locale: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with opened(browser, address, viewport={"width": 360, "height": 740}, locale=locale) as page:
        begin(page)
        folded = page.locator("main details:not([open]) > summary")
        while folded.count():
            folded.first.click()
        page.wait_for_selector("#import")
        page.wait_for_selector("[data-start-matrix]")
        page.wait_for_load_state("networkidle")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_is_wider_than_a_phone(browser: Any, address: str, locale: str) -> None:
    with opened(browser, address, viewport={"width": 360, "height": 740}, locale=locale) as page:
        for place in PAGES:
            visit(page, place)
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, place


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_the_first_page_is_small_and_quick(browser: Any, address: str, locale: str) -> None:
    """The seconds are the processor's, of the page's thread: other work on the machine does not count."""
    with opened(browser, address, locale=locale) as page:
        host, known = page.url.split("#")[0], page.context.storage_state()
    context = browser.new_context(storage_state=known, locale=locale)  # logged in, and its cache empty
    page = context.new_page()
    sizes: list[tuple[str, int]] = []
    page.on("response", lambda answer: sizes.append((answer.url, answer.request.sizes()["responseBodySize"]))
            if "api/events" not in answer.url else None)  # fmt: skip
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(host)
    page.wait_for_selector("[data-recipe=digits]", timeout=SECONDS * 1000)
    measured = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    context.close()
    assert len(sizes) <= BUDGET_REQUESTS
    assert all(url.startswith(host) for url, _ in sizes)
    assert not any(url.endswith("/zh.fields.json") for url, _ in sizes)  # no form is open yet
    assert 10_000 < sum(size for _, size in sizes) <= BUDGET_BYTES
    assert 0 < measured["TaskDuration"] <= BUDGET_SECONDS


def test_the_language_changes_without_a_reload(page: Any) -> None:
    begin(page)
    page.evaluate("globalThis.kept = true")
    page.click("header button[lang=zh-CN]")
    page.wait_for_selector("h1:has-text('新建运行')")
    assert page.evaluate("globalThis.kept") is True
    assert page.get_attribute("html", "lang") == "zh-CN"
    page.reload()
    page.wait_for_selector("h1:has-text('新建运行')")


def test_a_field_is_documented_in_chinese_by_the_kind_of_its_block(browser: Any, address: str) -> None:
    """The texts are loaded with the first form, and the one that is drawn is of the workload's kind."""
    texts = json.loads((STATIC / "text" / "zh.fields.json").read_text())["fields"]
    with opened(browser, address, locale="zh-CN") as page:
        loaded: list[str] = []
        page.on("request", lambda request: loaded.append(request.url))
        begin(page)
        shown = "[data-field='workload.data.bad_rows'] .doc"
        page.fill("#search-fields", "bad_rows")
        until(page, lambda: page.inner_text(shown) == texts["workload.data.bad_rows"]["image_classification"])
        assert sum(url.endswith("/zh.fields.json") for url in loaded) == 1
        visit(page, "#/new?recipe=alpaca-sft")
        until(page, lambda: page.inner_text(shown) == texts["workload.data.bad_rows"]["language_model"])
        page.click("header button[lang=en]")
        until(page, lambda: page.inner_text(shown).startswith("Rows that cannot be used"))


def test_the_language_of_the_fields_changes_with_that_of_the_page(page: Any) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    begin(page)
    assert not any("/text/zh" in url for url in loaded)
    page.fill("#search-fields", "loader.prefetch")
    page.click("header button[lang=zh-CN]")
    until(page, lambda: "每个加载进程" in page.inner_text("[data-field='loader.prefetch'] .doc"))


def test_the_form_is_in_english_where_its_texts_cannot_be_loaded(browser: Any, address: str) -> None:
    with opened(browser, address, locale="zh-CN") as page:
        page.route("**/zh.fields.json", lambda route: route.abort())
        begin(page)
        page.fill("#search-fields", "loader.prefetch")
        until(page, lambda: page.inner_text("[data-field='loader.prefetch'] .doc").startswith("Micro-batches"))


def test_tabs_are_moved_between_by_arrows(page: Any) -> None:
    begin(page)
    page.focus("[data-tab=form]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#yaml")
    assert page.evaluate("document.activeElement.dataset.tab") == "yaml"

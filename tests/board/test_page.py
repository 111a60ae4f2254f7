"""The board's page in a real browser, by clicks alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import drivetrain
from drivetrain.board.board import OWN
from drivetrain.board.entries import Asked, Claim, Ended, Entries, claimed, now, read_stop
from tests.board.boards import point, write_run
from tests.board.browsing import SECONDS, board, chromium, opened, until

STATIC = Path(drivetrain.__file__).parent / "board" / "static"
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


def begin(page: Any, recipe: str = "digits") -> None:
    page.click(f"[data-recipe={recipe}]")
    page.wait_for_selector("[data-ready]")


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


def visit(page: Any, place: str) -> None:
    page.goto(f"{page.url.split('#')[0]}{place}")


@pytest.mark.long
def test_a_run_is_trained_by_clicks_alone_and_started_once(page: Any, trained: str) -> None:
    visit(page, f"#/runs/{trained}")
    page.wait_for_selector("[data-chart=loss] canvas")
    charts = page.locator("[data-chart]").evaluate_all("all => all.map(each => each.dataset.chart)")
    assert {"loss", "accuracy", "lr", "grad_norm"} <= set(charts)
    page.click("[data-tab=log]")
    page.wait_for_selector("pre.log:has-text('completed')")
    page.click("[data-tab=checkpoints]")
    page.wait_for_selector("td:has-text('step-')")
    page.click("nav a:has-text('Runs')")
    page.wait_for_selector(f"tbody a:has-text('{trained}')")
    assert page.locator(f"tbody a:has-text('{trained}')").count() == 1  # a double click starts one run


def test_runs_are_compared_by_ticking_them(page: Any, folder: Path, trained: str) -> None:
    runs = folder / "runs"
    shutil.copytree(runs / trained, runs / "faster", symlinks=True)
    settings = (runs / trained / "run.yaml").read_text()
    (runs / "faster" / "run.yaml").write_text(re.sub(r"\blr: 0\.1\b", "lr: 0.2", settings))
    visit(page, "#/runs")
    for name in (trained, "faster"):
        page.check(f"input[aria-label*='{name} ']")
    page.click("a:has-text('Compare 2 runs')")
    page.wait_for_selector("[data-chart=loss] canvas")
    assert page.locator("[data-chart=loss] .key").all_inner_texts()[0].startswith(trained)
    differing = page.locator("td:first-child code").all_inner_texts()
    assert differing == ["optimizer.lr"]
    assert page.locator("tr:has(code)").inner_text().split() == ["optimizer.lr", "0.1", "0.2"]


def test_notes_and_tags_are_kept_and_searched(page: Any, trained: str) -> None:
    visit(page, f"#/runs/{trained}?tab=notes")
    page.fill("#tags", "baseline, first")
    page.fill("#note", "<b>bold</b> as typed")
    page.click("main form button")
    page.wait_for_selector("text=Saved")
    page.reload()
    assert page.input_value("#note") == "<b>bold</b> as typed"
    visit(page, "#/runs?tag=baseline")
    page.wait_for_selector(f"tbody a:has-text('{trained}')")
    assert page.locator("tbody .badge:has-text('baseline')").count() == 1


def test_what_a_click_does_is_said_before_it_is_done(page: Any, folder: Path, trained: str) -> None:
    shutil.copytree(folder / "runs" / trained, folder / "runs" / "superfluous", symlinks=True)
    visit(page, "#/runs/superfluous")
    page.click("[data-action=delete]")
    assert re.search(r"[0-9]", page.inner_text("dialog p"))  # what it frees
    page.click("dialog button:has-text('Cancel')")
    assert (folder / "runs" / "superfluous").exists()
    page.click("[data-action=delete]")
    page.click("dialog button.danger")
    page.wait_for_url("**/#/runs")
    assert not (folder / "runs" / "superfluous").exists()


def test_an_error_is_shown_at_its_field_and_start_waits_for_it(page: Any) -> None:
    begin(page)
    page.fill("#field-optimizer-lr", "fast")
    page.wait_for_selector("#field-optimizer-lr-error")
    assert page.get_attribute("#field-optimizer-lr", "aria-invalid") == "true"
    assert page.is_disabled("[data-start]")
    page.fill("#field-optimizer-lr", "0.05")
    page.wait_for_selector("[data-ready]")
    assert page.locator(".field .error").count() == 0
    assert page.is_enabled("[data-start]")


def test_form_and_yaml_are_one_and_comments_stay(page: Any) -> None:
    begin(page)
    page.click("[data-tab=yaml]")
    text = page.input_value("#yaml")
    page.fill("#yaml", text.replace("batch_size: 64", "batch_size: 32  # small"))
    page.click("[data-tab=form]")
    until(page, lambda: page.input_value("#field-batch_size") == "32")
    page.fill("#field-seed", "7")
    page.wait_for_selector("[data-field=seed].set")
    page.click("[data-tab=yaml]")
    text = page.input_value("#yaml")
    assert "batch_size: 32  # small" in text
    assert "seed: 7" in text
    page.fill("#yaml", f"{text}\nbatchsize: 3\n")
    page.wait_for_selector("#problems .note.bad:has-text('batchsize')")  # an unknown key is an error


def test_every_field_is_found_by_search(page: Any) -> None:
    begin(page)
    page.fill("#search-fields", "log_every")
    page.fill("#field-tracking-log_every", "3")
    page.wait_for_selector("[data-field='tracking.log_every'].set")
    page.fill("#search-fields", "no such thing")
    page.wait_for_selector("text=Fields found: 0")


def test_a_reload_keeps_what_was_typed(page: Any) -> None:
    begin(page)
    page.fill("#field-batch_size", "48")
    page.wait_for_selector("[data-ready]")
    page.reload()
    until(page, lambda: page.input_value("#field-batch_size") == "48")


def test_the_language_changes_without_a_reload(page: Any) -> None:
    begin(page)
    page.evaluate("globalThis.kept = true")
    page.click("header button[lang=zh-CN]")
    page.wait_for_selector("h1:has-text('新建训练')")
    assert page.evaluate("globalThis.kept") is True
    assert page.get_attribute("html", "lang") == "zh-CN"
    page.reload()
    page.wait_for_selector("h1:has-text('新建训练')")


def test_a_field_is_documented_in_chinese_by_the_kind_of_its_block(browser: Any, address: str) -> None:
    """The texts are loaded with the first form, and the one that is drawn is of the workload's kind."""
    texts = json.loads((STATIC / "text" / "zh.fields.json").read_text())
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
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with opened(browser, address, color_scheme=theme, locale=locale) as page:
        for place in [*PAGES, f"#/runs/{trained}", f"#/runs/{trained}?tab=log"]:
            visit(page, place)
            page.wait_for_selector("h1")
            page.wait_for_load_state("networkidle")
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_is_wider_than_a_phone(browser: Any, address: str, locale: str) -> None:
    with opened(browser, address, viewport={"width": 360, "height": 740}, locale=locale) as page:
        for place in PAGES:
            visit(page, place)
            page.wait_for_load_state("networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, place


def test_tabs_are_moved_between_by_arrows(page: Any) -> None:
    begin(page)
    page.focus("[data-tab=form]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#yaml")
    assert page.evaluate("document.activeElement.dataset.tab") == "yaml"


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


@pytest.mark.slow
def test_the_plan_stands_beside_start(page: Any) -> None:
    begin(page)
    page.click("[data-check]")
    page.wait_for_selector("dt:has-text('Parameters') + dd:has-text('20,346 in all')", timeout=300_000)
    assert page.inner_text("dt:has-text('Memory') + dd").endswith("a device")
    assert "free" in page.inner_text("dt:has-text('Checkpoints') + dd")


@pytest.mark.slow
def test_data_are_shown_as_the_run_sees_them(page: Any) -> None:
    begin(page)
    page.click("[data-tab=data]")
    page.wait_for_selector(".pictures img", timeout=300_000)
    assert page.locator(".pictures img").count() == 20
    assert page.locator(".classes [role=progressbar]").count() == 10
    assert page.locator("img").last.evaluate("image => image.naturalWidth") > 0


@pytest.mark.slow
def test_a_run_evaluates_predicts_an_upload_and_exports(page: Any, trained: str, tmp_path: Path) -> None:
    Image.new("L", (32, 32), 255).save(tmp_path / "white.png")
    visit(page, "#/evaluate")
    page.select_option("#run", trained)
    page.click("[data-evaluate]")
    page.wait_for_selector("dt:has-text('Accuracy') + dd b", timeout=300_000)
    assert 0 <= float(page.inner_text("dt:has-text('Accuracy') + dd b")) <= 1
    page.set_input_files("#upload", tmp_path / "white.png")
    page.wait_for_selector("a:has-text('CSV')", timeout=300_000)
    assert page.locator("section table tbody tr").count() == 1
    with page.expect_download() as downloaded:
        page.click("a:has-text('CSV')")
    assert len(downloaded.value.path().read_text().splitlines()) == 2
    visit(page, f"#/export?run={trained}")
    page.click("[data-export]")  # plain Transformers has no ResNet with GroupNorm: the reason is shown
    page.wait_for_selector("pre.log:has-text('GroupNorm')", timeout=300_000)
    page.click(".recipe:has-text('torch-export')")
    page.click("[data-export]")
    page.wait_for_selector(".note.good:has-text('Verified')", timeout=300_000)
    assert page.locator("a[href*='/exports/']").count() > 0


def test_data_are_chosen_by_clicks(page: Any, folder: Path) -> None:
    (folder / "pictures" / "cat").mkdir(parents=True)
    begin(page)
    page.click("[data-field='workload.data.train'] button:has-text('Choose')")
    page.click("dialog li button:has-text('pictures')")
    page.wait_for_selector("dialog li button:has-text('cat')")
    page.click("dialog button:has-text('Use this folder')")
    until(page, lambda: page.input_value("#field-workload-data-train") == str(folder / "pictures"))


@pytest.mark.long
def test_a_run_that_fails_shows_its_cause(page: Any, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "broken.png").write_bytes(b"this is no picture")
    begin(page)
    page.select_option("#field-workload-data-source", "folder")
    page.fill("#field-workload-data-train", str(tmp_path))
    page.fill("#field-name", "broken")
    page.wait_for_selector("[data-ready]")
    page.click("[data-start]")
    page.wait_for_url("**/#/runs/broken*")
    page.wait_for_selector(".badge.bad")
    shown = page.inner_text(".note.bad")
    assert re.search("class|picture|image", shown)


def test_edits_are_kept_while_the_server_cannot_be_reached(page: Any) -> None:
    begin(page)
    page.context.set_offline(True)
    page.fill("#field-batch_size", "48")
    page.wait_for_selector("#problems .note.bad:has-text('cannot be reached')")
    page.fill("#field-seed", "9")
    page.wait_for_timeout(600)
    assert page.is_disabled("[data-start]")
    page.context.set_offline(False)
    page.wait_for_selector("[data-ready]")
    page.click("[data-tab=yaml]")
    text = page.input_value("#yaml")
    assert "batch_size: 48" in text
    assert "seed: 9" in text


def test_a_point_that_comes_while_a_curve_is_awaited_is_asked_for_afterwards(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "slow", steps=5, finished=None)
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        found = route.fetch()
        if len(asked) == 1:
            point(run, 6)
            page.wait_for_timeout(3000)  # the page hears of the point while it waits
        route.fulfill(response=found)

    page.route(re.compile(r"/curve\?"), answer)
    visit(page, "#/runs/slow")
    page.wait_for_selector("[data-chart=loss] canvas")
    until(page, lambda: len(asked) == 2)
    shutil.rmtree(run)


def test_what_runs_beside_training_is_ended_by_a_click(page: Any, folder: Path, trained: str) -> None:
    entries = Entries(folder / "runs" / OWN / "entries")
    asked = Asked(id="e" * 20, digest="", verb="evaluate", run=trained, words=["x"], owner="admin", created=now())
    entry, _ = entries.add(asked, {})
    claimed(entries.folder / entry.id, Claim(by="keeper", time=now(), host="other", process=1))
    visit(page, "#/runs")
    page.click(f"[data-end={entry.id}]")
    page.wait_for_selector(".badge:has-text('stopping')")
    stop = read_stop(entries.folder / entry.id)
    assert stop is not None
    assert stop.now
    (entries.folder / entry.id / "ended.json").write_text(Ended(code=-9, time=now()).model_dump_json())

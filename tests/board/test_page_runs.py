"""Runs in a real browser, by clicks alone: trained, watched, compared, used."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from drivetrain.board.board import OWN
from drivetrain.board.entries import Entries, claimed, read_stop
from drivetrain.board.records import Asked, Claim, Ended, now
from drivetrain.runtime.lock import held
from tests.board.boards import point, write_run
from tests.board.browsing import begin, opened, until, visit


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


def downloaded(page: Any, selector: str) -> Path:
    with page.expect_download() as begun:
        page.click(selector)
    return Path(begun.value.path())


def test_the_report_of_a_run_is_a_file_that_stands_by_itself(page: Any, trained: str, tmp_path: Path) -> None:
    visit(page, f"#/runs/{trained}")
    file = shutil.copy(downloaded(page, "[data-report]"), tmp_path / "report.html")
    other = page.context.new_page()
    loaded: list[str] = []
    other.on("request", lambda request: loaded.append(request.url))
    other.goto(Path(file).as_uri())
    assert other.locator("figure svg").count() >= 4
    assert "batch_size: 64" in other.inner_html("details >> nth=0")
    assert loaded == [Path(file).as_uri()]


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
    report = downloaded(page, "[data-report]").read_text(encoding="utf-8")
    assert "What to do" in report
    assert "The end of its log" in report


def test_a_point_that_comes_while_a_curve_is_awaited_is_asked_for_afterwards(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "slow", steps=5, finished=None)
    asked: list[str] = []
    answered: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.url)
        found = route.fetch()
        if len(asked) == 1:
            point(run, 6)
            page.wait_for_timeout(3000)  # the page hears of the point while it waits
        route.fulfill(response=found)
        answered.append(route.request.url)

    page.route(re.compile(r"/curve\?"), answer)
    visit(page, "#/runs/slow")
    page.wait_for_selector("[data-chart=loss] canvas")
    until(page, lambda: len(asked) == 2)
    until(page, lambda: len(answered) == 2)  # an answer under way would fail when the page is closed
    shutil.rmtree(run)


def test_tabs_of_one_browser_ask_once_for_what_is_new(browser: Any, address: str, folder: Path) -> None:
    run = write_run(folder / "runs" / "shared", steps=5, finished=None)
    asked: list[str] = []
    with opened(browser, address) as first:
        tabs = [first, *(first.context.new_page() for _ in range(3))]
        for tab in tabs:
            tab.goto(f"{address.split('login')[0]}#/runs/shared?smooth=0")
            tab.wait_for_selector("[data-chart=loss] canvas")
            tab.on("request", lambda request: asked.append(request.url) if "/curve?" in request.url else None)
        for step in range(6, 11):
            point(run, step, loss=float(step))
            for tab in tabs:
                tab.wait_for_selector(f"[data-chart=loss] .plot[aria-label$='value {step}']")
        assert 5 <= len(asked) < 2 * 5, "each of four tabs would have asked five times"
    shutil.rmtree(run)


def test_a_hidden_tab_asks_for_its_curve_when_somebody_looks(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "hidden", steps=5, finished=None)
    visit(page, "#/runs/hidden?smooth=0")
    page.wait_for_selector("[data-chart=loss] canvas")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => globalThis.looks !== true })")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/curve?" in request.url else None)
    point(run, 6, loss=6.0)
    page.wait_for_selector("text=step 6 of 100")
    page.wait_for_timeout(500)
    assert not asked
    page.evaluate("globalThis.looks = true; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("[data-chart=loss] .plot[aria-label$='value 6']")
    assert len(asked) == 1
    shutil.rmtree(run)


def test_curves_lie_along_tokens_and_the_utilisation_is_a_line_for_each_rank(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "ranks", steps=2, finished=None)  # an older version wrote these: without both
    visit(page, "#/runs/ranks")
    page.wait_for_selector("[data-chart=loss] canvas")
    assert not page.is_visible("button:text-is('Tokens')")
    for step in (3, 4):
        point(run, step, tokens=step * 100, utilisation=0.25, utilisation_by_rank=[0.25, 0.75])
    page.click("button:text-is('Tokens')")
    page.wait_for_url("**x=tokens*")
    keys = "[data-chart=utilisation] .key"
    shown = lambda: [" ".join(each.split()) for each in page.locator(keys).all_inner_texts()]  # noqa: E731
    until(page, lambda: shown() == ["rank 0 0.25", "rank 1 0.75"])
    shutil.rmtree(run)


def test_answers_of_a_run_are_shown_as_text_beside_their_rewards(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "answers", workload={"type": "language_model", "stage": "grpo"})
    evil = "<img src=x onerror='globalThis.struck = 1'>\nsecond line"
    lines = [
        {"step": 10, "prompt": "2 + 2?", "answer": "four", "reference": "4", "reference_model": "five"},
        {"step": 20, "event": "rollout", "prompt": "3 + 3?", "answer": evil, "reference": None, "reward": 0.5,
         "rewards": {"length": 0.25}, "advantage": -1.5},
    ]  # fmt: skip
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    visit(page, "#/runs/answers")
    page.click("[data-tab=samples]")
    page.wait_for_selector("[data-sample]")
    newest, older = page.locator("[data-sample]").all_inner_texts()
    assert re.sub(
        r"\s+", " ", newest
    ) == f"step 20 · reward 0.5 · advantage -1.5 · length 0.25 Prompt 3 + 3? Answer {evil}".replace("\n", " ")
    assert "Reference model\nfive" in older
    assert "In the data\n4" in older
    assert page.evaluate("globalThis.struck") is None
    shutil.rmtree(run)


NOTICES = """
globalThis.notices = [];
globalThis.Notification = class {
  static permission = "granted";
  static requestPermission = async () => "granted";
  constructor(title, { body }) { notices.push(`${title}: ${body}`); }
};
"""


def test_a_browser_that_was_asked_to_tells_when_something_ends(page: Any, folder: Path, trained: str) -> None:
    page.add_init_script(NOTICES)
    entries = Entries(folder / "runs" / OWN / "entries")

    def end(number: int, asks: bool) -> None:
        name = f"{number}" * 20
        asked = Asked(id=name, digest="", verb="evaluate", run=trained, words=["x"], owner="admin", created=now())
        entry, _ = entries.add(asked, {})
        claimed(entries.folder / entry.id, Claim(by="keeper", time=now(), host="other", process=1))
        page.wait_for_selector(f"[data-end='{name}']")
        if asks:
            page.check("[data-notices]")
        (entries.folder / entry.id / "ended.json").write_text(Ended(code=-9, time=now()).model_dump_json())
        page.wait_for_selector(f"[data-end='{name}']", state="detached")

    visit(page, "#/runs")
    page.reload()
    end(1, asks=False)
    assert page.evaluate("notices") == []
    end(2, asks=True)
    until(page, lambda: page.evaluate("notices") == [f"Drivetrain: {trained} (evaluate): failed"])
    page.reload()  # what was asked for is kept
    end(3, asks=False)
    until(page, lambda: page.evaluate("notices.length") == 1)


def test_a_run_that_says_nothing_for_long_is_pointed_out(page: Any, folder: Path) -> None:
    run = write_run(folder / "runs" / "silent", steps=3, finished=None)
    with held(run):
        visit(page, "#/runs/silent")
        page.wait_for_selector("main .badge:text-is('running')")
        assert not page.is_visible("[data-silent]")
        early = time.time() - 1200
        os.utime(run / "events.jsonl", (early, early))
        page.reload()
        page.wait_for_selector("[data-silent]:has-text('20 min')")
    shutil.rmtree(run)


def test_the_room_on_the_disk_is_shown(page: Any) -> None:
    visit(page, "#/runs")
    page.wait_for_selector("text=of disk free")


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

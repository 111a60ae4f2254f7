"""The page for a reader of Chinese alone: no English is left on it but names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.compare.files import as_json
from tests.board.boards import append, write_run
from tests.board.browsing import begin, opened, until, visit
from tests.compare.made import comparison, report

PACKAGE = Path(drivetrain.__file__).parent
MESSAGES = PACKAGE / "board" / "static" / "text" / "zh.messages.json"
PLACES = [
    *("#/new", "#/new?recipe=digits", "#/new?recipe=digits&tab=yaml", "#/new?recipe=digits&tab=data", "#/runs"),
    *("#/runs/clicked", "#/runs/clicked?tab=log", "#/runs/clicked?tab=checkpoints", "#/runs/clicked?tab=config"),
    *("#/runs/clicked?tab=notes", "#/runs/nothing", "#/runs/vanished", "#/compare", "#/compare?runs=clicked/vanished"),
    *("#/compare?matrix=one-seed", "#/compare?matrix=disturbed", "#/compare?matrix=at-chance"),
    *("#/evaluate?run=clicked", "#/chat", "#/export?run=clicked", "#/machine", "#/nowhere"),
]
# What is not looked at: names (translate="no"), what programs read or printed, choices of a field, and the button that
# changes to English. Texts with Chinese in them may hold names as well.
LATIN = """() => {
  const passes = "pre, code, textarea, select, [translate=no], header [lang=en], .brand";
  const isEnglish = (text) => /[A-Za-z]{2,}/.test(text) && !/[\\u4e00-\\u9fff]/.test(text);
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { data, parentElement } = texts.currentNode;
    if (!parentElement.checkVisibility() || parentElement.closest(passes)) continue;
    if (isEnglish(data) && !/^[\\s\\d.,]*(B|KiB|MiB|GiB|YAML)\\s*$/.test(data)) found.push(data.trim());
  }
  for (const name of ["aria-label", "title", "placeholder"]) {
    for (const each of document.querySelectorAll(`[${name}]`)) {
      const text = each.getAttribute(name);
      if (each.checkVisibility() && isEnglish(text) && !/[=.]/.test(text)) found.push(`${name}: ${text}`);
    }
  }
  for (const each of document.querySelectorAll("input[type=file]:not(.hidden)")) found.push(`the browser's ${each.id}`);
  return found;
}"""


@pytest.fixture(scope="module")
def vanished(folder: Path) -> str:
    """A run whose process is gone without a word."""
    run = write_run(folder / "runs" / "vanished", finished=None)
    left_out = "1 row left out: 1 because it has no text (first line 6376 (row 6375) of a.csv)"
    append(run, "warning", message=left_out)
    return "vanished"


@pytest.fixture(scope="module")
def compared(folder: Path) -> Path:
    """Comparisons of which each has other advice; returns the folder of the first."""
    data = {"evaluation_samples": 300, "largest_class": {"class": "yes", "share": 0.5333}, "classes": 2}
    guessed = {"data": data, "metrics": {"accuracy": 0.5333, "loss": 0.69, "macro_f1": 0.348}}
    known = {"evaluation_samples": 1000}
    made = {
        "one-seed": {
            "fp32": [report(100, data=known)],
            "bf16-mixed": [report(109, 0.902, 2**19, data=known)],
            "pure": [report(50, 0.7, data=known)],
        },
        "disturbed": {"fp32": [report(100, emulated=True)], "bf16-mixed": [report(300)]},
        "at-chance": {"fp32": [report(100, **guessed)], "bf16-mixed": [report(150, **guessed)]},
    }
    for name, rows in made.items():
        found = comparison(folder / "made" / name, **rows)
        if name == "disturbed":
            [result] = found.rows[0].results
            mixed = replace(result, outcome=result.outcome.model_copy(update={"foreign_share": 0.4}))
            found = replace(found, rows=(replace(found.rows[0], results=(mixed,)), found.rows[1]))
        place = folder / "runs" / name
        place.mkdir(parents=True)
        (place / "rows.json").write_text("{}")
        (place / "comparison.json").write_text(as_json(found), encoding="utf-8")
    return folder / "runs" / "one-seed"


@pytest.fixture
def chinese(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address, locale="zh-CN") as found:
        yield found


@pytest.mark.usefixtures("trained", "vanished", "compared")
def test_no_english_is_left_on_the_chinese_page(chinese: Any) -> None:
    left: dict[str, list[str]] = {}
    for place in PLACES:
        visit(chinese, place)
        chinese.wait_for_selector("main h1, main .note")
        chinese.wait_for_load_state("networkidle")
        folded = chinese.locator("main details:not([open]) > summary")
        while folded.count():
            folded.first.click()
        chinese.wait_for_timeout(300)
        if found := chinese.evaluate(LATIN):
            left[place] = found
    assert left == {}


def test_the_advice_of_a_comparison_is_in_the_language_of_the_page(chinese: Any, compared: Path) -> None:
    visit(chinese, f"#/compare?matrix={compared.name}")
    chinese.wait_for_selector("[data-advice]:has-text('没有胜者：fp32和bf16-mixed的速度除噪声外相同。')")
    shown = chinese.inner_text("[data-advice]")
    assert "准确率 0.9020" in shown or "准确率 0.9000" in shown
    assert "假定速率的变化为 6%" in shown
    assert not re.search(r"[A-Za-z]{4,} [A-Za-z]{2,} [A-Za-z]{2,}", shown), "no words of English stand in it"
    chinese.click("header button[lang=en]")
    chinese.wait_for_selector("[data-advice]:has-text('No winner: fp32 and bf16-mixed are equally quick')")
    chinese.click("header button[lang=zh-CN]")
    written = json.loads((compared / "comparison.json").read_text(encoding="utf-8"))
    earlier = compared.with_name("earlier")
    earlier.mkdir()
    (earlier / "rows.json").write_text("{}")
    (earlier / "comparison.json").write_text(json.dumps({**written, "statements": None}), encoding="utf-8")
    visit(chinese, "#/compare?matrix=earlier")
    chinese.wait_for_selector("[data-advice][lang=en]:has-text('No winner')")


@pytest.mark.usefixtures("vanished")
def test_a_message_within_a_message_is_translated_too(chinese: Any) -> None:
    visit(chinese, "#/runs/vanished")
    chinese.wait_for_selector("text=略去了 1 行：1 行的原因：没有文本（第一处：a.csv 第 6376 行（第 6375 条））")


def test_a_file_that_is_not_there_is_named_in_chinese(chinese: Any) -> None:
    """The first that a new user of the recipe reads."""
    chinese.click("[data-recipe=hotel-bert]")
    chinese.wait_for_selector(
        "[data-field='workload.data.train'] .error:has-text('data/ChnSentiCorp_htl_all.csv 不存在')"
    )
    assert re.search("相对路径从当前文件夹 .* 算起", chinese.inner_text("[data-field='workload.data.train'] .error"))
    assert chinese.evaluate(LATIN) == []


@pytest.mark.usefixtures("trained")
def test_what_the_server_says_is_translated_with_what_differs_in_it(chinese: Any) -> None:
    visit(chinese, "#/runs/nothing")
    chinese.wait_for_selector("text=没有名为 nothing 的运行")
    visit(chinese, "#/runs/clicked")
    chinese.click("[data-action=delete]")
    assert "此操作不可撤销" in chinese.inner_text("dialog p")
    chinese.keyboard.press("Escape")
    visit(chinese, "#/new")
    begin(chinese)
    chinese.fill("#field-batch_size", "0")
    shown = "[data-field='batch_size'] .error"
    until(
        chinese, lambda: "填写的是 0；应当大于 0" in chinese.inner_text(shown) if chinese.is_visible(shown) else False
    )
    assert "全局批次" in chinese.inner_text(shown), "the advice is the field's own text"


def test_why_a_run_was_refused_is_translated_from_the_log_that_wraps_its_lines(chinese: Any) -> None:
    log = """1 problem: refused before any work.
  workload.data.max_length: max_length (1024) > the model's context (512;\x20
max_position_embeddings)
      shorten it"""
    said = chinese.evaluate("async (text) => (await import('./static/js/language.js')).said(text)", log)
    assert "字段 workload.data.max_length：max_length（1024）超过模型的上下文长度" in said


@pytest.mark.parametrize(
    ("message", "translated"),
    [
        ("short of 3.2 GiB, most of it activations", "内存缺 3.2 GiB"),
        ("there are no evaluation data: none are held out; workload.data.evaluation gives some", "没有评估数据"),
    ],
)
def test_why_a_plan_does_not_fit_and_what_a_run_lacks_is_translated(
    chinese: Any, message: str, translated: str
) -> None:
    said = chinese.evaluate("async (text) => (await import('./static/js/language.js')).said(text)", message)
    assert said == translated


def test_each_message_that_is_translated_is_one_that_the_server_has() -> None:
    """Their literal parts stand in the sources: a message that is worded anew is translated anew."""
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    whole = re.sub(r'"\s*f?"|\s+', " ", re.sub(r'"\n\s*f?"', "", sources))
    for form, text in json.loads(MESSAGES.read_text(encoding="utf-8")).items():
        parts = [part.strip(" '.:;") for part in re.split(r"\{\w+\}| at |[.;,] ", form.removeprefix("yaml: "))]
        known = whole + sources
        pydantics = "input should" in form
        words = [part for part in parts if len(part) > 14]  # shorter ones may be put together of several
        missing = [part for part in words if all(each not in known for each in (part, part[:1].lower() + part[1:]))]
        assert pydantics or not missing, form
        assert set(re.findall(r"\{(\w+)\}", text)) <= set(re.findall(r"\{(\w+)\}", form)), form
        assert re.search("[\u4e00-\u9fff]", text), form

"""The page's files: texts in two languages, vendored libraries, and nothing that comes from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

import drivetrain
from drivetrain.init.catalogue import recipes

STATIC = Path(drivetrain.__file__).parent / "board" / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".html"})
OWN = [path for path in FILES if "vendor" not in path.parts]
PLACE = re.compile(r"\{(\w+)\}")
# what a browser loads of all pages together, compressed as the server sends it; test_page.py bounds the first page
BUDGET_BYTES = 120_000
BUDGET_EDITOR_BYTES = 112_000
MOST_LINES = 350


def catalogue(language: str) -> dict[str, str]:
    pairs = json.loads((STATIC / "text" / f"{language}.json").read_text(encoding="utf-8"), object_pairs_hook=list)
    doubled = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    assert not doubled
    return dict(pairs)


def test_both_languages_have_every_text() -> None:
    english, chinese = catalogue("en"), catalogue("zh")
    assert english.keys() == chinese.keys()
    assert all(text.strip() for text in [*english.values(), *chinese.values()])
    for key, text in english.items():
        assert sorted(PLACE.findall(text)) == sorted(PLACE.findall(chinese[key])), key


def test_a_run_without_answers_names_rewards_too_for_generate_need_not_be_what_it_lacks() -> None:
    for language, words in (("en", "Reinforcement learning has them once"), ("zh", "强化学习在算出奖励后才有")):
        text = catalogue(language)["sample.none"]
        assert words in text
        assert "workload.generate" in text


def test_every_recipe_has_a_title() -> None:
    assert {name for name, _ in recipes()} == {key[7:] for key in catalogue("zh") if key.startswith("recipe.")}


def test_chinese_texts_are_chinese() -> None:
    names = {"YAML", "，", "：", "。"}  # written so in both, or punctuation
    texts = set(catalogue("zh").values()) - names
    assert [text for text in texts if not re.search("[\u4e00-\u9fff]", text)] == []


def test_a_run_is_called_by_one_word_in_chinese() -> None:
    """README.zh-CN.md calls a run 运行, and a workload 任务."""
    named = {key for key, text in catalogue("zh").items() if "任务" in text}
    assert named == {"section.task", "label.workload.type"}


def scripts() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in OWN if path.suffix == ".js")


def test_no_text_is_missing_and_none_is_left_over() -> None:
    text, known = scripts(), catalogue("en")
    literal = set(re.findall(r"""["'`]([a-z_]+(?:\.[\w-]+)+)["'`]""", text)) | set(re.findall(r't\("(\w+)"', text))
    prefixes = tuple(set(re.findall(r"`([a-z_]+\.[a-z_]*)\$\{", text)))
    used_directly = set(re.findall(r'\bt\("([\w.]+)"', text))
    assert used_directly <= known.keys()
    assert [key for key in known if key not in literal and not key.startswith(prefixes)] == []


@pytest.mark.parametrize("name", ["htm-preact.js", "uplot.js", "uplot.css", "codemirror.js"])
def test_libraries_are_those_of_their_packages(name: str) -> None:
    table = (STATIC / "vendor" / "VENDORED.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest()
    assert re.search(rf"^\| {re.escape(name)} \|.*\| {digest} \|$", table, re.MULTILINE)


def test_all_files_together_are_small() -> None:
    editor = STATIC / "vendor" / "codemirror.js"  # loaded with the tab YAML alone
    assert len(gzip.compress(editor.read_bytes())) <= BUDGET_EDITOR_BYTES
    loaded = [*(path for path in FILES if path != editor), STATIC / "icon.svg", *(STATIC / "text").glob("zh*.json")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in loaded) <= BUDGET_BYTES


def imported(path: Path) -> set[Path]:
    """Returns the modules that a browser needs before it runs this one."""
    found = {
        (path.parent / name).resolve()
        for name in re.findall(
            r'^(?:import|export|  from)\b.*?"(\..+?)";$', path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    return {path, *(other for each in found for other in imported(each))}


def test_all_modules_of_the_first_page_are_asked_for_at_once() -> None:
    """A module names others, which name others: each level would be a round trip."""
    named = set(re.findall(r'<link rel="modulepreload" href="([^"]+)">', (STATIC / "index.html").read_text()))
    main, first = STATIC / "js" / "main.js", STATIC / "js" / "pages" / "new_run.js"
    needed = {f"static/{path.relative_to(STATIC).as_posix()}" for path in (imported(main) | imported(first)) - {main}}
    assert named == needed


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(STATIC).as_posix())
def test_a_file_names_no_other_host_and_needs_no_inline_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert not re.search(r"\b(eval|new Function|innerHTML|dangerouslySetInnerHTML|document\.write)\b", text)
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"""(?:src|href)=["']/""", text)  # the board may stand behind a subpath

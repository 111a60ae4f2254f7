"""Each Chinese page says what its English page says, as far as that shows without reading either language.

A page is cut into units: a heading, a paragraph, a list item, a table row, a code block. The pages of a pair have the
same kinds of units in the same order, and unit by unit the same code, inline code, links and figures. So a change to
one page fails here until its twin has it too. Two things in code blocks may be translated, and keep their figures:
comments after two spaces, and the annotations of the tree in the README. Figures are digits: numbers in words are not
compared.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.test_docs import anchors

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = [ROOT / "README.md", ROOT / "docs" / "tutorial" / "first-run.md"]
HAN = re.compile(r"[\u4e00-\u9fff]")
INLINE_CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
COMMENT = re.compile(r"(.*?)\s{2,}#\s.*")
TREE = "src/drivetrain/\n"


@dataclass(frozen=True)
class Unit:
    """A heading, paragraph, list item, table row or code block, with the number of its first line."""

    kind: str
    line: int
    text: str


def twin(page: Path) -> Path:
    """Returns the Chinese page of an English one, and the other way round."""
    stem = page.name.removesuffix(".md")
    return page.with_name(f"{stem.removesuffix('.zh-CN')}.md" if stem.endswith(".zh-CN") else f"{stem}.zh-CN.md")


def units(text: str) -> list[Unit]:
    """Cuts a page into its units, in order."""
    found: list[Unit] = []
    fence: str | None = None  # the language of the code block that is open
    ended = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if fence is None:
                fence = line[3:]
                found.append(Unit(f"code block {fence}".strip(), number, ""))
            else:
                fence = None
            ended = True
        elif fence is None and not line.strip():
            ended = True
        elif fence is None and (ended or kind(line) != "text"):
            found.append(Unit(kind(line), number, line + "\n"))
            ended = line.startswith("#")
        else:
            found[-1] = Unit(found[-1].kind, found[-1].line, found[-1].text + line + "\n")
    assert fence is None, "a code block is not closed"
    return found


def kind(line: str) -> str:
    """Names the unit that a line outside code blocks begins, or "text" where it may go on with one."""
    if heading := re.match(r"#+ ", line):
        return f"heading of level {len(heading[0]) - 1}"
    if line.startswith("|"):
        return f"table row of {INLINE_CODE.sub('', line).count('|') - 1}"
    return "list item" if re.match(r"\s*(?:[-*]|\d+\.) ", line) else "text"


def links(text: str) -> Counter[str]:
    return Counter(target for found in LINK.findall(INLINE_CODE.sub("", text)) for target in found if target)


def expected_in_twin(target: str, page: Path) -> str:
    """Returns the link that the twin of `page` has for a link of `page`: to the twin of a page that has one."""
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if linked not in ENGLISH and twin(linked) not in ENGLISH:
        return target
    if anchor:
        anchor = "#" + anchors(twin(linked))[anchors(linked).index(anchor)]
    return (f"{path.removesuffix(linked.name)}{twin(linked).name}" if path else "") + anchor


def prose_figures(text: str) -> Counter[str]:
    """Counts the numbers outside inline code and links, those in names such as fp8 or ZeRO-1 too."""
    return Counter(FIGURE.findall(LINK.sub("", INLINE_CODE.sub("", text))))


def code_lines(code: str) -> list[str | tuple[str, Counter[str]]]:
    """Returns the lines as they must agree: of a translated comment or annotation, its figures and names of files."""
    return [code_line(line, tree=code.startswith(TREE)) for line in code.splitlines()]


def code_line(line: str, tree: bool) -> str | tuple[str, Counter[str]]:
    parts = re.fullmatch(r"(\s*\S+)\s{2,}.*", line) if tree else COMMENT.fullmatch(line)
    if not parts:
        return line
    remark = line[parts.end(1) :]
    return parts[1], Counter(re.findall(r"\w+\.py\b", remark, re.ASCII)) + prose_figures(remark)


def differences(english: str, chinese: str, page: Path) -> list[str]:
    """Lists what the two texts of `page` (the English one's path) do not have in common; empty when they agree."""
    pairs = list(zip_longest(units(english), units(chinese)))
    for one, other in pairs:
        if one is None or other is None or one.kind != other.kind:
            return [f"English {one} stands where Chinese {other} does"]
    return [problem for one, other in pairs for problem in unit_differences(one, other, page)]


def unit_differences(one: Unit, other: Unit, page: Path) -> list[str]:
    where = f"line {one.line} of {page.name}, line {other.line} of {twin(page).name}"
    if one.kind.startswith("code block"):
        lines = zip_longest(code_lines(one.text), code_lines(other.text))
        return [f"{where}: code {mine!r} against {theirs!r}" for mine, theirs in lines if mine != theirs]
    wanted = Counter({expected_in_twin(target, page): number for target, number in links(one.text).items()})
    compared = {
        "inline code": (Counter(INLINE_CODE.findall(one.text)), Counter(INLINE_CODE.findall(other.text))),
        "links": (wanted, links(other.text)),
        "figures": (prose_figures(one.text), prose_figures(other.text)),
    }
    return [
        f"{where}: {name}: {dict(mine - theirs)} against {dict(theirs - mine)}"
        for name, (mine, theirs) in compared.items()
        if mine != theirs
    ]


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_chinese_page_has_the_headings_code_links_and_figures_of_its_english_page(page: Path) -> None:
    problems = differences(page.read_text(), twin(page).read_text(), page)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_the_two_pages_of_a_pair_link_to_each_other_above_the_first_paragraph(page: Path) -> None:
    for one in (page, twin(page)):
        assert twin(one).name in links(units(one.read_text())[1].text)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_every_heading_paragraph_and_list_item_is_translated(page: Path) -> None:
    for unit in units(twin(page).read_text())[2:]:
        if unit.kind in ("text", "list item") or unit.kind.startswith("heading"):
            assert HAN.search(unit.text), unit


def test_every_chinese_page_is_compared() -> None:
    pages = [*ROOT.glob("*.zh-CN.md"), *(ROOT / "docs").rglob("*.zh-CN.md")]
    assert sorted(pages) == sorted(twin(page) for page in ENGLISH)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_change_to_any_figure_link_or_code_of_the_english_page_alone_is_a_difference(page: Path) -> None:
    """Changes each unit of the page in turn, as its text allows."""
    text, chinese = page.read_text(), twin(page).read_text()
    changed = 0
    for mine, theirs in zip(units(text), units(chinese), strict=True):
        for pattern, new in ((FIGURE, "31415"), (INLINE_CODE, "`changed`"), (LINK, "](changed.md)")):
            if found := pattern.search(mine.text):
                other = Unit(mine.kind, mine.line, mine.text[: found.start()] + new + mine.text[found.end() :])
                assert unit_differences(other, theirs, page), other
                changed += 1
    assert changed > 100 if page.name == "README.md" else changed > 20


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_a_heading_paragraph_or_block_of_one_page_alone_is_a_difference(page: Path) -> None:
    text, chinese = page.read_text(), twin(page).read_text()
    for added in ("\n## One more\n", "\nOne paragraph more.\n", "\n```\ndrivetrain doctor\n```\n"):
        assert differences(text + added, chinese, page)
        assert differences(text, chinese + added, page)
    assert differences(text.replace("\n## ", "\n### ", 1), chinese, page)
    assert differences(text.replace("\n- ", "\n", 1), chinese, page)

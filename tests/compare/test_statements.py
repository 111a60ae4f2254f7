"""Statements as data: each language has a text for every one of them, with the same places."""

from __future__ import annotations

import json
import re
from pathlib import Path

import drivetrain
from drivetrain.compare.advice import advice, sentences
from drivetrain.compare.files import as_json
from drivetrain.compare.statements import JOINTS, PLACE, TEXTS, as_data, english, listed, stated
from tests.compare.made import comparison, report

PACKAGE = Path(drivetrain.__file__).parent
CHINESE = PACKAGE / "board" / "static" / "text" / "zh.advice.json"
FIGURES = {"row_value", "row_in_brackets", "best_metric"}  # names and figures alone


def test_chinese_has_every_text_with_the_same_places_and_no_other() -> None:
    texts = json.loads(CHINESE.read_text(encoding="utf-8"))
    assert texts.keys() == {*TEXTS, *(f"by.{name}" for name in JOINTS)}
    for key, text in TEXTS.items():
        assert sorted(PLACE.findall(text)) == sorted(PLACE.findall(texts[key])), key
        assert key in FIGURES or re.search("[\u4e00-\u9fff]", texts[key]), key
    assert all(texts[f"by.{name}"].count("|") == 1 for name in JOINTS)


def test_every_text_is_stated_somewhere() -> None:
    sources = "\n".join(
        (PACKAGE / "compare" / name).read_text() for name in ("advice.py", "chance.py", "statements.py")
    )
    literal = set(re.findall(r'"(\w+)"(?!:)', sources))
    made = tuple(re.findall(r'stated\(f"(\w+_)\{', sources))
    assert [key for key in TEXTS if key not in literal and not key.startswith(made)] == []


def test_values_in_a_row_are_joined_and_of_many_the_first_are_named() -> None:
    assert english(listed("and", ["a"])) == "a"
    assert english(listed("and", ["a", "b"])) == "a and b"
    assert english(listed("and", ["a", "b", "c"])) == "a, b and c"
    assert english(listed("comma", ["a", "b", "c"])) == "a, b, c"
    assert english(listed("and", [*"abcde"], most=2)) == "a, b and 3 more"


def test_a_statement_is_data_of_its_parts() -> None:
    found = stated("slower", rows=listed("comma", [stated("row_times", row="a", ratio="0.50"), "b"]))
    assert str(found) == "slower: a (0.50 times), b"
    assert as_data(found) == {
        "says": "slower",
        "values": {
            "rows": {"by": "comma", "items": [{"says": "row_times", "values": {"row": "a", "ratio": "0.50"}}, "b"]}
        },
    }


def test_the_file_of_a_comparison_has_the_advice_as_a_text_and_as_data(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=[report(100)], bf16=[report(200)])
    written = json.loads(as_json(found))
    assert written["advice"] == advice(found)
    assert written["statements"] == [as_data(each) for each in sentences(found)]
    assert written["statements"][0]["says"] == "choose"

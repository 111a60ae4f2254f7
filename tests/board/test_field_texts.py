"""The Chinese documentation of the run file's fields: every field has it, and it names what the English one names."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.board.form import UNUSED, form
from drivetrain.config.field_paths import owned_fields

TEXTS = Path(drivetrain.__file__).parent / "board" / "static" / "text"
FILE = TEXTS / "zh.fields.json"
WORD = re.compile(r"[A-Za-z0-9]+(?:[_.:/-][A-Za-z0-9]+)*")
TRANSLATED = {"ONE", "e.g"}  # words of the English texts that look like names
TAGS = {field["path"] for field in form()["fields"] if field.get("tag")}  # fields that choose among kinds of a block
Kinds = dict[str, str]  # kind of the block that has the field → documentation


def english() -> dict[str, Kinds]:
    """Returns the documentation of every field by its path. A tag's is that of all kinds together, and of no kind."""
    found: dict[str, Kinds] = {}
    for kind, path, info in owned_fields():
        dotted, text = ".".join(path), info.description or ""
        if dotted in TAGS:
            found[dotted] = {"": f"{found.get(dotted, {}).get('', '')} {text}"}
        elif kind not in UNUSED:
            found.setdefault(dotted, {})[kind] = text
    return found


def chinese() -> dict[str, str | Kinds]:
    return json.loads(FILE.read_text(encoding="utf-8"))["fields"]


def problems(texts: dict[str, str | Kinds]) -> list[str]:
    """Lists fields without a text, and texts without a field. Kinds whose English texts differ need a text each."""
    wanted = english()
    found = [f"{path}: no such field" for path in texts.keys() - wanted.keys()]
    found += [f"{path}: no text" for path in wanted.keys() - texts.keys()]
    for path in wanted.keys() & texts.keys():
        own = texts[path]
        named = set(own) if isinstance(own, dict) else set()
        needed = set(wanted[path]) if named or len(set(wanted[path].values())) > 1 else set()
        found += [f"{path}: {kind} has no such field" for kind in named - needed]
        found += [f"{path}: no text for {kind}" for kind in needed - named]
    return found


def names(text: str, choices: set[str]) -> set[str]:
    """Returns the words that a translation leaves as they are: choices, figures, keys, files, abbreviations."""
    text = re.sub(r"\b([CG]PU)s\b", r"\1", text)
    words = {word for word in WORD.findall(text) if re.search(r"[0-9_.:/]|[A-Z].*[A-Z]", word) or word in choices}
    return words - TRANSLATED


def differences(texts: dict[str, str | Kinds]) -> list[str]:
    """Lists names that the English text of a field has and the Chinese one has not, of tags all choices; and the other
    way round names that are neither in the English text nor choices."""
    choices: dict[str, set[str]] = {}
    for field in form()["fields"]:
        offered = [*field.get("choices", []), *field.get("suggestions", [])]
        choices.setdefault(field["path"], set()).update(map(str, offered))
    found = []
    for path, kinds in english().items():
        own, known = texts[path], choices.get(path, set())
        for kind, text in kinds.items():
            mine, theirs = names(text, known), names(own[kind] if isinstance(own, dict) else own, known)
            needed = known if path in TAGS else mine
            found += [f"{path} {kind}: {word} is missing" for word in needed - theirs]
            found += [f"{path} {kind}: {word} is not in English" for word in theirs - mine - known]
    return found


def test_every_field_is_documented_in_chinese_and_no_other() -> None:
    assert problems(chinese()) == []


def test_the_fields_are_those_of_the_form_and_of_data_sets_in_full() -> None:
    shown = {field["path"] for field in form()["fields"]}
    rest = english().keys() - shown
    assert shown <= english().keys()
    assert {path for path in rest if not path.startswith(("workload.data.train.", "workload.data.evaluation."))} == {
        "output"
    }


def test_the_page_finds_the_text_of_every_kind_of_block() -> None:
    """A field's last condition names the kinds of its block, as static/js/language.js reads it."""
    texts = chinese()
    for field in form()["fields"]:
        own = texts[field["path"]]
        if isinstance(own, dict):
            assert [own[kind] for kind in field["when"][-1]["is"] if kind in own], field["path"]


def test_no_path_is_written_twice() -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        assert not doubled
        return dict(pairs)

    json.loads(FILE.read_text(encoding="utf-8"), object_pairs_hook=once)


def chinese_label(path: str, labels: dict[str, str]) -> str | None:
    """Returns a field's name for people, as static/js/language.js finds it."""
    common = json.loads((TEXTS / "zh.json").read_text(encoding="utf-8"))
    return common.get(f"label.{path}", labels.get(path, labels.get(path.rpartition(".")[2])))


def labels_lacking(labels: dict[str, str]) -> list[str]:
    """Lists fields of the form without a label in Chinese, fields of one block with the same one, and labels of no
    field."""
    by_path = {field["path"]: chinese_label(field["path"], labels) for field in form()["fields"]}
    found = [f"{path}: no label" for path, label in by_path.items() if not re.search("[\u4e00-\u9fff]", label or "")]
    inside = Counter((path.rpartition(".")[0], label) for path, label in by_path.items() if label)
    found += [f"{block}: {label} stands for several fields" for (block, label), count in inside.items() if count > 1]
    names = {part for path in by_path for part in (path, path.rpartition(".")[2])}
    used = {key for path in by_path for key in (path, path.rpartition(".")[2]) if by_path[path] == labels.get(key)}
    return found + [f"{key}: no such field" for key in labels if key not in names or key not in used]


def test_every_field_has_a_chinese_label_of_its_own() -> None:
    labels = json.loads(FILE.read_text(encoding="utf-8"))["labels"]
    assert labels_lacking(labels) == []
    assert "scaler.init_scale: no label" in labels_lacking({k: v for k, v in labels.items() if k != "init_scale"})
    assert "lrr: no such field" in labels_lacking({**labels, "lrr": "学习率"})
    doubled = {**labels, "tp": labels["pp"]}
    assert f"engine: {labels['pp']} stands for several fields" in labels_lacking(doubled)


def test_every_text_is_chinese() -> None:
    texts = [text for own in chinese().values() for text in (own.values() if isinstance(own, dict) else [own])]
    assert [text for text in texts if not re.search("[\u4e00-\u9fff]", text) or text != text.strip()] == []


def test_figures_names_and_choices_are_those_of_the_english_text() -> None:
    assert differences(chinese()) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("seed", None, "seed: no text"),
        ("workload.data.train.weight", None, "workload.data.train.weight: no text"),
        ("sed", "种子", "sed: no such field"),
        ("engine.config", "配置", "engine.config: no text for accelerate"),
        ("engine.pp", {"mesh": "阶段", "fsdp": "阶段"}, "engine.pp: fsdp has no such field"),
    ],
)
def test_a_text_too_few_or_too_many_is_found(path: str, text: str | Kinds | None, problem: str) -> None:
    texts = chinese()
    texts.pop(path, None)
    assert problem in problems(texts if text is None else {**texts, path: text})


@pytest.mark.parametrize(
    ("path", "old", "new", "difference"),
    [
        ("workload.preference.beta", "0.1", "0.2", "0.1 is missing"),
        ("optimizer.name", "adafactor、", "", "adafactor is missing"),
        ("quantised_base.format", "nf4", "nf3", "nf3 is not in English"),
    ],
)
def test_a_change_of_a_figure_or_a_name_is_a_difference(path: str, old: str, new: str, difference: str) -> None:
    texts = chinese()
    text = texts[path]
    assert isinstance(text, str)
    assert any(each.endswith(difference) for each in differences({**texts, path: text.replace(old, new)}))

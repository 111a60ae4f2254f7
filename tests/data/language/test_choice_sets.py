"""Questions of multiple choice, read from files as the benchmarks ship them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.language.choice_sets import read_subjects
from drivetrain.errors import UserError
from tests.choice_files import ceval, cmmlu, made, mmlu, write


def test_mmlus_prompt_is_the_published_one(tmp_path: Path) -> None:
    (subject,) = read_subjects(mmlu(tmp_path, ["high_school_physics"]), [], shots=1)
    shot, question = subject.shots[0], subject.questions[0]
    text, choices, answer = made(5, 3 + 5)[0]
    assert subject.prompt(question, 1) == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        f"{text.strip()}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\nD. {choices[3]}\nAnswer: {answer}\n\n"
        f"{question.text.strip()}\nA. {question.choices[0]}\nB. {question.choices[1]}\nC. {question.choices[2]}\n"
        f"D. {question.choices[3]}\nAnswer:"
    )
    assert "ABCD"[shot.right] == answer
    assert len(subject.questions) == 12


def test_ceval_is_asked_on_its_validation_split_whose_answers_ship(tmp_path: Path) -> None:
    found = read_subjects(ceval(tmp_path, ["law", "physics"]), [], shots=5)
    assert [(each.name, each.title, each.category, len(each.questions)) for each in found] == [
        ("law", "科目law", "Other", 10),
        ("physics", "科目physics", "STEM", 10),
    ]
    prompt = found[0].prompt(found[0].questions[0], 0)
    assert prompt.startswith("以下是中国关于科目law的单项选择题，请选出其中的正确答案。\n\n")
    assert prompt.endswith("\n答案：")


def test_cmmlu_has_an_index_column_and_its_own_words(tmp_path: Path) -> None:
    (found,) = read_subjects(cmmlu(tmp_path, ["anatomy", "law"]), ["anatomy"], shots=0)
    assert found.prompt(found.questions[0], 0).startswith("以下是关于anatomy的单项选择题，请直接给出正确答案的选项。")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: write(folder / "test" / "law_test.csv", [["q", *"1234", "E"]]), "row 1 of"),
        (lambda folder: write(folder / "test" / "law_test.csv", []), "has no question"),
        (lambda folder: (folder / "test" / "law_test.csv").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: write(folder / "dev" / "law_dev.csv", [["q", *"1234", "A"]]), "has 1 answered examples"),
        (lambda folder: (folder / "mapping.json").write_text('{"law": 3}'), "mapping.json cannot be read"),
    ],
)
def test_what_is_wrong_with_files_is_named(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(mmlu(tmp_path, ["law"]))
    with pytest.raises(UserError, match=words):
        read_subjects(tmp_path, [], shots=2)


def test_subjects_that_are_not_there_come_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no lore") as raised:
        read_subjects(mmlu(tmp_path, ["law"]), ["lore"], shots=0)
    assert "it has: law" in str(raised.value)
    with pytest.raises(UserError, match="no test/ or val/"):
        read_subjects(tmp_path / "test", [], shots=0)


@given(st.lists(st.lists(st.text(max_size=5), max_size=8), max_size=4))
def test_any_table_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]) -> None:
    folder = tmp_path_factory.mktemp("any")
    write(folder / "test" / "any.csv", [[cell.encode("utf-8", "ignore").decode() for cell in row] for row in rows])
    try:
        (found,) = read_subjects(folder, [], shots=0)
    except UserError:
        return
    assert all(len(each.choices) == 4 and 0 <= each.right < 4 for each in found.questions)

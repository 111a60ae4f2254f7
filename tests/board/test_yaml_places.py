"""Problems of a run file are marked at the lines of its text at which they stand."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.board.run_file import check, values_of
from drivetrain.board.yaml_places import placed
from drivetrain.errors import Problem, UserError
from tests.board.boards import DIGITS, FixedMachine

MACHINE = FixedMachine().machine()


def marked(text: str, found: dict[str, Any]) -> str:
    """Returns the part of a text that a problem marks, as a browser counts its signs."""
    line = text.splitlines()[found["line"] - 1].encode("utf-16-le")
    return line[2 * found["column"] - 2 : 2 * found["end_column"] - 2].decode("utf-16-le")


def problem_of(text: str, field: str) -> dict[str, Any]:
    [found] = [each for each in check(text, MACHINE).as_dict()["problems"] if each["field"] == field]
    return found


@pytest.mark.parametrize(
    ("old", "new", "field", "part"),
    [
        ("batch_size: 64", "batch_size: 0  # none", "batch_size", "batch_size: 0"),
        ("lr: 0.1", "lr: fast", "optimizer.lr", "lr: fast"),
        ("lr: 0.1", "lr: fast, weird: 1", "optimizer.weird", "weird: 1"),
        ("optimizer:", "optimzer:", "optimzer", "optimzer"),
        ("loop: {steps: 3}", "loop:\n  steps: 3\n  epochs: 2", "loop", "loop"),
        ("norm: group", "norm: none", "workload.model.norm", "norm: none"),
    ],
)
def test_a_problem_is_marked_at_its_field(old: str, new: str, field: str, part: str) -> None:
    text = DIGITS.replace(old, new)
    found = problem_of(text, field)
    assert marked(text, found) == part
    assert text.splitlines()[found["line"] - 1].count(part) == 1


def test_a_field_that_is_missing_is_marked_at_the_block_that_lacks_it() -> None:
    text = DIGITS.replace("source: digits, ", "")
    assert marked(text, problem_of(text, "workload.data.source")) == "data"
    text = DIGITS[: DIGITS.index("batch_size")]
    assert marked(text, problem_of(text, "loop")) == "workload"
    assert "line" not in problem_of("# nothing yet", "workload")


def test_columns_are_those_of_browsers_which_count_some_signs_twice() -> None:
    text = '{name: "\N{WATER WAVE} \N{WATER WAVE}", batch_size: 0}'
    found = problem_of(text, "batch_size")
    assert found["column"] == text.index("batch_size") + 1 + 2
    assert marked(text, found) == "batch_size: 0"


def test_an_item_of_a_list_is_marked_and_of_a_text_of_several_lines_the_first() -> None:
    text = "a:\n  - b: 1\n  - b: |\n      one\n      two\n"
    found = [each.as_dict() for each in placed(text, [Problem("a.1", "", ""), Problem("a.1.b", "", "")])]
    assert [(each["line"], marked(text, each)) for each in found] == [(3, "b: |"), (3, "b: |")]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [("a: 1\nb: [\n", 3, 1), ("a: 1\n  b: 2\n", 2, 4), ("a: 1\nb: 2\na: 3\n", 3, 1), ("a: 1\r\nb: }\r\n", 2, 4)],
)
def test_a_text_that_is_broken_is_marked_where_the_reader_gave_up(text: str, line: int, column: int) -> None:
    with pytest.raises(UserError) as error:
        values_of(text)
    [found] = error.value.problems
    assert found.field == "yaml"
    assert (found.as_dict()["line"], found.as_dict()["column"]) == (line, column)
    assert f"line {line}, column {column}" in found.why

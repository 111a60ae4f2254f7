"""Verifiers: which answers they take for right."""

from __future__ import annotations

import pytest

from drivetrain.rewards.verifiers import exact_match, length, math, regex


def test_an_exact_match_looks_past_white_space_and_if_asked_past_case() -> None:
    assert exact_match([" Paris\n", "paris", "Paris."], ["Paris"] * 3) == [1, 0, 0]
    assert exact_match(["paris", "Rome"], ["Paris", None], ignore_case=True) == [1, None]


def test_a_pattern_is_found_anywhere_or_its_last_group_is_compared() -> None:
    assert regex(["so\n<a>\n3</a>", "3"], [None, None], "<a>.*</a>") == [1, 0]
    answers = ["x = 1, x = 2", "x = 2, x = 1", "2"]
    assert regex(answers, ["2", "2", None], r"x = (\d)", compare=True) == [1, 0, None]
    with pytest.raises(ValueError, match="has no group"):
        regex(["a"], ["a"], "a", compare=True)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("The answer is 1/2.", "\\frac{1}{2}", 1),
        ("#### 1,234", "4 * 3 = 12 ... #### 1234", 1),
        ("x is 7", "8", 0),
        ("I do not know", "8", 0),
        ("8", None, None),
        ("(x+1)^2 = $x^2+2x+1$", "x^2 + 2x + 1", 1),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of ANTLR and SymPy
def test_mathematics_compares_values(answer: str, reference: str | None, value: float | None) -> None:
    pytest.importorskip("math_verify")
    assert math([answer], [reference]) == [value]


def test_length_is_punished_softly_and_then_by_one() -> None:
    ids = [[0] * count for count in (10, 80, 90, 100, 120)]
    assert length(ids, most=100, over=20) == pytest.approx([0, 0, -0.5, -1, -1])

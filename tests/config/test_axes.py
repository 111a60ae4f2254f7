"""`key=a,b` → cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.axes import Axis, choices, read_axes, split
from drivetrain.errors import UserError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fp32", ["fp32"]),
        ("fp32,bf16-mixed", ["fp32", "bf16-mixed"]),
        ("64, 128", ["64", "128"]),
        ("[1,1],[2,2]", ["[1,1]", "[2,2]"]),
        ("{name: sgd, lr: 1},{name: adamw}", ["{name: sgd, lr: 1}", "{name: adamw}"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("don't,stop", ["don't", "stop"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_values_are_split_at_commas_that_stand_free(text: str, parts: list[str]) -> None:
    assert split(text) == parts


@given(st.lists(st.text("abc123.-_", min_size=1, max_size=5), min_size=1, max_size=5))
def test_plain_values_come_back_as_they_were_joined(values: list[str]) -> None:
    assert split(",".join(values)) == values


@given(st.text(max_size=30))
def test_no_character_but_commas_and_outer_space_is_lost(text: str) -> None:
    def bare(value: str) -> str:
        return "".join(value.split()).replace(",", "")

    assert bare("".join(split(text))) == bare(text)


def test_one_value_overrides_and_several_are_an_axis() -> None:
    fixed, axes = read_axes(["lr=1e-3", "precision=fp32,bf16", "trackers=[progress,jsonl]", "batch_size=1,128"])
    assert fixed == ["lr=1e-3", "trackers=[progress,jsonl]"]
    assert axes == [Axis("precision", ("fp32", "bf16")), Axis("batch_size", ("1", "128"))]
    cells = list(choices(fixed, axes))
    assert [cell.label for cell in cells] == ["fp32, 1", "fp32, 128", "bf16, 1", "bf16, 128"]
    assert cells[1].overrides == (*fixed, "precision=fp32", "batch_size=128")


def test_without_axes_there_is_the_run_as_it_is() -> None:
    (only,) = choices(["lr=1"], [])
    assert (only.overrides, only.label) == (("lr=1",), "as it is")


def test_all_problems_of_the_axes_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        read_axes(["precision=fp32,fp32", "lr=1,", "optimizer.lr=2", "batchsize=1,2", "fp32"])
    reported = [found.why for found in caught.value.problems]
    assert len(reported) == 5
    for why, words in zip(
        reported, ("given twice", "empty", "given twice", "no such field", "is no axis"), strict=True
    ):
        assert words in why

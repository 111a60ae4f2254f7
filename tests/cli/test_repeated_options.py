"""An option of one value that is given twice is refused by every verb; one that may be repeated is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from typer.main import get_command

from drivetrain.cli.app import app
from drivetrain.cli.program import Verb

Drivetrain = Callable[..., tuple[int, str, str]]


def verbs(command: object) -> Iterator[object]:
    below = getattr(command, "commands", None)
    if below is None:
        yield command
    for each in (below or {}).values():
        yield from verbs(each)


def test_every_verb_is_of_the_class_that_refuses() -> None:
    found = [*verbs(get_command(app))]
    assert len(found) > 25
    assert [each for each in found if not isinstance(each, Verb)] == []


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        (["plan", "run.yaml", "--machine", "2x8xH100", "-m", "4xP40"], {"--machine": "2x8xH100, 4xP40"}),
        (
            ["board", "--data", "no", "--runs", "runs", "--port", "1", "--runs=../c", "--port", "1"],
            {"--runs": "runs, ../c"},
        ),
        (["checkpoint", "convert", "runs/a", "-oa", "-ob", "--to", "dcp", "--to", "dcp"], {"--output": "a, b"}),
    ],
)
def test_a_repeated_option_of_one_value_is_refused_with_its_values(
    drivetrain: Drivetrain, typed: list[str], values: dict[str, str]
) -> None:
    code, _, err = drivetrain(*typed)
    assert code == 2
    for option, given in values.items():
        assert f"{option}: it takes one value, and 2 were given: {given}" in err
    assert "a command of its own for each" in err
    assert err.count("problem") == 1
    assert ("2 problems" in err) == ("board" in typed or "convert" in typed), "all of them at once"


def test_an_option_that_may_be_repeated_takes_all_its_values(drivetrain: Drivetrain) -> None:
    code, _, err = drivetrain("board", "--data", "no-one", "--data", "no-other")
    assert code == 2
    assert "no-one, no-other: there is no such folder" in err

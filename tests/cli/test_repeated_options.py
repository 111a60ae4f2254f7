"""An option of one value, or an override, that is given twice is refused by every verb; what may be repeated is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.mark.parametrize(
    "words",
    [["train"], ["check"], ["data"], ["predict"], ["evaluate"], ["prove"], ["profile"], ["launch", "--slurm"]],
    ids=" ".join,
)
def test_a_repeated_override_is_refused_with_its_values(drivetrain: Drivetrain, words: list[str]) -> None:
    code, _, err = drivetrain(*words, "run.yaml", "seed=1", "lr=0.1", "loop.epochs=1", "optimizer.lr=0.2", "seed=1")
    assert code == 2
    assert "2 problems: refused before any work" in err
    assert "seed: it takes one value, and 2 were given: seed=1, seed=1" in err
    assert "optimizer.lr: it takes one value, and 2 were given: lr=0.1, optimizer.lr=0.2" in err


def test_a_repeated_override_is_refused_beside_a_repeated_option(drivetrain: Drivetrain) -> None:
    code, _, err = drivetrain("train", "run.yaml", "--nodes", "1", "seed=1", "--nodes", "2", "seed=2")
    assert code == 2
    assert "--nodes: it takes one value, and 2 were given: 1, 2" in err
    assert "seed: it takes one value, and 2 were given: seed=1, seed=2" in err


@pytest.mark.parametrize("verb", ["plan", "compare"])
def test_a_repeated_axis_is_refused_with_its_values(drivetrain: Drivetrain, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: 8\n", encoding="utf-8")
    code, _, err = drivetrain(verb, str(file), "seed=1", "seed=2")
    assert code == 2
    assert "seed: was given twice (seed=1 and seed=2)" in err


def test_a_flag_given_twice_and_several_fields_of_one_name_are_no_repetition(
    drivetrain: Drivetrain, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch_size: 8\n", encoding="utf-8")
    code, _, err = drivetrain(
        "check", str(file), "--json", "--json", "engine=ddp", "engine.name=ddp", "optimizer.name=sgd"
    )
    assert code == 2
    assert "were given" not in err


def test_folders_with_an_equals_sign_in_their_names_are_no_overrides(
    drivetrain: Drivetrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr=0.1", "lr=0.2"):
        Path(name).mkdir()
    code, _, err = drivetrain("evaluate", "lr=0.1", "lr=0.2")
    assert code == 2
    assert "it takes one value" not in err
    assert "lr=0.1" in err

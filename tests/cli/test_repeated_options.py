"""An option of one value that is given twice is refused by every verb; one that may be repeated is not. Of overrides of
one field the last one counts, and a note says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from drivetrain.cli.app import app
from drivetrain.cli.arguments import note_repeated
from drivetrain.cli.program import Verb
from drivetrain.config.repeated_overrides import without_effect
from tests.launch.test_start import prepared

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
    ("overrides", "words"),
    [
        (["precision=fp32", "lr=1", "precision=bf16"], ["precision=fp32 has no effect: precision=bf16, given after"]),
        (["lr=1", "optimizer.lr=2", "lr=3"], ["lr=1 has no effect: lr=3,", "optimizer.lr=2 has no effect: lr=3,"]),
        (
            ["engine.bucket_mb=4", "engine=ddp"],
            ["engine.bucket_mb=4 has no effect: engine=ddp, given after it, counts"],
        ),
        (["engine=ddp", "engine.bucket_mb=4"], []),
        (["seed=1", "lr=2", "seed=1"], []),
        (["nonsense=1", "nonsense=2", "lr"], []),
        (["mirror=s3://me:secret@b/a", "mirror=s3://b/a"], ["mirror=s3://<...>@b/a has no effect: mirror=s3://b/a,"]),
    ],
)
def test_an_override_that_a_later_one_makes_void_is_named_with_it(overrides: list[str], words: list[str]) -> None:
    found = without_effect(overrides)
    assert len(found) == len(words)
    assert all(each.startswith(begin) for each, begin in zip(found, words, strict=True))


@pytest.mark.parametrize("verb", [["check"], ["data"], ["launch", "--local"], ["train"]])
def test_of_two_overrides_of_one_field_a_command_takes_the_last_and_notes_it_once(
    verb: list[str], tmp_path: Path, drivetrain: Drivetrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    code, out, err = drivetrain(*verb, "run.yaml", "loop.steps=9", "device=cpu", "loop.steps=2")
    assert code == 0, out + err
    if verb == ["train"]:
        assert json.loads(Path("runs/run/report.json").read_text())["steps"] == 2
    assert err.count("loop.steps=9 has no effect: loop.steps=2, given after it, counts") == 1


def test_of_the_ranks_of_another_launcher_the_first_one_notes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    for rank, count in (("0", 1), ("1", 0)):
        for name, value in {**given, "RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert note_repeated(["seed=1", "seed=2"]) == ["seed=1", "seed=2"]
        assert capsys.readouterr().err.count("seed=1 has no effect") == count

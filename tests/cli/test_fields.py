"""`drivetrain fields`: the keys of a run file, and those that a word picks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rich.console import Console

from drivetrain.cli.app import app
from drivetrain.cli.fields import fields_table
from drivetrain.config.field_paths import field_paths
from drivetrain.errors import UserError

Drivetrain = Callable[..., tuple[int, str, str]]


def keys(*wanted: str) -> list[str]:
    return list(fields_table(wanted).columns[0].cells)


def test_every_key_is_there_and_none_twice_without_its_owner() -> None:
    assert set(keys()) == {".".join(path) for path, _ in field_paths()}
    table = fields_table()
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert len(set(rows)) == len(rows)
    twice = [row for row in rows if keys().count(row[0]) > 1]
    assert twice
    assert all(meaning.endswith("]") for _, _, meaning in twice)


def test_a_word_picks_the_keys_of_which_a_part_begins_so() -> None:
    assert keys("optimizer")[:2] == ["optimizer", "optimizer.name"]
    assert all(key.startswith("optimizer") for key in keys("optimizer"))
    assert set(keys("warmup_ratio", "seed")) == {"schedule.warmup_ratio", "seed"}


def test_a_word_with_which_no_key_begins_is_reported_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean warmup_steps\?"):
        fields_table(["warmup_stepz"])


OTHERS = [
    ("learning_rate", "did you mean optimizer.lr?"),
    ("gradient_accumulation_steps", "give batch_size, the samples of a step"),
    ("zero2", "write engine=zero2"),
]


@pytest.mark.parametrize(("word", "meant"), OTHERS)
def test_a_word_of_other_trainers_and_the_name_of_an_engine_are_reported_with_what_to_write(
    word: str, meant: str
) -> None:
    with pytest.raises(UserError, match=re.escape(meant)):
        fields_table([word])


def test_where_there_is_no_terminal_a_key_has_one_line(drivetrain: Drivetrain) -> None:
    _, out, _ = drivetrain("fields")
    lines = out.splitlines()
    assert len(lines) == 1 + len(keys())
    assert all(line.split()[0] == key for line, key in zip(lines[1:], keys(), strict=True))


def test_nothing_is_cut_off_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=60).print(fields_table(["checkpoints"]))
    assert "…" not in capsys.readouterr().out


def test_every_verb_ends_its_help_with_an_example(drivetrain: Drivetrain) -> None:
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    for verb in sorted(verbs):
        code, out, _ = drivetrain(verb, "--help")
        assert code == 0
        assert f"drivetrain {verb}" in out.partition("Examples:")[2], verb
    for group, its_example in (((), "drivetrain train run.yaml"), (("checkpoint",), "drivetrain checkpoint verify")):
        assert its_example in drivetrain(*group, "--help")[1].partition("Examples:")[2]

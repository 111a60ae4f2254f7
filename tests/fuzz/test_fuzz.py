"""Almost right command lines: each ends in words and an exit code, soon, and leaves the user's files as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.mutants import VERBS, Mutant, mutant
from tests.fuzz.performed import Answer, in_a_process, in_process
from tests.fuzz.place import furnish

SEED = 20261123
QUICK, IN_PROCESS, REAL = 100, 1200, 200  # mutants of make test, of all here, of those in processes of their own


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that each mutant gets a copy of."""
    before, home = Path.cwd(), os.environ.get("HOME")
    folder = tmp_path_factory.mktemp("template")
    try:
        furnish(folder)
        os.chdir(folder.parent)
        os.environ["HOME"] = str(folder.parent / "home")
        yield folder
    finally:
        os.chdir(before)
        os.environ.pop("HOME") if home is None else os.environ.update(HOME=home)


def faults(answers: Iterator[Answer]) -> str:
    return "\n\n".join(f"seed {SEED}, {answer}" for answer in answers if answer.faults)


@pytest.mark.long
def test_almost_right_command_lines_are_answered_in_words(template: Path, tmp_path: Path) -> None:
    assert not faults(in_process(mutant(SEED, each), template, tmp_path / "here") for each in range(QUICK))


@pytest.mark.slow
def test_many_more_are_too(template: Path, tmp_path: Path) -> None:
    chosen = range(QUICK, IN_PROCESS)
    assert not faults(in_process(mutant(SEED, each), template, tmp_path / "here") for each in chosen)


@pytest.mark.slow
def test_the_real_command_answers_them_too(template: Path, tmp_path: Path) -> None:
    chosen = range(IN_PROCESS, IN_PROCESS + REAL)
    made = (mutant(SEED, each, for_processes=True) for each in chosen)
    assert not faults(in_a_process(each, template, tmp_path / "here") for each in made)


# faults that mutants found, and that were mended
FOUND: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "events without their keys": (["report", "runs/run"], [("runs/run/events.jsonl", "made an object")]),
    "events that are numbers": (["report", "runs/run", "runs/run"], [("runs/run/events.jsonl", "made a number")]),
    "events without an end": (["report", "runs/run"], [("runs/run/events.jsonl", "made endless")]),
    "a report nested deeply": (["report", "runs/run"], [("runs/run/report.json", "made deep")]),
    "a folder in the report's place": (["train", "run.yaml", "--resume"], [("runs/run/report.json", "made a folder")]),
    "a name too long": (["checkpoint", "convert", "x" * 5000, "--to", "dcp", "--output", "new"], []),
    "an output too long": (["checkpoint", "convert", "runs/run", "--to", "dcp", "--output", "x" * 300], []),
    "data at a path too long": (["data", "talks.yaml", f"workload.data.train={'x' * 300}"], []),
    "predictions to a link to itself": (["predict", "run.yaml", "--output", "loop.csv"], []),
    "predictions to a pipe": (["predict", "run.yaml", "--output", "fifo.csv"], []),
    "an import to a pipe": (["import", "ds.json", "--output", "fifo.yaml", "--overwrite"], []),
    "an import to a link to itself": (["import", "ds.json", "--onto", "run.yaml", "--output", "loop.yaml"], []),
    "a conversion to a link to itself": (["checkpoint", "convert", "runs/run", "--to", "dcp", "--output", "loop"], []),
    "a text that is a link to itself": (["train", "run.yaml", "--overwrite", "trackers=[loop]"], []),
    "the home of no user": (["train", "run.yaml", "output=~nobody-there/x"], []),
    "a pipe for a workload": (["evaluate", "run.yaml"], [("linear.py", "made a pipe")]),
    "a folder for a workload": (["compare", "run.yaml", "precision=fp32,bf16"], [("linear.py", "made a folder")]),
    "a pipe to import": (["import", "ds.json", "--onto", "run.yaml"], [("ds.json", "made a pipe")]),
    "a bomb for a run file": (["data", "run.yaml"], [("run.yaml", "made a bomb")]),
}


@pytest.mark.parametrize(("arguments", "damage"), FOUND.values(), ids=FOUND)
def test_a_fault_that_was_found_does_not_come_back(
    arguments: list[str], damage: list[tuple[str, str]], template: Path, tmp_path: Path
) -> None:
    verb = " ".join(arguments[:2]) if arguments[0] == "checkpoint" else arguments[0]
    answer = in_process(Mutant(0, verb, arguments, damage), template, tmp_path / "here")
    assert not answer.faults, answer


def test_a_mutant_is_a_function_of_seed_and_number() -> None:
    assert [mutant(SEED, each) for each in range(50)] == [mutant(SEED, each) for each in range(50)]
    assert {mutant(SEED, each).verb for each in range(600)} == set(VERBS)

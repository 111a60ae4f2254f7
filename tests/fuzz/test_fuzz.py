"""Almost right command lines: each ends in words and an exit code, soon, and leaves the user's files as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.mutants import VERBS, mutant
from tests.fuzz.performed import Answer, in_a_process, in_process
from tests.fuzz.place import furnish

SEED = 20261123
QUICK, IN_PROCESS, REAL = 120, 1200, 200  # mutants of make test, of all here, of those in processes of their own


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


def test_a_mutant_is_a_function_of_seed_and_number() -> None:
    assert [mutant(SEED, each) for each in range(50)] == [mutant(SEED, each) for each in range(50)]
    assert {mutant(SEED, each).verb for each in range(600)} == set(VERBS)

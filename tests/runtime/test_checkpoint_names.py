"""Checkpoints by their names alone: the steps that are there, and those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.errors import UserError
from drivetrain.runtime.checkpoint_names import check_named, check_there, finished


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("step-00000010", ".step-00000012.replaced-1", ".step-00000014.partial-2", ".step-00000008.deleted-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000020").write_text("no folder")
    return tmp_path


def test_finished_checkpoints_are_found_by_their_steps(root: Path) -> None:
    assert {step: path.name for step, path in finished(root).items()} == {
        10: "step-00000010",
        12: ".step-00000012.replaced-1",
    }
    assert finished(root / "nowhere") == {}


def test_a_step_that_was_retired_is_answered_with_those_that_are_there(root: Path) -> None:
    (root / "step-00000012").mkdir()
    for given in ("4", "step-00000004", str(root / "step-00000011")):
        with pytest.raises(UserError) as refused:
            check_named(given, root, "--checkpoint")
        [found] = refused.value.problems
        assert found.field == "--checkpoint"
        assert found.why.startswith(f"{given} is no checkpoint folder; {root} holds the steps 10, 12")
        assert found.fix.startswith(f"give best, last, a step, or a folder, as {root}/step-0000001")
    for given in (str(root / "step-00000010"), "step-00000010", "step-10", "10"):
        assert check_named(given, root, "--checkpoint") == root / "step-00000010"


def test_a_path_of_another_run_is_not_taken_for_a_step_of_this_one(root: Path) -> None:
    with pytest.raises(UserError, match="is no checkpoint folder"):
        check_named("runs/other/checkpoints/step-00000010", root, "--checkpoint")


def test_of_many_steps_the_newest_are_listed(root: Path) -> None:
    for step in range(100, 130):
        (root / f"step-{step:08d}").mkdir()
    with pytest.raises(UserError, match=r"holds the steps \.\.\., 110, 111, .*, 129") as refused:
        check_named("step-00000050", root, "--checkpoint")
    assert "step-00000012" in str(refused.value), "the nearest is named"


def test_a_run_without_checkpoints_is_answered_with_what_to_do(tmp_path: Path) -> None:
    for given in ("best", "last", "3"):
        with pytest.raises(UserError, match="train first, or give the folder of one"):
            check_there(given, tmp_path, "--checkpoint")

"""Links beside a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.checkpoint.links import best_step, link


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    return tmp_path / "run" / "checkpoints"


def pointed(root: Path) -> dict[str, str]:
    return {name: (root.parent / name).resolve().name for name in ("best", "last") if (root.parent / name).is_symlink()}


def test_links_follow_the_newest_and_the_best_checkpoint(root: Path) -> None:
    link(root / "step-00000010", 5)
    assert pointed(root) == {"best": "step-00000005", "last": "step-00000010"}
    link(root / "step-00000015", 15)
    assert pointed(root) == {"best": "step-00000015", "last": "step-00000015"}


def test_links_are_relative_so_that_a_folder_may_be_moved(root: Path) -> None:
    link(root / "step-00000015", 5)
    moved = root.parent.rename(root.parent.with_name("moved"))
    assert (moved / "best").resolve() == (moved / "checkpoints" / "step-00000005").resolve()


def test_a_best_evaluation_that_has_no_checkpoint_has_no_link(root: Path) -> None:
    link(root / "step-00000015", 5)
    link(root / "step-00000015", 7)
    assert pointed(root) == {"last": "step-00000015"}


def test_what_a_user_keeps_under_such_a_name_stays(root: Path) -> None:
    (root.parent / "best").mkdir()
    link(root / "step-00000015", 5)
    assert (root.parent / "best").is_dir()
    assert pointed(root) == {"last": "step-00000015"}


def test_a_file_system_without_links_is_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refused)
    link(root / "step-00000015", 5)
    assert pointed(root) == {}


@pytest.mark.parametrize(("facts", "step"), [({}, None), ({"best": None}, None), ({"best": {"step": 5}}, 5)])
def test_the_best_step_is_read_off_a_manifests_facts(facts: dict[str, object], step: int | None) -> None:
    assert best_step(facts) == step

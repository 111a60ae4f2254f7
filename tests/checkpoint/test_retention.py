"""The newest and the best stay; the only good one is never deleted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint.directory import newest_good, steps
from drivetrain.checkpoint.retention import best, prune
from drivetrain.checkpoint.saving import save
from drivetrain.errors import RunError


def save_all(root: Path, *metrics: float | None) -> list[Path]:
    """Checkpoints of steps 1, 2, ... with these metrics; None for one that was not evaluated."""
    return [
        save(root, step, {"model": {"w": torch.ones(1)}}, {} if metric is None else {"metric": metric})
        for step, metric in enumerate(metrics, start=1)
    ]


def left(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in steps(root)]


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "higher_is_better", "expected"),
    [
        (1, 0, True, [5]),
        (2, 0, True, [4, 5]),
        (2, 1, True, [2, 4, 5]),
        (1, 2, True, [2, 3, 5]),
        (2, 1, False, [1, 4, 5]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, keep_last: int, keep_best: int, higher_is_better: bool, expected: list[int]
) -> None:
    save_all(tmp_path, 0.1, 0.9, 0.7, None, 0.3)
    prune(tmp_path, keep_last, keep_best, higher_is_better)
    assert left(tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == len(expected), "nothing hidden is left"


def test_fewer_than_asked_for_all_stay(tmp_path: Path) -> None:
    save_all(tmp_path, 0.1, 0.2)
    prune(tmp_path, 5, 5, True)
    assert left(tmp_path) == [1, 2]


def test_the_best_is_the_earliest_of_equals(tmp_path: Path) -> None:
    _, second, *_ = save_all(tmp_path, 0.1, 0.9, 0.9, None)
    assert best(tmp_path, higher_is_better=True) == second


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    _, second, _ = save_all(tmp_path, math.nan, 3.0, math.inf)
    assert best(tmp_path, higher_is_better=False) == second


def test_a_damaged_one_is_not_the_best(tmp_path: Path) -> None:
    first, second = save_all(tmp_path, 0.1, 0.9)
    flip_a_bit(second)
    assert best(tmp_path, higher_is_better=True) == first


def test_infinity_is_never_the_best(tmp_path: Path) -> None:
    first, *_ = save_all(tmp_path, 0.5, math.inf)
    assert best(tmp_path, higher_is_better=True) == first


def test_there_is_no_best_without_an_evaluation(tmp_path: Path) -> None:
    save_all(tmp_path, None, math.nan)
    assert best(tmp_path, higher_is_better=True) is None
    assert best(tmp_path / "nothing", higher_is_better=True) is None


def test_a_damaged_manifest_is_not_the_best(tmp_path: Path) -> None:
    first, second = save_all(tmp_path, 0.1, 0.9)
    (second / "manifest.json").write_text("{")
    assert best(tmp_path, higher_is_better=True) == first


def test_the_only_good_one_is_kept_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    _, second, third, fourth = save_all(tmp_path, 0.1, 0.2, 0.3, 0.4)
    flip_a_bit(third)
    flip_a_bit(fourth)
    prune(tmp_path, 1, 1, True)
    assert newest_good(tmp_path)[0] == second
    assert left(tmp_path) == [2, 4]


def test_what_was_just_saved_stays_beside_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    """A run that passed over them went on before them; an older best one that is good is no reason to delete it."""
    paths = save_all(tmp_path, 0.9, 0.2, 0.3, 0.4, 0.5)
    flip_a_bit(paths[3])
    flip_a_bit(paths[4])
    prune(tmp_path, 1, 1, True, saved=paths[2])
    assert left(tmp_path) == [1, 3, 4, 5]
    assert newest_good(tmp_path)[0] == paths[2]


def test_checkpoints_are_ranked_by_one_metric_alone(tmp_path: Path) -> None:
    for step, (name, value) in enumerate([("loss", 261.0), ("r2", 0.6), ("r2", 0.95), ("r2", 0.5)], start=1):
        save(tmp_path, step, {"model": {"w": torch.ones(1)}}, {"metric": value, "metric_name": name})
    assert best(tmp_path, True, "r2") == tmp_path / "step-00000003"
    prune(tmp_path, 1, 1, True, "r2")
    assert left(tmp_path) == [3, 4]


def test_nothing_is_deleted_where_nothing_is_good(tmp_path: Path) -> None:
    for path in save_all(tmp_path, 0.1, 0.2):
        flip_a_bit(path)
    prune(tmp_path, 1, 0, True)
    assert left(tmp_path) == [1, 2]


def test_one_killed_while_deleting_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, 0.1, 0.2)
    monkeypatch.setattr("drivetrain.runtime.storage.shutil.rmtree", lambda *_, **__: None)
    prune(tmp_path, 1, 0, True)
    assert left(tmp_path) == [2]
    assert newest_good(tmp_path)[1] == []


def test_one_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = save_all(tmp_path, 0.1, 0.2)

    def refuse(self: Path, _: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunError, match=rf"{first} could not be deleted: Permission denied"):
        prune(tmp_path, 1, 0, True)

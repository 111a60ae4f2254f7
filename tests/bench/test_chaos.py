"""The chaos bench notices what it is there to notice; nothing is killed here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.chaos import deck
from bench.killing import Disturbed, Kill, Made, kept
from drivetrain.checkpoint.saving import save
from tests.launch.history import check_each_once, surviving


def recorded(folder: Path, name: str, *lines: tuple[int, int, list[int]], cut: str = "") -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text + cut)


def test_what_counts_of_a_step_is_what_each_rank_took_for_it_last(tmp_path: Path) -> None:
    recorded(tmp_path, "0-100", (1, 0, [3, 1]), (2, 0, [9]), cut="[3, 0, [7")
    recorded(tmp_path, "1-101", (1, 0, [2]))
    recorded(tmp_path, "0-200", (2, 0, [0]), (3, 1, [1, 0]))
    recorded(tmp_path, "1-201", (2, 0, [4]), (3, 1, [2]))
    assert surviving(tmp_path) == {1: (0, [1, 2, 3]), 2: (0, [0, 4]), 3: (1, [0, 1, 2])}
    check_each_once(surviving(tmp_path), 3, 5)


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ({1: (0, [0, 1]), 3: (1, [0, 1])}, r"steps \[2\] are missing"),
        ({1: (0, [0, 1]), 2: (0, [1]), 3: (1, [0])}, "epoch 0 repeats samples"),
        ({1: (0, [0]), 2: (1, [1]), 3: (1, [0])}, "epoch 0 leaves samples out"),
    ],
)
def test_a_step_or_a_sample_that_is_missing_or_there_twice_is_noticed(history: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_each_once(history, 3, 2)


def test_every_way_to_kill_is_dealt_at_every_moment() -> None:
    kills = deck(25, alone=False, dice=random.Random(0))
    assert len(kills) == 25
    assert len(set(kills)) == 9
    assert sum(kill.when == "saving" for kill in kills) == 10
    assert {kill.who for kill in deck(25, alone=True, dice=random.Random(0))} == {"one rank", "launcher"}


def disturbed(folder: Path, *steps: int) -> Disturbed:
    """Just after a kill, with the checkpoints that were whole before it."""
    run = Disturbed(folder, Path("run"), (), random.Random(0), {})
    for step in steps:
        save(folder / "run" / "checkpoints", step, {"model": {"weight": torch.ones(2)}}, {})
    run.made.append(Made(Kill("one rank", "saving"), True, 1, steps[-1]))
    run._before = run._whole
    return run


def test_a_checkpoint_that_is_lost_or_damaged_is_noticed(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 1, 2, 3)
    run._check_checkpoints([])
    weights = run._checkpoints / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError, match="does not have its checksum"):
        run._check_checkpoints([])
    weights.parent.rename(tmp_path / "away")
    with pytest.raises(AssertionError, match=r"lost by .*step-00000002"):
        run._check_checkpoints([])
    save(run._checkpoints, 4, {"model": {"weight": torch.ones(2)}}, {})
    save(run._checkpoints, 5, {"model": {"weight": torch.ones(2)}}, {})
    run._check_checkpoints([])  # by now retention may have taken it


def test_a_start_from_an_older_checkpoint_than_there_was_is_noticed(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 1, 2, 3)
    events = [{"event": "run_started", "first_step": step} for step in (0, 3)]
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run._check_starts()
    events[1]["first_step"] = 2
    (tmp_path / "run" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(AssertionError, match="threw a checkpoint away"):
        run._check_starts()


def test_retention_keeps_the_newest_three_and_the_best() -> None:
    names = {f"step-{number:08d}" for number in range(1, 7)}
    assert kept(names, {"step-00000002": 0.5, "step-00000001": 0.7}) == {
        f"step-{number:08d}" for number in (2, 4, 5, 6)
    }

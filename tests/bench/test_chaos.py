"""The chaos bench notices what it is there to notice, and keeps what it found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import chaos_record
from bench.chaos import AT_ONCE, ENGINES, WHEN, deck
from bench.chaos_checks import check_restarts, check_times
from bench.faults import FAULTS, Fault
from bench.killing import Disturbed, Made, kept
from drivetrain.checkpoint.saving import save
from drivetrain.tracking.events import RunStarted
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
    ("history", "words"),
    [
        ({1: (0, [0, 1]), 3: (1, [0, 1])}, r"steps \[2\] are missing"),
        ({1: (0, [0, 1]), 2: (0, [1]), 3: (1, [0])}, "epoch 0 repeats samples"),
        ({1: (0, [0]), 2: (1, [1]), 3: (1, [0])}, "epoch 0 leaves samples out"),
    ],
)
def test_a_step_or_a_sample_that_is_missing_or_there_twice_is_noticed(history: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_each_once(history, 3, 2)


def test_ranks_that_should_take_the_same_samples_count_once_and_others_are_noticed(tmp_path: Path) -> None:
    """Two ranks of a tensor-parallel pair, twice."""
    for rank, samples in enumerate([[3, 1], [1, 3], [2, 0], [0, 2]]):
        recorded(tmp_path, f"{rank}-100", (1, 0, samples))
    assert surviving(tmp_path, copies=2) == {1: (0, [0, 1, 2, 3])}
    recorded(tmp_path, "3-200", (1, 0, [0, 4]))
    with pytest.raises(AssertionError, match="of step 1 2 ranks each should have the same"):
        surviving(tmp_path, copies=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_fault_of_an_engine_is_dealt_in_its_share_and_at_every_moment(engine: str) -> None:
    kind = ENGINES[engine]
    rounds = len(kind.faults) * len(WHEN)
    dealt = [fault for number in range(rounds) for fault in deck(kind, f"7 {engine}", number)]
    assert {fault.when for fault in dealt} == {*WHEN}
    for what in {*kind.faults}:
        found = [fault.when for fault in dealt if fault.what == what]
        assert len(found) == kind.faults.count(what) * AT_ONCE * len(WHEN)
        assert {*found} == {*WHEN}
    assert deck(kind, f"7 {engine}", 3) == deck(kind, f"7 {engine}", 3), "a run's number and seed say all"
    assert "full disk" not in {fault.what for fault in deck(kind, "7", 0, [n for n in FAULTS if n != "full disk"])}


def disturbed(folder: Path, *steps: int) -> Disturbed:
    """Just after a kill, with the checkpoints that were whole before it."""
    run = Disturbed(folder, Path("run"), (), random.Random(0), {})
    for step in steps:
        save(folder / "run" / "checkpoints", step, {"model": {"weight": torch.ones(2)}}, {})
    run.made.append(Made(Fault("one rank", "saving"), True, 1, steps[-1], steps[-1]))
    run._before = run._whole
    return run


def test_a_checkpoint_that_is_lost_or_damaged_is_noticed(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 1, 2, 3)
    run._check_checkpoints()
    weights = run._checkpoints / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError, match="does not have its checksum"):
        run._check_checkpoints()
    weights.parent.rename(tmp_path / "away")
    with pytest.raises(AssertionError, match=r"lost by .*step-00000002"):
        run._check_checkpoints()
    save(run._checkpoints, 4, {"model": {"weight": torch.ones(2)}}, {})
    save(run._checkpoints, 5, {"model": {"weight": torch.ones(2)}}, {})
    run._check_checkpoints()  # by now retention may have taken it


def test_a_start_from_an_older_checkpoint_than_there_was_is_noticed(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 1, 2, 3)

    def started(*first_steps: int) -> None:
        events = [RunStarted("run", "run", 9, first_step=step, samples_per_epoch=5) for step in first_steps]
        lines = [json.dumps(event.as_dict()) + "\n" for event in events]
        (tmp_path / "run" / "events.jsonl").write_text("".join(lines))

    started(0, 3)
    run._check_starts()
    started(0, 2)
    with pytest.raises(AssertionError, match="threw a checkpoint away"):
        run._check_starts()


def test_retention_keeps_the_newest_three_and_the_best() -> None:
    names = {f"step-{number:08d}" for number in range(1, 7)}
    assert kept(names, {"step-00000002": 0.5, "step-00000001": 0.7}) == {
        f"step-{number:08d}" for number in (2, 4, 5, 6)
    }


def test_a_death_that_was_no_fault_and_one_that_was_not_counted_are_noticed(tmp_path: Path) -> None:
    run = disturbed(tmp_path, 1)
    run.made += [Made(Fault(what, "stepping"), False, 1, 1, 1) for what in ("launcher", "all ranks", "clock jump")]
    check_restarts(run, {"restarts": ["rank 0 was ended by SIGKILL"]})
    for restarts in ([], ["one", "another"]):
        with pytest.raises(AssertionError, match="1 deaths since the last launch"):
            check_restarts(run, {"restarts": restarts})


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"seconds": 5.0, "effective_share": 0.5}, None),
        ({"seconds": -5.0, "effective_share": 0.5}, "are negative"),
        ({"seconds": 5.0, "effective_share": 0.001}, "0.001"),
        ({"seconds": 0.5, "effective_share": 1.0}, "1.0"),
    ],
)
def test_times_that_a_clocks_jump_went_into_are_noticed(tmp_path: Path, report: Any, words: str | None) -> None:
    run = Disturbed(tmp_path, Path("run"), (), random.Random(0), {}, lasted=10.0)
    if words is None:
        check_times(run, report)
        return
    with pytest.raises(AssertionError, match=words):
        check_times(run, report)


def test_only_a_start_that_had_no_step_left_to_do_may_have_a_share_of_nought(tmp_path: Path) -> None:
    run = Disturbed(tmp_path, Path("run"), (), random.Random(0), {}, lasted=10.0, relaunched=True)
    for share in (0.0, 0.5):
        check_times(run, {"effective_share": share}, trained=False)
    for share, trained in ((0.0, True), (1.5, False), (-0.5, False)):
        with pytest.raises(AssertionError, match=str(share)):
            check_times(run, {"effective_share": share}, trained=trained)


# --- the record ------------------------------------------------------------------------------------------------------


def test_a_failure_stays_in_the_record_when_the_same_run_goes_well_later(tmp_path: Path) -> None:
    record = tmp_path / "chaos.jsonl"
    made = [Made(Fault(what, "starting"), True, 1, 10, 12) for what in ("one rank", "one rank", "clock jump")]
    chaos_record.add(record, chaos_record.line("ddp", 7, 3, "warm", made, 2.0, "AssertionError: a | lost"))
    chaos_record.add(record, chaos_record.line("ddp", 7, 3, "warm", made, 2.0))
    lines = chaos_record.read(record)
    assert chaos_record.kills(lines) == 4
    assert chaos_record.faults(lines) == 6
    page = chaos_record.page(lines, "how")
    assert "4 kills and 2 other faults, of 1 seeds: 1 runs (0 of them started as a user does) ended" in page
    assert "1 did not (below)" in page
    assert "| ddp | 7 | 3 | " in page
    assert "AssertionError: a / lost | open |" in page
    chaos_record.add(record, {"cause_of": ["ddp", 7, 3], "cause": "a rename"})
    assert "AssertionError: a / lost | a rename |" in chaos_record.page(chaos_record.read(record), "how")


def test_the_page_in_the_repository_is_made_of_the_record_and_has_the_first_hundred_kills() -> None:
    results = Path(__file__).resolve().parents[2] / "bench" / "results"
    lines = chaos_record.read(results / "chaos.jsonl")
    assert chaos_record.kills([line for line in lines if line.get("seed") == 28317]) == 100
    page = (results / "chaos.md").read_text()
    assert page == chaos_record.page(lines, page.split("\n\n", 1)[1].split("\n\n" + chaos_record.sentence(lines))[0])

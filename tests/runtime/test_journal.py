"""Results kept line by line: found again by all ranks, also after a kill in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from drivetrain.runtime import storage
from drivetrain.runtime.journal import Journal


def test_what_any_rank_kept_is_found_by_all_of_the_same_settings(tmp_path: Path) -> None:
    one, other = (Journal(tmp_path / "journal", rank, "a") for rank in (0, 1))
    one.keep_all({one.key("x", 1): [1.5, None]})
    other.keep_all({other.key("x", 2): "two"})
    found = Journal(tmp_path / "journal", 0, "a")
    assert [found.found(found.key("x", number)) for number in (1, 2, 3)] == [[1.5, None], "two", None]
    changed = Journal(tmp_path / "journal", 0, "b")
    assert changed.found(changed.key("x", 1)) is None


def test_a_line_that_a_kill_cut_off_is_passed_over_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", 0, "")
    journal.keep_all({journal.key(1): "kept"})
    file = tmp_path / "journal" / "rank-0.jsonl"
    file.write_text(file.read_text() + '["abc", {"va')
    again = Journal(tmp_path / "journal", 0, "")
    again.keep_all({again.key(2): "later"})
    last = Journal(tmp_path / "journal", 0, "")
    assert [last.found(last.key(number)) for number in (1, 2)] == ["kept", "later"]


def test_without_a_folder_results_last_as_long_as_the_object() -> None:
    journal = Journal(None, 0, "")
    journal.keep_all({"a": 1})
    assert journal.found("a") == 1


def test_lines_of_steps_that_a_checkpoint_covers_are_removed_and_the_others_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    one, two = (Journal(folder, rank, "", world=2) for rank in (0, 1))
    for step in (0, 4, 8, 12):
        for journal in (one, two):
            journal.begin(step, covered=max(0, step - 4))
            journal.keep_all({journal.key(step, journal is two): step})
    again = Journal(folder, 0, "", world=1)
    for other in (False, True):
        found = [again.found(again.key(step, other)) for step in (0, 4, 8, 12)]
        assert found == [None, None, 8, 12]
    again.begin(16, covered=16)
    assert storage.entries(folder) == [], "the file of a rank that is no more is shortened too"


def test_results_of_earlier_steps_take_no_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", 0, "")
    for step in range(3):
        journal.begin(step, covered=0)
        journal.keep_all({str(step): step})
    assert [journal.found(str(step)) for step in range(3)] == [None, None, 2]
    assert [Journal(tmp_path / "journal", 0, "").found(str(step)) for step in range(3)] == [0, 1, 2]

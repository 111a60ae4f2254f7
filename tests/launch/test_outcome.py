"""What a rank leaves of its end, and how its failure reads to the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.errors import RankError, RunError, problem
from drivetrain.launch.outcome import cause_of, failed, outcomes, raised


@pytest.mark.parametrize("error", [problem("data.train", "no such folder", "give one"), RunError("a NaN"), KeyError()])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_failure_goes_through_the_file_and_names_its_rank(tmp_path: Path, error: Exception, rank: int) -> None:
    failed(rank, error, "Traceback").write(tmp_path)
    (outcome,) = outcomes(tmp_path)
    again = raised(outcome)
    assert type(again) is (RankError if isinstance(error, KeyError) else type(error))
    is_first_users = rank == 0 and not isinstance(error, KeyError | RunError)
    assert (f"rank {rank}" in str(again)) is not is_first_users, "what the first rank is told, all are"


def test_the_first_failure_is_the_cause_and_what_all_saw_is_the_first_ranks() -> None:
    one, other = problem("data.train", "no such folder", "give one"), RunError("the others are gone")
    earlier, *failures = [failed(rank, error, "") for rank, error in ((1, other), (1, one), (2, other), (0, one))]
    assert cause_of(failures).rank == 0
    assert str(raised(cause_of(failures))) == str(one)
    assert cause_of([*failures, earlier]).rank == 1, "the lowest that failed as the first one did"

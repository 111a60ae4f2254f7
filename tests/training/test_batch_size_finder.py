"""The search for the largest micro-batch that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config.load import validate
from drivetrain.config.micro_batch_backoff import again, reduced, reduction
from drivetrain.config.run import RunConfig
from drivetrain.training.batch_size_trials import Tried, sizes


def run(**changes: Any) -> RunConfig:
    raw = {"workload": {"type": "module", "path": "tiny.py"}, "batch_size": 16, "loop": {"steps": 2}}
    built, problems = validate(raw | changes, [])
    assert built is not None, problems
    return built


@given(batch=st.integers(1, 300), fits=st.integers(0, 300))
def test_whatever_fits_the_largest_possible_size_is_found_in_few_trials(batch: int, fits: int) -> None:
    possible, tried, failures = sizes(run(batch_size=batch)), Tried(), 0
    while (size := tried.next(possible)) is not None:
        if size <= fits:
            tried.fit.append(size)
        else:
            tried.fails, failures = size, failures + 1
    assert tried.largest == max((size for size in possible if size <= fits), default=0)
    assert len(tried.fit) + failures <= 2 * batch.bit_length()
    assert tried.fit == sorted(tried.fit), "smaller ones are tried first"


def test_sizes_that_are_too_few_for_the_model_are_left_out() -> None:
    tried = Tried(least=2)
    assert tried.next([1, 2, 3, 6]) == 2
    assert tried.possible([1, 2, 3, 6]) == [2, 3, 6]


def test_the_sizes_are_those_that_cut_a_share_evenly() -> None:
    assert sizes(run(batch_size=12)) == [1, 2, 3, 4, 6, 12]
    assert sizes(run(batch_size=7)) == [1, 2, 3, 4, 7]


def test_the_sizes_are_of_a_devices_share_and_leave_each_stage_a_piece() -> None:
    assert sizes(run(batch_size=12, engine="ddp", processes=2)) == [1, 2, 3, 6]
    assert sizes(run(batch_size=12, engine="dp", processes=3)) == [1, 2, 4]
    assert sizes(run(batch_size=12, engine={"name": "mesh", "pp": 2}, processes=2)) == [1, 2, 3, 4, 6]


def test_what_was_tried_outlives_the_processes_that_tried(tmp_path: Path) -> None:
    assert Tried.read(tmp_path) == Tried()
    Tried(fit=[1, 2], fails=8, trying=4).write(tmp_path)
    assert Tried.read(tmp_path) == Tried(fit=[1, 2], fails=8, trying=4)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_is_reduced_to_half_of_what_did_not_fit_until_one_sample_is_left() -> None:
    given_run = run(batch_size=12)
    cuts = []
    now: RunConfig | None = given_run
    while now is not None:
        cuts.append(now.micro_batch)
        now = reduced(now, now.micro_batch)
    assert cuts == [12, 6, 3, 2, 1]


def test_a_bound_in_tokens_is_halved_with_it() -> None:
    smaller = reduced(run(micro_batch_tokens=4096), 9)
    assert smaller is not None
    assert (smaller.micro_batch_size, smaller.micro_batch_tokens) == (5, 2048)


def test_replicas_of_one_process_share_its_samples() -> None:
    both = run(engine="dp", processes=2, micro_batch_size=4)
    smaller = reduced(both, 8)
    assert smaller is not None
    assert smaller.micro_batch_size == 2
    assert reduced(both.model_copy(update={"micro_batch_size": 1}), 2) is None


def test_a_resumed_run_is_cut_as_it_was_unless_its_run_file_says_otherwise_now() -> None:
    before = run(micro_batch_size=8)
    smaller = reduced(before, 8)
    assert smaller is not None
    kept = reduction(before, smaller)
    assert again(before, kept) == smaller
    other = run(micro_batch_size=6)
    assert again(other, kept) is other
    assert reduction(before, before) is None
    assert again(before, None) is before


@pytest.mark.parametrize("size", [0, -1, "many"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    raw = {"workload": {"type": "module", "path": "tiny.py"}, "batch_size": 16, "loop": {"steps": 2}}
    _, problems = validate(raw | {"micro_batch_size": size}, [])
    assert [each.field for each in problems] == ["micro_batch_size"]

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.split import evenly, stratified_split
from drivetrain.errors import UserError


def test_a_split_of_sorted_labels_keeps_every_class_in_proportion() -> None:
    labels = np.array([0] * 700 + [1] * 300)
    train, evaluation = stratified_split(labels, 0.1, seed=0, field="F")
    assert np.bincount(labels[evaluation]).tolist() == [70, 30]
    assert sorted([*train, *evaluation]) == list(range(1000))
    assert (np.diff(train) > 0).all()
    assert (np.diff(evaluation) > 0).all()


def test_a_split_follows_its_seed_alone() -> None:
    labels = np.arange(100) % 3
    first, again, other = (stratified_split(labels, 0.2, seed, "F")[1].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_names_and_numbers_of_the_same_classes_split_alike() -> None:
    numbers = np.arange(60) % 2
    names = np.array(["bad", "good"])[numbers]
    assert np.array_equal(stratified_split(numbers, 0.25, 3, "F")[1], stratified_split(names, 0.25, 3, "F")[1])


def test_a_class_of_one_sample_is_named() -> None:
    with pytest.raises(UserError, match=r"workload\.data: .* one sample .*: rare"):
        stratified_split(np.array(["common"] * 20 + ["rare"]), 0.1, 0, "workload.data")


def test_a_share_that_empties_a_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"0\.9 of 8 samples"):
        stratified_split(np.arange(8) % 4, 0.9, 0, "F")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 80))
def test_a_limit_is_shared_evenly_over_the_classes(labels: list[int], limit: int) -> None:
    array = np.array(labels)
    kept = evenly(array, limit, seed=0)
    assert len(kept) == min(limit, len(labels))
    assert (np.diff(kept) > 0).all()
    taken, held = np.bincount(array[kept], minlength=5), np.bincount(array, minlength=5)
    # no class has two fewer than another, unless all of it was taken
    assert all(taken[c] == held[c] or taken[c] >= taken.max() - 1 for c in range(5))

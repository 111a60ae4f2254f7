from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from drivetrain.data.split import limit_note, limited, stratified_split
from drivetrain.errors import UserError
from tests.properties import examples


def test_a_split_of_sorted_labels_keeps_every_class_in_proportion() -> None:
    labels = np.array([0] * 700 + [1] * 300)
    train, evaluation = stratified_split(labels, 0.1, seed=0, field="F")
    assert np.bincount(labels[evaluation]).tolist() == [70, 30]
    assert sorted([*train, *evaluation]) == list(range(1000))
    assert (np.diff(train) > 0).all()
    assert (np.diff(evaluation) > 0).all()


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_a_split_holds_out_what_scikit_learn_does(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=6))
    seed, fraction = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.floats(0.02, 0.9))
    labels = np.repeat(np.arange(len(counts)), counts)[np.random.default_rng(seed).permutation(sum(counts))]
    size = max(len(counts), round(fraction * len(labels)))
    assume(size <= len(labels) - len(counts))
    theirs = train_test_split(np.arange(len(labels)), test_size=size, random_state=seed, stratify=labels)
    for mine, other in zip(stratified_split(labels, fraction, seed, "F"), theirs, strict=True):
        assert np.array_equal(mine, np.sort(other))


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


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 80))
def test_a_limit_keeps_each_class_s_share_to_within_one_sample(labels: list[int], limit: int) -> None:
    array = np.array(labels)
    kept = limited(array, limit, seed=0)
    assert len(kept) == min(limit, len(labels))
    assert (np.diff(kept) > 0).all()
    taken, held = np.bincount(array[kept], minlength=5), np.bincount(array, minlength=5)
    assert (np.abs(taken - held * len(kept) / len(labels)) < 1).all()


def test_a_limit_keeps_the_majority_s_share_by_its_seed_alone() -> None:
    names = np.array(["bad"] * 320 + ["good"] * 680)
    kept, again, other = (limited(names, 100, seed) for seed in (1, 1, 2))
    assert (names[kept] == "good").mean() == 0.68
    assert np.array_equal(kept, again)
    assert not np.array_equal(kept, other)
    assert limit_note(names, kept, "F") is None


def test_of_equal_classes_a_limit_draws_what_it_drew_when_it_was_shared_evenly() -> None:
    labels = np.arange(50) % 5
    order = np.random.default_rng(3).permutation(50)
    evenly = np.concatenate([order[labels[order] == each][:4] for each in range(5)])
    assert limited(labels, 20, 3).tolist() == sorted(evenly)


def test_classes_that_a_limit_leaves_out_are_named() -> None:
    names = np.array(["common"] * 98 + ["odd", "rare"])
    note = limit_note(names, limited(names, 20, 0), "workload.data.limit_train")
    assert note == "workload.data.limit_train=20 leaves no sample of 2 of 3 classes: odd, rare"

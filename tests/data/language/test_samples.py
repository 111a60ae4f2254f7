"""Samples: windows of texts, tokens end to end, rows of a stream, several data sets after each other."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.language.samples import JoinedSamples, TextWindows, TokenSamples

sizes, lengths, epochs = st.integers(2, 80), st.integers(1, 90), st.integers(0, 4)


# --- windows ----------------------------------------------------------------------------------------------------------


@given(sizes, lengths, epochs, st.integers(0, 3))
def test_every_token_but_one_is_a_target_once_an_epoch(size: int, length: int, epoch: int, seed: int) -> None:
    windows = TextWindows(np.arange(size, dtype=np.int32), length, "text", seed)
    targets: Counter[int] = Counter()
    for index in range(len(windows)):
        ids, trained = windows.load(index, epoch)
        assert 2 <= len(ids) <= length + 1
        assert trained.all()
        assert np.array_equal(ids, (ids[0] + np.arange(len(ids))) % size)  # what follows in the text, going round
        targets.update(ids[1:].tolist())
    assert set(targets.values()) == {1}
    assert len(targets) == size - 1


@given(sizes, lengths)
def test_the_first_epoch_cuts_the_text_from_its_beginning(size: int, length: int) -> None:
    text = np.arange(size, dtype=np.int32)
    windows = TextWindows(text, length, "text", seed=5)
    assert len(windows) == -(-(size - 1) // length)
    for index in range(len(windows)):
        assert windows.load(index, 0)[0].tolist() == text[index * length : (index + 1) * length + 1].tolist()


def test_later_epochs_cut_it_elsewhere_and_a_seed_decides_where() -> None:
    text = np.arange(1000, dtype=np.int32)
    begins = [[int(TextWindows(text, 100, "t", seed).load(0, epoch)[0][0]) for epoch in range(6)] for seed in (0, 0, 1)]
    assert begins[0] == begins[1] != begins[2]
    assert begins[0][0] == 0 not in begins[0][1:]
    assert len(set(begins[0])) > 3
    assert all(0 <= begin < 100 for begin in begins[0])


def test_a_text_of_one_token_has_no_sample() -> None:
    assert [len(TextWindows(np.zeros(size, np.int32), 8, "text")) for size in (0, 1, 2)] == [0, 0, 1]


def test_windows_are_named_by_their_place() -> None:
    assert TextWindows(np.zeros(99, np.int32), 10, "book.txt").name(3) == "book.txt from token 30"


# --- tokens end to end ------------------------------------------------------------------------------------------------


def tokens(*parts: list[int]) -> TokenSamples:
    ids = np.concatenate([np.array(part, np.int32) for part in parts])
    lengths = np.array([len(part) for part in parts], np.int64)
    return TokenSamples(
        ids, ids % 2 == 1, np.cumsum(lengths) - lengths, lengths, [f"line {number}" for number in range(len(parts))]
    )


def test_samples_end_to_end_are_found_again() -> None:
    samples = tokens([1, 2, 3], [4, 5], [6, 7, 8, 9])
    assert [samples.load(index, 3)[0].tolist() for index in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert samples.load(1, 0)[1].tolist() == [False, True]
    assert samples.lengths.tolist() == [3, 2, 4]
    assert samples.name(2) == "line 2"


def test_several_data_sets_are_one_after_the_other_empty_ones_too() -> None:
    nothing = tokens([])
    empty = TokenSamples(nothing.ids, nothing.targets, nothing.starts[:0], nothing.lengths[:0], [])
    joined = JoinedSamples([empty, tokens([1], [2]), empty, tokens([3]), empty])
    assert len(joined) == 3
    assert [joined.load(index, 0)[0].tolist() for index in range(3)] == [[1], [2], [3]]
    assert joined.names == ["line 0", "line 1", "line 0"]
    assert joined.starts == [0, 0, 2, 2, 3, 3]

"""Which prompts run forward together, over a store that notes its passes and runs no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain.generation.requests import Piece, Request
from drivetrain.generation.row_stores import Choose, Look, RowStore
from drivetrain.generation.running_batch import RunningBatch
from drivetrain.generation.sampling import Choice
from drivetrain.generation.sequence import Running


class Noted(RowStore):
    """Passes over prompts: their lengths. chunk and padding: as a test sets them."""

    def __init__(self, chunk: int, padding: int, passes: list[list[int]] | None = None) -> None:
        self._chunk, self._padding, self.rows = chunk, padding, 0
        self.passes: list[list[int]] = [] if passes is None else passes
        self.joined: list[list[int]] = []  # rows of each store that joined, each time

    @property
    def chunk(self) -> int:
        return self._chunk

    @property
    def padding(self) -> int:
        return self._padding

    def new(self) -> Noted:
        return Noted(self._chunk, self._padding, self.passes)

    def start(self, prompts: Sequence[Sequence[int]], choose: Choose, look: Look | None = None) -> list[Choice]:
        del look
        self.passes.append(list(map(len, prompts)))
        self.rows = len(prompts)
        return choose(torch.zeros(len(prompts), 4))

    def next(self, tokens: Sequence[int], choose: Choose) -> list[Choice]:
        assert len(tokens) == self.rows
        return choose(torch.zeros(self.rows, 4))

    def join(self, parts: Sequence[tuple[Noted, Sequence[int]]]) -> None:
        self.joined.append([len(rows) for _, rows in parts])
        self.rows += sum(self.joined[-1])

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = len(rows)


def batch_of(prompts: Sequence[Sequence[int]], store: Noted, rows: int = 64) -> tuple[RunningBatch, list[Running]]:
    batch = RunningBatch(store, rows, 10**9)
    waiting = [
        Running(number, Request(tuple(ids), 5), _dropped, str, frozenset(), 5) for number, ids in enumerate(prompts)
    ]
    for each in waiting:
        batch.add(each)
    return batch, waiting


def _dropped(piece: Piece) -> None:
    del piece


def of_lengths(*lengths: int) -> list[list[int]]:
    return [[place] * length for place, length in enumerate(lengths)]


def test_prompts_of_like_length_run_together_and_padding_is_no_more_than_another_pass_costs() -> None:
    store = Noted(chunk=10_000, padding=20)
    batch, _ = batch_of(of_lengths(100, 8, 99, 10, 104, 60), store)
    batch.step()
    assert [sorted(each) for each in store.passes] == [[99, 100, 104], [8, 10], [60]]
    assert store.rows == 6


def test_where_a_pass_costs_as_much_as_a_chunk_all_prompts_run_in_one() -> None:
    store = Noted(chunk=10_000, padding=10_000)
    batch_of(of_lengths(100, 8, 99, 10, 104, 60), store)[0].step()
    assert [sorted(each) for each in store.passes] == [[8, 10, 60, 99, 100, 104]]


def test_prompts_that_ran_apart_in_one_step_join_the_rows_at_once() -> None:
    """The rows' store may be copied for each time."""
    store = Noted(1000, 0)
    batch, _ = batch_of(of_lengths(3, 5, 5, 9), store)
    batch.step()
    assert sorted(map(len, store.passes)) == [1, 1, 2]
    assert [sorted(each) for each in store.joined] == [[1, 1, 2]]


def test_no_more_than_a_chunk_of_prompts_runs_before_the_rows_go_on() -> None:
    store = Noted(chunk=100, padding=0)
    batch, waiting = batch_of(of_lengths(*[30] * 10), store)
    batch.step()
    assert store.passes == [[30] * 3]
    assert [len(each.new) for each in waiting] == [2] * 3 + [0] * 7
    batch.step()
    assert store.passes == [[30] * 3] * 2


def test_a_prompt_longer_than_a_chunk_waits_for_no_other_and_runs_alone() -> None:
    store = Noted(chunk=100, padding=100)
    batch, _ = batch_of(of_lengths(30, 150, 30), store)
    batch.step()
    batch.step()
    assert store.passes == [[30, 30], [150]]


def test_the_request_that_waits_longest_is_next_and_none_that_has_no_room_passes_it() -> None:
    store = Noted(chunk=10_000, padding=0)
    batch, waiting = batch_of(of_lengths(50, 7, 50, 7, 50), store, rows=2)
    batch.step()
    assert store.passes == [[50], [7]]
    for _ in range(4):
        batch.step()
    assert store.passes == [[50], [7], [50], [7]]
    while batch.requests:
        batch.step()
    assert store.passes == [[50], [7], [50], [7], [50]]
    assert [each.finish_reason for each in waiting] == ["length"] * 5


def test_answers_to_one_prompt_run_it_once_however_others_are_as_long() -> None:
    store = Noted(chunk=100, padding=50)
    batch, _ = batch_of([[1] * 30, [2] * 30, [3] * 30, [4] * 30, [4] * 30, [1] * 30], store)
    batch.step()
    assert (store.passes, store.rows) == ([[30] * 3], 4)
    batch.step()
    assert (store.passes, store.rows) == ([[30] * 3, [30]], 6)


def test_a_request_that_was_cancelled_while_it_waited_runs_no_prompt() -> None:
    store = Noted(chunk=10_000, padding=0)
    batch, waiting = batch_of(of_lengths(9, 5), store)
    waiting[0].cancel()
    batch.step()
    assert store.passes == [[5]]

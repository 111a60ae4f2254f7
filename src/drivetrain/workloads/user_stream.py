"""A user's IterableDataset: its samples come one after the other, and its own state holds its position.

Each rank goes through all of it and takes its share of every global batch: samples must be the same on all ranks. The
state is taken between global batches; a checkpoint keeps that of its own step and how many samples had come by then, so
that a resumed run begins there, on any number of ranks. A sample's random numbers, from Python's, NumPy's or torch's
generator, come from one of its own, seeded by its number. Loader workers go through all of it too, each in a copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.data.augment import counter_bits
from drivetrain.data.mixture import Phase
from drivetrain.data.order import DrawnOrder
from drivetrain.data.streams.endless import Endless
from drivetrain.errors import RunError, problem
from drivetrain.workloads.seeded import seeded
from drivetrain.workloads.user_file import FIELD

KEPT_BATCHES = 8  # of samples and of states: the loop reads some steps ahead of what it has trained on
KEPT_SAMPLES = 256  # at least: the first ones are tried before the training


class UserStream(Endless):
    """Samples by draw. Draws are requested in about their order: those of the last batches are kept."""

    def __init__(self, data: Any, name: str, seed: int) -> None:
        self._data, self._name, self._seed, self._batch = data, name, seed, 1
        self._coming: Iterator[Any] | None = None
        self._pass, self._place = 0, 0  # passes begun, and the draw that comes next
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._states: OrderedDict[int, Any] = OrderedDict()  # draws → the state before the next one
        self._remember()
        self._first = self._states[0]  # which is gone back to after samples were tried

    def __len__(self) -> int:
        why = f"{self._name} is an IterableDataset, whose length is not known"
        raise problem("loop.epochs", why, "give loop.steps")

    @property
    def identity(self) -> str:
        return type(self._data).__name__

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> DrawnOrder:
        """Returns the order. Raises UserError if the run's length is in epochs."""
        if by_epochs:
            len(self)
        self._batch = batch_size
        return DrawnOrder([Phase(0, (1.0,))], batch_size, seed, None)

    def load(self, index: int, epoch: int) -> Any:
        del epoch
        if index < self._place and index not in self._held:
            self._go_back(index)
        while self._place <= index:
            self._advance()
        return self._held[index]

    def _advance(self) -> None:
        with seeded(counter_bits(self._seed, 0, self._place)):
            self._held[self._place] = self._next()
        self._place += 1
        if self._place % self._batch == 0:
            self._remember()
        while len(self._held) > max(KEPT_SAMPLES, KEPT_BATCHES * self._batch):
            self._held.popitem(last=False)

    def state_at(self, step: int) -> Any:
        """Returns the state. A step that was read too long ago is read again, from the nearest known state."""
        draws = step * self._batch
        if draws < self._place and draws not in self._states:
            self._go_back(draws)
        while self._place < draws:  # the last samples of the batch are of other ranks or of loader workers
            self._advance()
        turn, state = self._states[draws]
        return {"draws": draws, "pass": turn, "state": state}

    def restore(self, state: Any) -> None:
        if state["pass"] != self._pass:  # before the state, which may know the pass better
            self._set_epoch(state["pass"])
        self._place, self._pass, self._coming = state["draws"], state["pass"], None
        self._held.clear()
        self._states.clear()
        self._data.load_state_dict(copy.deepcopy(state["state"]))
        self._remember()

    def _go_back(self, index: int) -> None:
        states = {0: self._first, **self._states}
        draws = max(draws for draws in states if draws <= index)
        turn, state = states[draws]
        self.restore({"draws": draws, "pass": turn, "state": state})

    def _remember(self) -> None:
        self._states[self._place] = (self._pass, copy.deepcopy(self._data.state_dict()))
        while len(self._states) > KEPT_BATCHES:
            self._states.popitem(last=False)

    def _next(self) -> Any:
        for _ in range(2):
            if self._coming is None:
                self._coming = iter(self._data)
            try:
                return next(self._coming)
            except StopIteration:
                self._coming, self._pass = None, self._pass + 1
                self._set_epoch(self._pass)
        raise RunError(f"{self._name} has no samples in its pass {self._pass + 1}")

    def _set_epoch(self, number: int) -> None:
        if callable(set_epoch := getattr(self._data, "set_epoch", None)):
            set_epoch(number)


def user_stream(data: Any, name: str, seed: int) -> UserStream:
    """Returns the stream. Raises UserError for an IterableDataset that could not be resumed."""
    lacking = [each for each in ("state_dict", "load_state_dict") if not callable(getattr(data, each, None))]
    if lacking:
        why = f"{name} is an IterableDataset without {' and '.join(lacking)}: a resumed run could not find its place"
        fix = "define both (the state after the samples that were taken so far), or give a Dataset with __getitem__"
        raise problem(FIELD, why, fix)
    if not _can_be_kept(data.state_dict()):
        why = f"state_dict of {name} holds what a checkpoint cannot keep"
        fix = "give dicts by text, lists, tuples, numbers, texts and tensors"
        raise problem(FIELD, why, fix)
    return UserStream(data, name, seed)


def _can_be_kept(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(name, str) and _can_be_kept(value) for name, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_can_be_kept, state))
    return state is None or isinstance(state, bool | int | float | str | torch.Tensor)

"""Wraps a user's data set so that a sample depends on (seed, epoch, index) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.data.augment import counter_bits
from drivetrain.data.lazy_texts import RowNames
from drivetrain.errors import problem
from drivetrain.workloads.seeded import seeded
from drivetrain.workloads.user_file import FIELD, UserFile
from drivetrain.workloads.user_stream import UserStream, user_stream

NEVER_RANDOM = (list, tuple, np.ndarray, torch.Tensor, TensorDataset)


class UserSamples:
    """Draws a sample's random numbers, from Python's, NumPy's or torch's generator, from generators of its own.

    So random augmentation works as in any script, yet neither workers nor ranks nor a resumed run change it.
    """

    def __init__(self, data: Any, called: str, seed: int) -> None:
        self._data, self._called, self._seed = data, called, seed
        self._may_draw = type(data) not in NEVER_RANDOM

    def __len__(self) -> int:
        return len(self._data)

    @property
    def names(self) -> Sequence[str]:
        return RowNames(range(len(self)), self._called)

    def load(self, index: int, epoch: int) -> Any:
        """Returns a sample. What the data set raises tells by a note which one it was."""
        try:
            if not self._may_draw:
                return self._data[index]
            with seeded(counter_bits(self._seed, epoch, index)):
                return self._data[index]
        except Exception as error:
            error.add_note(f"It was raised for {self._called} {index} of the {type(self._data).__name__}.")
            raise


def training_samples(file: UserFile, seed: int) -> UserSamples | UserStream:
    """Returns the file's train_data. Raises UserError like `user_samples`, and for an IterableDataset without a
    state."""
    data = file.made("train_data")
    if isinstance(data, IterableDataset):
        return user_stream(data, "train_data", seed)
    return _checked(data, "train_data", "sample", seed)


def user_samples(file: UserFile, name: str, called: str, seed: int) -> UserSamples:
    """Returns the file's data set of that name. Raises UserError if it has no items, or none by number."""
    data = file.made(name)
    if isinstance(data, IterableDataset):
        why = f"{name} is an IterableDataset, and each evaluation goes over the same samples"
        raise problem(FIELD, why, "give a list of the samples, or a Dataset")
    return _checked(data, name, called, seed)


def _checked(data: Any, name: str, called: str, seed: int) -> UserSamples:
    if isinstance(data, DataLoader):
        raise problem(FIELD, f"{name} is a DataLoader", "give its data set: the run file has the batch size and order")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        why = f"{name} is a {type(data).__name__}, which has no length or no items"
        raise problem(FIELD, why, "give a Dataset or a list of (input, target)")
    if isinstance(data, tuple) and any(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        raise problem(FIELD, f"{name} is a tuple of tensors, not of samples", "give TensorDataset(inputs, targets)")
    if not len(data):
        raise problem(FIELD, f"{name} is empty", "give at least one sample")
    return UserSamples(data, called, seed)

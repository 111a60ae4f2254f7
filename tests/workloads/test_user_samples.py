from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from drivetrain.workloads.user_samples import UserSamples


class Augmented(Dataset[Any]):
    """Draws from all three generators, as transforms of different libraries do."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    samples = UserSamples(Augmented(), "sample", seed=1)
    first = samples.load(2, epoch=3)
    random.random(), np.random.rand(), torch.rand(1)  # whatever else was drawn meanwhile
    samples.load(4, epoch=3)
    assert samples.load(2, epoch=3) == first
    others = [samples.load(2, 4), samples.load(3, 3), UserSamples(Augmented(), "sample", seed=2).load(2, 3)]
    for other in others:
        assert all(a != b for a, b in zip(first, other, strict=True))


def test_loading_a_sample_leaves_the_generators_as_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def seed() -> None:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seed()
    expected = drawn()
    seed()
    UserSamples(Augmented(), "sample", seed=1).load(0, 0)
    assert drawn() == expected


@pytest.mark.parametrize("data", [[1, 2], (1, 2), np.array([1, 2])])
def test_plain_data_are_simply_looked_up(data: Any) -> None:
    samples = UserSamples(data, "sample", seed=0)
    assert [samples.load(i, 0) for i in range(len(samples))] == [1, 2]
    assert list(samples.names) == ["sample 0", "sample 1"]


def test_what_a_data_set_raises_tells_which_sample_it_was() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> tuple[float, float, float]:
            if index == 3:
                raise ValueError("no such picture")
            return super().__getitem__(index)

    samples = UserSamples(Broken(), "sample", seed=1)
    samples.load(2, epoch=0)
    with pytest.raises(ValueError, match="no such picture") as raised:
        samples.load(3, epoch=0)
    assert raised.value.__notes__ == ["It was raised for sample 3 of the Broken."]

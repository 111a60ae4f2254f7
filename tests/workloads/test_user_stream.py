"""IterableDatasets of a user's: taken with a state, refused without one, and resumed through it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from drivetrain.config.training import Loader
from drivetrain.config.workload import UserModule
from drivetrain.data.loader import training_windows
from drivetrain.data.micro_batches import Slice
from drivetrain.engines.window_loss import few_samples
from drivetrain.errors import UserError
from drivetrain.workloads.user_module import UserModuleWorkload
from drivetrain.workloads.user_stream import UserStream

FILE = """
import torch
from torch import nn
from torch.utils.data import IterableDataset

class Counted(IterableDataset):
    def __init__(self): self.at = 0
    def __iter__(self):
        while self.at < 30:
            self.at += 1
            yield torch.full((3,), float(self.at)) + torch.rand(3), torch.tensor([float(self.at)])
        self.at = 0
    {state}

train_data = Counted()
model = nn.Linear(3, 1)
loss = nn.MSELoss()
"""
STATE = """
    def state_dict(self): return {'at': self.at}
    def load_state_dict(self, state): self.at = state['at']
"""


class Lines(IterableDataset[int]):
    """Numbers 0 to 29, over and over."""

    def __init__(self) -> None:
        self.at, self.epochs, self.restored = 0, 0, list[int]()

    def __iter__(self) -> Any:
        while self.at < 30:
            self.at += 1
            yield 100 * self.epochs + self.at - 1 + random.random()
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epochs = state["at"], state["epochs"]
        self.restored.append(self.at)


def build(folder: Path, text: str) -> UserModuleWorkload:
    torch.set_num_threads(1)
    (folder / "mine.py").write_text(text)
    return UserModuleWorkload(UserModule(path=folder / "mine.py"), 0)


def taken(stream: UserStream, steps: range, rank: int = 0, world: int = 1, workers: int = 0) -> list[list[float]]:
    order = stream.order(8, 0, by_epochs=False)
    windows = training_windows(
        stream,
        lambda samples: {"number": torch.tensor(samples, dtype=torch.float64)},
        order,
        steps,
        Slice(rank, world, 3),
        Loader(workers=workers),
    )
    return [torch.cat([each.tensors["number"] for each in window.micro_batches]).tolist() for window in windows]


def test_one_with_a_state_is_trained_on_and_one_without_is_refused_with_what_to_do(tmp_path: Path) -> None:
    workload = build(tmp_path, FILE.replace("    {state}", STATE))
    assert isinstance(workload.train, UserStream)
    first, target = workload.train.load(0, 0)
    assert target.tolist() == [1.0], "what was tried before the training is gone back on"
    assert torch.equal(first, build(tmp_path, FILE.replace("    {state}", STATE)).train.load(0, 0)[0])
    assert workload.facts["train_samples"] is None
    with pytest.raises(UserError, match=r"without state_dict and load_state_dict: a resumed run could not find") as no:
        build(tmp_path, FILE.replace("    {state}", ""))
    assert "define both" in str(no.value)
    with pytest.raises(UserError, match=r"loop\.epochs: train_data is an IterableDataset.*\n    give loop\.steps"):
        workload.order(8, 0, by_epochs=True)
    with pytest.raises(UserError, match="holds what a checkpoint cannot keep"):
        build(tmp_path, FILE.replace("    {state}", STATE.replace("{'at': self.at}", "{'at': {1}}")))
    with pytest.raises(UserError, match="evaluation_data is an IterableDataset"):
        build(tmp_path, FILE.replace("    {state}", STATE) + "evaluation_data = Counted()\n")


def test_one_is_trained_on_by_sums_of_the_file_s_own_too(tmp_path: Path) -> None:
    sums = "def loss_sum(model, batch): return (model(batch['input']) - batch['target']).square().sum()\n"
    sums += "def count(batch): return batch['target'].numel()\n"
    text = FILE.replace("    {state}", STATE).replace("loss = nn.MSELoss()\n", sums)
    workload = build(tmp_path, text)
    assert workload.train.load(0, 0)[1].tolist() == [1.0]
    assert few_samples(workload).tensors["target"].tolist() == [[1.0], [2.0]]


def test_ranks_and_workers_share_each_batch_of_one_sequence() -> None:
    alone = taken(UserStream(Lines(), "lines", 0), range(12))
    flat = [int(number) for batch in alone for number in batch]
    assert flat == [100 * (place // 30) + place % 30 for place in range(96)]
    for workers in (0, 2):
        parts = [taken(UserStream(Lines(), "lines", 0), range(12), rank, 3, workers) for rank in range(3)]
        for step in range(12):
            assert sorted(number for part in parts for number in part[step]) == sorted(alone[step])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_one_goes_on_through_its_state_without_going_through_what_came_before(workers: int) -> None:
    straight = taken(UserStream(Lines(), "lines", 0), range(12))
    first = UserStream(Lines(), "lines", 0)
    taken(first, range(7), 1, 2, workers)
    state = first.state_at(7)
    assert state["draws"] == 56
    data = Lines()
    again = UserStream(data, "lines", 0)
    again.order(8, 0, by_epochs=False)
    again.restore(state)
    assert taken(again, range(7, 12)) == straight[7:]
    assert data.restored == [26], "row 56 - 30, to which the state leads at once"


def test_the_state_of_a_step_long_past_is_found_by_reading_again() -> None:
    stream = UserStream(Lines(), "lines", 0)
    straight = taken(stream, range(20))
    again = UserStream(Lines(), "lines", 0)
    again.order(8, 0, by_epochs=False)
    again.restore(stream.state_at(5))
    assert taken(again, range(5, 20)) == straight[5:]
    assert taken(stream, range(20)) == straight


def test_a_sample_that_is_wanted_again_is_the_same() -> None:
    stream = UserStream(Lines(), "lines", 0)
    stream.order(8, 0, by_epochs=False)
    numbers = [stream.load(draw, 0) for draw in range(600)]
    assert [stream.load(draw, 0) for draw in (599, 560, 3, 0)] == [numbers[draw] for draw in (599, 560, 3, 0)]


class Epochs(Lines):
    """As PyTorch's samplers: an epoch that is set, and a state that has the place in it alone."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_one_whose_state_lacks_its_epoch_has_it_set_where_reading_goes_on_or_back() -> None:
    straight = taken(UserStream(Epochs(), "lines", 0), range(12))
    first = UserStream(Epochs(), "lines", 0)
    taken(first, range(7))
    again = UserStream(Epochs(), "lines", 0)
    again.order(8, 0, by_epochs=False)
    again.restore(first.state_at(7))
    assert taken(again, range(7, 12)) == straight[7:]
    tried = UserStream(Epochs(), "lines", 0)
    tried.load(1000, 0)  # into later passes
    assert taken(tried, range(12)) == straight

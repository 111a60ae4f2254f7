from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from drivetrain.config.workload import UserModule
from drivetrain.errors import UserError
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_cuts import LOOKED_AT, MOST, check_adds_up, cuts, varied_samples
from drivetrain.workloads.user_module import UserModuleWorkload

Build = Callable[[str], UserModuleWorkload]

HEADER = (
    "import functools\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    "from torch.utils.data import TensorDataset\nx = torch.randn(400, 3)\n"
)
SORTED = "y = torch.arange(400) * 4 // 400\n"  # 100 of each class, one class after the other
LATE = "y = torch.arange(400) % 4\ny[-20:] = 9\n"  # 9 marks padding, in late samples alone
DATA = "train_data = TensorDataset(x, y)\nmodel = nn.Linear(3, 4)\n"
ZERO = "nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)\n"
DICTS = (
    "train_data = [{'x': x[i], 'labels': y[i]} for i in range(400)]\n"
    "class Net(nn.Linear):\n    def forward(self, x, labels=None):\n"
    "        logits = super().forward(x)\n"
    "        return {'logits': logits, 'loss': F.cross_entropy(logits, labels, ignore_index=9)}\n"
    "model = Net(3, 4)\n"
)
WEIGHTS = "W = torch.tensor([1.0, 2.0, 5.0, 0.5])\n"
COUNT = "def count(batch):\n    return len(batch['target'])\n"
SUMMED = "F.cross_entropy(model(batch['input']), batch['target'], reduction='sum'"


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def made(text: str) -> UserModuleWorkload:
        (tmp_path / "mine.py").write_text(HEADER + text)
        return UserModuleWorkload(UserModule(path=tmp_path / "mine.py"), 0)

    yield made
    torch.set_num_threads(threads)


WEIGHTED = SORTED + DATA + WEIGHTS + "def loss(o, t):\n    return F.cross_entropy(o, t, weight=W)\n"
DEPENDS = {
    "class weights over sorted classes": WEIGHTED,
    "class weights, and a head that starts at zero": WEIGHTED + ZERO,
    "class weights that hardly differ": WEIGHTED.replace("[1.0, 2.0, 5.0, 0.5]", "[1.0, 1.01, 1.02, 0.99]"),
    "class weights by partial": SORTED + DATA + WEIGHTS + "loss = functools.partial(F.cross_entropy, weight=W)\n",
    "padding in late samples": LATE + DATA + "def loss(o, t):\n    return F.cross_entropy(o, t, ignore_index=9)\n",
    "a focal loss over what is valid": LATE
    + DATA
    + "def loss(o, t):\n    valid = t != 9\n    p = o[valid].softmax(1).gather(1, t[valid][:, None])\n"
    "    return (-((1 - p) ** 2) * p.log()).mean()\n",
    "a model in evaluation mode, whose loss pads": LATE
    + DATA
    + "model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))\n"
    "def loss(o, t):\n    return F.cross_entropy(o, t, ignore_index=9)\n",
    "a model's own mean of valid targets": LATE
    + DICTS
    + "def loss_sum(model, batch):\n    return model(**batch)['loss'] * len(batch['x'])\n"
    "def count(batch):\n    return len(batch['x'])\n",
    "a mean in the place of a sum": SORTED
    + DATA
    + COUNT
    + "def loss_sum(model, batch):\n    return F.cross_entropy(model(batch['input']), batch['target'])\n",
    "a mean of what draws noise": SORTED + DATA + COUNT + "def loss_sum(model, batch):\n    x = batch['input']\n"
    "    return F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), batch['target'])\n",
    "a count of batches": SORTED
    + DATA
    + f"def loss_sum(model, batch):\n    return {SUMMED})\ndef count(batch):\n    return 1\n",
    "a count of classes": SORTED + DATA + f"def loss_sum(model, batch):\n    return {SUMMED})\n"
    "def count(batch):\n    return len(batch['target'].unique())\n",
    "a count of weights": SORTED
    + DATA
    + "W = torch.tensor([1.0, 2.3, 5.1, 0.55])\n"
    + f"def loss_sum(model, batch):\n    return {SUMMED}, weight=W)\n"
    "def count(batch):\n    return W[batch['target']].sum()\n",
}


@pytest.mark.parametrize("text", DEPENDS.values(), ids=DEPENDS)
def test_a_loss_that_depends_on_the_cut_is_refused(build: Build, text: str) -> None:
    with pytest.raises(UserError) as caught:
        build(text)
    message = str(caught.value)
    assert message.startswith("workload.path: ")
    if "weights" not in message:  # a count that is no whole number says no more
        assert "samples" in message
        assert "is not the sum of each one's: cut into 2 + 3 + 4 + 7 it is" in message
        assert "splits_batches = False" in message


def test_a_head_that_starts_at_zero_still_does_after_the_check(build: Build) -> None:
    kept = (
        SORTED + DATA + ZERO + "kept = model\ndel model\ndef build_model():\n    return kept\nloss = F.cross_entropy\n"
    )
    assert not any(parameter.any() for parameter in build(kept).build_model().parameters())


@pytest.mark.parametrize("name", ["class weights over sorted classes", "a mean in the place of a sum"])
def test_a_loss_that_needs_its_whole_batch_may_say_so(build: Build, name: str) -> None:
    assert not build(DEPENDS[name] + "splits_batches = False\n").splits_batches


def test_what_the_refused_loss_of_class_weights_should_become_is_taken(build: Build) -> None:
    build(SORTED + DATA + WEIGHTS + COUNT + f"def loss_sum(model, batch):\n    return {SUMMED}, weight=W)\n")


NUMBERS = "y = torch.randn(400, 1)\ntrain_data = TensorDataset(x, y)\nmodel = nn.Linear(3, 1)\n"
YES = "y = (torch.randn(400, 1) > 1).float()\ntrain_data = TensorDataset(x, y)\nmodel = nn.Linear(3, 1)\n"
SPLITS = {
    "cross-entropy": SORTED + DATA + "loss = F.cross_entropy\n",
    "cross-entropy that ignores": LATE + DATA + "loss = nn.CrossEntropyLoss(ignore_index=9)\n",
    "cross-entropy of a function": SORTED + DATA + "def loss(o, t):\n    return F.cross_entropy(o, t)\n",
    "label smoothing": SORTED + DATA + "loss = nn.CrossEntropyLoss(label_smoothing=0.1)\n",
    "margins with weights": SORTED + DATA + "loss = nn.MultiMarginLoss(weight=torch.tensor([1.0, 2.0, 5.0, 0.5]))\n",
    "squares": NUMBERS + "loss = F.mse_loss\n",
    "large values": NUMBERS.replace("torch.randn(400, 1)", "1e6 * torch.randn(400, 1)") + "loss = nn.MSELoss()\n",
    "huge values": NUMBERS.replace("torch.randn(400, 1)", "1e15 + 1e12 * torch.randn(400, 1)") + "loss = F.l1_loss\n",
    "signs that cancel": NUMBERS + "def loss(o, t):\n    return (o - t).mean()\n",
    "a fit to the last digit": NUMBERS + "def loss(o, t):\n    return 0 * (o - t).square().mean()\n",
    "yes with weights": YES + "loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))\n",
    "batchmean": "y = torch.rand(400, 4).softmax(1)\n" + DATA + "loss = nn.KLDivLoss(reduction='batchmean')\n",
    "samples end to end": "y = torch.arange(800).reshape(400, 2) % 4\ntrain_data = TensorDataset(x, y)\n"
    "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).reshape(-1, 4)\n"
    "model = Net(3, 8)\n"
    "def collate(samples):\n    return {'input': torch.stack([a for a, _ in samples]),"
    " 'target': torch.cat([b for _, b in samples])}\nloss = nn.CrossEntropyLoss()\n",
    "noise": SORTED + DATA + COUNT + "def loss_sum(model, batch):\n    x = batch['input']\n"
    "    return F.cross_entropy(model(x + torch.randn_like(x)), batch['target'], reduction='sum')\n",
    "a loss of its own gradient": NUMBERS
    + COUNT
    + "def loss_sum(model, batch):\n    x = batch['input'].clone().requires_grad_()\n"
    "    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)\n"
    "    return (model(x) - batch['target']).square().sum() + slope.square().sum()\n",
    "a model's own loss of all targets": SORTED
    + DICTS
    + "def loss_sum(model, batch):\n    return model(**batch)['loss'] * len(batch['x'])\n"
    "def count(batch):\n    return len(batch['x'])\n",
    "one sample": HEADER + "train_data = [(x[0], x[0, :1])]\nmodel = nn.Linear(3, 1)\nloss = nn.MSELoss()\n",
    "two samples": HEADER
    + "train_data = [(x[i], x[i, :1]) for i in (0, 1)]\nmodel = nn.Linear(3, 1)\nloss = F.mse_loss\n",
}


@pytest.mark.parametrize("text", SPLITS.values(), ids=SPLITS)
def test_a_loss_that_is_a_sum_over_samples_is_taken(build: Build, text: str) -> None:
    assert build(text).splits_batches


class Numbered:
    """Samples of one number and a target each; `read` has the numbers of those that were asked for."""

    def __init__(self, targets: torch.Tensor, width: int = 1) -> None:
        self.targets, self.width, self.read = targets, width, set[int]()

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, index: int, epoch: int) -> Batch:
        del epoch
        self.read.add(index)
        return {"input": torch.zeros(self.width), "target": self.targets[index]}


def targets_of(samples: Numbered, model: nn.Module | None = None) -> list[float]:
    chosen = varied_samples(samples, default_collate, model or nn.Linear(1, 1))
    return [float(each["target"]) for each in chosen]


def test_samples_are_of_every_target_wherever_it_stands() -> None:
    targets = torch.zeros(10_000)
    targets[-300:] = 1
    assert targets_of(Numbered(targets)) == [0.0] * 14 + [1.0] * 2
    assert targets_of(Numbered(torch.arange(1000) * 4 // 1000)) == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    numbers = targets_of(Numbered(torch.linspace(5, -5, 1000)))
    assert (numbers[0], numbers[-1], len(numbers)) == (-5.0, 5.0, MOST)
    assert numbers == sorted(numbers)


def test_of_a_large_data_set_large_samples_or_a_large_model_few_are_run() -> None:
    many = Numbered(torch.arange(1_000_000) % 7)
    assert len(targets_of(many)) == MOST
    assert len(many.read) == LOOKED_AT
    assert len(targets_of(Numbered(torch.arange(100), width=2**20))) == 3
    with torch.device("meta"):
        large = nn.Linear(2**15, 2**15)
    assert targets_of(Numbered(torch.arange(100)), large) == [0.0, 99.0]


@pytest.mark.parametrize("count", [2, 3, 4, 6, 11, 16])
def test_cuts_take_each_sample_once_in_more_than_one_part(count: int) -> None:
    parts = cuts(count)
    assert [index for part in parts for index in range(count)[part]] == list(range(count))
    assert len(parts) > 1
    assert min(part.stop - part.start for part in parts) == (2 if count > 3 else 1)


def test_rounding_is_no_fault_and_a_thousandth_is() -> None:
    terms = np.linspace(1, 2, 16)
    for wrong, refused in ((1e-6, False), (1e-3, True)):

        def value(part: slice, wrong: float = wrong) -> float:
            return float(terms[part].sum()) * (1 + wrong * (part.stop - part.start < 16))

        if refused:
            with pytest.raises(UserError, match="is not the sum of each one's"):
                check_adds_up("it", 16, value, 1e-4, "mend it")
        else:
            check_adds_up("it", 16, value, 1e-4, "mend it")


SMALL = (
    "class Net(nn.Linear):\n    def forward(self, x):\n"
    "        if len(x) > 4:\n            raise torch.OutOfMemoryError('CUDA out of memory')\n"
    "        return super().forward(x)\nmodel = Net(3, 4)\n"
)


def test_samples_that_do_not_fit_into_memory_together_are_fewer(build: Build) -> None:
    """What trains in micro-batches of four is not refused for want of memory, and is checked all the same."""
    build(SORTED + DATA + SMALL + "loss = nn.CrossEntropyLoss()\n")
    with pytest.raises(UserError, match="is not the sum of each one's"):
        build(WEIGHTED + SMALL)
